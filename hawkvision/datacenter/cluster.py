"""Deploys the tier to a Ray cluster that runs, removes it, and takes nodes out of the cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hawkvision.core.errors import BackendError, ConfigError, NotReady
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter import cluster_nodes
from hawkvision.datacenter.cluster_nodes import Node
from hawkvision.datacenter.deployment.ray_settings import CONNECTION_RETRIES, TUNING, check_ray
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, load_catalogs

if TYPE_CHECKING:
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.servers.served_task import TaskState

log = logging.getLogger("hawkvision.datacenter")

DEPLOY_TIMEOUT_S: Final = 600.0
"""For each stage to have its replicas. The cluster goes on if it passes."""
_REPORT_S: Final = 5.0
"""From one line about what a deployment waits for to the next."""


def deploy(read: cluster_nodes.ReadSettings, address: str) -> None:
    """Deploy or update the application on the Ray cluster at `address`, and wait until it is ready.

    It is the application that `hawkvision dc up` runs. Each node that may run a replica needs HawkVision in this
    machine's version, with the extra `datacenter`, and the model files under `cache_dir`; nothing is uploaded. A
    cluster with a key needs `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN` here. `TUNING` takes effect only if the cluster's own
    processes were started with it (`hawkvision dc environment`).

    Args:
        read: gives the tier's settings; it takes defaults that suit the cluster's nodes.
        address: as `ray.init` takes it: `auto`, `HOST:6379` on a node of the cluster, `ray://HOST:10001` elsewhere.

    Raises:
        ConfigError: if the stages are unknown, the cluster cannot be reached, refuses the key or runs another Ray, or
            its Serve listens elsewhere than the settings say.
        BackendError: if a node lacks the models, or if a task cannot be served there, with the reason; once all others
            are, if there are any. Or if they are not ready within `DEPLOY_TIMEOUT_S`, with what they wait for.
    """
    config = read({})
    catalogs = load_catalogs(config)
    with _connected(address):
        if os.environ.get("RAY_AUTH_MODE") != "token":
            log.warning(
                "RAY_AUTH_MODE is not 'token': a Ray that takes this deployment runs the code of anybody who reaches "
                "its ports"
            )
        from ray.serve.config import HTTPOptions

        from hawkvision.datacenter.ingress.application import application, run_application

        nodes = cluster_nodes.replica_nodes()
        config = cluster_nodes.fitted(read, catalogs, nodes)
        app = application(config, catalogs=catalogs)
        http = HTTPOptions(host=config.host, port=config.port, location="EveryNode")
        _check_listening(http)
        log.info("looking for the models on %s", ", ".join(node.address for node in nodes) or "no node")
        cluster_nodes.check_models_on(nodes, config, catalogs)
        run_application(app, config, http)
        _wait_until_ready(config, catalogs)


def remove(address: str, app_name: str) -> None:
    """Remove an application from the cluster, once its requests are answered; the others stay.

    Raises:
        ConfigError: if the cluster cannot be reached, or has no such application.
    """
    with _connected(address):
        from ray import serve

        applications = serve.status().applications
        if app_name not in applications:
            there = ", ".join(applications) or "none"
            raise ConfigError(f"--app-name: no application {app_name!r} on this cluster; it has {there}")
        serve.delete(app_name)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """While the block lasts, this process is connected to the Ray at `address`.

    Raises:
        ConfigError: if it cannot be reached, refuses the key or is of another version.
    """
    check_ray()
    check_address(address)
    for name, value in {**TUNING, **CONNECTION_RETRIES}.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"dc.address: cannot use the Ray at {address!r}: {_one_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_listening(wanted: HTTPOptions) -> None:
    """Refuse an address other than the one where Serve listens already; Serve would ignore it.

    Raises:
        ConfigError: names both.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None and (client.http_config.host, client.http_config.port) != (wanted.host, wanted.port):
        host, port = client.http_config.host, client.http_config.port
        raise ConfigError(
            f"dc.host = {wanted.host}, dc.port = {wanted.port}: Serve on this cluster already listens on "
            f"{host}:{port}, for all its applications; expected --host {host} --port {port}"
        )


