"""The tier process: starts a private Ray, deploys the application, and watches until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.launcher_socket import socket_path
from hawkvision.datacenter.launch import local_ray
from hawkvision.datacenter.launch.messages import ABANDON_S, LOST, RAY_DIED, READY
from hawkvision.datacenter.servers.http_server import make_http_server
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, check_models, load_catalogs
from hawkvision.servers.tls import server_certificates
from hawkvision.system.child_server import adopt_orphans
from hawkvision.system.log_relay import relaying

if TYPE_CHECKING:
    from ray.serve import Application

log = logging.getLogger("hawkvision.datacenter")

ResultT = TypeVar("ResultT")

_POLL_S: Final = 0.1
_SLOW_S: Final = 60.0
"""After so long, and again after as long, a start that is not over is reported."""


def serve(config: DatacenterConfig, folder: Path, launcher: socket.socket, stopping: threading.Event) -> None:
    """Run the application on a private Ray until SIGTERM or SIGINT; then stop Ray and return.

    Tells the launcher when the application serves. If Ray's raylet or its global control store dies, the process ends
    with the status `RAY_DIED`, because neither can be replaced while Ray runs.

    Args:
        config: the tier's settings.
        folder: private, for Ray's sockets and logs.
        launcher: a socket that keeps message boundaries.
        stopping: set by a signal that came before; it ends the start at its next step.

    Raises:
        ConfigError: if stages, keys or certificates are unknown or unusable.
        ArtifactError: if each task lacks a model file, or has another one than the manifest names.
        BackendError: if no task can be served.
    """
    catalogs = load_catalogs(config)
    # Replicas and ingress read all that again; here a mistake is an error of one line.
    check_models(config, catalogs)
    make_http_server(config, catalogs)
    server_certificates(config, "dc")
    local_ray.set_environment()
    adopt_orphans()  # `local_ray.stop_ray` ends them
    asyncio.run(_TierProcess(config, folder, launcher, catalogs).run(stopping))


class _TierProcess:
    def __init__(
        self,
        config: DatacenterConfig,
        folder: Path,
        launcher: socket.socket,
        catalogs: Mapping[str, Catalog | TaskFailure],
    ) -> None:
        self._config = config
        self._folder = folder
        self._launcher = launcher
        self._catalogs = catalogs
        self._waits_for = "the application is built"

    async def run(self, stopping: threading.Event) -> None:
        """Run until a signal; raises what a failed start raises."""
        self._stop = asyncio.Event()
        self._stop_on_signal()
        if stopping.is_set():
            self._stop.set()
        watcher = local_ray.RayWatcher()
        # Ray starts outside the main thread, where it would take SIGTERM for itself. One thread lives as long as Ray's
        # processes, because the kernel kills them with the thread that started them.
        with relaying(self._folder), ThreadPoolExecutor(1, "ray") as ray_thread:
            opening = asyncio.create_task(self._open(ray_thread, watcher))
            reporting = asyncio.create_task(self._report_slow_start())
            lost = asyncio.create_task(watcher.lost.wait())
            try:
                await asyncio.wait((opening, lost), return_when=asyncio.FIRST_COMPLETED)
                reporting.cancel()
                if opening.done() and await opening:
                    self._report(READY)
                    stopped = asyncio.create_task(self._stop.wait())
                    await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
                if lost.done() and not self._stop.is_set():
                    self._report(LOST)
                    await _abandon()
            finally:
                watcher.stop()
                local_ray.stop_ray(ask=not lost.done())
                lost.cancel()

    async def _open(self, ray_thread: ThreadPoolExecutor, watcher: local_ray.RayWatcher) -> bool:
        """Start Ray and the application; False if `stop` was set before it serves.

        A step is never interrupted, because Ray cannot be stopped under a call that uses it. The longest are Ray's own
        start and that of Serve's controller, some seconds each.

        Raises:
            BackendError: if no task can be served.
        """

        async def step(work: Callable[[], ResultT], waits_for: str) -> ResultT:
            self._waits_for = waits_for
            return await asyncio.get_running_loop().run_in_executor(ray_thread, work)

        if self._stop.is_set():
            return False
        app = await step(self._application, self._waits_for)
        await step(lambda: local_ray.start_ray(app, self._folder), "Ray starts")
        # Ray has installed its own handlers meanwhile: they print the stack, and abort after three seconds.
        self._stop_on_signal()
        watcher.start()
        if self._stop.is_set():
            return False
        # Imports Ray, once its variables are set.
        from hawkvision.datacenter.ingress.application import Progress, missing, task_states

        await step(lambda: local_ray.deploy(app, self._config), "Serve's controller starts")
        progress = Progress(self._config, self._catalogs)
        while not self._stop.is_set():
            lacks = await step(progress.waits_for, self._waits_for)
            lacks = lacks or missing(await task_states(self._config.app_name))
            if lacks is None:
                return True
            self._waits_for = lacks
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _POLL_S)
        return False

    async def _report_slow_start(self) -> None:
        begun = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(_SLOW_S)
            waited_s = asyncio.get_running_loop().time() - begun
            log.warning("not ready after %.0f s: %s; is there enough memory and time?", waited_s, self._waits_for)

    def _application(self) -> Application:
        from hawkvision.datacenter.ingress.application import application

        return application(self._config, socket_path(self._folder), self._catalogs)

    def _report(self, word: bytes) -> None:
        """Send the launcher a word; if the launcher is gone, the kernel ends this process as well."""
        with contextlib.suppress(OSError):
            self._launcher.send(word, socket.MSG_DONTWAIT)

    def _stop_on_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)


async def _abandon() -> NoReturn:
    """End the process after a death in Ray, once the ingress had the time to answer the requests inside.

    Ray's own shutdown is left out: it waits for processes that may be gone.
    """
    await asyncio.sleep(ABANDON_S)
    local_ray.kill(local_ray.children())
    logging.shutdown()
    os._exit(RAY_DIED)
