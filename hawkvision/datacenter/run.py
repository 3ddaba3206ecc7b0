"""The datacenter tier: `serve` runs it on this machine, `deploy` sends it to a Ray cluster.

`serve` is the tier process that `launch.supervisor` starts. It starts a private Ray, deploys one application per group
of variants, and hosts the server itself, which speaks kept-alive HTTP. That is what the edge's escalation costs least
over; two shared cores, no-op variant, 30 KB JPEG, milliseconds that the caller waits, client, tier and proxy on one
machine:

    python -m tests.bench.grpc_hop                  load 2, n = 1,920 a row
                              callers      P50      P99    req/s
    own server, HTTP                  1      3.9      9.1      235
    Serve's gRPC proxy              1      7.4       17      125
    own server, HTTP                 16       35      111      406
    Serve's gRPC proxy             16       58      111      264

    python -m loadgen.bench.dc_hop                  load 3, n = 800 a row; less decoding, queue and inference
    own server, HTTP                  1      2.3      7.1
    Serve's HAProxy, HTTP           1      2.4      8.2
    Serve's Python proxy, HTTP      1      9.1       25       tuned; 11 and 24 as it comes

HAProxy is as fast, but takes twice as long to start, cannot answer while models load, and opens its statistics port on
every interface; it is what clusters use (`manifests`), where those do not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import uvicorn

from hawkvision.core import logs
from hawkvision.core.errors import BackendError, ConfigError, DeadlineMissed
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.catalog import Catalog, load_catalog
from hawkvision.datacenter.execution.ensemble import errands_of
from hawkvision.datacenter.launch.messages import ALIVE, BEAT_S, LEAVING, LISTENING, RAY_DIED, READY
from hawkvision.datacenter.launch.ray_version import check_ray
from hawkvision.datacenter.launch.sockets import PublicSockets
from hawkvision.datacenter.servers.datagram_server import DatagramServer
from hawkvision.datacenter.servers.http_server import HttpServer, make_http_server
from hawkvision.datacenter.servers.local_socket import Replicas
from hawkvision.datacenter.service import Tier
from hawkvision.models.artifacts import load_variant
from hawkvision.models.manifest import cache_dir
from hawkvision.servers.certificates import server_certificates
from hawkvision.servers.connections import KEEP_ALIVE_S, Limits, connections_for, raise_open_files
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import bounded
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import Certificates
from hawkvision.system.log_relay import relaying
from hawkvision.system.telemetry import SILENCED
from hawkvision.transport.settings import DatagramSettings

if TYPE_CHECKING:
    from hawkvision.datacenter.app import HandleVariants

log = logging.getLogger("hawkvision.datacenter")

ResultT = TypeVar("ResultT")

# Ray reads these when it is imported, so `serve` sets them first; whoever has set one keeps it.
TUNING = {
    # Handle calls by gRPC: 1.1 ms instead of 2.8 ms for 30 KB, and no object store for large images.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Our replicas and server never block their loop (models and decoders have threads), so two hops between loops go.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    **SILENCED,
}
# A second apart; Ray would try twenty times. Where somebody listens and refuses so often, the key is likely wrong.
_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "5"}
# Images travel by gRPC; what Ray itself keeps in the store is small. 78 MB is the least it accepts.
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_LOOPBACK = "127.0.0.1"
_VITAL = ("gcs_server", "raylet")
_DRAIN_S = 10
_ABANDON_S = 1.0
_GIVE_BACK_S = 0.1
_REACH_S = 5.0
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def serve(
    config: DatacenterConfig,
    sockets: PublicSockets,
    folder: Path,
    launcher: socket.socket,
    stopping: threading.Event,
    *,
    restarts: int,
) -> None:
    """Serve at the public sockets until SIGTERM or SIGINT; then answer what is inside, stop Ray and return.

    Tells the launcher (`launch.supervisor`) when the server listens and when every variant is loaded. Should Ray's
    raylet or global control store die, the process ends at once with the status `RAY_DIED`: neither can be replaced
    under what runs on it.

    Args:
        config: the settings.
        sockets: where callers come in.
        folder: private, for Ray's own sockets and logs.
        launcher: keeps messages apart.
        stopping: set by a signal that came before: ends the start at its next step.
        restarts: how many tier processes came before this one; for the metrics.

    Raises:
        ConfigError: if stages, keys or certificates are unknown or unusable.
        ArtifactError: if a model file is missing or is not the one that the manifest names.
        BackendError: if a variant does not start.
    """
    catalog = load_catalog(config)
    http_server = make_http_server(config, catalog)
    certificates = server_certificates(config, "dc")
    if config.backend != "noop":
        for variant in catalog.variants:  # each replica checks again; here it fails at once, and says why
            load_variant(cache_dir(config.cache_dir), config.task, variant)
    for name, value in TUNING.items():
        os.environ.setdefault(name, value)
    # A call that finds Ray stopped must fail; by default it would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # Whatever was set: all that Ray listens on asks for a key of this process's own.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray's address is loopback's, and most of its ports are there alone. Otherwise it would ask the way to a public
    # name server to learn which address of this machine it has.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    _adopt_orphans()
    asyncio.run(_serve(config, catalog, http_server, certificates, sockets, folder, launcher, stopping, restarts))


async def _serve(
    config: DatacenterConfig,
    catalog: Catalog,
    http_server: HttpServer,
    certificates: Certificates | None,
    sockets: PublicSockets,
    folder: Path,
    launcher: socket.socket,
    stopping: threading.Event,
    restarts: int,
) -> None:
    stop = asyncio.Event()
    _stop_on_signal(stop)
    if stopping.is_set():
        stop.set()
    http_server.tier.metrics.restarts.set(restarts)
    datagram: DatagramServer | None = None
    port = config.feature(DatagramSettings).port
    if port is not None:
        datagram = await DatagramServer.open(config, port, http_server.tier, http_server.keys, sockets.datagrams)
        http_server.transports = datagram.offered.transports
    reloads = FileWatcher.of(http_server.keys, certificates)
    if datagram is not None:
        reloads.add("dc.datagram_certificate", datagram.offered.files, datagram.offered.reload)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloads.now)
    reloads.start()
    server = _Server(
        uvicorn.Config(
            http_server.asgi,
            http=_protocol(config, http_server, certificates),
            interface="asgi3",
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="off",
            ws="none",
            access_log=False,
            server_header=False,
            log_config=None,  # its lines are written as ours
            log_level="warning",
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[sockets.http]))
    replicas = await _replicas(config, catalog, http_server.tier)
    _tell(launcher, LISTENING)
    beating = asyncio.create_task(_beat(launcher))
    watch = _RayWatch()
    # Ray is started outside the main thread, where it would take SIGTERM for itself and block the server; and by one
    # thread that lives as long as Ray's processes, because the kernel kills them with the thread that started them.
    with relaying(folder), ThreadPoolExecutor(1, "ray") as ray_thread:
        opening = asyncio.create_task(_open(http_server, config, catalog, folder, replicas, ray_thread, watch, stop))
        lost = asyncio.create_task(watch.lost.wait())
        try:
            await asyncio.wait((opening, lost), return_when=asyncio.FIRST_COMPLETED)
            if opening.done() and await opening:
                _tell(launcher, READY)
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait((stopped, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not stop.is_set():
                http_server.tier.variants = None
                replicas.close()
                await _give_back(sockets, launcher)
                await _abandon(server, serving)
        finally:
            http_server.tier.variants = None
            await _give_back(sockets, launcher)
            server.should_exit = True
            await serving
            await reloads.close()
            if datagram is not None:
                await datagram.close(_DRAIN_S)
            replicas.close()
            beating.cancel()
            watch.end()
            _stop_ray(ask=not lost.done())
            lost.cancel()


async def _replicas(config: DatacenterConfig, catalog: Catalog, tier: Tier) -> Replicas:
    """Where replicas report. As long as a group that should have one has none, the tier is not ready."""
    replicas = Replicas(
        [group.name for group in catalog.groups],
        max_ongoing=config.max_ongoing_requests,
        max_queued=config.max_queued_requests,
        changed=tier.replicas_changed if config.min_replicas > 0 else lambda *_: None,
        states=tier.states,
    )
    await replicas.listen()
    return replicas


async def _give_back(sockets: PublicSockets, launcher: socket.socket) -> None:
    """Leave new callers to the launcher, and give those that have just come the time to ask."""
    _tell(launcher, LEAVING)
    asyncio.get_running_loop().remove_reader(sockets.http.fileno())
    await asyncio.sleep(_GIVE_BACK_S)


async def _abandon(server: _Server, serving: asyncio.Task[None]) -> NoReturn:
    """End the process, for Ray is not whole any more.

    Ray is not told: its shutdown asks processes that may be gone, and waits for them.
    """
    server.should_exit = True
    await asyncio.wait((serving,), timeout=_ABANDON_S)
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    logging.shutdown()
    os._exit(RAY_DIED)


class _RayWatch:
    """Knows when one of the processes dies that Ray cannot be without."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self._watched: list[int] = []

    def begin(self) -> None:
        """Watch those that run by now; they are this process's children."""
        loop = asyncio.get_running_loop()
        for pid in _children():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in _VITAL:
                watched = os.pidfd_open(pid)
                self._watched.append(watched)
                loop.add_reader(watched, self._ended, name, pid)

    def end(self) -> None:
        """Watch no more: they are about to be stopped."""
        while self._watched:
            watched = self._watched.pop()
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    def _ended(self, name: str, pid: int) -> None:
        log.error("Ray's %s (process %d) died: all of Ray is started again", name, pid)
        self.end()
        self.lost.set()


