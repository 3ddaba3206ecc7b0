"""Takes a node out of a Ray cluster without losing a request: Serve moves its replicas away first.

Ray is asked by its own command and by its state API, both of which need `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN` of a
cluster with a token. No driver is started, because the drained node may end before the drain is over.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hawkvision.core.errors import BackendError, ConfigError, NotReady
from hawkvision.datacenter.deployment.ray_address import check_address

if TYPE_CHECKING:
    from ray.util.state.common import NodeState

log = logging.getLogger("hawkvision.datacenter")

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
