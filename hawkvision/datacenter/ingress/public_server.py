"""Serves at the public sockets of the launcher on this machine: bounded HTTP, TLS and datagrams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from hawkvision.core.escalation_api import Transports
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.launcher_socket import Acceptor
from hawkvision.datacenter.servers.datagram_server import TierDatagramServer
from hawkvision.datacenter.servers.http_server import HttpServer
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import bounded
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates

_LEAVE_S: Final = 0.1
"""The time for callers that were just accepted to send their requests."""


class PublicServer:
    """The servers of one ingress replica at the launcher's sockets. `serve` first, within a running loop."""

    def __init__(
        self,
        config: DatacenterConfig,
        http_server: HttpServer,
        certificates: Certificates | None,
        reloads: FileWatcher,
    ) -> None:
        """Nothing is accepted yet.

        Args:
            config: the tier's settings.
            http_server: answers the requests.
            certificates: for TLS; without them callers speak plain HTTP.
            reloads: has the keys and the certificates; gets those of the datagram server.
        """
        self._config = config
        self._http_server = http_server
        self._certificates = certificates
        self._reloads = reloads
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        self._connecting: set[asyncio.Task[object]] = set()
        self._datagrams: TierDatagramServer | None = None

    @property
    def failed(self) -> bool:
        """Whether the HTTP server has ended although nobody has drained it."""
        return self._serving is not None and self._serving.done() and not self._is_draining

    @property
    def _is_draining(self) -> bool:
        return self._acceptor is not None and not self._acceptor.is_open

    async def serve(self, listener: socket.socket) -> None:
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

    async def take_datagrams(self, bound: socket.socket) -> None:
        """Serve datagrams at this UDP socket.

        Raises:
            ConfigError: if certificate and key cannot be used.
        """
        self._datagrams = server = await TierDatagramServer.open(
            self._config, int(bound.getsockname()[1]), self._http_server.tier, self._http_server.keys, bound
        )
        self._http_server.transports = server.offered.transports
        self._reloads.add("dc.datagram_certificate", server.offered.files, server.offered.reload)
        self._reloads.start()

    @property
    def transports(self) -> Transports | None:
        """What `GET /v1/transport` says of the datagram server here; None if another replica has it."""
        return None if self._datagrams is None else self._datagrams.offered.transports()

    def stop_accepting(self) -> None:
        """Leave new callers to others."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def drain(self, within_s: float) -> None:
        """Answer the requests inside, for at most about `within_s`, and end all connections."""
        self.stop_accepting()
        await asyncio.sleep(_LEAVE_S)
        ends: list[asyncio.Future[object] | asyncio.Task[None]] = []
        if self._server is not None and self._serving is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(within_s))
            self._server.should_exit = True
            ends.append(self._serving)
        if self._datagrams is not None:
            ends.append(asyncio.create_task(self._datagrams.close(within_s)))
        await asyncio.gather(*ends)

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
