"""Deploys the tier to a Ray cluster that runs, and takes nodes out of it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hawkvision.core.errors import BackendError, ConfigError, NotReady
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import CONNECTION_RETRIES, TUNING, check_ray
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure, load_catalogs

if TYPE_CHECKING:
    from ray.util.state.common import NodeState

    from hawkvision.datacenter.servers.served_task import TaskState

log = logging.getLogger("hawkvision.datacenter")

DEPLOY_TIMEOUT_S: Final = 600.0
"""For each stage to have a replica. The cluster goes on if it passes."""


def deploy(config: DatacenterConfig, address: str) -> None:
    """Deploy or update the application on the Ray cluster at `address`, and wait until it is ready.

    It is the application that `hawkvision dc up` runs. Each node that may run a replica needs HawkVision in this
    machine's version, with the extra `datacenter`, and the model files under `config.cache_dir`; nothing is uploaded. A
    cluster with a key needs `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN` here. Serve listens on `config.host` and
    `config.port` of each node, unless it already listens elsewhere. `TUNING` takes effect only if the cluster's own
    processes were started with it (`hawkvision dc environment`).

    Args:
        config: the tier's settings.
        address: as `ray.init` takes it: `auto`, `HOST:6379` on a node of the cluster, `ray://HOST:10001` elsewhere.

    Raises:
        ConfigError: if the stages are unknown, or the cluster cannot be reached, refuses the key or runs another Ray.
        BackendError: if a task cannot be served there, with the reason; once all others are, if there are any. Or if
            they are not ready within `DEPLOY_TIMEOUT_S`.
    """
    check_ray()
    check_address(address)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning(
            "RAY_AUTH_MODE is not 'token': a Ray that takes this deployment runs the code of anybody who reaches its "
            "ports"
        )
    for name, value in {**TUNING, **CONNECTION_RETRIES}.items():
        os.environ.setdefault(name, value)
    import ray
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions

    from hawkvision.datacenter.ingress.application import application, run_application

    catalogs = load_catalogs(config)
    app = application(config, catalogs=catalogs)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"dc.address: cannot use the Ray at {address!r}: {_one_line(error)}") from None
    try:
        run_application(app, config, HTTPOptions(host=config.host, port=config.port, location="EveryNode"))
        _wait_until_ready(config, catalogs)
    finally:
        ray.shutdown()


def _wait_until_ready(config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> None:
    """Wait until each task is served or has failed; log what is missing.

    Raises:
        BackendError: if a task has failed, or if they are not ready in time.
    """
    import ray

    from hawkvision.datacenter.ingress.application import Progress, missing, task_states_blocking

    # On the cluster: the ingress can be called from there, and perhaps not from here (ray://).
    asked = ray.remote(num_cpus=0)(task_states_blocking)
    progress = Progress(config, catalogs)
    ends = time.monotonic() + DEPLOY_TIMEOUT_S
    shown = None
    while True:
        waits_for: str | None = "Serve starts its replicas"
        if progress.is_running():
            states = ray.get(asked.remote(config.app_name))
            waits_for = missing(states)
            if waits_for is None:
                _check_all_served(states)
                return
        if waits_for != shown:
            log.info("%s: %s", config.app_name, waits_for)
            shown = waits_for
        if time.monotonic() > ends:
            raise BackendError(f"{config.app_name!r} is not ready after {DEPLOY_TIMEOUT_S:g} s: {waits_for}")
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
_COMMAND_S: Final = 60.0
"""The longest that Ray's own command may take."""
_DRAIN_NODE: Final = ("-c", "from ray.scripts.scripts import main; main()", "drain-node")


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
    check_address(address)
    found = find_node(_nodes(address), node)
    until = time.monotonic() + limit_s
    _ask_ray(address, found.node_id, limit_s)
    while left := _serve_actors(address, found.node_id):
        if time.monotonic() > until:
            raise NotReady(
                f"{found.node_name} still runs {', '.join(left)} after {limit_s} s; is there room elsewhere?"
            )
        time.sleep(_POLL_S)
    return str(found.node_name)


def _nodes(address: str) -> list[NodeState]:
    from ray.util.state import list_nodes

    try:
        return list(list_nodes(address, filters=[("state", "=", "ALIVE")]))
    except Exception as error:  # noqa: BLE001 - requests', gRPC's and Ray's own errors; nobody answers
        raise ConfigError(f"--address: cannot ask the Ray at {address!r}: {' '.join(str(error).split())}") from None


def find_node(nodes: Sequence[NodeState], wanted: str | None) -> NodeState:
    """The node of a name, address or ID; None for the one on this machine.

    Raises:
        ConfigError: if there is not exactly one, or it is the head.
    """
    if wanted is None:
        matching = [node for node in nodes if _is_own(node.node_ip)]
    else:
        matching = [node for node in nodes if wanted in (node.node_id, node.node_name, node.node_ip)]
    if len(matching) != 1:
        known = ", ".join(f"{node.node_name} ({node.node_id})" for node in nodes)
        what = "nodes of this machine" if wanted is None else f"nodes called {wanted!r}"
        raise ConfigError(f"--node: {len(matching)} {what}; expected one of {known}")
    (found,) = matching
    if found.is_head_node:
        raise ConfigError(f"--node: {found.node_name} is the head, which ends with its cluster; expected a worker")
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


def _ask_ray(address: str, node_id: str, limit_s: int) -> None:
    words = ["--address", address, "--node-id", node_id, "--deadline-remaining-seconds", str(limit_s)]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "hawkvision dc drain"]
    command = [sys.executable, *_DRAIN_NODE, *words]
    done = subprocess.run(  # noqa: S603  our own words, and no shell
        command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode != 0:
        raise BackendError(f"Ray did not drain the node: {' '.join(done.stderr.split())}")


def _serve_actors(address: str, node_id: str) -> list[str]:
    """Names of Serve's replicas and proxies on the node; unknown ones are reported as such."""
    from ray.util.state import list_actors

    conditions = [("node_id", "=", node_id), ("state", "=", "ALIVE"), ("ray_namespace", "=", "serve")]
    try:
        return [str(actor.class_name) for actor in list_actors(address, filters=conditions)]
    except Exception as error:  # noqa: BLE001 - the head may be busy or restarting, so it is asked again
        log.warning("the head does not say what runs on the node: %s", " ".join(str(error).split()))
        return ["what the head did not say"]


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
