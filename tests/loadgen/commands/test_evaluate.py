"""Evaluation: which images are sent, what is made of the answers, and what is refused."""

import asyncio
import itertools
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import BadImage, ConfigError, NotReady, TargetUnreachable
from hawkvision.core.types import (
    AccuracyGuarantee,
    AccuracyStatus,
    Answer,
    Basis,
    LabelledClass,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Tier,
    target_fields,
)
from hawkvision.models.datasets import LabelledImages
from hawkvision.tasks.classification import Classification
from loadgen.__main__ import main
from loadgen.analysis.bootstrap import exact_interval
from loadgen.analysis.evaluation import (
    EvaluatedImage,
    EvaluatedImages,
    TargetRow,
    UnattainableTarget,
    rows_of,
    summarise,
    written,
)
from loadgen.commands.evaluate import EvaluatedTask, measure, parse_targets
from loadgen.workload.held_out import HeldOutIndices, read_indices, thin
from tests.hawkvision.tasks.classes import TEN

TARGETS = st.one_of(
    st.sampled_from(Quality),
    st.builds(MaxAccuracyDrop, st.floats(0, 1)),
    st.builds(MinAccuracy, st.floats(0, 1)),
    st.builds(MinConfidence, st.floats(0, 1)),
)
TASK = EvaluatedTask("t", TEN, "/v1/classify")


def answer(index: int, escalated: bool = False, max_drop: float | None = 0.01, degraded: bool = False) -> Answer:
    status = AccuracyStatus.BEST_EFFORT if max_drop is None else AccuracyStatus.CERTIFIED
    guarantee = AccuracyGuarantee(Quality.FAST, status, Basis.LABELLED, max_drop, 0.05, 100)
    top = Classification((LabelledClass(str(index), index, 0.9),))
    return Answer("id", "t", top, "m", Tier.EDGE, guarantee, escalated=escalated, degraded=degraded)


def images(n: int) -> LabelledImages:
    """Image i is its own number as text; its label is i modulo 7."""
    bodies = [b"%d" % i for i in range(n)]
    return LabelledImages("set.npz", "a" * 64, bodies, np.arange(n) % 7, np.full(n, "x"), np.zeros(n, np.bool_))


