"""A replica as Ray Serve calls it: bytes in, bytes out.

    no models ── load ──► models ── new settings ──► other models, or the same ones and a refusal
        └── fails ─┬─ it may not wait, or another replica of the group serves ──► raised: Serve starts another replica
                   └─ else ──► no models and a reason; tried again after growing pauses, and with each new settings

A process that waits keeps its task's failure away from other tasks: for Serve the deployment is healthy, so that the
application runs. It takes new settings and mended files without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from hawkvision.core import __version__
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import BackendError, DeadlineMissed, HawkVisionError, NotReady, Overloaded, RequestError
from hawkvision.core.logs import resume
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
from hawkvision.datacenter.execution.group_settings import GroupSettings, ProcessSettings
from hawkvision.datacenter.execution.replica import Replica

log = logging.getLogger("hawkvision.datacenter")

EXPECTED = (RequestError, DeadlineMissed, Overloaded, NotReady)
"""Errors that are replied, not raised. Ray logs raised errors with tracebacks, so callers could fill the disk."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
"""Pauses between loads double from the first to this one: a load may read and hash gigabytes."""
_REASON_CHARS: Final = 1000


class ReplicaEndpoint:
    """A replica in one of Ray's processes; see `messages` for what its methods take and return."""

    def __init__(self, process: ProcessSettings, another_serves: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Without models; Serve calls `reconfigure` next, which loads them.

        Args:
            process: what this process keeps.
            another_serves: whether another replica of the group has loaded its models. Without it a failed first load
                is raised.
        """
        self._replica: Replica | None = None
        self._failed = ""
        """Why there are no models; empty if there are, or before the first load."""
        self._refused = ""
        """Why the newest settings are not in use; empty if they are."""
        self._process = process
        self._another_serves = another_serves
        self._superseded = False
        self._wanted: dict[str, Any] = {}
        self._turn = asyncio.Lock()
        """Held while models are loaded."""
        self._retrying: asyncio.Task[None] | None = None

    @property
    def replica(self) -> Replica:
        """What runs the models.

        Raises:
            NotReady: if they cannot be loaded; gives the reason.
        """
        if self._replica is None:
            raise NotReady(f"its models cannot be loaded: {self._failed}" if self._failed else "its models are loading")
        return self._replica

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the models and limits of `GroupSettings`, at the start and whenever Serve has new ones.

        A running replica that cannot take the new ones keeps those that it has, and says so in its presence. It raises
        nothing then, because Serve would stop it.

        Raises:
            ConfigError, ArtifactError, BackendError, Exception: if the first models cannot be loaded, and this process
                may not wait for better ones.
        """
        async with self._turn:
            self._wanted = user_config
            if self._replica is not None:
                await self._replace(self._replica)
                return
            try:
                await self._load()
            except Exception as error:
                if self._another_serves is None or await self._another_serves():
                    raise
                self._fail(error)
                self._retrying = self._retrying or asyncio.create_task(self._retry())

    async def check_health(self) -> None:
        """Infer with each model, unless images do. Serve calls this at the start and regularly.

        Raises:
            BackendError: if a model fails or is stuck, or if this process has none and another replica serves; Serve
                then replaces the replica.
        """
        if self._replica is not None:
            await self._replica.check_health()
        elif self._superseded:
            raise BackendError(f"the models cannot be loaded here, and another replica serves: {self._failed}")

    async def present(self, _protocol: int) -> bytes:
        """The presence, whatever the caller's version: the caller compares."""
        if (running := self._replica) is None:
            return encode_presence(Presence(PROTOCOL, __version__, failed=self._failed or "its models are loading"))
        return encode_presence(Presence(PROTOCOL, __version__, running.statement, running.backends, self._refused))

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
        evaluations, left_ms, ids = decode_request(request)
        resume(ids)
        deadline = None if left_ms is None else Deadline.after_ms(left_ms, time.monotonic())
        async with aclosing(self.replica.run(image, evaluations, deadline, streaming=streaming)) as parts:
            async for part in parts:
                yield part

    async def _load(self) -> None:
        settings = GroupSettings.from_user_config(self._wanted)
        self._replica = await asyncio.to_thread(Replica, self._process, settings)
        self._failed = ""

    async def _replace(self, replica: Replica) -> None:
        try:
            await replica.reconfigure(GroupSettings.from_user_config(self._wanted))
            self._refused = ""
        except Exception as error:
            if not isinstance(error, HawkVisionError):  # a library may raise anything about a file
                log.exception("settings could not be taken")
            self._refused = f"new settings refused, the old ones stay in use: {_reason(error)}"
            log.error("%s", self._refused)

    def _fail(self, error: Exception) -> None:
        """Keep the reason, and log it unless it is the one of the last attempt."""
        reason = _reason(error)
        if reason != self._failed:
            log.error("task %s cannot be served: %s", self._wanted.get("task"), reason)
        self._failed = reason

    async def _retry(self) -> None:
        assert self._another_serves is not None, "else the first failure was raised"
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
            async with self._turn:
                if self._replica is not None:
                    break
                try:
                    await self._load()
                except Exception as error:  # noqa: BLE001 - a library may raise anything about a file
                    self._fail(error)
                else:
                    break
            self._superseded = await self._another_serves()
        log.info("task %s is served now", self._wanted.get("task"))


def _reason(error: Exception) -> str:
    """An error in one line of bounded length."""
    message = error.message if isinstance(error, HawkVisionError) else f"{type(error).__name__}: {error}".rstrip(": ")
    return " ".join(message.split())[:_REASON_CHARS]
