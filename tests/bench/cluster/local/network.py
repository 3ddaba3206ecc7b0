"""A network of namespaces on this machine: one for each node of a cluster, joined by a bridge.

      node 1             node 2          ...
    10.79.0.1          10.79.0.2
        └──── veth ──────┴──── veth ── bridge 10.79.0.254: the load generator, a load balancer, Redis

Nobody outside reaches it, and its processes reach nobody outside. It needs root and ip(8).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from hawkvision.core.errors import NotReady
from loadgen.network.namespaces import available, entered, ip, new_name, remove, sweep

OUTSIDE: Final = "10.79.0.254"
"""The address beside the nodes."""
MAX_NODES: Final = 16
_BRIDGE: Final = "bridge"
_BRIDGE_MAC: Final = "02:00:0a:4f:00:fe"
"""Its own: by default it changes with the nodes that are added."""


class Network:
    """The namespaces of the nodes, by number from 1. Made by `network`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: set[int] = set()

    def address(self, node: int) -> str:
        """The address of a node."""
        return f"10.79.0.{node}"

    def namespace(self, node: int) -> str:
        """The namespace of a node; 0: the one beside the nodes."""
        return f"{self._name}-node{node}"

    def add(self, node: int) -> None:
        """Make a node's namespace and its connection to the bridge."""
        assert 1 <= node <= MAX_NODES, f"node {node}: expected 1 to {MAX_NODES}"
        namespace = self.namespace(node)
        ip("netns", "add", namespace)
        self._nodes.add(node)
        ip("link", "add", f"node{node}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", f"node{node}", "master", _BRIDGE, "up")
        lines = ("link set lo up", f"addr add {self.address(node)}/24 dev eth0", "link set eth0 up")
        ip("-n", namespace, "-batch", "-", batch="\n".join(lines) + "\n")

    def prefix(self, node: int) -> Sequence[str]:
        """The words that make a command run on a node."""
        return ("ip", "netns", "exec", self.namespace(node))

    def processes(self, node: int) -> list[int]:
        """The processes that run on a node."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(node)).split()]

    def kill(self, node: int) -> None:
        """Kill every process of a node at once, and again those that were being started."""
        while pids := self.processes(node):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what runs on the nodes and remove them."""
        for node in self._nodes:
            remove(self.namespace(node))
        self._nodes.clear()


@contextmanager
def network() -> Iterator[Network]:
    """A network to which nodes can be added. The calling thread, and what it starts, is beside them meanwhile.

    Raises:
        NotReady: if this machine allows no namespaces.
    """
    missing = available()
    if missing is not None:
        raise NotReady(f"a network of several nodes: {missing}")
    sweep()
    made = Network(new_name())
    outside = made.namespace(0)
    ip("netns", "add", outside)
    try:
        with entered(outside):
            ip("link", "set", "lo", "up")
            ip("link", "add", _BRIDGE, "type", "bridge")
            ip("addr", "add", f"{OUTSIDE}/24", "dev", _BRIDGE)
            ip("link", "set", _BRIDGE, "address", _BRIDGE_MAC, "up")
            try:
                yield made
            finally:
                made.close()
    finally:
        remove(outside)
