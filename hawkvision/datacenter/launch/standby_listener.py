"""What callers are told while no tier process takes them: 503, at once, by the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Final

import msgspec

from hawkvision.core.errors import NotReady

log = logging.getLogger("hawkvision.datacenter")

_CONNECTIONS: Final = 256
"""At once; more are hung up on."""
_PAUSE_S: Final = 0.1
"""After a connection could not be accepted."""
_ANSWER_S: Final = 2.0
"""For a caller to send its request, and to hang up."""
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
    """Answers 503 to all callers while no tier process listens: nobody waits for what is not there."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._is_open = False
        self._pause: asyncio.TimerHandle | None = None
        self._answering: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Take callers from now on."""
        # Not asyncio's server: what that has accepted when it is closed may be left open, and its caller waiting.
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self._is_open = True

    def close(self) -> None:
        """Leave the socket to others; those who are inside are answered yet."""
        if self._pause is not None:
            self._pause.cancel()
        if self._is_open:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._is_open = False

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except BlockingIOError:  # the tier process was quicker
            return
        except OSError as error:  # the caller is gone, or there are no file descriptors just now
            log.warning("cannot accept a connection: %s", error)
            self.close()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self.open)
            return
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
                if not head or head[0] == _TLS_HANDSHAKE:  # there is no word for this before a handshake
                    return
                await loop.sock_sendall(caller, _NOT_READY)
                caller.shutdown(socket.SHUT_WR)
                # What still comes is read and dropped, or the kernel would reset the connection under the answer.
                while await loop.sock_recv(caller, 65536):
                    pass
