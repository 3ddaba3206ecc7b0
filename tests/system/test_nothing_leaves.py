"""Nothing leaves: a node, a tier, a build and a load test look no name up, and write nothing but their own files."""

from __future__ import annotations

import asyncio
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
from tests.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REPORTS = "onnxruntime.db"
"""Where ONNX Runtime keeps what it would report."""


def foreign(trace: Trace, *own: str) -> set[str]:
    """What was written that is not below one of these parts of the trace's folder.

    Python tries with an empty file of eight characters whether a folder for temporary files can be written to.
    """
    ours = tuple(f"{trace.folder}/{each}" for each in own)
    tried = re.compile(rf"{trace.folder}/tmp/[a-z0-9_]{{8}}")
    return {path for path in trace.written() if not path.startswith(ours) and not tried.fullmatch(path)}


def serve_one(trace: Trace, prefix: list[str], *options: str, reports: bool = False) -> None:
    """One answer of a node; with `reports` it runs until the runtime has begun its own, which it does at leisure."""
    with (
        running("edge", "--port", "0", *options, prefix=prefix, env=trace.environment) as node,
        Client(node.url) as client,
    ):
        client.classify(encoded())
        if reports:
            asyncio.run(until(lambda: any(trace.folder.rglob(REPORTS))))


def test_a_node_asks_for_no_name_and_writes_only_to_its_own_cache(cascade: None) -> None:
    with traced() as (trace, prefix):
        serve_one(trace, prefix, "--backend", "onnxruntime", "--cache-dir", str(cache_dir()))
    assert trace.lines
    assert not trace.sent()
    assert not foreign(trace, "cache/hawkvision", "tmp/hawkvision")


def test_a_node_on_openvino_asks_for_no_name_and_writes_only_to_its_own_cache(cascade: None) -> None:
    with traced() as (trace, prefix):
        serve_one(trace, prefix, "--backend", "openvino", "--cache-dir", str(cache_dir()))
    assert trace.lines
    assert not trace.sent()
    assert not foreign(trace, "cache/hawkvision", "tmp/hawkvision")


def test_reports_that_an_operator_allows_are_seen_by_this_test(cascade: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests beside this one can fail."""
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    with traced() as (trace, prefix):
        serve_one(trace, prefix, "--backend", "onnxruntime", "--cache-dir", str(cache_dir()), reports=True)
    assert any(path.endswith(f"/.onnxruntime/{REPORTS}") for path in foreign(trace, "cache/hawkvision"))


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