async def _open(
    http_server: HttpServer,
    config: DatacenterConfig,
    catalog: Catalog,
    folder: Path,
    replicas: Replicas,
    ray_thread: ThreadPoolExecutor,
    watch: _RayWatch,
    stop: asyncio.Event,
) -> bool:
    """Start Ray, load every variant and give them to the server; False if `stop` was set first.

    Each step runs to its end before `stop` is looked at: Ray cannot be stopped under a call that uses it. The longest
    are Ray's own start and that of Serve's controller, 2 to 5 s each; loading models is awaited by polling.

    Raises:
        BackendError: if a variant does not start.
    """

    async def step(work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(ray_thread, work)

    if stop.is_set():
        return False
    await step(lambda: _start_ray(config, catalog, folder))
    # Ray's core has put a handler before ours by now: it prints the stack, and aborts if that takes three seconds.
    _stop_on_signal(stop)
    watch.begin()
    if stop.is_set():
        return False
    variants = await step(lambda: _deploy_here(config, catalog, replicas))
    while not stop.is_set():
        if await step(lambda: _all_running(catalog)) and (config.min_replicas == 0 or not replicas.absent):
            await _connect(variants, config, catalog)
            http_server.tier.metrics.describe(config.task, await variants.backends())
            http_server.tier.variants = variants
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_S)
    return False


