"""Runs side by side: equal ones show no difference, shifted ones do, and the command says so in its exit status."""

from __future__ import annotations

import html
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from loadgen.__main__ import main
from loadgen.analysis.compare import (
    RatioVerdict,
    RunComparison,
    compare,
    compare_all,
    same_schedule,
    slower,
    written,
)
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import summarise
from loadgen.workload.record import Run, load, save
from tests.fuzz.examples import examples
from tests.loadgen.command import unread
from tests.loadgen.runs import answer, origin, refusal, run_of


def served(seed: int, *, slow: float = 1.0, n: int = 300, name: str = "a", wrong: float = 0.2, kib: int = 10) -> Run:
    """A run whose requests are the same for all seeds, and whose answers are not."""
    rng = np.random.default_rng(seed)
    outcomes = [
        answer(k / 10, 20 * slow * rng.lognormal(0, 0.4), right=bool(rng.random() > wrong), image=k,
               escalated=bool(rng.random() < 0.3), sent_bytes=1024 * kib)
        for k in range(n)
    ]  # fmt: skip
    return run_of(outcomes, name=name)


def verdicts(found: RunComparison) -> dict[str, RatioVerdict]:
    return {ratio.figure: ratio.verdict for ratio in found.ratios}


def test_run_beside_itself_shows_no_difference() -> None:
    run = served(1)
    found = compare(run, run)
    assert found.paired
    assert set(verdicts(found).values()) == {RatioVerdict.SAME}
    assert {ratio.ratio for ratio in found.ratios} == {1.0}


@pytest.mark.parametrize("paired", [True, False])
def test_equal_servers_seldom_show_a_difference(paired: bool) -> None:
    shown = 0
    for seed in range(12):
        first, other = served(seed), served(1_000 + seed, n=300 if paired else 280)
        found = compare(first, other)
        assert found.paired is paired
        shown += sum(found.ratio(name).verdict is not RatioVerdict.SAME for name in ("P50", "accuracy", "escalated"))
    assert shown <= 5  # of 36, at 5 % each; more than 5 has a chance of about one in a hundred


def test_slower_less_accurate_and_larger_run_is_told_as_such() -> None:
    found = verdicts(compare(served(1), served(2, slow=1.5, wrong=0.4, kib=20)))
    assert (found["P50"], found["P90"], found["bytes sent"]) == (
        RatioVerdict.SLOWER,
        RatioVerdict.SLOWER,
        RatioVerdict.MORE,
    )
    assert found["accuracy"] is found["effective accuracy"] is RatioVerdict.WORSE


def test_pairs_show_a_difference_that_a_varying_schedule_hides() -> None:
    hours = np.random.default_rng(5).lognormal(0, 1.0, 400)
    first = run_of([answer(k / 10, 10 * ms, image=k) for k, ms in enumerate(hours)], name="a")
    other = run_of([answer(k / 10, 10.5 * ms, image=k) for k, ms in enumerate(hours)], name="b")
    assert compare(first, other).ratio("P50").verdict is RatioVerdict.SLOWER
    unpaired = msgspec.structs.replace(other, schedule="replay:elsewhere")
    assert compare(first, unpaired).ratio("P50").verdict is RatioVerdict.SAME


@pytest.mark.parametrize(
    "change",
    [{"schedule": "poisson:9"}, {"origin": origin(8)}, {"outcomes": served(1).outcomes[1:]}, {"targets": []}],
    ids=lambda change: next(iter(change)),
)
def test_runs_of_other_requests_are_not_paired(change: dict[str, object]) -> None:
    first = served(1)
    other = msgspec.structs.replace(first, **change)
    assert not same_schedule(
        first, other, counted_of(first), counted_of(msgspec.structs.replace(other, targets=first.targets))
    )


def test_percentile_that_requests_without_an_answer_reach_is_marked() -> None:
    answered, shed = [answer(k / 10, 10) for k in range(98)], [refusal(9.9, 1), refusal(10.0, 1)]
    found = compare(run_of(answered), run_of(answered + shed))
    assert [one.other_at_least for one in found.ratios] == [False, False, True, False, False, False, False, False]
    assert not any(one.first_at_least for one in found.ratios)
    assert written("P99", 100.0, at_least=True) == "≥ 100.0 ms"


@pytest.mark.parametrize(
    ("ms", "shown"), [(500, RatioVerdict.FASTER), (10, RatioVerdict.UNKNOWN), (200, RatioVerdict.UNKNOWN)]
)
def test_run_that_left_requests_unanswered_is_not_called_the_faster_one(ms: float, shown: RatioVerdict) -> None:
    shedding = run_of([refusal(k / 10, 1) if k % 20 == 0 else answer(k / 10, ms) for k in range(400)])
    other = run_of([answer(k / 10, 200) for k in range(400)])
    assert compare(shedding, other).ratio("P99").verdict is shown


