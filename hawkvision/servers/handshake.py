"""TLS in front of bounded HTTP. A connection counts from its acceptance, not from the end of its handshake.

asyncio's TLS servers report a connection only after its handshake, for which they allow a minute. Callers who never
finish it could take all file descriptors.

    accept ─► Handshake ── first bytes ──► start_tls ── done ──► BoundedProtocol
              │ registered; handshake and first head must arrive within `head_s`
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
"""For a caller to confirm the end of TLS, or to read why it was refused."""
LOG_EVERY_S: Final = 10.0
"""Shortest time between log lines on failed handshakes, because anybody can cause them."""


class HandshakeFailures:
    """Counts and logs the failed handshakes of a server."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._unreported = 0
        self._next = 0.0
        self.leaving = 0
        """Refused connections that are open until their callers have read the alert."""

    def left(self, end: socket.socket) -> None:
        """Close a refused connection."""
        self.leaving -= 1
        end.close()

    def failed(self, peer: Any, error: Exception) -> None:
        """Count and log a failed handshake."""
        self._certificates.handshakes_failed += 1
        now = time.monotonic()
        if now < self._next:
            self._unreported += 1
            return
        address = peer[0] if isinstance(peer, tuple) else "a caller"
        why = str(error) or type(error).__name__  # the error of a caller that hangs up has no text
        log.info("TLS handshake with %s failed: %s (and %d before it)", address, why, self._unreported)
        self._unreported, self._next = 0, now + LOG_EVERY_S


class Handshake(asyncio.Protocol):
    """One connection until the end of its handshake. `behind_tls` binds the class to a server."""

    inner: BoundedProtocol
    certificates: Certificates
    failures: HandshakeFailures

    def __init__(self) -> None:
        self._raw: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        """Data that arrived with the end of the handshake, at most one read."""
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and wait for its first bytes; TLS begins only then."""
        self._raw = transport
        if not self.inner.handshaking(transport):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Begin the handshake. Data that arrives with its end is kept for the connection's own protocol."""
        if self._task is None:
            self._raw.pause_reading()  # TLS reads what follows
            self._task = self.inner.loop.create_task(self._shake(data))
        else:
            self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a connection that ended before or with its handshake."""
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
        # Two turns of the loop: `start_tls` sets its protocol, then the protocol begins. Callbacks run in order.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if isinstance(context, ServerContext):
            context.on_alert(self._refuse)
        try:
            if not starting.done() and not raw.is_closing():
                _feed(cast(asyncio.BufferedProtocol, raw.get_protocol()), first)
            transport = await starting
        except (OSError, RuntimeError) as error:  # TLS errors are OSErrors; uvloop raises RuntimeError if closed
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
        """Send the alert on a copy of the socket, because the loop closes the connection at once, which resets it."""
        raw, failures = self._raw, self.failures
        sock = raw.get_extra_info("socket")
        if sock is None or raw.get_write_buffer_size() > 0 or failures.leaving >= MAX_LEAVING:
            return
        with contextlib.suppress(OSError):  # the alert is lost if the buffer is full or the caller is gone
            end = socket.socket(fileno=os.dup(sock.fileno()))
            failures.leaving += 1
            self.inner.loop.call_later(GOODBYE_S, failures.left, end)
            end.setblocking(False)
            end.send(alert)
            end.shutdown(socket.SHUT_WR)


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Give bytes that were read before TLS began to its protocol, which is buffered in asyncio and uvloop."""
    rest = memoryview(data)
    while rest:
        place = memoryview(protocol.get_buffer(len(rest)))
        size = min(len(place), len(rest))
        place[:size] = rest[:size]
        protocol.buffer_updated(size)
        rest = rest[size:]


def behind_tls(protocol: type[asyncio.Protocol], certificates: Certificates) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=…)` that runs `protocol`, a `BoundedProtocol`, behind TLS."""
    reported = HandshakeFailures(certificates)

    class Gate(Handshake):
        failures = reported

        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.certificates = certificates
            inner = protocol(**kwargs)
            assert isinstance(inner, BoundedProtocol), "bounds hold for every connection"
            self.inner = inner

    return Gate
