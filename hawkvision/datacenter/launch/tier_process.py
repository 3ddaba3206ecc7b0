"""The tier process: starts a private Ray, deploys each group of variants, and serves HTTP and datagrams itself.

The process speaks HTTP itself rather than through Serve's proxies: its own server has the lowest cost per escalation,
answers while models load, and opens no port beside its own. Clusters use Serve's proxies (`manifests`). The comparison
is `tests/bench/transport/escalation_http.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

import uvicorn

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.launch import local_ray
from hawkvision.datacenter.launch.messages import ALIVE, BEAT_S, LEAVING, LISTENING, RAY_DIED, READY
from hawkvision.datacenter.launch.sockets import PublicSockets
from hawkvision.datacenter.local_socket.registry import QueueBounds, ReplicaRegistry
from hawkvision.datacenter.servers.datagram_server import TierDatagramServer
from hawkvision.datacenter.servers.http_server import HttpServer, make_http_server
from hawkvision.datacenter.servers.service import TierService
from hawkvision.datacenter.stages.catalog import Catalog, check_models, load_catalogs
from hawkvision.datacenter.stages.ensemble import evaluation_requests
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import bounded
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates
from hawkvision.servers.tls_from_settings import server_certificates
from hawkvision.system.log_relay import relaying
from hawkvision.transport.settings import DatagramSettings

if TYPE_CHECKING:
    from hawkvision.datacenter.deployment.handles import HandleVariants

log = logging.getLogger("hawkvision.datacenter")

ResultT = TypeVar("ResultT")

_DRAIN_S: Final = 10
_ABANDON_S: Final = 1.0
_LEAVE_S: Final = 0.1
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher hands to a tier process."""

    config: DatacenterConfig
    sockets: PublicSockets
    folder: Path
    """Private, for Ray's sockets and logs."""
    launcher: socket.socket
    """Keeps message boundaries (SOCK_SEQPACKET)."""
    restarts: int
    """How many tier processes preceded this one; for the metrics."""


def serve(launch: Launch, stopping: threading.Event) -> None:
    """Serve at the public sockets until SIGTERM or SIGINT; then answer the requests inside, stop Ray and return.

    Tells the launcher when the server listens and when each variant is loaded. If Ray's raylet or its global control
    store dies, the process ends at once with the status `RAY_DIED`, because neither can be replaced while Ray runs.

    Args:
        launch: settings, sockets and the launcher.
        stopping: set by a signal that came before; it ends the start at its next step.

    Raises:
        ConfigError: if stages, keys or certificates are unknown or unusable.
        ArtifactError: if a model file is missing or is not the one that the manifest names.
        BackendError: if a variant does not start.
    """
    config = launch.config
    catalogs = check_models(config, load_catalogs(config))  # replicas check the files again
    http_server = make_http_server(config, catalogs)
    certificates = server_certificates(config, "dc")
    local_ray.set_environment()
    local_ray.adopt_orphans()
    asyncio.run(_TierProcess(launch, http_server, certificates).run(stopping))


