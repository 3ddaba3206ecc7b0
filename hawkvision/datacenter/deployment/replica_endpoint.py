"""A replica as Ray Serve calls it: bytes in, bytes out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded, RequestError
from hawkvision.core.logs import resume
from hawkvision.core.version import __version__
from hawkvision.datacenter.deployment.messages import (
    PROTOCOL,
    Part,
    Presence,
    check_protocol,
    decode_request,
    encode_answers,
    encode_failure,
    encode_presence,
)
from hawkvision.datacenter.deployment.served_models import ServedModels
from hawkvision.datacenter.execution.group_settings import ProcessSettings
from hawkvision.datacenter.execution.replica import Replica

EXPECTED = (RequestError, DeadlineMissed, Overloaded, NotReady)
"""Errors that are replied, not raised. Ray logs raised errors with tracebacks, so callers could fill the disk."""


class ReplicaEndpoint:
    """A replica in one of Ray's processes; see `messages` for what its methods take and return."""

    def __init__(self, settings: ProcessSettings, another_serves: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Without models; Serve calls `reconfigure` next, which loads them. See `ServedModels` for the arguments."""
        self._models = ServedModels(settings, another_serves)

    @property
    def replica(self) -> Replica:
        """What runs the models, once `reconfigure` has loaded them.

        Raises:
            NotReady: if they cannot be loaded.
        """
        return self._models.ready()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the models and limits of `GroupSettings`, at the start and whenever Serve has new ones.

        A running replica that cannot take the new ones keeps those that it has, and says so in its presence. It raises
        nothing then, because Serve would stop it.

        Raises:
            ConfigError, ArtifactError, BackendError: if the first settings cannot be used; see `ServedModels`.
        """
        await self._models.configure(user_config)

    async def check_health(self) -> None:
        """Infer with each model, unless images do. Serve calls this at the start and regularly.

        Raises:
            BackendError: if a model fails or is stuck; Serve then replaces the replica.
        """
        await self._models.check_health()

    async def present(self, _protocol: int) -> bytes:
        """The presence, whatever the caller's version: the caller compares."""
        models = self._models
        if models.replica is None:
            return encode_presence(Presence(PROTOCOL, __version__, failed=models.failed or "its models are loading"))
        running = models.replica
        return encode_presence(Presence(PROTOCOL, __version__, running.statement, running.backends, models.refused))

    async def classify(self, protocol: int, image: bytes, request: bytes) -> bytes:
        """All parts of the answer to an image, or the error.

        The name is that of protocol 1, whose callers are refused by their version.
        """
        try:
            async with aclosing(self._run(protocol, image, request, streaming=False)) as parts:
                return encode_answers([part async for part in parts])
        except EXPECTED as error:
            return encode_failure(error)

    async def classify_streaming(self, protocol: int, image: bytes, request: bytes) -> AsyncIterator[bytes]:
        """As `classify`, but each part comes as soon as it is ready, and parts are smaller; an error comes last.

        The first view runs alone on all cores that its variant can use, the others run side by side.
        """
        try:
            async with aclosing(self._run(protocol, image, request, streaming=True)) as parts:
                async for part in parts:
                    yield encode_answers((part,))
        except EXPECTED as error:
            yield encode_failure(error)

    async def _run(self, protocol: int, image: bytes, request: bytes, *, streaming: bool) -> AsyncGenerator[Part]:
        check_protocol(protocol)
        sent = decode_request(request)
        resume(sent.request)
        left_ms = sent.remaining_ms
        deadline = None if left_ms is None else Deadline.after_ms(left_ms, time.monotonic())
        async with aclosing(self.replica.run(image, sent.evaluations, deadline, streaming=streaming)) as parts:
            async for part in parts:
                yield part