@dataclass
class Oracle:
    """A node that is right at `best`, and wrong about every `wrong_every`-th image otherwise."""

    wrong_every: int = 4
    refuse: int | None = None
    degraded_times: int = 0
    """Of each image, how often `best` is answered by the edge, below the target."""
    seen: list[tuple[int, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        number, target = (
            int(await request.read()),
            "&".join(f"{k}={v}" for k, v in request.query.items() if k != "task"),
        )
        self.seen.append((number, target))
        if number == self.refuse:
            return web.json_response(BadImage("odd image").body(), status=400)
        if "min_accuracy" in request.query:
            return web.json_response(TargetUnreachable("too much", 0.9).body(), status=422)
        best = request.query.get("quality") == "best"
        right = best or number % self.wrong_every != 0
        if best and self.seen.count((number, target)) <= self.degraded_times:
            return web.json_response(answer(7, escalated=False, degraded=True).to_json())
        return web.json_response(answer(number % 7 if right else 7, escalated=best).to_json())


@asynccontextmanager
async def asking(oracle: Oracle) -> AsyncIterator[AsyncClient]:
    app = web.Application()
    app.router.add_post("/v1/classify", oracle.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield client
    finally:
        await runner.cleanup()


def evaluate(
    oracle: Oracle, chosen: list[int], *targets: Quality | MinAccuracy | MaxAccuracyDrop, concurrency: int = 1
) -> tuple[TargetRow | UnattainableTarget, ...]:
    async def scenario() -> tuple[TargetRow | UnattainableTarget, ...]:
        async with asking(oracle) as client:
            return await measure(client, TASK, images(40), np.array(chosen), targets, concurrency)

    return asyncio.run(scenario())


def test_every_target_is_asked_about_the_chosen_images_and_no_others() -> None:
    oracle = Oracle()
    evaluate(oracle, [3, 5, 8], Quality.FAST, MaxAccuracyDrop(0.01))
    wanted = itertools.product([3, 5, 8], ["quality=best", "quality=fast", "max_accuracy_drop=0.01"])
    assert sorted(oracle.seen) == sorted(wanted)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_accuracy_and_paired_drop_are_those_of_the_node(concurrency: int) -> None:
    best, fast = evaluate(Oracle(), list(range(40)), Quality.BEST, Quality.FAST, concurrency=concurrency)
    assert isinstance(best, TargetRow)
    assert isinstance(fast, TargetRow)
    assert (best.accuracy, best.drop, best.escalated) == (1.0, 0.0, 1.0)
    assert (fast.accuracy, fast.lost, fast.gained, fast.drop, fast.escalated) == (0.75, 10, 0, 0.25, 0.0)


def test_best_is_asked_once_even_when_it_is_a_target() -> None:
    oracle = Oracle()
    evaluate(oracle, [1, 2], Quality.BEST)
    assert len(oracle.seen) == 2


def test_unattainable_target_is_a_row_with_the_maximum() -> None:
    (row,) = evaluate(Oracle(), [1], MinAccuracy(0.99))
    assert row == UnattainableTarget("min_accuracy=0.99", 0.9)


def test_refused_image_ends_the_run_and_is_named() -> None:
    with pytest.raises(BadImage) as caught:
        evaluate(Oracle(refuse=8), [3, 8, 9], Quality.FAST, concurrency=2)
    assert caught.value.__notes__ == ["image 8 of set.npz, quality=best"]


def test_gains_offset_losses_in_the_drop() -> None:
    best = [EvaluatedImage(right, 1.0, answer(0)) for right in (True, True, False, False)]
    other = [EvaluatedImage(right, 1.0, answer(0)) for right in (False, True, True, False)]
    row = summarise("x", other, best)
    assert (row.lost, row.gained, row.drop) == (1, 1, 0.0)


def test_guarantee_is_the_weakest_stated_and_absent_if_any_is() -> None:
    some = [EvaluatedImage(True, 1.0, answer(0, max_drop=drop)) for drop in (0.01, 0.03)]
    assert summarise("x", some, some).guaranteed_drop == 0.03
    mixed = [*some, EvaluatedImage(True, 1.0, answer(0, max_drop=None))]
    row = summarise("x", mixed, mixed)
    assert row.guaranteed_drop is None
    assert row.status == {AccuracyStatus.CERTIFIED: 2, AccuracyStatus.BEST_EFFORT: 1}


@given(TARGETS)
def test_targets_are_read_as_they_are_written(target: Quality | MaxAccuracyDrop) -> None:
    assert parse_targets(written(target)) == (target,)
    assert len(target_fields(target)) == 1


def test_repeated_target_is_measured_once() -> None:
    assert parse_targets("quality=fast, quality=fast") == (Quality.FAST,)


@pytest.mark.parametrize(
    "text", ["", "fast", "quality=great", "min_accuracy=", "min_accuracy=2", "max_accuracy_drop=nan"]
)
def test_what_is_no_target_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--targets"):
        parse_targets(text)


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=200), st.integers(1, 250))
def test_thinning_keeps_distinct_members_in_order(numbers: set[int], limit: int) -> None:
    kept = thin(np.array(sorted(numbers)), limit)
    assert len(kept) == min(limit, len(numbers))
    assert set(kept.tolist()) <= numbers
    assert np.all(np.diff(kept) > 0)


def test_thinning_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--limit"):
        thin(np.arange(5), 0)


def write_indices(path: Path, indices: tuple[int, ...], sha256: str = "a" * 64) -> Path:
    path.write_bytes(msgspec.json.encode(HeldOutIndices(sha256, indices)))
    return path


def test_held_out_numbers_are_read(tmp_path: Path) -> None:
    path = write_indices(tmp_path / "held_out.json", (4, 2, 9))
    assert read_indices(path, images(10)).tolist() == [4, 2, 9]


def test_held_out_numbers_of_other_data_are_refused(tmp_path: Path) -> None:
    path = write_indices(tmp_path / "held_out.json", (1,), sha256="b" * 64)
    with pytest.raises(ConfigError, match=r"bbbbbbbbbbbb.*aaaaaaaaaaaa"):
        read_indices(path, images(10))


@pytest.mark.parametrize("indices", [(1, 1), (-1,), (10,)])
def test_impossible_numbers_are_refused(tmp_path: Path, indices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="distinct numbers from 0 to 9"):
        read_indices(write_indices(tmp_path / "held_out.json", indices), images(10))


def test_a_calibration_that_held_none_out_names_the_other_splits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held no images out; pass --split auto"):
        read_indices(write_indices(tmp_path / "held_out.json", ()), images(10))


def test_missing_indices_name_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hawkvision calibrate"):
        read_indices(tmp_path / "none.json", images(10))


@given(st.binary(max_size=60))
def test_garbage_for_indices_is_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "indices.json"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=path.name):
            read_indices(path, images(10))


