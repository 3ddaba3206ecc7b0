"""Runs an edge node from its settings to its end.

The socket listens at once, so that health probes get an answer while models load and warm. Then the line
`ready: http://HOST:PORT` appears on standard output. SIGTERM and SIGINT drain: accepted requests are answered.
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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import uvicorn

from edge.factory import Environment, Loaded, NodeComponents, close_tasks, load_tasks, open_tasks
from edge.inference.startup_thread import Loading
from edge.monitoring.certificate_reload import CertificationReload, files_of
from edge.servers.gate import Gate
from edge.servers.http import HttpApp
from edge.servers.shared.frontend import Frontend
from edge.serving.tasks import ServedTasks
from hawkvision.core import logs
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import read_command_line, settings_of_tasks
from hawkvision.servers.browsers import Browsers
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.cors import check_origins, with_cors
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.keys import Keys
from hawkvision.servers.protocol import bounded
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates, datacenter_certificates, server_certificates
from hawkvision.system.library_environment import warn_if_allowed
from hawkvision.transport.settings import DatagramSettings

if TYPE_CHECKING:
    from edge.servers.datagram import DatagramServer

log = logging.getLogger("hawkvision.edge")

END_S: Final = 5.0
"""Seconds from the last answer to the end of the process: a thread that runs a graph cannot be told to end."""
LISTEN_BACKLOG: Final = 1024


class _UvicornServer(uvicorn.Server):
    """Uvicorn, which by itself would raise the signal again after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `EdgeServer`."""
        yield

    def stop(self) -> None:
        """Drain and end; the second time, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