def _wait_until_ready(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> None:
    """Wait until each task is served or has failed; log every few seconds what is missing.

    Raises:
        BackendError: if a task has failed, or if they are not ready in time.
    """
    import ray

    from hawkvision.datacenter.ingress.application import Progress, missing, task_states_blocking

    # On the cluster: the ingress can be called from there, and perhaps not from here (ray://).
    asked = ray.remote(num_cpus=0)(task_states_blocking)
    progress = Progress(config, catalogs)
    began = shown = time.monotonic()
    while True:
        if (waits_for := progress.waits_for()) is None:
            states = ray.get(asked.remote(config.app_name))
            waits_for = missing(states)
            if waits_for is None:
                _check_all_served(states)
                return
        else:
            waits_for += f"; {cluster_nodes.free_cores(config)}"
        now = time.monotonic()
        if now - began > DEPLOY_TIMEOUT_S:
            raise BackendError(f"{config.app_name!r} is not ready after {DEPLOY_TIMEOUT_S:g} s: {waits_for}")
        if now - shown > _REPORT_S:
            log.info("%s waits, %.0f s so far: %s", config.app_name, now - began, waits_for)
            shown = now
        time.sleep(_POLL_S)


def _check_all_served(states: tuple[TaskState, ...]) -> None:
    """Report the tasks that are not served beside others that are.

    Raises:
        BackendError: names all of them.
    """
    from hawkvision.datacenter.ingress.application import failures

    if failed := failures(states):
        served = ", ".join(state.task for state in states if state.status == "ready")
        raise BackendError(f"{'; '.join(failed)}; served: {served}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


_POLL_S: Final = 0.5


def drain(address: str, node: str | None, limit_s: int) -> str:
    """Drain a node, and return its name once it runs nothing of Serve's.

    Serve starts the node's replicas elsewhere, sends no more requests to the old ones, and lets them and the node's
    HTTP proxy finish what they have. If there is no room elsewhere, they stay until shortly before the limit.

    Args:
        address: the cluster, `auto` or `HOST:PORT`.
        node: a node's name, address or ID; None for the one on this machine.
        limit_s: seconds after which Ray may regard the node as gone.

    Raises:
        ConfigError: if the cluster or the node is not found, or the node is the head.
        BackendError: if Ray refuses.
        NotReady: if something of Serve's still runs at the limit.
    """
    with _connected(address):
        found = find_node(cluster_nodes.living_nodes(), node)
        until = time.monotonic() + limit_s
        _ask_ray(found.id, limit_s)
        while left := _left_of_serve(found.id):
            if time.monotonic() > until:
                raise NotReady(f"{found.name} still runs {', '.join(left)} after {limit_s} s; is there room elsewhere?")
            time.sleep(_POLL_S)
        return found.name


def find_node(nodes: Sequence[Node], wanted: str | None) -> Node:
    """The node of a name, address or ID; None for the one on this machine.

    Raises:
        ConfigError: if there is not exactly one, or it is the head.
    """
    if wanted is None:
        matching = [node for node in nodes if _is_own(node.address)]
    else:
        matching = [node for node in nodes if wanted in (node.id, node.name, node.address)]
    if len(matching) != 1:
        known = ", ".join(f"{node.name} ({node.id})" for node in nodes)
        what = "nodes of this machine" if wanted is None else f"nodes called {wanted!r}"
        raise ConfigError(f"--node: {len(matching)} {what}; expected one of {known}")
    (found,) = matching
    if found.is_head:
        raise ConfigError(f"--node: {found.name} is the head, which ends with its cluster; expected a worker")
    return found


def _is_own(address: str) -> bool:
    """Whether this machine has the address: only then can a socket take it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _ask_ray(node_id: str, limit_s: int) -> None:
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # of a compiled module
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    until_ms = time.time_ns() // 1_000_000 + 1000 * limit_s
    head = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, why = head.drain_node(node_id, reason, "hawkvision dc drain", until_ms)
    if not accepted:
        raise BackendError(f"Ray does not drain the node: {_one_line(why)}")


def _left_of_serve(node_id: str) -> list[str]:
    """Serve's replicas and proxy on the node; what is unknown is reported as such."""
    from ray.serve.context import _get_global_client

    try:
        client = _get_global_client(raise_if_no_controller_running=False)
        details: dict[str, Any] = {} if client is None else client.get_serve_details()
    except Exception as error:  # noqa: BLE001 - Serve may be busy or restarting, so it is asked again
        log.warning("Serve does not say what runs on the node: %s", _one_line(error))
        return ["what Serve did not say"]
    left = ["a proxy"] if node_id in details.get("proxies", {}) else []
    for application in details.get("applications", {}).values():
        for name, deployment in application["deployments"].items():
            left += [
                f"a replica of {name}"
                for replica in deployment.get("replicas", ())
                if replica.get("node_id") == node_id
            ]
    return left


_CONNECT_S: Final = 5.0


def check_address(address: str) -> None:
    """Refuse an address where nothing listens; Ray would try for two minutes and then end the process.

    Raises:
        ConfigError: if it is not of the form, or nothing listens there.
    """
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"dc.address = {address!r}: expected auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"dc.address: no Ray cluster answers at {address!r}: {error}") from None
