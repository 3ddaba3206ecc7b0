"""What a run says, beside what is computed by hand."""

from __future__ import annotations

import io
import re
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import AccuracyStatus
from loadgen.analysis.accuracy import TargetVerdict
from loadgen.analysis.summary import ClassSummary, RunSummary, show, summarise, targets_kept
from loadgen.workload.record import RequestOutcome, Run, TargetClass
from tests.fuzz.examples import examples
from tests.loadgen.runs import answer, plausible, refusal, run_of

DROP = TargetClass({"max_accuracy_drop": "0.02"}, 1.0)
AT_LEAST = TargetClass({"min_accuracy": "0.8"}, 1.0)
BEST_EFFORT = AccuracyStatus.BEST_EFFORT


def only(run: Run) -> ClassSummary:
    (one,) = summarise(run).classes
    return one


def drops(
    lost: int, n: int, target: TargetClass = DROP, *, guarantee: AccuracyStatus = AccuracyStatus.CERTIFIED
) -> list[RequestOutcome]:
    """Images that the reference stage gets right; the first `lost` of them were answered wrong."""
    return [answer(k / 100, 10, right=k >= lost, image=k, guarantee=guarantee) for k in range(n)]


def all_right(n: int) -> dict[int, bool]:
    return dict.fromkeys(range(n), True)


def test_percentiles_are_measured_values() -> None:
    total = summarise(run_of([answer(k / 10, k + 1) for k in range(100)])).total
    assert [round(one.ms, 6) for one in total.percentiles] == [50, 90, 99, 100]
    assert round(total.max_ms, 6) == 100


def test_requests_due_during_warm_up_do_not_count() -> None:
    run = run_of([answer(0.5, 900), answer(1.5, 10), answer(2.0, 20)], warm_up_s=1.0)
    total = summarise(run).total
    assert (total.n, round(total.max_ms)) == (2, 20)


def test_rates_are_per_second_of_counted_schedule() -> None:
    run = run_of([answer(0.5, 9), answer(1.5, 10), answer(4.0, 3_000), refusal(4.5, 1)], duration_s=5.0, warm_up_s=1.0)
    total = summarise(run).total
    assert (total.offered_per_s, total.answered_per_s) == (3 / 4, 1 / 4)


def test_quick_refusal_waits_at_least_until_the_deadline() -> None:
    total = summarise(run_of([refusal(0.1, 2), answer(0.2, 30), answer(0.3, 40)])).total
    assert round(total.max_ms, 6) == 100
    assert total.percentile(0.99).at_least
    assert not total.percentile(0.5).at_least


def test_without_deadline_a_failure_counts_as_long_as_it_took() -> None:
    total = summarise(run_of([refusal(0.1, 700, 0, "timeout"), answer(0.2, 30)], deadline_ms=None)).total
    assert round(total.max_ms, 6) == 700
    assert total.in_time is None


def test_effective_accuracy_wants_right_and_in_time_of_all_requests() -> None:
    outcomes = [answer(0.1, 50), answer(0.2, 150), answer(0.3, 50, right=False), refusal(0.4, 1)]
    total = summarise(run_of(outcomes)).total
    assert total.effective is not None
    assert total.accuracy is not None
    assert total.in_time is not None
    assert (total.effective.value, total.accuracy.value, total.in_time.value) == (1 / 4, 2 / 3, 2 / 4)


def test_shed_requests_and_errors_are_counted_by_code() -> None:
    outcomes = [refusal(0.1, 1), refusal(0.2, 1), refusal(0.3, 1, 503, "not_ready"), refusal(0.4, 1, 0, ""),
                refusal(0.5, 1, 502, "")]  # fmt: skip
    total = summarise(run_of(outcomes)).total
    assert (total.shed, total.shed_share) == (3, 3 / 5)
    assert total.errors == {"overloaded": 2, "not_ready": 1, "unanswered": 1, "http_502": 1}
    assert (total.answered, total.accuracy) == (0, None)


