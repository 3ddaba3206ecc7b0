"""MLPerf LoadGen as a driver: its verdict, its logs, its accuracy mode."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from hawkvision.core.errors import NotReady
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.system.child_server import ServerProcess
from hawkvision.tasks.counting import Counts
from hawkvision.tasks.registry import task_kind
from loadgen.__main__ import main
from loadgen.clients.base import ClientReply
from loadgen.commands.mlperf import judged, verdict
from tests.loadgen.command import against, command
from tests.loadgen.oracle import Oracle, asking, write_set
from tests.loadgen.scripted import RecordedRequest, reply, scripted

try:
    import mlperf_loadgen  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

    INSTALLED = True
except ImportError:
    INSTALLED = False
needs_loadgen = pytest.mark.skipif(not INSTALLED, reason="mlcommons-loadgen is not installed (extra [loadgen])")
ACCURACY = ("mlperf", "--scenario", "Offline", "--mode", "accuracy")


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
def test_accuracy_mode_scores_every_image(null: ServerProcess, tmp_path: Path) -> None:
    data = write_set(tmp_path, [0, 0, 0, 5])  # the null server always says 0
    done = command(*ACCURACY, "--url", null.url, "--data", str(data), "--out", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 images, 75.00% right, 0 not answered" in done.stdout
    entries = json.loads((tmp_path / "logs" / "mlperf_log_accuracy.json").read_text())
    assert sorted((each["qsl_idx"], each["data"]) for each in entries) == [(i, "00000000") for i in range(4)]


@needs_loadgen
def test_accuracy_is_shown_for_each_target_class(tmp_path: Path) -> None:
    """Of 40 images `fast` gets every fourth wrong, `best` none."""
    data, oracle = write_set(tmp_path, [i % 7 for i in range(40)]), Oracle(wrong_every=4)

    status, out, _ = against(
        asking(oracle), *ACCURACY, "--data", str(data), "--targets", "quality:best,quality:fast", "--out", str(tmp_path)
    )
    assert status == 0, out
    found = {name: (int(asked), float(right)) for name, asked, right in
             re.findall(r"quality=(\w+): (\d+) requests, ([\d.]+)% right, 0 not answered", out)}  # fmt: skip
    (best, best_right), (fast, fast_right) = found["best"], found["fast"]
    assert best + fast == 40
    assert (best_right, 0 < fast_right < 100) == (100.0, True)
    whole = re.search(r"40 images, ([\d.]+)% right", out)
    assert whole is not None
    assert float(whole[1]) == pytest.approx((best * best_right + fast * fast_right) / 40, abs=0.01)
    assert {target for _, target in oracle.seen} == {"quality=best", "quality=fast"}


@needs_loadgen
def test_interrupt_ends_at_once_and_names_the_logs_that_are_incomplete(tmp_path: Path) -> None:
    enough = asyncio.Event()
    seen: list[RecordedRequest] = []

    async def say(asked: RecordedRequest) -> bytes:
        seen.append(asked)
        if (tmp_path / "mlperf_log_detail.txt").exists():  # the warm-up is over
            enough.set()
        return reply(b'{"index": 1}')

    words = ("mlperf", "--scenario", "SingleStream", "--out", str(tmp_path))
    status, _, err = against(scripted(say), *words, until=enough)
    assert status == 130
    assert f"its logs in {tmp_path} are incomplete" in err


def test_verdict_is_loadgens_own() -> None:
    assert verdict("x\nResult is : VALID\n  Min duration satisfied : Yes\n")
    assert not verdict("Result is : INVALID\n")
    with pytest.raises(NotReady, match="no verdict"):
        verdict("")


def test_answers_are_judged_and_logged_as_classes() -> None:
    found = [
        judged(None, 2, reply) for reply in (ClientReply(200, index=2), ClientReply(200, index=9), ClientReply(503))
    ]
    assert [(answered, right, logged[0]) for answered, right, logged in found] == [
        (True, 1.0, 2),
        (True, 0.0, 9),
        (False, 0.0, -1),
    ]
    assert found[0][2].tobytes() == struct.pack("<i", 2)


def test_answers_of_other_kinds_are_judged_by_their_loss() -> None:
    kind = task_kind("counting", ["person"], {"groups": {"all": ["person"]}, "max_error": 4})
    (truth,) = kind.truths([Annotation(np.zeros(4, np.int64), np.tile([0.0, 0.0, 1.0, 1.0], (4, 1)))])
    replies = [ClientReply(200, prediction=Counts({"image": {"all": n}}, 1.0)) for n in (4, 3, 0)]
    found = [judged(kind, truth, reply) for reply in [*replies, ClientReply(504)]]
    assert [(answered, right) for answered, right, _ in found] == [(True, 1.0), (True, 0.75), (True, 0.0), (False, 0.0)]
    assert [logged[0] for _, _, logged in found] == [1.0, 0.75, 0.0, 0.0]
    answered, _, _ = judged(kind, truth, ClientReply(200, index=3))
    assert not answered, "a class is no answer to this task"


@needs_loadgen
def test_a_task_of_another_kind_is_driven_too(tmp_path: Path) -> None:
    async def say(_: RecordedRequest) -> bytes:
        return reply(b'{"objects": [], "confidence": 1.0}')

    status, out, _ = against(scripted(say), *ACCURACY, "--task", "coco", "--limit", "3", "--out", str(tmp_path))
    assert status == 0, out
    assert "accuracy: 3 images, without labels (1 − the loss of detection), 0 not answered" in out


@needs_loadgen
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scenario Offline --processes 2", "--processes: expected 1"),
        ("--scenario Offline --out {folder}/file/x", "--out: {folder}/file/x: expected a folder"),
        ("--scenario Server", "--target-qps"),
        ("--scenario Server --target-qps 1e30", "--target-qps: expected "),
        ("--scenario Server --user-conf {folder}/none", "--user-conf"),
        ("--scenario Server --user-conf {folder}/file", "--user-conf"),
        ("--scenario SingleStream --min-queries 99999999999999999999", "--min-queries: expected "),
        ("--scenario SingleStream --min-queries 0", "--min-queries: expected "),
        ("--scenario SingleStream --min-duration-s nan", "--min-duration-s: expected "),
        ("--scenario SingleStream --target-latency-ms 1e30", "--target-latency-ms: expected "),
        ("--scenario SingleStream --benchmark nosuch", "--benchmark: expected "),
    ],
)
def test_what_loadgen_cannot_keep_to_is_named_before_anything_is_asked(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("*.Server.foo = x\n")
    given = ["--out", str(tmp_path)] if "--out" not in words else []
    assert main(["mlperf", "--url", "http://127.0.0.1:1", *words.format(folder=tmp_path).split(), *given]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {said.format(folder=tmp_path)}")
