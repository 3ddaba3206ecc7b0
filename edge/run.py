"""An edge node from its settings to its end.

The socket listens at once, so that health probes get an answer; models load and warm meanwhile, and then the line
`ready: http://HOST:PORT` appears on standard output. SIGTERM and SIGINT drain: what was accepted is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import uvicorn

from edge.factory import load_components, open_node
from edge.inference.loading import Loading
from edge.monitoring.certification import CertificationReload, files_of
from edge.servers.datagram import DatagramServer
from edge.servers.fast_path import fast_path_protocol
from edge.servers.frontend import Frontend
from edge.servers.http import HttpApp
from edge.serving.node import EdgeNode
from hawkvision.core import logs
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.arguments import EDGE_UP, parse_arguments
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.servers.bodies import bodies_limit
from hawkvision.servers.certificates import datacenter_certificates, server_certificates
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.cors import check_origins, with_cors
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.keys import Keys
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates
from hawkvision.system.telemetry import warn_if_allowed
from hawkvision.transport.settings import DatagramSettings

log = logging.getLogger("hawkvision.edge")

LISTEN_BACKLOG: Final = 1024


class _Server(uvicorn.Server):
    """Uvicorn, without its habit of raising the signal once more after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield

    def stop(self) -> None:
        """Drain and end; the second time, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(config: EdgeConfig) -> bool:
    """Listen, load, answer until told to stop, drain. Whether nothing is left at work, so that the process can end.

    Raises:
        ConfigError: if the address cannot be bound, or an origin is none.
        HawkVisionError: if the node cannot be loaded.
    """
    check_origins("edge.cors_origins", config.cors_origins)
    clock, metrics = MonotonicClock(), EdgeMetrics()
    keys = Keys(config.api_key, config.keys_file, where="edge.api_key")
    certificates = server_certificates(config, "edge")
    datacenter = datacenter_certificates(config)
    frontend = Frontend(metrics, clock, keys, config.max_body_bytes)
    if certificates is not None:
        metrics.watch_tls(certificates.state)
    reloads = FileWatcher.of(keys, certificates, datacenter)
    listener = _listen(config.host, config.port)
    limits = Limits(connections_for(raise_open_files()), config.connections_per_address)
    server = _server(HttpApp(frontend), limits, config, certificates)
    datagram: DatagramServer | None = None
    node: EdgeNode | None = None
    certification: CertificationReload | None = None

    def stop() -> None:
        server.stop()
        # Nothing was accepted before there is a node, so nobody waits for models, compilers or devices.
        if node is None:
            loading.give_up()
        if datagram is not None:
            datagram.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloads.now)
    reloads.start()
    loading = Loading(partial(load_components, config))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        loaded = await loading.result()
        if loaded is None:
            log.info("told to stop while models were loading")
            return not loading.left_behind()
        node = await open_node(config, loaded, metrics, clock, None if datacenter is None else datacenter.renewing())
        if node.baseline is None:  # baselines certify nothing
            certification = CertificationReload(config, node.guarantees.adopt, loaded.certification)
            reloads.add("certificates", files_of(config), certification.reload)
            reloads.start()
        if node.admission.parts is not None:
            frontend.bodies.limit_bytes = bodies_limit(node.admission.parts)
        port = config.feature(DatagramSettings).port
        if port is not None:
            datagram = await DatagramServer.open(config, port, frontend, loaded.useful_side)
            frontend.transports = datagram.offered.transports
            reloads.add("edge.datagram_certificate", datagram.offered.files, datagram.offered.reload)
            reloads.start()
        if server.should_exit:  # told to stop meanwhile; the socket is closed
            return True
        # What is loaded by now lives as long as the process: keep it out of every later collection.
        gc.collect()
        gc.freeze()
        frontend.mark_ready(node)
        _announce(listener, node, datagram, tls=certificates is not None)
        await serving
        return True
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await reloads.close()
        if datagram is not None:
            await datagram.close(config.drain_timeout_s)
        if certification is not None:
            await certification.close()
        frontend.start_draining()
        if node is not None:
            await node.close()
        listener.close()


def _server(app: HttpApp, limits: Limits, config: EdgeConfig, certificates: Certificates | None) -> _Server:
    """The server of the HTTP server; it does not listen by itself."""
    protocol = fast_path_protocol(limits, app, answers_pages=not config.cors_origins)
    if certificates is not None:
        protocol = behind_tls(protocol, certificates)
    return _Server(
        uvicorn.Config(
            with_cors(app, config.cors_origins) if config.cors_origins else app,
            loop="uvloop",
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_config=None,  # its lines are written as ours
            log_level="warning",
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
    )


def _announce(listener: socket.socket, node: EdgeNode, datagram: DatagramServer | None, *, tls: bool) -> None:
    """Say on standard output where images are taken: who started the node waits for the first line."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"ready: {'https' if tls else 'http'}://{shown}:{port}", flush=True)  # noqa: T201
    if node.baseline is not None:
        print(f"policy: {node.baseline.name}", flush=True)  # noqa: T201
    if datagram is not None:
        print(f"lossy: udp://{shown}:{datagram.offer.port}", flush=True)  # noqa: T201


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def run(argv: Sequence[str]) -> int:
    """Run a node from a command line; the exit status is 0 after a clean stop, 1 for an error that was explained."""
    logs.configure()  # until the settings are read
    try:
        config = parse_arguments(EdgeConfig, *EDGE_UP, argv)
        logs.configure(config.log_level, config.log_format)
        if not is_loopback(config.host) and config.tls_certificate is None:
            log.warning("listening on %s without TLS: keys and images travel in clear text from there on", config.host)
        warn_if_allowed()
        import uvloop

        if not uvloop.run(serve(config)):
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)  # a model is being read by a thread that cannot be told to end
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
