"""An ingress replica at the public sockets of the launcher on its machine: bounded HTTP, TLS and datagrams.

The launcher sends the sockets over a Unix socket, and tells when to drain (`launcher_socket`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.launcher_socket import (
    BEAT_S,
    Acceptor,
    IngressState,
    Instruction,
    MessageSocket,
    connect_to_launcher,
)
from hawkvision.datacenter.servers.datagram_server import TierDatagramServer
from hawkvision.datacenter.servers.http_server import HttpServer
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import bounded
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates

log = logging.getLogger("hawkvision.datacenter")

_AGAIN_S: Final = 1.0
"""Between attempts to connect. They end with this process, which the kernel ends with the launcher."""
_LEAVE_S: Final = 0.1
"""The time for callers that were just accepted to send their requests."""


class PublicServer:
    """Serves at the sockets that the launcher sends. `start` within a running loop; then `drain`."""

    def __init__(
        self,
        path: Path,
        config: DatacenterConfig,
        http_server: HttpServer,
        certificates: Certificates | None,
        reloads: FileWatcher,
    ) -> None:
        """Nothing is connected yet.

        Args:
            path: the launcher's Unix socket.
            config: the tier's settings.
            http_server: answers the requests.
            certificates: for TLS; without them callers speak plain HTTP.
            reloads: has the keys and the certificates; gets those of the datagram server.
        """
        self.serves = asyncio.Event()
        """Set once callers are accepted."""
        self._path = path
        self._config = config
        self._http_server = http_server
        self._certificates = certificates
        self._reloads = reloads
        self._channel: MessageSocket[Instruction] | None = None
        self._running: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        self._connecting: set[asyncio.Task[object]] = set()
        self._datagrams: TierDatagramServer | None = None

    @property
    def failed(self) -> bool:
        """Whether the HTTP server has ended although nobody has drained it."""
        return self._serving is not None and self._serving.done() and self._draining is None

    def start(self) -> None:
        """Connect."""
        self._running = asyncio.create_task(self._run())

    async def drain(self, within_s: float) -> None:
        """Accept nobody any more, answer the requests inside, for at most about `within_s`, and disconnect."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(within_s))
        await asyncio.shield(self._draining)

    async def _run(self) -> None:
        while True:
            try:
                self._channel = channel = connect_to_launcher(self._path)
            except OSError as error:
                log.warning("no launcher at %s: %s", self._path, error)
            else:
                beating = asyncio.create_task(self._beat())
                try:
                    while True:
                        await self._follow(*await channel.receive())
                except ConnectionError as error:
                    log.warning("the launcher has disconnected: %s", error)
                finally:
                    beating.cancel()
                    channel.close()
                    self._channel = None
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self, instruction: Instruction, passed: socket.socket | None) -> None:
        match instruction.do:
            case "accept" if passed is not None and self._server is None:
                self._http_server.tier.metrics.restarts.set(instruction.restarts)
                await self._serve(passed)
                passed = None
            case "datagrams" if passed is not None and self._datagrams is None:
                await self._take_datagrams(passed)
                passed = None
            case "offer" if (transports := instruction.transports) is not None:
                self._http_server.transports = lambda: transports
            case "reload":
                self._reloads.now()
            case "drain":
                self._draining = self._draining or asyncio.create_task(self._drain(instruction.within_s))
        if passed is not None:  # connected again: it serves at the same socket
            passed.close()
        self._report()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._report()

    def _report(self) -> None:
        if self._channel is not None:
            transports = None if self._datagrams is None else self._datagrams.offered.transports()
            self._channel.send(IngressState(self.serves.is_set() and self._draining is None, transports))

    async def _serve(self, listener: socket.socket) -> None:
        """Accept callers at this listening socket."""
        self._server = server = _Server(
            uvicorn.Config(
                self._http_server.asgi,
                http=self._protocol(),
                interface="asgi3",
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="off",
                ws="none",
                access_log=False,
                server_header=False,
                log_config=None,  # its lines take our format
                log_level="warning",
            )
        )
        self._serving = asyncio.create_task(server.serve(sockets=[]))
        await server.up.wait()
        self._acceptor = Acceptor(listener, self._accepted)
        self._acceptor.open()
        self.serves.set()

    async def _take_datagrams(self, bound: socket.socket) -> None:
        """Serve datagrams at this UDP socket."""
        try:
            self._datagrams = server = await TierDatagramServer.open(
                self._config, int(bound.getsockname()[1]), self._http_server.tier, self._http_server.keys, bound
            )
        except ConfigError as error:
            log.error("no datagrams are served: %s", error)
            bound.close()
            return
        self._http_server.transports = server.offered.transports
        self._reloads.add("dc.datagram_certificate", server.offered.files, server.offered.reload)
        self._reloads.start()

    async def _drain(self, within_s: float) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        self._report()
        try:
            await asyncio.sleep(_LEAVE_S)
            ends: list[asyncio.Future[object] | asyncio.Task[None]] = []
            if self._server is not None and self._serving is not None:
                self._server.config.timeout_graceful_shutdown = max(1, round(within_s))
                self._server.should_exit = True
                ends.append(self._serving)
            if self._datagrams is not None:
                ends.append(asyncio.create_task(self._datagrams.close(within_s)))
            await asyncio.gather(*ends)
        finally:
            if self._running is not None:
                self._running.cancel()

    def _protocol(self) -> type[asyncio.Protocol]:
        """The bounded HTTP protocol, behind TLS if there is a certificate."""
        protocol = bounded(Limits(connections_for(raise_open_files()), self._config.connections_per_address))
        if self._certificates is None:
            return protocol
        self._http_server.tier.metrics.watch_tls(self._certificates.state)
        return behind_tls(protocol, self._certificates)

    def _accepted(self, caller: socket.socket) -> None:
        """Give an accepted connection to the HTTP server."""
        assert self._server is not None, "serve"
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(self._server.protocol, caller))
        self._connecting.add(task)
        task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[object]) -> None:
        self._connecting.discard(task)
        if not task.cancelled():
            task.exception()  # the caller is gone already


class _Server(uvicorn.Server):
    """Uvicorn without its listening sockets and signal handlers, which belong to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        """Set once connections may come."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self.up.set()

    def protocol(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
