"""One admission limit for the application, shared by its ingress replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Final

from ray import serve

log = logging.getLogger("hawkvision.datacenter")

_PERIOD_S: Final = 2.0
"""Between two questions to Serve's controller. Meanwhile the replicas may admit too few, or for as long too many."""


class AdmissionShare:
    """Tells an ingress replica how many requests it may have inside: the limit divided by the number of replicas.

    Serve's replica context gives a number only for a fixed number of replicas, so a scaled one is asked for.
    """

    def __init__(self, limit: int, replicas: int, on_change: Callable[[int], None], *, scales: bool) -> None:
        """Set the share for this many replicas.

        Args:
            limit: of the application.
            replicas: their number, or the least if Serve `scales` it.
            on_change: takes each new share.
            scales: whether the number may change.
        """
        self._limit = limit
        self._on_change = on_change
        self._scales = scales
        self._replicas = replicas
        self._task: asyncio.Task[None] | None = None
        on_change(share(limit, replicas))

    def set_limit(self, limit: int) -> None:
        """Share another limit."""
        self._limit = limit
        self._on_change(share(limit, self._replicas))

    def start(self) -> None:
        """Follow the number of replicas, if it may change. Needs Serve's replica context."""
        if self._scales and self._task is None:
            self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Follow it no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        context = serve.get_replica_context()
        while True:
            try:
                replicas = await asyncio.to_thread(_running_replicas, context.app_name, context.deployment)
            except Exception as error:  # noqa: BLE001 - whatever Ray raises while its controller restarts
                log.warning("the number of ingress replicas is unknown for now: %s", error)
            else:
                if replicas not in (0, self._replicas):
                    self._replicas = replicas
                    self._on_change(share(self._limit, replicas))
            await asyncio.sleep(_PERIOD_S)


def share(limit: int, replicas: int) -> int:
    """One replica's part of the limit, at least one request; together at most a request per replica above it."""
    return max(1, math.ceil(limit / replicas))


def _running_replicas(app: str, deployment: str) -> int:
    """The replicas of a deployment that serve now, or 0 if Serve does not know. Blocks."""
    application = serve.status().applications.get(app)
    deployed = None if application is None else application.deployments.get(deployment)
    return 0 if deployed is None else int(deployed.replica_states.get("RUNNING", 0))