def test_interval_is_the_textbook_one() -> None:
    # Clopper and Pearson's interval of 0 and of 10 in 10 has the closed form 1 - (δ/2)^(1/n).
    assert exact_interval(0, 10) == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)))
    assert exact_interval(10, 10) == pytest.approx((0.025 ** (1 / 10), 1.0))


def write_set(folder: Path, labels: list[int]) -> Path:
    """An npz set whose image i is the text i."""
    bodies = [b"%d" % i for i in range(len(labels))]
    path = folder / "set.npz"
    np.savez(
        path,
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]).astype(np.uint32),
        labels=np.array(labels, np.int16),
    )
    return path


def run_command(url: str, *options: str) -> asyncio.Future[tuple[int, str, str]]:
    async def command() -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadgen", "evaluate", "--url", url, *options,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return asyncio.ensure_future(command())


def test_command_writes_the_report_it_prints(tmp_path: Path) -> None:
    data = write_set(tmp_path, [i % 7 for i in range(12)])
    report = tmp_path / "report.json"

    async def scenario() -> tuple[int, str, str]:
        async with asking(Oracle()) as client:
            return await run_command(
                client.url, "--data", str(data), "--split", "all", "--targets", "quality=fast", "--json", str(report)
            )

    status, out, err = asyncio.run(scenario())
    assert (status, err) == (0, "")
    assert "quality=fast" in out
    (row,) = json.loads(report.read_text())["rows"]
    assert (row["n"], row["accuracy"], row["lost"]) == (12, 0.75, 3)


def test_drops_against_another_stage_than_the_best_are_no_success(tmp_path: Path) -> None:
    data, report = write_set(tmp_path, [0, 1, 2]), tmp_path / "report.json"

    async def scenario() -> tuple[int, str, str]:
        async with asking(Oracle(degraded_times=1)) as client:
            words = ("--data", str(data), "--split", "all", "--targets", "quality=fast", "--json", str(report))
            return await run_command(client.url, *words)

    status, out, _ = asyncio.run(scenario())
    assert status == 1
    assert "3 of 3 answers to quality=best were degraded" in out
    assert json.loads(report.read_text())["not_best"] == 3