def test_shares_of_answers_leave_out_those_without() -> None:
    outcomes = [answer(0.1, 1, escalated=True), answer(0.2, 1, degraded=True), answer(0.3, 1, guarantee=BEST_EFFORT),
                answer(0.4, 1, guarantee=None), refusal(0.5, 1)]  # fmt: skip
    total = summarise(run_of(outcomes)).total
    assert (total.escalated, total.degraded, total.flagged) == (1 / 4, 1 / 4, 3 / 4)


def test_p99_of_fewer_than_a_thousand_says_so() -> None:
    for n, few in ((999, True), (1_000, False)):
        assert summarise(run_of([answer(k / 1_000, 1) for k in range(n)])).total.percentile(0.99).few is few


def test_p99_reached_on_few_occasions_says_so_however_many_requests_there_are() -> None:
    times = [500 if k // 100 % 20 == 7 else 10 + k % 7 for k in range(5_000)]
    p99 = summarise(run_of([answer(k / 100, ms) for k, ms in enumerate(times)], duration_s=50)).total.percentile(0.99)
    assert (p99.occasions, p99.few) == (3, True)


def test_drop_is_paired_with_the_best_stage() -> None:
    outcomes = [answer(k / 10, 10, right=k not in (0, 1, 2), image=k) for k in range(10)]
    one = only(run_of(outcomes, reference={**all_right(9), 0: False, 9: False}))
    assert one.drop is not None
    assert one.drop.value == pytest.approx((2 - 1) / 10)  # 1 and 2 lost, 9 gained


FLAGGED = [answer(5 + k / 100, 10, right=False, image=400 + k, degraded=True) for k in range(40)]


@pytest.mark.parametrize(
    ("outcomes", "verdict", "unflagged"),
    [
        (drops(1, 400), TargetVerdict.KEPT, 1 / 400),
        (drops(40, 400), TargetVerdict.SILENT, 0.1),
        (drops(0, 400) + FLAGGED, TargetVerdict.FLAGGED, 0.0),
        (drops(40, 400, guarantee=BEST_EFFORT), TargetVerdict.UNCLAIMED, None),
        (drops(1, 40), TargetVerdict.UNCERTAIN, 1 / 40),
    ],
)
def test_target_is_kept_or_missed_by_what_its_answers_claim(
    outcomes: list[RequestOutcome], verdict: TargetVerdict, unflagged: float | None
) -> None:
    one = only(run_of(outcomes, targets=(DROP,), reference=all_right(440)))
    assert one.kept is not None
    assert one.kept.verdict is verdict
    assert (None if one.unflagged_drop is None else one.unflagged_drop.value) == unflagged


def test_target_kept_by_a_few_answers_is_not_shown_to_be() -> None:
    run = run_of(drops(0, 28), targets=(DROP,), reference=all_right(28))
    one = only(run)
    assert one.kept is not None
    assert one.kept.verdict is TargetVerdict.UNSHOWN
    assert one.kept.shortfall.value < 0 < one.kept.shortfall.high
    assert targets_kept(summarise(run)) == "1 of 1 (1 not shown)"
    assert "kept, not shown (spare 2.0 ±" in printed(summarise(run))


def test_late_answers_are_missing_in_the_effective_shortfall_alone() -> None:
    outcomes = [answer(k / 10, 500 if k < 10 else 10, image=k) for k in range(100)]
    one = only(run_of(outcomes, targets=(DROP,), reference=all_right(100)))
    assert one.kept is not None
    assert one.kept.shortfall.value == pytest.approx(-0.02)
    assert one.kept.effective_shortfall.value == pytest.approx(0.08)


def test_same_few_images_sent_often_leave_the_drop_uncertain() -> None:
    often = [answer(k / 100, 10, right=k % 10 != 0, image=k % 10) for k in range(1_000)]
    once = [answer(k / 100, 10, right=k % 10 != 0, image=k) for k in range(1_000)]
    wide, narrow = (only(run_of(outcomes, reference=all_right(1_000))).drop for outcomes in (often, once))
    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)


def test_guaranteed_drop_is_the_largest_and_only_if_every_claim_states_one() -> None:
    stated = [answer(0.1, 1, max_drop=0.01), answer(0.2, 1, max_drop=0.03), answer(0.3, 1, guarantee=BEST_EFFORT)]
    assert only(run_of(stated)).guaranteed_drop == 0.03
    assert only(run_of([*stated, answer(0.4, 1)])).guaranteed_drop is None


