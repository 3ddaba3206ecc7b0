"""The machines of a cloud, for Ray's autoscaler: nodes of this machine's network, started and stopped on its demand.

    bench ── NodeFactory, a Unix socket ◄── a JSON object per connection ── NamespaceProvider ── Ray's autoscaler

The autoscaler runs on the head and cannot start a namespace outside its own, so the provider asks the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tests.bench.cluster.local.nodes import HEAD, RayNodes

WORKER: Final = "worker"
_HEAD_TYPE: Final = "head"
_MAX_MESSAGE: Final = 1 << 20


def settings(folder: Path, cpus: int, most: int, idle_s: float) -> Path:
    """Write the autoscaler's settings: workers of so many cores, 1 to `most`, given back after so many idle seconds."""
    document = {
        "cluster_name": "bench",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60.0,
        "provider": {
            "type": "external",
            "module": f"{__name__}.NamespaceProvider",
            "socket": str(folder / "provider"),
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "docker": {},
        "head_node_type": _HEAD_TYPE,
        "available_node_types": {
            _HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            WORKER: {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 1, "max_workers": most},
        },
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
    file = folder / "autoscaler.json"
    file.write_text(json.dumps(document))
    return file


class NamespaceProvider(NodeProvider):  # type: ignore[misc]  # Ray is untyped
    """What the autoscaler calls. Keeps no state of its own."""

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """See `NodeProvider`."""
        nodes = self._ask(do="list")
        return [name for name, tags in nodes.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        """See `NodeProvider`."""
        return node_id in self._ask(do="list")

    def is_terminated(self, node_id: str) -> bool:
        """See `NodeProvider`."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """See `NodeProvider`."""
        tags: dict[str, str] = self._ask(do="list")[node_id]
        return tags

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """See `NodeProvider`."""
        self._ask(do="tag", node=node_id, tags=tags)

    def external_ip(self, node_id: str) -> str:
        """See `NodeProvider`; a node is named by its address."""
        return node_id

    def internal_ip(self, node_id: str) -> str:
        """See `NodeProvider`."""
        return node_id

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """See `NodeProvider`."""
        self._ask(do="create", tags=tags, count=count)

    def terminate_node(self, node_id: str) -> None:
        """See `NodeProvider`."""
        self._ask(do="terminate", node=node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """See `NodeProvider`."""
        return cluster_config

    def _ask(self, **request: object) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self.provider_config["socket"])
            with connection.makefile("rw") as lines:
                lines.write(json.dumps(request) + "\n")
                lines.flush()
                return json.loads(lines.readline())


class NodeFactory:
    """Starts and stops workers as the autoscaler asks. Made by `node_factory`."""

    def __init__(self, nodes: RayNodes, cpus: int) -> None:
        self._nodes = nodes
        self._cpus = cpus
        self._tags: dict[int, dict[str, str]] = {HEAD: _tags(NODE_KIND_HEAD, _HEAD_TYPE)}
        self._next = HEAD + 1
        self._starting: set[asyncio.Task[None]] = set()
        self.requests: list[tuple[float, int]] = []
        """When nodes were asked for (positive) or given back, on the monotonic clock."""

    @property
    def workers(self) -> int:
        """The workers that there are, those being started included."""
        return len(self._tags) - 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        request = json.loads(await reader.readline())
        writer.write(json.dumps(await self._act(request)).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def finish(self) -> None:
        """Wait for the starts under way."""
        await asyncio.gather(*self._starting, return_exceptions=True)

    async def _act(self, request: dict[str, Any]) -> object:
        address = self._nodes.net.address
        by_name = {address(node): node for node in self._tags}
        match request["do"]:
            case "list":
                return {address(node): tags for node, tags in self._tags.items()}
            case "tag":
                self._tags[by_name[request["node"]]] |= request["tags"]
            case "create":
                self.requests.append((time.monotonic(), request["count"]))
                for _ in range(request["count"]):
                    self._create(request["tags"])
            case "terminate":
                self.requests.append((time.monotonic(), -1))
                node = by_name[request["node"]]
                del self._tags[node]
                await asyncio.to_thread(self._nodes.kill, node)
        return None

    def _create(self, tags: dict[str, str]) -> None:
        node, self._next = self._next, self._next + 1
        self._tags[node] = _tags(NODE_KIND_WORKER, WORKER) | tags | {TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
        task = asyncio.create_task(asyncio.to_thread(self._nodes.add, node, self._cpus))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)


def _tags(kind: str, node_type: str) -> dict[str, str]:
    return {
        TAG_RAY_NODE_KIND: kind,
        TAG_RAY_USER_NODE_TYPE: node_type,
        TAG_RAY_NODE_NAME: node_type,
        TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
    }


@asynccontextmanager
async def node_factory(nodes: RayNodes, cpus: int) -> AsyncIterator[NodeFactory]:
    """Serve the provider while the block lasts; workers get so many cores."""
    factory = NodeFactory(nodes, cpus)
    server = await asyncio.start_unix_server(factory.serve, nodes.folder / "provider", limit=_MAX_MESSAGE)
    try:
        async with server:
            yield factory
    finally:
        await factory.finish()
