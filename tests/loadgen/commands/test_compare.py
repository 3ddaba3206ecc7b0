"""Runs side by side: equal ones show no difference, shifted ones do, and the command says so in its exit status."""

from __future__ import annotations

import asyncio
import html
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError
from loadgen.analysis.compare import (
    FIGURES,
    ComparisonReport,
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
from loadgen.commands import compare as command
from loadgen.workload.record import Run, load, save
from tests.fuzz.examples import examples
from tests.loadgen.command import unread
from tests.loadgen.runs import answer, origin, plausible, refusal, run_of


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


def test_the_other_way_round_it_is_faster() -> None:
    found = compare(served(2, slow=1.5), served(1))
    assert found.ratio("P50").verdict is RatioVerdict.FASTER


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


def test_nothing_escalated_in_either_run_is_no_difference() -> None:
    run = run_of([answer(k / 10, 10) for k in range(30)])
    ratio = compare(run, run).ratio("escalated")
    assert (ratio.ratio, ratio.verdict) == (None, RatioVerdict.SAME)


def test_something_beside_nothing_has_no_ratio() -> None:
    none = run_of([answer(k / 10, 10) for k in range(30)])
    some = run_of([answer(k / 10, 10, escalated=True) for k in range(30)])
    assert compare(none, some).ratio("escalated").verdict is RatioVerdict.UNKNOWN


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


def test_unlabelled_runs_are_compared_by_what_they_have() -> None:
    run = run_of([answer(k / 10, 10 + k, right=None) for k in range(30)], labelled=False)
    found = compare(run, run)
    assert found.ratio("P99").ratio == 1.0
    assert found.ratio("accuracy").verdict is RatioVerdict.UNKNOWN


@given(st.floats(1.02, 20.0))
@settings(max_examples=examples(50), deadline=None)
def test_ratio_of_a_run_slowed_by_a_factor_is_that_factor(factor: float) -> None:
    first = run_of([answer(k, 10 + k) for k in range(20)], deadline_ms=None)
    other = run_of([answer(k, (10 + k) * factor) for k in range(20)], deadline_ms=None)
    ratio = compare(first, other).ratio("P50")
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor) == ratio.high
    assert ratio.verdict is RatioVerdict.SLOWER


def test_only_what_is_shown_and_beyond_the_limit_counts_as_slower() -> None:
    found = [compare(served(1), served(1, slow=1.2, name="b"))]
    assert [sentence.split(" is ")[0] for sentence in slower(found, 10)] == ["b: P50", "b: P90", "b: P99"]
    assert slower(found, 25) == []


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


def test_every_figure_is_written_with_its_unit() -> None:
    assert [written(figure, 0.5) for figure in ("P99", "accuracy", "bytes sent")] == ["0.5 ms", "50.0%", "0.0 KiB"]
    assert [written(figure, math.nan) for figure in FIGURES] == [""] * len(FIGURES)


@dataclass
class Files:
    folder: Path

    def compare(self, *words: str) -> int:
        given = dict(zip(words[::2], words[1::2], strict=True))
        options = command.CompareOptions(
            runs=[self.folder / name for name in ("a.json", "b.json.gz")],
            fail_if_slower=float(given["--fail-if-slower"]) if "--fail-if-slower" in given else None,
            html=Path(given["--html"]) if "--html" in given else None,
            json=Path(given["--json"]) if "--json" in given else None,
        )
        return asyncio.run(command.run(options))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    save(served(1), tmp_path / "a.json", summarise(served(1)))
    save(served(1, slow=1.2, name="b"), tmp_path / "b.json.gz")
    return Files(tmp_path)


