"""MLPerf LoadGen as a driver: its verdict, its logs, its accuracy mode."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from hawkvision.errors import ConfigError, NotReady
from hawkvision.process import ServerProcess
from loadgen.mlperf import score, verdict
from tests.loadgen.command import command
from tests.loadgen.test_evaluate import write_set

try:
    import mlperf_loadgen  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False
needs_loadgen = pytest.mark.skipif(not INSTALLED, reason="mlcommons-loadgen is not installed (extra [loadgen])")


@needs_loadgen
def test_short_run_is_valid_and_leaves_loadgens_logs(null: ServerProcess, tmp_path: Path) -> None:
    conf = tmp_path / "user.conf"
    conf.write_text("*.SingleStream.min_duration = 500\n")
    done = command(
        "mlperf", "--url", null.url, "--scenario", "SingleStream", "--user-conf", str(conf), "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SingleStream: VALID" in done.stdout
    assert "min_duration_ms 500 (rules: 600000)" in done.stdout
    assert verdict((tmp_path / "mlperf_log_summary.txt").read_text())
    assert (tmp_path / "mlperf_log_detail.txt").stat().st_size > 0


@needs_loadgen
def test_latency_that_is_not_kept_is_invalid_and_the_status_says_so(null: ServerProcess, tmp_path: Path) -> None:
    done = command(
        "mlperf", "--url", null.url, "--scenario", "Server", "--target-qps", "50", "--target-latency-ms", "0.001",
        "--min-duration-s", "0.5", "--out", str(tmp_path),
    )  # fmt: skip
    assert (done.returncode, "Server: INVALID" in done.stdout) == (1, True), done.stdout + done.stderr


@needs_loadgen
def test_accuracy_mode_scores_every_picture(null: ServerProcess, tmp_path: Path) -> None:
    data = write_set(tmp_path, [0, 0, 0, 5])  # the null server always says 0
    done = command(
        "mlperf", "--url", null.url, "--scenario", "Offline", "--mode", "accuracy", "--data", str(data),
        "--out", str(tmp_path / "logs"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 pictures, 75.00% right, 0 not answered" in done.stdout


def test_verdict_is_loadgens_own() -> None:
    assert verdict("x\nResult is : VALID\n  Min duration satisfied : Yes\n")
    assert not verdict("Result is : INVALID\n")
    with pytest.raises(NotReady, match="no verdict"):
        verdict("")


def write_log(path: Path, classes: list[int]) -> Path:
    entries = [{"seq_id": i, "qsl_idx": i, "data": struct.pack("<i", c).hex()} for i, c in enumerate(classes)]
    path.write_text(json.dumps(entries))
    return path


def test_score_compares_the_log_with_the_labels(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.json", [1, 2, 9, -1])
    assert score(log, [1, 2, 3, 4]) == 0.5
    assert score(log, None) is None


@pytest.mark.parametrize(
    "content", ["", "{}", '[{"qsl_idx": 9, "data": "00000000"}]', '[{"qsl_idx": 0, "data": "zz"}]']
)
def test_logs_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    log = tmp_path / "log.json"
    log.write_text(content)
    with pytest.raises(ConfigError, match=r"log\.json"):
        score(log, [1])


@needs_loadgen
@pytest.mark.parametrize("content", [None, "*.Server.foo = x\n"])
def test_confs_that_are_none_are_refused_before_anything_is_asked(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadgen.__main__ import main

    conf = tmp_path / "user.conf"
    if content is not None:
        conf.write_text(content)
    words = ["mlperf", "--url", "http://127.0.0.1:1", "--scenario", "Server", "--user-conf", str(conf)]
    assert main(words) == 1
    assert "--user-conf" in capsys.readouterr().err


def test_server_scenario_needs_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    if not INSTALLED:
        pytest.skip("mlcommons-loadgen is not installed (extra [loadgen])")
    from loadgen.__main__ import main

    assert main(["mlperf", "--url", "http://127.0.0.1:1", "--scenario", "Server"]) == 1
    assert "--target-qps" in capsys.readouterr().err