def _protocol(
    config: DatacenterConfig, http_server: HttpServer, certificates: Certificates | None
) -> type[asyncio.Protocol]:
    """What speaks HTTP with callers, within bounds, and behind TLS where there is a certificate."""
    protocol = bounded(Limits(connections_for(raise_open_files()), config.connections_per_address))
    if certificates is None:
        return protocol
    http_server.tier.metrics.watch_tls(certificates.state)
    return behind_tls(protocol, certificates)


async def _connect(variants: HandleVariants, config: DatacenterConfig, catalog: Catalog) -> None:
    """Connect to the replicas that are asked through Ray, 60 ms; an expired request pays that and does nothing else."""
    if _is_fixed(config):
        return
    for group in catalog.groups:
        stage = catalog.stage(group.name)
        assert stage is not None, "a group is named after one of its stages"
        with contextlib.suppress(DeadlineMissed):
            await anext(variants.ask(errands_of(stage), b"", expires_at=0.0, piecemeal=False))


def _is_fixed(config: DatacenterConfig) -> bool:
    """Whether the number of replicas never changes; otherwise Serve must count what they are asked."""
    return config.min_replicas == config.max_replicas


def _tell(launcher: socket.socket, word: bytes) -> None:
    """Send the launcher a word; where it is gone, the kernel ends this process as well.

    One that was stopped, and has a full socket, misses words; some hundred fit.
    """
    with contextlib.suppress(OSError):
        launcher.send(word, socket.MSG_DONTWAIT)


async def _beat(launcher: socket.socket) -> None:
    """Let the launcher know that this process's event loop runs."""
    while True:
        _tell(launcher, ALIVE)
        await asyncio.sleep(BEAT_S)


