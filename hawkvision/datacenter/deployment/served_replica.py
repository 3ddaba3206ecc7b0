"""A replica as Ray Serve runs it: bytes in, bytes out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady, Overloaded, RequestError
from hawkvision.core.logs import LogFormat, LogLevel, adopt, resume
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
from hawkvision.datacenter.execution.group_settings import GroupSettings
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.local_socket.protocol import ReplicaRequest as LocalRequest
from hawkvision.datacenter.local_socket.replica_end import Registration, register
from hawkvision.system.log_relay import configure_worker

EXPECTED = (RequestError, DeadlineMissed, Overloaded, NotReady)
"""Errors that are replied, not raised. Ray logs raised errors with tracebacks, so callers could fill the disk."""


def log_like_the_tier(level: LogLevel, form: LogFormat) -> None:
    """Make this process, which Ray has started, and Serve in it log like the tier."""
    configure_worker(level, form)
    adopt("ray.serve")


class ServedReplica:
    """A replica in one of Ray's processes; see `messages` for what its methods take and return."""

    def __init__(self, settings: GroupSettings) -> None:
        """See `Replica`."""
        log_like_the_tier(settings.log_level, settings.log_format)
        self.replica = Replica(settings)
        self._settings = settings
        self._registration: Registration | None = None

    async def check_health(self) -> None:
        """Register with a server on this machine. Serve calls this before it calls the replica started, and regularly.

        Raises:
            OSError: if the server is gone; the replica is then of no use.
        """
        server = self._settings.server
        if server is not None and (self._registration is None or self._registration.closed):
            self._registration = await register(server, self._settings.group, self.replica.statement, self._run_local)

    async def _run_local(self, sent: LocalRequest) -> AsyncGenerator[Part]:
        left_ms = sent.remaining_ms
        deadline = None if left_ms is None else Deadline.after_ms(left_ms, time.monotonic())
        async with aclosing(self.replica.run(sent.image, sent.evaluations, deadline, streaming=sent.streaming)) as its:
            async for part in its:
                yield part

    async def present(self, _protocol: int) -> bytes:
        """The presence, whatever the caller's version: the caller compares."""
        replica = self.replica
        return encode_presence(Presence(PROTOCOL, __version__, replica.statement, replica.backends))

    async def classify(self, protocol: int, image: bytes, request: bytes) -> bytes:
        """All parts of the answer to an image, or the error."""
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