def test_command_prints_ratios_and_succeeds(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.compare() == 0
    out = capsys.readouterr().out
    assert "b against a (same schedule, paired)" in out
    assert "1.20x" in out
    assert "slower" in out


def test_command_fails_where_a_run_is_slower_than_allowed(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert files.compare("--fail-if-slower", "10") == 1
    assert "b: P99 is 1.20x that of a" in capsys.readouterr().err
    assert files.compare("--fail-if-slower", "30") == 0


@pytest.mark.parametrize("percent", ["nan", "-1", "inf"])
def test_command_refuses_a_limit_that_cannot_fail_or_is_none(percent: str, files: Files) -> None:
    with pytest.raises(ConfigError, match=f"--fail-if-slower: expected a number of percent from 0, got {percent}"):
        files.compare("--fail-if-slower", percent)


def test_command_refuses_one_file_for_both_and_folders_that_are_not_there(files: Files) -> None:
    both = str(files.folder / "both")
    with pytest.raises(ConfigError, match="both: expected a file of its own for --json and for --html"):
        files.compare("--json", both, "--html", both)
    with pytest.raises(ConfigError, match=r"no such folder: .*/nowhere"):
        files.compare("--json", str(files.folder / "nowhere" / "x.json"))
    assert sorted(path.name for path in files.folder.iterdir()) == ["a.json", "b.json.gz"]


def test_runs_of_one_name_are_called_by_their_files(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    save(served(1, slow=1.2, name="a"), files.folder / "b.json.gz")
    page = files.folder / "page.html"
    files.compare("--fail-if-slower", "10", "--html", str(page))
    first, other = (str(files.folder / name) for name in ("a.json", "b.json.gz"))
    assert f"{other}: P99 is 1.20x that of {first}" in capsys.readouterr().err
    assert f"<h2>Compared with {first}</h2>" in page.read_text()


def test_runs_behind_different_links_are_said_to_be(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.compare()
    assert "link" not in capsys.readouterr().out
    save(msgspec.structs.replace(served(2, name="b"), link="lte"), files.folder / "b.json.gz")
    files.compare("--html", str(files.folder / "page.html"))
    assert (
        "not behind the same link (no link and lte), so differences are the links' as well" in capsys.readouterr().out
    )
    shown = html.unescape((files.folder / "page.html").read_text())
    assert "b: behind lte, a behind no link: differences are the links' as well" in shown


def test_reader_who_leaves_does_not_change_the_status(files: Files) -> None:
    runs = [str(files.folder / name) for name in ("a.json", "b.json.gz")]
    passed, failed = (unread("compare", *runs, "--fail-if-slower", percent) for percent in ("30", "10"))
    assert (passed.returncode, passed.stderr, failed.returncode) == (0, "", 1)
    assert failed.stderr.splitlines()[-1].startswith("b: P99 is 1.20x that of a")


def test_command_writes_the_page(files: Files) -> None:
    files.compare("--html", str(files.folder / "page.html"))
    assert "<h2>Compared with a</h2>" in (files.folder / "page.html").read_text()


def test_command_writes_ratios_and_intervals_even_where_it_fails(files: Files) -> None:
    out = files.folder / "ratios.json"
    assert files.compare("--json", str(out), "--fail-if-slower", "10") == 1
    found = msgspec.json.decode(out.read_bytes(), type=ComparisonReport)
    assert found.runs == [str(files.folder / name) for name in ("a.json", "b.json.gz")]
    assert found.comparisons == compare_all([load(Path(name)) for name in found.runs])


def test_ratio_that_does_not_exist_is_null(files: Files) -> None:
    unlabelled = run_of([answer(k / 10, 10 + k, right=None) for k in range(30)], labelled=False)
    for name in ("a.json", "b.json.gz"):
        save(unlabelled, files.folder / name)
    files.compare("--json", str(files.folder / "ratios.json"))
    (found,) = msgspec.json.decode((files.folder / "ratios.json").read_bytes())["comparisons"]
    accuracy = next(each for each in found["ratios"] if each["figure"] == "accuracy")
    assert accuracy["ratio"] is accuracy["first"] is None


def test_file_that_holds_no_run_is_refused(files: Files) -> None:
    (files.folder / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a load test's record"):
        files.compare()


def test_runs_of_one_seed_are_paired_whatever_the_server_does() -> None:
    first, other = plausible("one", duration_s=20), plausible("two", duration_s=20, shed=0.2)
    assert compare(first, other).paired
