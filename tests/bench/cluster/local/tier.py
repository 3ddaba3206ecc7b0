"""The product's application on a cluster: a task with one stage, deployed by `hawkvision dc deploy`."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hawkvision.core.errors import NotReady
from hawkvision.models.manifest import artifact_path
from tests.bench.cluster.local.nodes import HEAD, RayNodes, ray_nodes
from tests.bench.cluster.local.sleep_backend import with_sleep
from tests.hawkvision.tasks.classes import write_labels

PORT: Final = 8000
STAGE: Final = "stage"
_WEIGHTS: Final = b"the backend `sleep` reads no weights"
_MANIFEST: Final = f"""
format = 1
task = "shapes"
labels = "labels.txt"
classes = 10
[cascade]
edge = ["{STAGE}"]
dc = ["{STAGE}"]
default_edge = "{STAGE}"
[[variants]]
name = "{STAGE}"
architecture = "{STAGE}"
precision = "fp32"
license = "MIT"
sha256 = "{hashlib.sha256(_WEIGHTS).hexdigest()}"
bytes = {len(_WEIGHTS)}
source = {{ package = "none", version = "1", member = "none", sha256 = "{"0" * 64}" }}
input = {{ height = 32, width = 32, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }}
"""


class ClusterTier:
    """A cluster and what is deployed on it. Made by `cluster_tier`."""

    def __init__(self, nodes: RayNodes, key: str) -> None:
        self.nodes = nodes
        self.key = key

    def deploy(self, **settings: object) -> None:
        """Deploy the application, or update it, with these settings of `[dc]`; returns once it runs.

        Raises:
            NotReady: if the command fails; with what it says.
        """
        options = {
            "address": self.nodes.address, "host": "0.0.0.0", "port": PORT, "allow_plain_http": "true", **settings
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        done = self.nodes.run(HEAD, sys.executable, "-m", "hawkvision.cli", "dc", "deploy", *words)
        if done.returncode != 0:
            raise NotReady(f"dc deploy: {done.stderr.strip()[-3000:]}")

    def replicas(self, node: int, deployment: str) -> list[int]:
        """The processes of a deployment's replicas on a node."""
        return [
            pid for pid in self.nodes.net.processes(node) if f"ray::ServeReplica:hawkvision:{deployment}" in title(pid)
        ]


@contextmanager
def cluster_tier(batch_ms: float, variables: Mapping[str, str] | None = None) -> Iterator[ClusterTier]:
    """A cluster without nodes yet, whose stage takes so many milliseconds per batch.

    Raises:
        NotReady: if this machine allows no network of several nodes.
    """
    key = secrets.token_hex(16)
    with ray_nodes({**with_sleep(batch_ms), "HAWKVISION_DC_API_KEY": key, **(variables or {})}) as nodes:
        (nodes.folder / "models" / "shapes").mkdir(parents=True)
        (nodes.folder / "models" / "shapes" / "manifest.toml").write_text(_MANIFEST)
        write_labels(nodes.folder / "models" / "shapes")
        artifact = artifact_path(nodes.folder / "cache", "shapes", STAGE)
        artifact.parent.mkdir(parents=True)
        artifact.write_bytes(_WEIGHTS)
        nodes.environment |= {
            "HAWKVISION_DC_MODELS_DIR": str(nodes.folder / "models"),
            "HAWKVISION_DC_CACHE_DIR": str(nodes.folder / "cache"),
            "HAWKVISION_DC_TASKS": "shapes",
            "HAWKVISION_DC_BACKEND": "sleep",
        }
        yield ClusterTier(nodes, key)


def title(pid: int) -> str:
    """What a process calls itself; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
