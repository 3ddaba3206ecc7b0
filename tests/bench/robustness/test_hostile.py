"""The hostile bench detects what it is made for."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_hostile_traffic_leaves_a_node_answering() -> None:
    asked = ("--targets", "edge", "--backend", "noop", "--seconds", "1")
    only = ("--only", "deep JSON,slow heads,pipelines,hidden,half-closed,datagrams")
    command = [sys.executable, "-m", "tests.bench.robustness.hostile", *asked, *only]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()[2:]
    assert len(lines) == 6
    assert all("all right of" in line for line in lines), ran.stdout
    assert "4x 400" in next(line for line in lines if "deep JSON" in line)
