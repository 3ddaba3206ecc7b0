"""The benchmark runs whole, in short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_quick_run_reports_every_part(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.servers.overhead.node", "--quick", "--json", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert [row["server"] for row in report["overhead"]] == ["Starlette echo", "edge node, no-op"]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in report["overhead"])
    assert report["throughput"]["ratio"][0] > 0
    assert report["footprint"]["ready_mb"][0] > 0
