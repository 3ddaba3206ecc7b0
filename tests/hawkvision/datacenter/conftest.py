"""Real datacenter tiers on the no-op backend, started once for the tests of this folder: a start takes Ray ten seconds
of processor time. A test that changes a tier for good starts its own.
"""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.models.manifest import Manifest, artifact_path, parse_manifest
from tests.bench.ports import free_port
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.tasks.classes import write_labels

ROOT = Path(__file__).parents[3]
KEY = "a-key-for-all-tests"
MARK = "HAWKVISION_TEST_MARK"
START_LIMIT_S = 240.0

_VARIANT = """
[[variants]]
name = "{name}"
architecture = "{name}"
precision = "fp32"
license = "MIT"
source = {{ package = "none", version = "1", member = "none", sha256 = "{sha}" }}
input = {{ height = {side}, width = {side}, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }}
"""
MANIFEST = (
    """
format = 1
task = "shapes"
labels = "labels.txt"
classes = 10
[cascade]
edge = ["small"]
dc = ["medium", "reference"]
default_edge = "small"
"""
    + "".join(_VARIANT.format(name=n, side=s, sha="0" * 64) for n, s in (("small", 32), ("medium", 48)))
    + """
[[ensembles]]
name = "reference"
members = ["small", "medium"]
horizontal_flip = true
"""
)


@dataclass(frozen=True)
class Running:
    """The process, its address, and the mark that every process it starts inherits."""

    process: subprocess.Popen[str]
    url: str
    mark: str
    log: Path | None = None
    """Where it logs, if not to where the tests do."""


def image(side: int = 64) -> bytes:
    pixels = np.random.default_rng(7).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", pixels)[1])


def marked_processes(mark: str) -> list[str]:
    """Command lines of the living processes that carry the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def launch(
    models: Path, *arguments: str, log: Path | None = None, prefix: Sequence[str] = (), **settings: str
) -> Running:
    """Start `python -m hawkvision.datacenter` on a free port, behind a command that runs it, and do not wait for it."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "HAWKVISION_DC_MODELS_DIR": str(models),
        "HAWKVISION_DC_TASKS": "shapes",
        **{f"HAWKVISION_DC_{k.upper()}": v for k, v in settings.items()},
    }
    port = free_port()
    program = [*prefix, sys.executable, "-m", "hawkvision.datacenter"]
    command = [*program, "--backend", "noop", "--port", str(port), *arguments]
    with ExitStack() as stack:
        to = None if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=to, text=True)
    return Running(process, f"http://127.0.0.1:{port}", mark, log)


def start(
    models: Path, *arguments: str, log: Path | None = None, prefix: Sequence[str] = (), **settings: str
) -> Running:
    """Start `python -m hawkvision.datacenter` and wait for its ready line."""
    running = launch(models, *arguments, log=log, prefix=prefix, **settings)
    assert ready_url(running.process) == running.url
    return running


def ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ends = time.monotonic() + START_LIMIT_S
    while time.monotonic() < ends:
        if not select.select([process.stdout], [], [], ends - time.monotonic())[0]:
            break
        line = process.stdout.readline()
        if line.startswith("ready: "):
            return line.removeprefix("ready: ").strip()
        if not line:
            break
    process.kill()
    raise AssertionError(f"no ready line; the process ended with {process.wait()}")


def stop(running: Running) -> int:
    running.process.terminate()
    code = running.process.wait(60)
    assert running.process.stdout is not None
    running.process.stdout.close()
    return code


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "shapes").mkdir()
    (folder / "shapes" / "manifest.toml").write_text(MANIFEST)
    write_labels(folder / "shapes")
    return folder


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    return parse_manifest(MANIFEST, "tests")


@pytest.fixture(scope="session")
def config(models: Path) -> DatacenterConfig:
    return DatacenterConfig(tasks=("shapes",), models_dir=models, backend="noop")


@pytest.fixture(scope="package")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One with a key, of both stages, that takes few requests and small bodies; it logs JSON."""
    limits = {"max_ongoing_requests": "4", "max_queued_requests": "4", "max_body_bytes": "200000", "datagram_port": "0"}
    log = tmp_path_factory.mktemp("service") / "log"
    running = start(models, "--log-format", "json", api_key=KEY, log=log, **limits)
    yield running
    stop_cleanly(running)


NO_NAMESPACES = (
    "unshare", "--user", "--map-current-user", "sh", "-c",
    'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh",
)  # fmt: skip
"""Whoever is run like this may make no network namespace."""


def can_forbid_namespaces() -> bool:
    return subprocess.run([*NO_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="package")
def medium(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One of a single stage, which shares the machine's network where that can be arranged.

    Tests of test_supervision.py kill parts of it and leave it ready; the last one ends it.
    """
    words, log = ("--variants", "medium", "--ray-network", "auto"), tmp_path_factory.mktemp("medium") / "log"
    running = start(models, *words, log=log, prefix=NO_NAMESPACES if can_forbid_namespaces() else ())
    yield running
    stop_cleanly(running)


def stop_cleanly(running: Running) -> None:
    """Whatever it has been through, it ends well and leaves nothing behind."""
    assert stop(running) == 0
    assert marked_processes(running.mark) == []


def with_models(manifest: Manifest, cache: Path, seed: int = 0) -> Manifest:
    """The manifest, and new model files for its variants, all different."""
    variants = []
    for number, variant in enumerate(manifest.variants, seed):
        side = variant.input.height
        data = tiny_classifier(height=side, width=side, classes=manifest.classes, seed=number)
        file = artifact_path(cache, manifest.task, variant.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        variants.append(msgspec.structs.replace(variant, sha256=hashlib.sha256(data).hexdigest()))
    return msgspec.structs.replace(manifest, variants=tuple(variants))
