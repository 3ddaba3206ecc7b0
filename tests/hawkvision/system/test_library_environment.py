"""Libraries report to their makers only where the operator allows it by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.system.library_environment import SILENCED, silence, warn_if_allowed

DEPLOY = Path(__file__).resolve().parents[3] / "edge" / "deploy"


@pytest.mark.parametrize("given", [{}, {"ORT_DISABLE_TELEMETRY": ""}, {"ORT_DISABLE_TELEMETRY": "disable, please"}])
def test_what_is_unset_empty_or_not_understood_forbids(given: dict[str, str]) -> None:
    silence(given)
    assert given == SILENCED


def test_a_value_that_forbids_in_other_words_is_spelt_as_the_library_reads_it() -> None:
    given = {"ORT_DISABLE_TELEMETRY": "TRUE", "RAY_USAGE_STATS_ENABLED": "false"}
    silence(given)
    assert given == SILENCED


@pytest.mark.parametrize("no", ["0", "false", "No", " off "])
def test_an_operator_who_allows_it_by_name_is_obeyed_and_the_log_says_so(
    no: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", no)
    silence(os.environ)
    assert os.environ["ORT_DISABLE_TELEMETRY"] == no
    warn_if_allowed()
    assert [record.getMessage() for record in caplog.records] == [
        f"ORT_DISABLE_TELEMETRY={no} in the environment: this library reports to its maker"
    ]


@pytest.mark.parametrize(
    "module",
    [
        "edge.run",
        "hawkvision.cli",
        "hawkvision.datacenter.app",
        "loadgen.__main__",
        "fpga.cli",
        "edge.factory",
    ],
)
def test_every_entry_point_and_every_replica_forbids_it_before_onnx_runtime_is_there(module: str) -> None:
    reported = (
        "import importlib, os, sys; importlib.import_module(sys.argv[1]); print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SILENCED}
    ran = subprocess.run([sys.executable, "-c", reported, module], env=environment, capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


def test_container_and_unit_forbid_it_too() -> None:
    for name in ("Dockerfile", "hawkvision-edge.service", "hawkvision-datacenter.service"):
        assert "ORT_DISABLE_TELEMETRY=1" in (DEPLOY / name).read_text(encoding="utf-8")