def _stop_on_signal(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: it would re-raise SIGTERM before Ray has been stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _start_ray(config: DatacenterConfig, catalog: Catalog, folder: Path) -> None:
    import ray

    # Silenced before the start: it would warn of not having taken SIGTERM for itself, which is the intention.
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Of Ray's API server nothing would run here but its usage reports. Disabled, they still ask name servers and the
    # metadata services of clouds where this machine is. Nobody else needs it.
    ray._private.services.start_api_server = lambda *_, **__: ("", None)
    # Two interpreters less: one asks for more machines, of which there are none, and one passes on logs, which replicas
    # send themselves.
    ray._private.node.Node.start_monitor = lambda _: None
    ray._private.node.Node.start_log_monitor = lambda _: None
    replicas = len(catalog.groups) * config.max_replicas
    ray.init(
        address="local",
        include_dashboard=False,
        # Ray starts this many workers ahead, in parallel; at least one per replica and one for Serve's controller.
        num_cpus=max(replicas + 1, math.ceil(replicas * config.num_cpus)),
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address=_LOOPBACK,
        _temp_dir=str(folder),
    )


def _deploy_here(config: DatacenterConfig, catalog: Catalog, replicas: Replicas) -> HandleVariants:
    """Have Serve start every group of variants; returns before they run."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    from hawkvision.datacenter.app import HandleVariants, group_apps

    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    logs.adopt("ray", logging.ERROR)
    logs.adopt("ray.serve")
    serve.start(http_options=HTTPOptions(location="NoServer"), logging_config=quiet)
    logs.adopt("ray.serve")  # once more, for the start has set it up again
    apps = group_apps(config, catalog, replicas.address)
    handles = serve.run_many(
        [serve.RunTarget(app, name=name, route_prefix=None, logging_config=quiet) for name, app in apps.items()],
        wait_for_applications_running=False,
    )
    watched = replicas if config.min_replicas > 0 else None
    return HandleVariants(catalog.groups, handles, watched, replicas if watched and _is_fixed(config) else None)


def _all_running(catalog: Catalog) -> bool:
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    applications = serve.status().applications
    for name, state in applications.items():
        if state.status == ApplicationStatus.DEPLOY_FAILED:
            raise BackendError(f"{name!r} did not start: {_one_line(state.message)}")
    running = [name for name, state in applications.items() if state.status == ApplicationStatus.RUNNING]
    return set(running) >= {group.name for group in catalog.groups}


def deploy(config: DatacenterConfig, address: str) -> None:
    """Deploy, or update, the application `hawkvision` on the Ray cluster at `address`, and wait until it runs.

    Every node that may run a replica needs `hawkvision[datacenter]` installed (the same version as here) and the
    model files under `config.cache_dir`; nothing is uploaded. `address` is what `ray.init` takes (`auto`, `HOST:6379`
    from a node of the cluster, `ray://HOST:10001` from outside). A cluster with a key wants it in `RAY_AUTH_MODE` and
    `RAY_AUTH_TOKEN`. Serve listens on `config.host` and `config.port` of every node, unless it already listens
    elsewhere. `TUNING` takes effect only if the cluster's own processes were started with it;
    `manifests.rayservice` does that.

    Raises:
        ConfigError: if the stages are unknown, or the cluster cannot be reached, refuses the key or runs another Ray.
        BackendError: if the application does not start on the cluster; says what Serve says.
    """
    check_ray()
    _reach(address)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning(
            "RAY_AUTH_MODE is not 'token': a Ray that takes this deployment runs the code of whoever reaches its ports"
        )
    for name, value in {**TUNING, **_TRIES}.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.app import APP_NAME, application

    app = application(config)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"dc.address: cannot use the Ray at {address!r}: {_one_line(error)}") from None
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port, location="EveryNode"))
        serve.run(app, name=APP_NAME, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise BackendError(f"the cluster at {address!r} did not start the application: {_one_line(error)}") from None
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Refuse an address where nothing listens; `ray.init` would try for two minutes and then end the process."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"dc.address = {address!r}: expected auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        raise ConfigError(f"dc.address: no Ray cluster answers at {address!r}: {error}") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _adopt_orphans() -> None:
    """Make descendants whose parent dies our children, so that `_stop_ray` can see that none is left (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stop_ray(*, ask: bool) -> None:
    """Stop every process that Ray started: first as Ray does, if it is to be asked; after five seconds the rest by
    force.

    Serve's own shutdown is left out. It drains replica by replica for 5 to 50 s; the server has already drained, so
    nothing is inside.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ask:
        ray.shutdown()
    patience_ends = time.monotonic() + (5.0 if ask else 0.0)
    while children := _children():
        if time.monotonic() > patience_ends:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


def _children() -> list[int]:
    """This process's living children, by Linux's account; elsewhere none are known."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in path.read_text().split()]