def test_run_of_warm_up_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="'short': none of its 1 requests was due after the warm-up of 5 s"):
        summarise(run_of([answer(1.0, 1)], name="short", warm_up_s=5.0))


@pytest.mark.parametrize("field", ["deadline_ms", "max_accuracy_drop"])
@pytest.mark.parametrize("value", ["soon", "nan", "-1", "inf"])
def test_target_that_is_no_number_is_refused_by_name(field: str, value: str) -> None:
    odd = TargetClass({field: value}, 1.0)
    with pytest.raises(ConfigError, match=f"{field}: expected a number from 0, got '{value}'"):
        summarise(run_of([answer(1.0, 1)], targets=(odd,)))


OUTCOMES = st.lists(
    st.one_of(
        st.builds(
            answer, st.floats(0, 9), st.floats(0.1, 1e4), right=st.sampled_from([True, False, None]),
            target=st.integers(0, 1), image=st.integers(0, 5), degraded=st.booleans(),
            guarantee=st.sampled_from([*AccuracyStatus, None]),
        ),
        st.builds(refusal, st.floats(0, 9), st.floats(0.1, 1e4), st.sampled_from([0, 429, 503, 500])),
    ),
    min_size=1,
    max_size=25,
)  # fmt: skip


@given(OUTCOMES, st.none() | st.just(100.0), st.booleans())
@settings(max_examples=examples(75), deadline=None)
def test_any_run_is_summarised_within_its_bounds(
    outcomes: list[RequestOutcome], deadline: float | None, labelled: bool
) -> None:
    run = run_of(
        outcomes, targets=(DROP, AT_LEAST), deadline_ms=deadline, reference={1: True, 2: False}, labelled=labelled
    )
    found = summarise(run)
    assert sum(one.figures.n for one in found.classes) == found.total.n == len(outcomes)
    for figures in chain([found.total], (one.figures for one in found.classes)):
        times = [one.ms for one in figures.percentiles]
        assert times == sorted(times)
        assert all(one.low <= one.ms <= one.high or one.few for one in figures.percentiles)
        for share in (figures.accuracy, figures.effective, figures.in_time):
            assert share is None or 0 <= share.low <= share.value <= share.high <= 1


def printed(summary: RunSummary, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(summary, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_each_target_has_a_block_in_which_no_figure_is_cut_or_broken(width: int) -> None:
    summary = summarise(plausible("[bold]mine"))
    lines = printed(summary, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "[bold]mine" in lines[0]
    heads = [line for line in lines if re.search(r": \d+ requests", line)]
    assert [line.rpartition(": ")[0] for line in heads] == ["all", *(one.target for one in summary.classes)]
    latencies = [line for line in lines if line.startswith("  latency")]
    assert len(latencies) == len(heads)
    for line in latencies:
        assert re.fullmatch(r"  latency, ms +P50 \S+, P99 \S+ \(\S+–\S+\), P99\.9 \S+", line.rstrip()), line
    assert not any("…" in line for line in lines)


def test_a_block_has_the_share_that_was_shed_and_marks_a_tail_of_few_requests() -> None:
    outcomes = [refusal(k / 10, 1) if k % 4 == 0 else answer(k / 10, 50) for k in range(40)]
    text = printed(summarise(run_of(outcomes, name="mine")))
    assert "all: 40 requests\n" in text
    assert re.search(r"P99\.9 ≥100\.0\?\s*$", text, re.MULTILINE)
    assert re.search(r"no answer +10 \(25\.0% shed\): 10 ", text)


def test_a_block_names_why_requests_got_no_answer() -> None:
    codes = ["timeout", *["unreachable"] * 4, *["broken"] * 3, *["[b]odd"] * 2, "rare"]
    run = run_of([answer(0.5, 10), *(refusal(1 + k / 10, 1, 0, code) for k, code in enumerate(codes))], name="mine")
    assert "no answer       11 (0.0% shed): 4 unreachable, 3 broken, 2 [b]odd, 2 others" in printed(summarise(run), 80)
