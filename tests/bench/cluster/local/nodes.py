"""A Ray of several nodes on this machine, each with its own network, resources and processes.

Node 1 is the head. It has no cores for replicas unless it is given some, as in edge/deploy/rayservice.yaml, and
every process has the variables of that file's pods. Ray asks for a token at every port.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hawkvision.core.errors import NotReady
from tests.bench.cluster.local.network import Network, network
from tests.bench.cluster.local.sleep_backend import ROOT

HEAD: Final = 1
GCS_PORT: Final = 6379
_OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024
_STOP_S: Final = 30.0
_STARTS: Final = 3
"""Ray gives up a node that has not started within 30 s, which a busy machine may need."""
RECONNECT_S: Final = "600"
"""How long nodes wait for a head that is away; KubeRay sets as much where the head has a store."""
_HAPROXY_FILES: Final = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
"""Files that are in /tmp otherwise, where another Serve of this machine may have its own."""


@dataclass(frozen=True, slots=True)
class HeadStore:
    """Where the head keeps its state, so that a new head finds it: HOST:PORT of a Redis and its password."""

    address: str
    password: str


class RayNodes:
    """The nodes of one cluster; made by `ray_nodes`."""

    def __init__(self, net: Network, folder: Path, variables: Mapping[str, str]) -> None:
        """No node yet.

        Args:
            net: where they are connected.
            folder: short, for Ray's sockets and logs.
            variables: of every process, besides those of the pods.
        """
        self.net = net
        self.folder = folder
        self.address = f"{net.address(HEAD)}:{GCS_PORT}"
        self.environment = {
            **os.environ,
            **_pod_variables(),
            **{name: str(folder / "haproxy" / file) for name, file in _HAPROXY_FILES.items()},
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_agent_register_timeout_ms": "300000",  # twenty processes may start at a time
            "RAY_worker_niceness": "0",  # by default replicas yield to all other work of the machine
            "RAY_gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
            **variables,
        }
        self.store: HeadStore | None = None
        """None: in memory."""
        self._cpus: dict[int, float] = {}
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """The nodes that run, the head first."""
        return tuple(sorted(self._running))

    def add(self, node: int, cpus: float) -> None:
        """Start a node with so many cores to give away, and wait until it has joined.

        Raises:
            NotReady: if it ends each time; with what it says.
        """
        if node not in self._cpus:
            self.net.add(node)
        self._cpus[node] = cpus
        said = ""
        for _ in range(_STARTS):
            process = self._start(node, cpus)
            self._running[node] = process
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.decode(errors="replace"))
                if b"Ray runtime started" in line:
                    return
            said = "".join(lines[-20:])
            self.kill(node)
        raise NotReady(f"node {node} does not start: {said}")

    def _start(self, node: int, cpus: float) -> subprocess.Popen[bytes]:
        variables, where = self._head() if node == HEAD else ({}, [f"--address={self.address}"])
        return subprocess.Popen(
            [*self.net.prefix(node), "setpriv", "--pdeathsig", "TERM", str(Path(sys.executable).with_name("ray")),
             "start", "--block", f"--object-store-memory={_OBJECT_STORE_BYTES}",
             f"--node-ip-address={self.net.address(node)}", f"--num-cpus={cpus:g}", *where],
            cwd=ROOT,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def kill(self, node: int) -> None:
        """Kill all of a node's processes: a machine that loses its power, but whose network answers for it."""
        self.net.kill(node)
        self._running.pop(node).wait()

    def _head(self) -> tuple[dict[str, str], list[str]]:
        """What the head gets in addition: variables and words."""
        variables: dict[str, str] = {}
        words = ["--head", f"--port={GCS_PORT}", f"--temp-dir={self.folder / 'ray'}", "--include-dashboard=false"]
        if self.store is not None:
            variables["RAY_REDIS_ADDRESS"] = self.store.address
            words.append(f"--redis-password={self.store.password}")
        return variables, words

    def restart(self, node: int) -> None:
        """Start a killed node again with what it had."""
        if node == HEAD:
            # Ray sees the processes of all nodes, and would take those that wait for the head for a head.
            (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self.add(node, self._cpus[node])

    def run(self, node: int, *words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, with the variables of its processes."""
        return subprocess.run(
            [*self.net.prefix(node), *words],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def close(self) -> None:
        """Stop all nodes, workers first."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        ends = time.monotonic() + _STOP_S
        for node, process in list(self._running.items()):
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.net.kill(node)
                process.wait()
        self._running.clear()


@contextmanager
def ray_nodes(variables: Mapping[str, str]) -> Iterator[RayNodes]:
    """A cluster without nodes; all that runs on them ends with the block.

    Raises:
        NotReady: if this machine allows no network of several nodes.
    """
    with network() as net, tempfile.TemporaryDirectory(prefix="hv", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(net, Path(folder), variables)
        try:
            yield nodes
        finally:
            nodes.close()


def _pod_variables() -> dict[str, str]:
    """The variables of Ray's pods on Kubernetes, secrets left out."""
    text = (ROOT / "edge" / "deploy" / "rayservice.yaml").read_text(encoding="utf-8")
    service: dict[str, Any] = next(iter(yaml.safe_load_all(text)))
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return {each["name"]: each["value"] for each in head["env"] if "value" in each}
