"""TLS in front of bounded HTTP: a connection counts from the moment it is accepted, not from the end of its handshake.

asyncio's own TLS servers tell nobody of a connection before its handshake is done, and give each a minute for that.
Callers who never finish theirs would take every file descriptor, and no bound would see them.

    accept ─► Handshake ── first bytes ──► start_tls ── done ──► BoundedProtocol
              │ counted; owes handshake and first head within `head_s`
              └── no room, too late, no TLS: aborted
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any, Final, cast

from hawkvision.servers.connections import MAX_LEAVING
from hawkvision.servers.protocol import BoundedProtocol
from hawkvision.servers.tls import Certificates, ServerContext

log = logging.getLogger("hawkvision.tls")

GOODBYE_S: Final = 2.0
"""For a caller to confirm the end of TLS, and for a refused one to read why."""
LOG_EVERY_S: Final = 10.0
"""Failed handshakes are told of so often, for anybody can cause them."""


class HandshakeFailures:
    """A server's failed handshakes: told of with a bound, and refused with a reason."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._untold = 0
        self._next = 0.0
        self.leaving = 0
        """Refused connections that are held open for their callers to read why."""

    def left(self, end: socket.socket) -> None:
        """Hold a refused connection no longer."""
        self.leaving -= 1
        end.close()

    def failed(self, peer: Any, error: Exception) -> None:
        """Count one."""
        self._certificates.handshakes_failed += 1
        now = time.monotonic()
        if now < self._next:
            self._untold += 1
            return
        address = peer[0] if isinstance(peer, tuple) else "a caller"
        why = str(error) or type(error).__name__  # of a caller that hangs up there is no more to be said
        log.info("TLS handshake with %s failed: %s (and %d before it)", address, why, self._untold)
        self._untold, self._next = 0, now + LOG_EVERY_S


class Handshake(asyncio.Protocol):
    """One connection until its handshake is done; `behind_tls` ties the class to a server."""

    inner: BoundedProtocol
    certificates: Certificates
    failures: HandshakeFailures

    def __init__(self) -> None:
        self._raw: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """What came with the handshake's end, before the loop got to give the connection on: one read at most."""
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and wait for its first bytes: until then it costs no TLS."""
        self._raw = transport
        if not self.inner.handshaking(transport):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Begin the handshake; what comes in the same breath as its end is for the connection's own protocol."""
        if self._task is None:
            self._raw.pause_reading()  # what comes next is for TLS to read
            self._task = self.inner.loop.create_task(self._shake(data))
        else:
            self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller left, or was cut off, before the handshake was done or just then."""
        if not self._lost:
            self._lost = True
            self.inner.connection_lost(exc or ConnectionAbortedError("the connection ended in its handshake"))

    async def _shake(self, first: bytes) -> None:
        inner, raw = self.inner, self._raw
        peer = raw.get_extra_info("peername")
        context = self.certificates.context
        starting = inner.loop.create_task(
            inner.loop.start_tls(
                raw,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=inner.registry.limits.head_s,
                ssl_shutdown_timeout=GOODBYE_S,
            )
        )
        # Once it has put its protocol in place, and once that has begun: callbacks run in the order of their making.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if isinstance(context, ServerContext):
            context.tell(self._refuse)
        try:
            if not starting.done() and not raw.is_closing():
                _feed(cast(asyncio.BufferedProtocol, raw.get_protocol()), first)
            transport = await starting
        except (OSError, RuntimeError) as error:  # TLS's errors are OSErrors; uvloop raises the other on a closed one
            self.failures.failed(peer, error)
            transport = None
        if transport is None or self._lost or transport.is_closing():
            raw.abort()
            self.connection_lost(None)
            return
        transport.set_protocol(inner)
        inner.connection_made(transport)
        for data in self._early:
            inner.data_received(data)
        self._early.clear()

    def _refuse(self, alert: bytes) -> None:
        """Send the alert, and let the caller read it: the loop closes the connection at once, which would reset it."""
        raw, failures = self._raw, self.failures
        sock = raw.get_extra_info("socket")
        if sock is None or raw.get_write_buffer_size() > 0 or failures.leaving >= MAX_LEAVING:
            return
        with contextlib.suppress(OSError):  # an alert is some bytes; if it finds no room, or nobody, it is lost
            end = socket.socket(fileno=os.dup(sock.fileno()))
            failures.leaving += 1
            self.inner.loop.call_later(GOODBYE_S, failures.left, end)
            end.setblocking(False)
            end.send(alert)
            end.shutdown(socket.SHUT_WR)


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Give TLS, which is a buffered protocol in asyncio and uvloop, what was read before it was there."""
    rest = memoryview(data)
    while rest:
        place = memoryview(protocol.get_buffer(len(rest)))
        size = min(len(place), len(rest))
        place[:size] = rest[:size]
        protocol.buffer_updated(size)
        rest = rest[size:]


def behind_tls(protocol: type[asyncio.Protocol], certificates: Certificates) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=…)` that has `protocol`, a `BoundedProtocol`, behind TLS."""
    told = HandshakeFailures(certificates)

    class Gate(Handshake):
        failures = told

        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.certificates = certificates
            inner = protocol(**kwargs)
            assert isinstance(inner, BoundedProtocol), "bounds hold for every connection"
            self.inner = inner

    return Gate
