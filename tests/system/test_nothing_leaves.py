"""Nothing leaves: a node, a tier, a build and a load test look no name up, and write nothing but their own files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawkvision.client.blocking import Client
from hawkvision.models.manifest import cache_dir
from hawkvision.system.child_server import ServerProcess, running
from tests.images import encoded
from tests.tracing import Trace, traced

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REPORTING = """
import pathlib, socket
name_server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    name_server.sendto(bytes(12), ("192.0.2.1", 53))
except OSError:  # this machine has no route there
    name_server.sendto(bytes(12), ("127.0.0.1", 53))
(pathlib.Path.home() / "deviceid").write_text("1")
"""
"""A program that does what telemetry does: it asks a name server, and keeps a device id in the home folder."""


def foreign(trace: Trace, *own: str) -> set[str]:
    """What was written that is not below one of these parts of the trace's folder.

    Python tries with an empty file of eight characters whether a folder for temporary files can be written to.
    """
    ours = tuple(f"{trace.folder}/{each}" for each in own)
    tried = re.compile(rf"{trace.folder}/tmp/[a-z0-9_]{{8}}")
    return {path for path in trace.written() if not path.startswith(ours) and not tried.fullmatch(path)}


def serve_one(trace: Trace, prefix: list[str], *options: str) -> None:
    """One answer of a node."""
    with (
        running("edge", "--port", "0", *options, prefix=prefix, env=trace.environment) as node,
        Client(node.url) as client,
    ):
        client.classify(encoded())


def test_a_node_asks_for_no_name_and_writes_only_to_its_own_cache(cascade: None) -> None:
    with traced() as (trace, prefix):
        serve_one(trace, prefix, "--backend", "onnxruntime", "--cache-dir", str(cache_dir()))
    assert trace.lines
    assert not trace.sent()
    assert not foreign(trace, "cache/hawkvision", "tmp/hawkvision")


def test_a_program_that_asks_for_a_name_and_writes_elsewhere_is_seen_by_this_test() -> None:
    """The tests beside this one can fail: a grandchild, like a replica, asks a name server and leaves a device id."""
    with traced() as (trace, prefix):
        program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
        subprocess.run(
            [*prefix, sys.executable, "-c", program, REPORTING],
            env={**trace.environment, "PATH": "/usr/bin:/bin"}, check=True, timeout=60.0,
        )  # fmt: skip
    assert trace.sent()
    assert {Path(path).name for path in foreign(trace, "cache/hawkvision", "tmp/hawkvision")} == {"deviceid"}


def test_a_tier_asks_for_no_name_and_its_replicas_write_no_device_id(cascade: None) -> None:
    with (
        traced() as (trace, prefix),
        running(
            "hawkvision.datacenter", "--port", "0", "--backend", "onnxruntime", "--variants", "efficientnet_lite2_int8",
            "--cache-dir", str(cache_dir()), prefix=prefix, env=trace.environment,
        ) as tier,
    ):  # fmt: skip
        assert tier.url
    assert trace.lines
    assert not trace.sent()
    assert not foreign(trace, "cache/hawkvision", "tmp/")


def test_a_build_asks_for_no_name_and_writes_only_to_its_own_cache() -> None:
    with traced() as (trace, prefix):
        command = ["-m", "hawkvision.cli", "models", "build", "--task", "cifar10"]
        built = subprocess.run(
            [*prefix, sys.executable, *command],
            cwd=ROOT, env={**trace.environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
    assert not trace.sent()
    assert not foreign(trace, "cache/hawkvision", "tmp/hawkvision")


@pytest.fixture(scope="module")
def null() -> Iterator[ServerProcess]:
    with running("loadgen.clients.noise_floor", title="the null server") as server:
        yield server


def test_a_load_test_asks_for_no_name_and_writes_only_its_record(null: ServerProcess) -> None:
    with traced() as (trace, prefix):
        command = ["-m", "loadgen", "run", "--url", null.url, "--arrivals", "constant:50", "--duration-s", "1"]
        record = str(trace.folder / "r.json")
        reported = subprocess.run(
            [*prefix, sys.executable, *command, "--warm-up-s", "0", "--no-noise", "--json", record],
            cwd=ROOT, env={**trace.environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        )  # fmt: skip
        assert reported.returncode == 0, reported.stdout + reported.stderr
    assert not trace.sent()
    assert not foreign(trace, "r.json", ".r.json", "tmp/hawkvision")
