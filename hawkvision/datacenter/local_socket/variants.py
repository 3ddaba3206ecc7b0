"""The server's access to replicas over the local socket."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby

from hawkvision.core.clock import Deadline
from hawkvision.core.logs import current_request
from hawkvision.datacenter.local_socket.protocol import Part, ReplicaRequest
from hawkvision.datacenter.local_socket.registry import ReplicaRegistry
from hawkvision.datacenter.stages.catalog import Group
from hawkvision.datacenter.stages.ensemble import EvaluationRequest


class LocalVariants:
    """See `cascade_executor.Variants`."""

    def __init__(self, groups: Sequence[Group], registry: ReplicaRegistry) -> None:
        self._groups = {variant.name: group.name for group in groups for variant in group.variants}
        self._registry = registry

    async def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[Part]:
        """See `cascade_executor.Variants.ask`."""
        by_group = groupby(evaluations, lambda evaluation: self._groups[next(iter(evaluation.wanted))])
        for group, of_group in by_group:
            left_ms = None if deadline is None else deadline.remaining_ms(time.monotonic())
            request = ReplicaRequest(image, tuple(of_group), left_ms, streaming, current_request())
            async with aclosing(self._registry.ask(group, request)) as parts:
                async for part in parts:
                    yield part
