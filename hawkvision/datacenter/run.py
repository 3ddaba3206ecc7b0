"""Starting and stopping the datacenter tier: `up` on this machine, `deploy` to a Ray cluster.

`up` starts a private Ray, deploys one application per group of variants, and hosts the door itself, which speaks
kept-alive HTTP. That is what the edge's hop costs least over; two shared cores, no-op variant, 30 KB JPEG, milliseconds
that the caller waits, client, tier and proxy on one machine:

    python -m tests.bench.grpc_hop                  load 2, n = 1,920 a row
                              callers      P50      P99    req/s
    own door, HTTP                  1      3.9      9.1      235
    Serve's gRPC proxy              1      7.4       17      125
    own door, HTTP                 16       35      111      406
    Serve's gRPC proxy             16       58      111      264

    python -m loadgen.bench.dc_hop                  load 3, n = 800 a row; less decoding, queue and inference
    own door, HTTP                  1      2.3      7.1
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
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from hawkvision.artifacts import load_variant
from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.catalog import Catalog, load_catalog
from hawkvision.datacenter.door import Door, make_door
from hawkvision.datacenter.lossy import LossyDoor
from hawkvision.datacenter.opinions import errands_of
from hawkvision.errors import BackendError, ConfigError, DeadlineMissed
from hawkvision.manifest import cache_dir
from hawkvision.servers.access import server_certificates
from hawkvision.servers.handshake import behind_tls
from hawkvision.servers.protocol import Limits, bounded, connections_for, raise_open_files
from hawkvision.servers.reload import Reloads
from hawkvision.servers.tls import Certificates

if TYPE_CHECKING:
    from hawkvision.datacenter.app import HandleVariants

ResultT = TypeVar("ResultT")

# Ray reads these when it is imported, so `up` sets them first; whoever has set one keeps it.
TUNING = {
    # Handle calls by gRPC: 1.1 ms instead of 2.8 ms for 30 KB, and no object store for large pictures.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Our replicas and door never block their loop (models and decoders have threads), so two hops between loops go.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# A second apart; Ray would try twenty times. Where somebody listens and refuses so often, the key is likely wrong.
_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "5"}
# Pictures travel by gRPC; what Ray itself keeps in the store is small. 78 MB is the least it accepts.
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_DRAIN_S = 10
_REACH_S = 5.0
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def up(config: DatacenterConfig, stopping: threading.Event) -> None:
    """Serve on this machine until SIGTERM or SIGINT; then answer what is inside, stop Ray and return.

    `stopping` is for a signal that came before: set, it ends the start at its next step.
    Prints `ready: http://HOST:PORT` on standard output once every variant is loaded; port 0 takes a free one. Until
    then, and while draining, the door answers 503. With `config.lossy_port` pictures are taken as datagrams, too;
    a second line `lossy: udp://HOST:PORT` and `GET /v1/transport` say where.

    Raises:
        ConfigError: if the address cannot be listened on, or rungs, keys or certificates are unknown or unusable.
        ArtifactError: if a model file is missing or is not the one that the manifest names.
    """
    catalog = load_catalog(config)
    door = make_door(config, catalog)
    certificates = server_certificates(config, "dc")
    if config.backend != "noop":
        for variant in catalog.variants:  # each replica checks again; here it fails at once, and says why
            load_variant(cache_dir(config.cache_dir), config.task, variant)
    try:
        listener = _listen(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"dc.host, dc.port: cannot listen on {config.host}:{config.port}: {error}") from None
    for name, value in TUNING.items():
        os.environ.setdefault(name, value)
    # A call that finds Ray stopped must fail; by default it would start another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        # Ray's own ports listen on every interface and run what they are sent; a key of this process's own shuts them.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    _adopt_orphans()
    with listener:
        asyncio.run(_serve(config, catalog, door, certificates, listener, stopping))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that names its protocol: asyncio turns Nagle's algorithm off only where it reads TCP there.

    With the protocol 0 of `socket.create_server`, every reply waited 40 ms for the caller's delayed acknowledgement.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


async def _serve(
    config: DatacenterConfig,
    catalog: Catalog,
    door: Door,
    certificates: Certificates | None,
    listener: socket.socket,
    stopping: threading.Event,
) -> None:
    stop = asyncio.Event()
    _stop_on_signal(stop)
    if stopping.is_set():
        stop.set()
    lossy = None
    if config.lossy_port is not None:
        lossy = await LossyDoor.open(config, config.lossy_port, door.tier, door.keys)
        door.transports = lossy.transports
    reloads = Reloads.of(door.keys, certificates)
    if lossy is not None:
        reloads.add("dc.lossy_certificate", lossy.files, lossy.reload)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloads.now)
    reloads.start()
    server = _Server(
        uvicorn.Config(
            door.asgi,
            interface="asgi3",
            http="auto" if certificates is None else _behind_tls(door, certificates),
            lifespan="off",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # Ray is started outside the main thread, where it would take SIGTERM for itself and block the door; and by one
    # thread that lives as long as Ray's processes, because the kernel kills them with the thread that started them.
    with ThreadPoolExecutor(1, "ray") as ray_thread:
        variants: HandleVariants | None = None
        try:
            variants = await _open(door, config, catalog, ray_thread, stop)
            if variants is not None:
                _say_ready(listener, lossy, tls=certificates is not None)
                await stop.wait()
        finally:
            door.tier.variants = None
            server.should_exit = True
            await serving
            await reloads.close()
            if lossy is not None:
                await lossy.close(_DRAIN_S)
            if variants is not None:
                await variants.close()
            _stop_ray()


async def _open(
    door: Door, config: DatacenterConfig, catalog: Catalog, ray_thread: ThreadPoolExecutor, stop: asyncio.Event
) -> HandleVariants | None:
    """Start Ray, load every variant and give them to the door; None if `stop` was set first.

    Each step runs to its end before `stop` is looked at: Ray cannot be stopped under a call that uses it. The longest
    are Ray's own start and that of Serve's controller, 2 to 5 s each; loading models is awaited by polling.

    Raises:
        BackendError: if a variant does not start.
    """

    async def step(work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(ray_thread, work)

    if stop.is_set():
        return None
    await step(lambda: _start_ray(config, catalog))
    # Ray's core has put a handler before ours by now: it prints the stack, and aborts if that takes three seconds.
    _stop_on_signal(stop)
    if stop.is_set():
        return None
    variants = await step(lambda: _deploy_here(config, catalog))
    while not stop.is_set():
        if await step(lambda: _all_running(catalog)):
            # The first call through a handle connects, 60 ms; an expired request pays that and does nothing else.
            for group in catalog.groups:
                rung = catalog.rung(group.name)
                assert rung is not None, "a group is named after one of its rungs"
                with contextlib.suppress(DeadlineMissed):
                    await anext(variants.ask(errands_of(rung), b"", expires_at=0.0, piecemeal=False))
            await variants.shortened()
            door.tier.variants = variants
            return variants
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_S)
    return None


def _behind_tls(door: Door, certificates: Certificates) -> type[asyncio.Protocol]:
    door.tier.metrics.watch_tls(certificates.state)
    return behind_tls(bounded(Limits(connections_for(raise_open_files()))), certificates)


def _say_ready(listener: socket.socket, lossy: LossyDoor | None, *, tls: bool) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"ready: {'https' if tls else 'http'}://{shown}:{port}", flush=True)  # noqa: T201  the contract
    if lossy is not None:
        print(f"lossy: udp://{shown}:{lossy.offer.port}", flush=True)  # noqa: T201


def _stop_on_signal(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: it would re-raise SIGTERM before Ray has been stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _start_ray(config: DatacenterConfig, catalog: Catalog) -> None:
    import ray

    # Silenced before the start: it would warn of not having taken SIGTERM for itself, which is the intention.
    logging.getLogger("ray").setLevel(logging.ERROR)
    replicas = len(catalog.groups) * config.max_replicas
    ray.init(
        address="local",
        include_dashboard=False,
        # Ray starts this many workers ahead, in parallel; at least one per replica and one for Serve's controller.
        num_cpus=max(replicas + 1, math.ceil(replicas * config.num_cpus)),
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
    )


def _deploy_here(config: DatacenterConfig, catalog: Catalog) -> HandleVariants:
    """Have Serve start every group of variants; returns before they run."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    from hawkvision.datacenter.app import HandleVariants, group_apps

    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    serve.start(http_options=HTTPOptions(location="NoServer"), logging_config=quiet)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    apps = group_apps(config, catalog)
    handles = serve.run_many(
        [serve.RunTarget(app, name=name, route_prefix=None, logging_config=quiet) for name, app in apps.items()],
        wait_for_applications_running=False,
    )
    return HandleVariants(catalog.groups, handles, config)


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
        ConfigError: if the rungs are unknown, or the cluster cannot be reached, refuses the key or runs another Ray.
        BackendError: if the application does not start on the cluster; says what Serve says.
    """
    _reach(address)
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


def _stop_ray() -> None:
    """Stop every process that Ray started: first as Ray does, then, after five seconds, the rest by force.

    Serve's own shutdown is left out. It drains replica by replica for 5 to 50 s; the door has already drained, so
    nothing is inside.
    """
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
    patience_ends = time.monotonic() + 5.0
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