class _TierProcess:
    def __init__(self, launch: Launch, http_server: HttpServer, certificates: Certificates | None) -> None:
        self._config = launch.config
        self._sockets = launch.sockets
        self._folder = launch.folder
        self._launcher = launch.launcher
        self._http_server = http_server
        self._tier = http_server.tier
        self._catalogs = http_server.tier.catalogs
        self._certificates = certificates
        self._tier.metrics.restarts.set(launch.restarts)

    async def run(self, stopping: threading.Event) -> None:
        """Serve until a signal; raises what a failed start raises."""
        self._stop = asyncio.Event()
        self._stop_on_signal()
        if stopping.is_set():
            self._stop.set()
        datagram = await self._open_datagram_server()
        reloads = self._start_reloads(datagram)
        server = self._uvicorn()
        serving = asyncio.create_task(server.serve(sockets=[self._sockets.http]))
        registries = {
            task: await _open_registry(self._config, catalog, self._tier) for task, catalog in self._catalogs.items()
        }
        self._report(LISTENING)
        heartbeat = asyncio.create_task(self._beat())
        watcher = local_ray.RayWatcher()
        # Ray starts outside the main thread, where it would take SIGTERM for itself and block the server. One thread
        # lives as long as Ray's processes, because the kernel kills them with the thread that started them.
        with relaying(self._folder), ThreadPoolExecutor(1, "ray") as ray_thread:
            opening = asyncio.create_task(self._load(registries, ray_thread, watcher))
            lost = asyncio.create_task(watcher.lost.wait())
            try:
                await asyncio.wait((opening, lost), return_when=asyncio.FIRST_COMPLETED)
                if opening.done() and await opening:
                    self._report(READY)
                    stopped = asyncio.create_task(self._stop.wait())
                    await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
                if lost.done() and not self._stop.is_set():
                    self._close(registries)
                    await self._leave()
                    await _abandon(server, serving)
            finally:
                self._stop_admitting()
                await self._leave()
                server.should_exit = True
                await serving
                await reloads.close()
                if datagram is not None:
                    await datagram.close(_DRAIN_S)
                self._close(registries)
                heartbeat.cancel()
                watcher.stop()
                local_ray.stop_ray(ask=not lost.done())
                lost.cancel()

    def _stop_admitting(self) -> None:
        for task in self._catalogs:
            self._tier.set_variants(task, None)

    def _close(self, registries: Mapping[str, ReplicaRegistry]) -> None:
        self._stop_admitting()
        for registry in registries.values():
            registry.close()

    async def _open_datagram_server(self) -> TierDatagramServer | None:
        port = self._config.feature(DatagramSettings).port
        if port is None:
            return None
        server = await TierDatagramServer.open(
            self._config, port, self._tier, self._http_server.keys, self._sockets.datagrams
        )
        self._http_server.transports = server.offered.transports
        return server

    def _start_reloads(self, datagram: TierDatagramServer | None) -> FileWatcher:
        reloads = FileWatcher.of(self._http_server.keys, self._certificates)
        if datagram is not None:
            reloads.add("dc.datagram_certificate", datagram.offered.files, datagram.offered.reload)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloads.now)
        reloads.start()
        return reloads

    def _uvicorn(self) -> _Server:
        return _Server(
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
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )

    def _protocol(self) -> type[asyncio.Protocol]:
        """The bounded HTTP protocol, behind TLS if there is a certificate."""
        protocol = bounded(Limits(connections_for(raise_open_files()), self._config.connections_per_address))
        if self._certificates is None:
            return protocol
        self._tier.metrics.watch_tls(self._certificates.state)
        return behind_tls(protocol, self._certificates)

    async def _load(
        self, registries: Mapping[str, ReplicaRegistry], ray_thread: ThreadPoolExecutor, watcher: local_ray.RayWatcher
    ) -> bool:
        """Start Ray, load all variants and give them to the server; False if `stop` was set first.

        A step is never interrupted, because Ray cannot be stopped under a call that uses it. The longest are Ray's own
        start and that of Serve's controller, some seconds each.

        Raises:
            BackendError: if a variant does not start.
        """
        config, catalogs = self._config, self._catalogs

        async def step(work: Callable[[], ResultT]) -> ResultT:
            return await asyncio.get_running_loop().run_in_executor(ray_thread, work)

        if self._stop.is_set():
            return False
        await step(lambda: local_ray.start_ray(config, catalogs, self._folder))
        # Ray has installed its own handlers meanwhile: they print the stack, and abort after three seconds.
        self._stop_on_signal()
        watcher.start()
        if self._stop.is_set():
            return False
        variants = await step(lambda: local_ray.deploy_groups(config, catalogs, registries))
        while not self._stop.is_set():
            running = await step(lambda: local_ray.all_running(catalogs))
            present = config.min_replicas == 0 or not any(registry.absent for registry in registries.values())
            if running and present:
                for task, of_task in variants.items():
                    await self._connect(self._catalogs[task], of_task)
                    self._tier.metrics.describe(task, await of_task.backends())
                    self._tier.set_variants(task, of_task)
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _POLL_S)
        return False

    async def _connect(self, catalog: Catalog, variants: HandleVariants) -> None:
        """Connect to replicas that are called through Ray, so that the first caller need not wait for it.

        An expired request connects and does nothing else.
        """
        if local_ray.is_fixed(self._config):
            return
        for group in catalog.groups:
            stage = catalog.best_of(group)
            with contextlib.suppress(DeadlineMissed):
                await anext(variants.ask(evaluation_requests(stage), b"", Deadline(0.0), streaming=False))

    async def _leave(self) -> None:
        """Leave new callers to the launcher, and give recent ones the time to send their requests."""
        self._report(LEAVING)
        asyncio.get_running_loop().remove_reader(self._sockets.http.fileno())
        await asyncio.sleep(_LEAVE_S)

    def _report(self, word: bytes) -> None:
        """Send the launcher a word; if the launcher is gone, the kernel ends this process as well.

        A suspended launcher with a full socket misses words; some hundred fit.
        """
        with contextlib.suppress(OSError):
            self._launcher.send(word, socket.MSG_DONTWAIT)

    async def _beat(self) -> None:
        """Show the launcher that this event loop runs."""
        while True:
            self._report(ALIVE)
            await asyncio.sleep(BEAT_S)

    def _stop_on_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)


async def _open_registry(config: DatacenterConfig, catalog: Catalog, tier: TierService) -> ReplicaRegistry:
    """Where replicas register. While a group that should have a live replica has none, the tier is not ready."""
    registry = ReplicaRegistry(
        [group.name for group in catalog.groups],
        QueueBounds(config.max_ongoing_requests, config.max_queued_requests),
        on_change=tier.set_live_replicas if config.min_replicas > 0 else lambda *_: None,
        on_statement=partial(tier.record_statement, catalog.task),
    )
    await registry.listen()
    return registry


async def _abandon(server: _Server, serving: asyncio.Task[None]) -> NoReturn:
    """End the process after a death in Ray.

    Ray's own shutdown is left out: it waits for processes that may be gone.
    """
    server.should_exit = True
    await asyncio.wait((serving,), timeout=_ABANDON_S)
    local_ray.kill(local_ray.children())
    logging.shutdown()
    os._exit(RAY_DIED)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: it would re-raise SIGTERM before Ray has been stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