def test_interrupted_command_tables_the_answers_it_has(tmp_path: Path) -> None:
    """Of twelve images `best` and the first target have all, the second has five when the node goes silent."""
    data, report = write_set(tmp_path, [i % 7 for i in range(12)]), tmp_path / "report.json"
    stuck, over = asyncio.Event(), asyncio.Event()

    class Silent(Oracle):
        async def handle(self, request: web.Request) -> web.Response:
            if len(self.seen) == 12 + 12 + 5:
                stuck.set()
                await over.wait()
            return await super().handle(request)

    async def scenario() -> tuple[int | None, str]:
        async with asking(Silent()) as client:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgen", "evaluate", "--url", client.url, "--data", str(data), "--split", "all",
                "--targets", "quality=fast,max_accuracy_drop=0.1,max_accuracy_drop=0.2", "--json", str(report),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            await stuck.wait()
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
            over.set()
            return process.returncode, out.decode()

    status, out = asyncio.run(scenario())
    assert status == 130
    assert "max_accuracy_drop=0.1 (5 images)" in out
    assert "interrupted" in out
    found = json.loads(report.read_text())
    assert found["interrupted"] is True
    rows = [(row["target"], row["n"]) for row in found["rows"]]
    assert rows == [("quality=fast", 12), ("max_accuracy_drop=0.1", 5)]


def test_a_node_that_fails_leaves_a_table_of_its_answers(tmp_path: Path) -> None:
    """Of twelve images `best` and the first target have all, the second has five when the node drains."""
    data, report = write_set(tmp_path, [i % 7 for i in range(12)]), tmp_path / "report.json"

    class Draining(Oracle):
        async def handle(self, request: web.Request) -> web.Response:
            if len(self.seen) == 12 + 12 + 5:
                return web.json_response(NotReady("draining").body(), status=503)
            return await super().handle(request)

    async def scenario() -> tuple[int, str, str]:
        async with asking(Draining()) as client:
            return await run_command(
                client.url, "--data", str(data), "--split", "all", "--json", str(report),
                "--targets", "quality=fast,max_accuracy_drop=0.1,max_accuracy_drop=0.2",
            )  # fmt: skip

    status, out, err = asyncio.run(scenario())
    assert status == 1
    assert "max_accuracy_drop=0.1 (5 images)" in out
    assert err.startswith("error: draining (image ")
    assert err.endswith(" of set.npz, max_accuracy_drop=0.1)\n")
    found = json.loads(report.read_text())
    assert found["interrupted"] is True
    assert [(row["target"], row["n"]) for row in found["rows"]] == [("quality=fast", 12), ("max_accuracy_drop=0.1", 5)]


def test_a_node_that_answers_nothing_leaves_no_table(tmp_path: Path) -> None:
    data = write_set(tmp_path, [0, 1])

    async def scenario() -> tuple[int, str, str]:
        return await run_command("http://127.0.0.1:1", "--data", str(data), "--split", "all")

    status, out, err = asyncio.run(scenario())
    assert (status, out) == (1, "")
    assert "cannot be reached" in err


def test_rows_of_an_interrupted_evaluation_are_over_images_that_best_has_too() -> None:
    right, wrong = (EvaluatedImage(which, 1.0, answer(0)) for which in (True, False))
    seen = EvaluatedImages({Quality.BEST: {1: right, 2: right, 3: right}, Quality.FAST: {1: right, 3: wrong, 4: wrong}})
    (row,) = rows_of(seen, np.array([4, 3, 2, 1]), (Quality.FAST, MinAccuracy(0.9)))
    assert isinstance(row, TargetRow)
    assert (row.n, row.lost, row.accuracy) == (2, 1, 0.5)


@pytest.mark.parametrize("option", ["--seed", "--concurrency", "--limit"])
def test_numbers_that_are_too_small_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--url", "http://127.0.0.1:1", "--data", str(write_set(tmp_path, [0, 1])), "--split", "all"]
    assert main([*words, option, "-1"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {option}: expected ")


def test_command_refuses_data_that_was_not_held_out(tmp_path: Path) -> None:
    data = write_set(tmp_path, [0, 1])
    indices = write_indices(tmp_path / "held_out.json", (0,))

    async def scenario() -> tuple[int, str, str]:
        return await run_command("http://127.0.0.1:1", "--data", str(data), "--indices", str(indices))

    status, _, err = asyncio.run(scenario())
    assert status == 1
    assert "--split all" in err
