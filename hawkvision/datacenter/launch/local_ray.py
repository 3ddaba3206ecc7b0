"""A private Ray on this machine: its start, the deployment of the groups, its supervision and its stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hawkvision.core import logs
from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import TUNING

if TYPE_CHECKING:
    from ray.serve import Application

log = logging.getLogger("hawkvision.datacenter")

_OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
"""Images travel by gRPC, so the store holds only Ray's own small objects. 78 MB is the least that Ray accepts."""
_LOOPBACK: Final = "127.0.0.1"
_VITAL: Final = ("gcs_server", "raylet")
_STOP_S: Final = 5.0


def set_environment() -> None:
    """Set the variables that Ray reads when it is imported."""
    for name, value in TUNING.items():
        os.environ.setdefault(name, value)
    # A call that finds Ray stopped must fail; by default it would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Each of Ray's ports asks for a key of this process's own, whatever was set before.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Keeps Ray's address and most of its ports on loopback. By default Ray asks a public name server for its address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def start_ray(app: Application, folder: Path) -> None:
    """Start Ray with its sockets and logs in `folder`, large enough for this application.

    The kernel ends it with the thread that calls this.

    Raises:
        BackendError: if it does not start, on a busy machine within Ray's 30 s; gives Ray's message.
    """
    import ray

    # Before the start: Ray would warn that it did not get SIGTERM, which is intended.
    logging.getLogger("ray").setLevel(logging.ERROR)
    # The API server would only report usage. Even disabled, these reports ask name servers and the metadata services
    # of clouds where this machine is.
    ray._private.services.start_api_server = lambda *_, **__: ("", None)
    # Saves two interpreters: one asks for more machines, of which there are none, and one passes on logs, which
    # replicas send themselves.
    ray._private.node.Node.start_monitor = lambda _: None
    ray._private.node.Node.start_log_monitor = lambda _: None
    cpus = cpus_for(app)
    log.info("Ray plans with %d CPUs, which the replicas reserve; this machine has %s", cpus, os.cpu_count())
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=cpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address=_LOOPBACK,
            _temp_dir=str(folder),
        )
    except Exception as error:  # Ray raises no class of its own
        raise BackendError(f"Ray did not start: {' '.join(str(error).split())}") from error


def cpus_for(app: Application) -> int:
    """The CPUs that all replicas reserve, so that a machine with fewer can run them too.

    Ray starts as many workers ahead, in parallel: at least one per replica and one for Serve's controller.
    """
    from ray.serve._private.build_app import build_app
    from ray.serve.config import AutoscalingConfig
    from ray.serve.deployment import deployment_to_schema

    replicas, cpus = 0, 0.0
    for built in build_app(app, name="planned").deployments:
        scaling = deployment_to_schema(built).autoscaling_config
        most = scaling.max_replicas if isinstance(scaling, AutoscalingConfig) else int(built.num_replicas)
        replicas += most
        cpus += most * float((built.ray_actor_options or {}).get("num_cpus", 1))
    return max(replicas + 1, math.ceil(cpus))


def deploy(app: Application, config: DatacenterConfig) -> None:
    """Make Serve start the application without proxies of its own; returns before it runs."""
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.ingress.application import run_application

    logs.adopt("ray", logging.ERROR)
    logs.adopt("ray.serve")
    run_application(app, config, HTTPOptions(location="NoServer"))
    logs.adopt("ray.serve")  # again, because the start of Serve has replaced the handlers


class RayWatcher:
    """Notices the death of a process without which Ray cannot go on."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self._pidfds: list[int] = []

    def start(self) -> None:
        """Watch the vital processes that run now; they are this process's children."""
        loop = asyncio.get_running_loop()
        for pid in children():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in _VITAL:
                pidfd = os.pidfd_open(pid)
                self._pidfds.append(pidfd)
                loop.add_reader(pidfd, self._on_exit, name, pid)

    def stop(self) -> None:
        """Watch no more, because Ray is about to be stopped."""
        while self._pidfds:
            pidfd = self._pidfds.pop()
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _on_exit(self, name: str, pid: int) -> None:
        log.error("Ray's %s (process %d) died: all of Ray is started again", name, pid)
        self.stop()
        self.lost.set()


def stop_ray(*, ask: bool) -> None:
    """Stop all of Ray's processes: by Ray's own shutdown if `ask`, and after five seconds by force.

    Serve's shutdown is left out: it drains replica by replica for 5 to 50 s, and the ingress has drained already.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ask:
        ray.shutdown()
    kill_at = time.monotonic() + (_STOP_S if ask else 0.0)
    while left := children():
        if time.monotonic() > kill_at:
            kill(left)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


def kill(pids: list[int]) -> None:
    """Kill these processes, as far as they live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """This process's living children, from Linux's /proc; empty elsewhere."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]