@given(st.floats(1.02, 20.0))
@settings(max_examples=examples(50), deadline=None)
def test_ratio_of_a_run_slowed_by_a_factor_is_that_factor(factor: float) -> None:
    first = run_of([answer(k, 10 + k) for k in range(20)], deadline_ms=None)
    other = run_of([answer(k, (10 + k) * factor) for k in range(20)], deadline_ms=None)
    ratio = compare(first, other).ratio("P50")
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor) == ratio.high
    assert ratio.verdict is RatioVerdict.SLOWER


def test_run_without_an_answer_is_less_accurate_and_counts_as_slower() -> None:
    dead = run_of([refusal(k / 10, 1, 404, "not_found", image=k) for k in range(300)], name="dead", deadline_ms=None)
    found = compare(msgspec.structs.replace(served(1), deadline_ms=None), dead)
    assert (found.ratio("effective accuracy").verdict, found.ratio("effective accuracy").other) == (
        RatioVerdict.WORSE,
        0.0,
    )
    assert found.ratio("accuracy").verdict is RatioVerdict.UNKNOWN
    assert [sentence.split(",")[0] for sentence in slower([found], 5)] == [
        "dead: P50 is unknown",
        "dead: P90 is unknown",
        "dead: P99 is unknown",
        "dead: 0.0% of its requests were answered",
    ]


def test_fewer_answers_count_as_slower_only_where_they_are_shown() -> None:
    def failing(name: str, *failed: int) -> Run:
        outcomes = [refusal(k / 10, 1) if k in failed else answer(k / 10, 10 + k % 7) for k in range(1_000)]
        return run_of(outcomes, name=name, duration_s=100)

    whole = failing("whole")
    assert slower([compare(whole, failing("chance", 500))], 5) == []
    assert slower([compare(whole, failing("shown", *range(50, 950, 100)))], 5) == [
        "shown: 99.1% of its requests were answered, 100.0% of whole’s"
    ]
    assert slower([compare(failing("first", *range(0, 900, 9)), whole)], 5) == []


@pytest.mark.parametrize("n", [0, 1, 13])
def test_too_few_or_too_many_runs_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 2 to 12 runs, got {n}"):
        compare_all([served(1, n=20)] * n)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The records of two runs, the second a fifth slower."""
    first, other = tmp_path / "a.json", tmp_path / "b.json.gz"
    save(served(1), first, summarise(served(1)))
    save(served(1, slow=1.2, name="b"), other)
    return str(first), str(other)


def test_command_fails_where_a_run_is_slower_than_allowed(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *files]) == 0
    out = capsys.readouterr().out
    assert "b against a (same schedule, paired)" in out
    assert "1.20x" in out
    assert "link" not in out
    assert main(["compare", *files, "--fail-if-slower", "10"]) == 1
    assert [each.partition(" that of a")[0] for each in capsys.readouterr().err.splitlines()] == [
        f"b: {name} is 1.20x" for name in ("P50", "P90", "P99")
    ]
    assert main(["compare", *files, "--fail-if-slower", "30"]) == 0


@pytest.mark.parametrize("percent", ["nan", "-1", "inf"])
def test_command_refuses_a_limit_that_cannot_fail_or_is_none(
    percent: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *files, f"--fail-if-slower={percent}"]) == 1
    assert f"--fail-if-slower: expected a number of percent from 0, got {percent}" in capsys.readouterr().err


def test_runs_of_one_name_are_called_by_their_files_and_other_links_are_named(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = files
    save(msgspec.structs.replace(served(1, slow=1.2, name="a"), link="lte"), Path(other))
    assert main(["compare", *files, "--fail-if-slower", "10", "--html", str(tmp_path / "page.html")]) == 1
    out, err = capsys.readouterr()
    assert f"{other}: P99 is 1.20x that of {first}" in err
    assert "not behind the same link (no link and lte), so differences are the links' as well" in " ".join(out.split())
    shown = html.unescape((tmp_path / "page.html").read_text())
    assert f"<h2>Compared with {first}</h2>" in shown
    assert f"{other}: behind lte, {first} behind no link: differences are the links' as well" in shown


def test_reader_who_leaves_does_not_change_the_status(files: tuple[str, str]) -> None:
    passed, failed = (unread("compare", *files, "--fail-if-slower", percent) for percent in ("30", "10"))
    assert (passed.returncode, passed.stderr, failed.returncode) == (0, "", 1)
    assert failed.stderr.splitlines()[-1].startswith("b: P99 is 1.20x that of a")


def test_command_writes_ratios_and_intervals_even_where_it_fails(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "ratios.json"
    assert main(["compare", *files, "--json", str(out), "--fail-if-slower", "10"]) == 1
    found = msgspec.json.decode(out.read_bytes())
    assert found["runs"] == list(files)
    comparisons = msgspec.convert(found["comparisons"], tuple[RunComparison, ...])
    assert comparisons == compare_all([load(Path(name)) for name in found["runs"]])
