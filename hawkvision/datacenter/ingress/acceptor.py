"""Accepts connections at a listening socket that several processes share."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger("hawkvision.datacenter")

_PAUSE_S: Final = 0.1
"""The pause after a failed `accept`."""


class Acceptor:
    """Hands out one connection after the other while it is open.

    asyncio's server is not used: closed, it may leave an accepted connection open and its caller waiting; and it
    accepts all waiting connections at once, which would go to one of several processes.
    """

    def __init__(self, listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._on_connection = on_connection
        self._is_open = False
        self._pause: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether it accepts."""
        return self._is_open

    def open(self) -> None:
        """Accept callers from now on."""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Leave the socket to other processes."""
        if self._pause is not None:
            self._pause.cancel()
        if self._is_open:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._is_open = False

    def _accept(self) -> None:
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # another process has accepted it, or the caller is gone
            return
        except OSError as error:  # no file descriptor is free
            log.warning("cannot accept a connection: %s", error)
            self.close()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self.open)
            return
        self._on_connection(caller)