class EdgeServer:
    """A node with its servers, from listening to the end. Made and used on one event loop, once."""

    def __init__(self, config: EdgeConfig, drained: Callable[[], None] = lambda: None) -> None:
        """Begin to listen; health probes get an answer once `run` is called.

        `drained` is called when it was told to stop and no request is left.

        Raises:
            ConfigError: if the address cannot be bound, an origin is invalid, or keys or certificates cannot be read.
        """
        check_origins("edge.cors_origins", config.cors_origins)
        self._config, self._drained = config, drained
        self._clock, self._metrics = MonotonicClock(), EdgeMetrics()
        keys = Keys(config.api_key, config.keys_file, where="edge.api_key")
        self._certificates = server_certificates(config, "edge")
        self._datacenter_certificates = datacenter_certificates(config)
        self._frontend = Frontend(
            self._metrics, self._clock, keys, config.max_body_bytes, Browsers(config.hosts, config.cors_origins)
        )
        if self._certificates is not None:
            self._metrics.watch_tls(self._certificates.state)
        self._files = FileWatcher.of(keys, self._certificates, self._datacenter_certificates)
        self._listener = _listen(config.host, config.port)
        limits = Limits(connections_for(raise_open_files()), config.connections_per_address)
        self._server = _uvicorn_server(self._frontend, limits, config, self._certificates)
        self._configs = settings_of_tasks(config)
        self._loading = Loading(partial(load_tasks, self._configs))
        self._tasks: ServedTasks | None = None
        self._certifications: list[CertificationReload] = []
        self._datagram: DatagramServer | None = None

    async def run(self) -> bool:
        """Load, answer until told to stop, drain. False if a thread is left at work, so that the process cannot end.

        Raises:
            HawkVisionError: if no task can be loaded.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._files.now)
        self._files.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            loaded = await self._loading.result()
            if loaded is None:
                log.info("told to stop while models were loading")
                return not self._loading.left_behind()
            tasks = await self._open(loaded)
            if not self._server.should_exit:  # else it was told to stop meanwhile, and the socket is closed
                # What is loaded by now lives as long as the process: keep it out of every later collection.
                gc.collect()
                gc.freeze()
                self._frontend.mark_ready(tasks)
                _announce(self._listener, tasks, self._datagram, tls=self._certificates is not None)
                await serving
            return True
        finally:
            await self._close(serving)

    def stop(self) -> None:
        """Drain and end. While models, compilers or devices are awaited, no request can be under way: end at once."""
        self._server.stop()
        self._frontend.stopping.set()
        if self._tasks is None:
            self._loading.give_up()
            self._drained()
        if self._datagram is not None:
            self._datagram.stop()

    async def _open(self, loaded: Mapping[str, Loaded]) -> ServedTasks:
        """The tasks, with the datagram server and the reloads of their certificates."""
        config, datacenter = self._config, self._datacenter_certificates
        tls = None if datacenter is None else datacenter.renewing()
        shared = Environment(self._metrics, self._clock, len(loaded), tls)
        self._tasks = tasks = await open_tasks(self._configs, loaded, shared)
        self._watch_certificates(tasks, loaded)
        self._frontend.divide_bodies(tasks)
        port = config.feature(DatagramSettings).port
        if port is not None:
            from edge.servers.datagram import DatagramServer  # with QUIC, which HTTP needs not

            served = [loaded[node.task] for node in tasks.nodes]
            side = max(each.useful_side for each in served if isinstance(each, NodeComponents))
            self._datagram = await DatagramServer.open(config, port, self._frontend, side)
            offered = self._datagram.offered
            self._frontend.transports = offered.transports
            self._files.add("edge.datagram_certificate", offered.files, offered.reload)
            self._files.start()
        return tasks

    def _watch_certificates(self, tasks: ServedTasks, loaded: Mapping[str, Loaded]) -> None:
        for node in tasks.nodes:
            components, config = loaded[node.task], self._configs[node.task]
            if node.baseline is None and isinstance(components, NodeComponents):  # baselines certify nothing
                reload = CertificationReload(config, node.guarantees.adopt, components.certification)
                self._certifications.append(reload)
                if node.reviewer is not None:
                    node.reviewer.on_written = reload.reload
                self._files.add(f"certificates of {node.task}", files_of(config), reload.reload)
        self._files.start()

    async def _close(self, serving: asyncio.Task[None]) -> None:
        self._server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        self._drained()
        await self._files.close()
        if self._datagram is not None:
            await self._datagram.close(self._config.drain_timeout_s)
        for reload in self._certifications:
            await reload.close()
        self._frontend.start_draining()
        if self._tasks is not None:
            await close_tasks(self._tasks)
        self._listener.close()


async def serve(config: EdgeConfig, drained: Callable[[], None] = lambda: None) -> bool:
    """Run a node until it is told to stop. False if a thread is left at work, so that the process cannot end.

    Raises:
        ConfigError: if the address cannot be bound, or an origin is invalid.
        HawkVisionError: if no task can be loaded.
    """
    return await EdgeServer(config, drained).run()


def _uvicorn_server(
    frontend: Frontend, limits: Limits, config: EdgeConfig, certificates: Certificates | None
) -> _UvicornServer:
    """Uvicorn with our protocol; it does not listen by itself."""
    app, protocol = HttpApp(frontend, page=config.page), bounded(limits, Gate(frontend))
    if certificates is not None:
        protocol = behind_tls(protocol, certificates)
    return _UvicornServer(
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


def _announce(listener: socket.socket, tasks: ServedTasks, datagram: DatagramServer | None, *, tls: bool) -> None:
    """Write the addresses to standard output. Programs that start a node wait for the first line."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"ready: {'https' if tls else 'http'}://{shown}:{port}", flush=True)  # noqa: T201
    baseline = tasks.nodes[0].baseline
    if baseline is not None:
        print(f"policy: {baseline.name}", flush=True)  # noqa: T201
    if datagram is not None:
        print(f"datagram: udp://{shown}:{datagram.offer.port}", flush=True)  # noqa: T201
    for failed in tasks.failures:
        print(f"task {failed.task} cannot be served: {failed.reason}", flush=True)  # noqa: T201


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


def _end_soon() -> None:
    """End this process after `END_S`, if it does not end by itself."""

    def end() -> None:
        log.error("a thread is at work %g s after the last answer, perhaps on a graph that never ends: ended", END_S)
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()


def run(argv: Sequence[str]) -> int:
    """Run a node from a command line. The exit status is 0 after a clean stop, and 1 after a printed error."""
    logs.configure()  # until the settings are read
    try:
        config = read_command_line(EdgeConfig, argv, "hawkvision edge up", "Start an edge node.")
        logs.configure(config.log_level, config.log_format)
        logs.adopt("python_multipart", logging.ERROR)  # it warns of each malformed form, which its caller is told
        if not is_loopback(config.host) and config.tls_certificate is None:
            log.warning("listening on %s without TLS: keys and images travel in clear text from there on", config.host)
        warn_if_allowed()
        import uvloop

        if not uvloop.run(serve(config, _end_soon)):
            logging.shutdown()
            sys.stdout.flush()
            os._exit(0)  # a model is being read by a thread that cannot be told to end
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
