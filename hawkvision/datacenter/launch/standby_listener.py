"""The launcher's immediate 503 for callers while no ingress replica accepts them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

import msgspec

from hawkvision.core.errors import NotReady
from hawkvision.datacenter.ingress.acceptor import Acceptor

_CONNECTIONS: Final = 256
"""At once; more are closed."""
_ANSWER_S: Final = 2.0
"""The time for a caller to send its request and to disconnect."""
_TLS_HANDSHAKE: Final = 0x16
"""The first byte of a TLS record that begins one (RFC 8446 §5.1)."""


def _not_ready() -> bytes:
    error = NotReady("the datacenter tier is starting")
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_NOT_READY: Final = _not_ready()


class StandbyListener:
    """Answers 503 to all callers while no ingress replica does."""

    def __init__(self, listener: socket.socket) -> None:
        self._acceptor = Acceptor(listener, self._accepted)
        self._answering: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept callers from now on."""
        self._acceptor.open()

    def close(self) -> None:
        """Leave the socket to others; accepted callers still get their answer."""
        self._acceptor.close()

    def _accepted(self, caller: socket.socket) -> None:
        if len(self._answering) >= _CONNECTIONS:
            caller.close()
            return
        task = asyncio.create_task(self._answer(caller))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, caller: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        caller.setblocking(False)
        with caller, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                head = await loop.sock_recv(caller, 65536)
                if not head or head[0] == _TLS_HANDSHAKE:  # TLS has no such answer before a handshake
                    return
                await loop.sock_sendall(caller, _NOT_READY)
                caller.shutdown(socket.SHUT_WR)
                # Read and drop the rest, or the kernel would reset the connection and lose the answer.
                while await loop.sock_recv(caller, 65536):
                    pass
