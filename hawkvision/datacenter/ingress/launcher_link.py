"""An ingress replica's end of its connection with the launcher on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.core.escalation_api import Transports
from hawkvision.datacenter.ingress.launcher_socket import (
    BEAT_S,
    Alive,
    DatagramOffer,
    Drain,
    FromLauncher,
    Leaving,
    MessageSocket,
    PublicListener,
    Reload,
    Serving,
    TakeDatagrams,
    connect_to_launcher,
)
from hawkvision.datacenter.ingress.public_server import PublicServer

log = logging.getLogger("hawkvision.datacenter")

_AGAIN_S: Final = 1.0
"""Between attempts to connect. They end with this process, which the kernel ends with the launcher."""


class LauncherLink:
    """Serves at the sockets that the launcher sends. `start` within a running loop; then `drain`."""

    def __init__(
        self,
        path: Path,
        server: PublicServer,
        *,
        reload: Callable[[], None],
        on_restarts: Callable[[int], None],
        on_transports: Callable[[Transports], None],
    ) -> None:
        """Nothing is connected yet.

        Args:
            path: the launcher's Unix socket.
            server: serves at the sockets.
            reload: reads keys and certificates again.
            on_restarts: takes how many tier processes preceded this one.
            on_transports: takes the reply to `GET /v1/transport` if another replica has the datagram server.
        """
        self._path = path
        self._server = server
        self._reload = reload
        self._on_restarts = on_restarts
        self._on_transports = on_transports
        self._channel: MessageSocket[FromLauncher] | None = None
        self._running: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self.serves = asyncio.Event()
        """Set once callers are accepted."""

    def start(self) -> None:
        """Connect; the second call does nothing."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def drain(self, within_s: float) -> None:
        """Accept nobody any more, answer the requests inside, for at most about `within_s`, and disconnect."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(within_s))
        await asyncio.shield(self._draining)

    async def _drain(self, within_s: float) -> None:
        self._server.stop_accepting()
        self._send(Leaving())
        try:
            await self._server.drain(within_s)
        finally:
            if self._running is not None:
                self._running.cancel()

    async def _run(self) -> None:
        while True:
            try:
                self._channel = connect_to_launcher(self._path)
            except OSError as error:
                log.warning("no launcher at %s: %s", self._path, error)
            else:
                await self._attend(self._channel)
            await asyncio.sleep(_AGAIN_S)

    async def _attend(self, channel: MessageSocket[FromLauncher]) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                message, passed = await channel.receive()
                await self._handle(message, passed)
        except ConnectionError as error:
            log.warning("the launcher has disconnected: %s", error)
        finally:
            beating.cancel()
            channel.close()
            self._channel = None

    async def _handle(self, message: FromLauncher, passed: socket.socket | None) -> None:
        match message:
            case PublicListener(restarts) if passed is not None and not self.serves.is_set():
                self._on_restarts(restarts)
                await self._server.serve(passed)
                self.serves.set()
                self._send(Serving())
            case PublicListener():  # connected again: it serves at the same socket
                _close(passed)
                self._send(Serving())
            case TakeDatagrams() if passed is not None and self._server.transports is None:
                await self._take_datagrams(passed)
            case TakeDatagrams():
                _close(passed)
            case DatagramOffer(transports):
                self._on_transports(transports)
            case Reload():
                self._reload()
            case Drain(within_s):
                self._draining = self._draining or asyncio.create_task(self._drain(within_s))

    async def _take_datagrams(self, bound: socket.socket) -> None:
        try:
            await self._server.take_datagrams(bound)
        except ConfigError as error:
            log.error("no datagrams are served: %s", error)
            bound.close()

    async def _beat(self) -> None:
        """Show the launcher that this event loop runs, and what the datagram server here offers."""
        offered: Transports | None = None
        while True:
            await asyncio.sleep(BEAT_S)
            self._send(Alive())
            if (offer := self._server.transports) is not None and offer != offered:
                self._send(DatagramOffer(offer))
                offered = offer

    def _send(self, message: Alive | Serving | Leaving | DatagramOffer) -> None:
        if self._channel is not None:
            self._channel.send(message)


def _close(passed: socket.socket | None) -> None:
    with contextlib.suppress(OSError):
        if passed is not None:
            passed.close()
