"""What a comparison claims: rounds put together without their warm-ups, right in time first, equal accuracy."""

import io

import msgspec
import pytest
from rich.console import Console

from hawkvision.core.types import AccuracyStatus
from loadgen.analysis.compare import RatioVerdict
from loadgen.workload.record import LinkSample, RequestOutcome, Run, TargetClass
from tests.bench.policies.goal_checks import (
    GoalCheck,
    LinkBytes,
    PolicyCell,
    PolicyResult,
    RoundRange,
    figures,
    judge,
    merged,
    show_rows,
    together,
)
from tests.loadgen.runs import answer, refusal, run_of


def result(name: str, ms: float, *, wrong: int = 0, uplink: int = 0, honest: bool = True) -> PolicyResult:
    """Two hundred requests of one latency, some of them wrong, evenly spread."""
    guarantee = AccuracyStatus.BEST_EFFORT if honest else AccuracyStatus.CERTIFIED
    outcomes = [
        answer(n / 20, ms + n % 3, right=n * wrong % 200 >= wrong, image=n, guarantee=guarantee, max_drop=0.01)
        for n in range(200)
    ]
    target = TargetClass({"max_accuracy_drop": "0.01"}, 1.0)
    run = run_of(outcomes, name=name, targets=(target,), reference=dict.fromkeys(range(200), True))
    return PolicyResult(run, LinkBytes(dc_up=uplink))


def claims_of(*results: PolicyResult) -> dict[tuple[str, str], GoalCheck]:
    _, claims = judge(PolicyCell("a link", 20.0, {each.run.name: each for each in results}))
    return {(claim.what.split(",")[0], claim.against): claim for claim in claims}


RIGHT = "right within the deadline"


def test_what_counts_first_is_how_many_more_are_right_in_time() -> None:
    claim = claims_of(result("hawkvision", 50.0), result("static", 60.0, wrong=40))[RIGHT, "static"]
    assert claim.value == pytest.approx(0.2)
    assert claim.low is not None
    assert claim.high is not None
    assert claim.low > 0.0
    assert claim.high < 0.4
    assert (claim.met, claim.note) == (True, "100.0% and 80.0%")


def test_right_answers_that_come_late_are_not_right_in_time() -> None:
    """The deadline of these runs is 100 ms."""
    claims = claims_of(result("hawkvision", 50.0, wrong=40), result("static", 500.0), result("all-edge", 20.0))
    assert (claims[RIGHT, "static"].value, claims[RIGHT, "static"].met) == (0.8, True)
    assert claims[RIGHT, "all-edge"].value == pytest.approx(-0.2)
    assert claims[RIGHT, "all-edge"].met is False


def test_a_difference_that_chance_may_have_made_is_not_shown() -> None:
    claims = claims_of(
        result("hawkvision", 50.0, wrong=2), result("static", 50.0, wrong=3), result("split", 50.0, wrong=2)
    )
    assert [claims[RIGHT, name].met for name in ("static", "split")] == [None, None]


def test_policies_that_were_not_sent_the_same_requests_are_not_compared_in_pairs() -> None:
    other = result("static", 50.0, wrong=40)
    other = PolicyResult(msgspec.structs.replace(other.run, outcomes=other.run.outcomes[:150]), other.traffic)
    claim = claims_of(result("hawkvision", 50.0), other)[RIGHT, "static"]
    assert (claim.met, claim.low, claim.rounds) == (None, None, None)
    assert claim.note.endswith("(not the same requests)")


def test_every_baseline_is_compared_and_ours_with_itself_is_not() -> None:
    names = ["hawkvision", "hawkvision-tcp", "infaas", "static", "static+fallback", "all-edge"]
    claims = claims_of(*(result(name, 50.0) for name in names))
    assert [against for what, against in claims if what == RIGHT] == names[2:]
    assert [against for what, against in claims if what == "P99"] == names[2:]


def test_a_slower_baseline_of_equal_accuracy_bears_the_claim_out() -> None:
    claims = claims_of(result("hawkvision", 50.0), result("infaas", 200.0))
    claim = claims["P99", "infaas"]
    assert claim.value == pytest.approx(202 / 52)
    assert claim.low is not None
    assert claim.met is True
    assert claim.ratio is not None
    assert (claim.ratio.first, claim.ratio.other, claim.ratio.verdict) == (52.0, 202.0, RatioVerdict.SLOWER)
    assert "accuracy 100.0% and 100.0%" in claim.note
    assert claims["P50", "infaas"].met is True


def test_being_quicker_and_less_accurate_shows_nothing_whoever_is() -> None:
    claims = claims_of(result("hawkvision", 50.0, wrong=2), result("static", 90.0), result("all-edge", 20.0, wrong=40))
    assert (claims["P99", "static"].met, claims["P99", "static"].unequal) == (None, "ours is quicker and less accurate")
    edge = claims["P99", "all-edge"]
    assert (edge.met, edge.unequal) == (None, "theirs is quicker and less accurate")


def test_a_baseline_that_is_quicker_and_no_less_accurate_refutes_the_claim() -> None:
    assert claims_of(result("hawkvision", 50.0, wrong=2), result("static", 20.0))["P99", "static"].met is False


def rounds_of(name: str, *wrong: int) -> PolicyResult:
    """A contender with so many wrong answers in each round, which is by 10 ms slower than the one before."""
    return together([result(name, 50.0 + 10.0 * number, wrong=many) for number, many in enumerate(wrong)])


def test_the_worst_and_the_best_round_stand_beside_all() -> None:
    rows, claims = judge(
        PolicyCell(
            "a link",
            20.0,
            {each.run.name: each for each in (rounds_of("hawkvision", 0, 20), rounds_of("static", 10, 60))},
        )
    )
    ours, theirs = rows
    assert (ours.effective_rounds, theirs.effective_rounds) == (RoundRange(0.9, 1.0), RoundRange(0.7, 0.95))
    assert (ours.p99_rounds, ours.p50_rounds) == (RoundRange(62.0, 52.0), RoundRange(61.0, 51.0))
    claim = next(claim for claim in claims if claim.what.startswith(RIGHT))
    assert claim.rounds is not None
    assert [claim.rounds.worst, claim.rounds.best] == pytest.approx([0.05, 0.2])
    assert claim.value == pytest.approx(0.125)
    assert figures(claim)[2] == "+5.0% to +20.0%"


def test_contenders_are_listed_by_how_many_are_right_in_time() -> None:
    results = [result("static", 500.0), result("hawkvision", 50.0, wrong=10), result("all-edge", 20.0, wrong=40)]
    rows, _ = judge(PolicyCell("a link", 20.0, {each.run.name: each for each in results}))
    assert [row.name for row in rows] == ["hawkvision", "all-edge", "static"]
    assert [row.silent for row in rows] == [False] * 3
    assert rows[0].kept == "0 of 1 (1 missed, never claimed)"


def test_the_bytes_to_the_datacenter_are_those_of_the_link() -> None:
    rows, _ = judge(PolicyCell("a link", 20.0, {"hawkvision": result("hawkvision", 50.0, uplink=400_000)}))
    assert rows[0].uplink_bytes == 2_000.0


def test_missing_accuracy_is_forgiven_only_with_a_flag() -> None:
    flagged = claims_of(result("hawkvision", 50.0, wrong=40))["accuracy missing without a flag", "its targets"]
    silent = claims_of(result("hawkvision", 50.0, wrong=40, honest=False))[
        "accuracy missing without a flag", "its targets"
    ]
    assert (flagged.met, silent.met) == (True, False)
    assert silent.value == pytest.approx(0.19)


def test_both_ways_of_hawkvision_have_claims_of_their_own() -> None:
    results = [result(name, 50.0) for name in ("hawkvision", "hawkvision-tcp", "infaas")]
    _, claims = judge(PolicyCell("a link", 20.0, {each.run.name: each for each in results}))
    assert {claim.ours for claim in claims} == {"hawkvision", "hawkvision-tcp"}


def test_a_row_counts_what_was_not_answered_and_the_bytes_of_each() -> None:
    run = run_of([answer(0.1, 10.0), refusal(0.2, 5.0)], name="infaas")
    cell = PolicyCell("a link", 8.0, {"infaas": PolicyResult(run, LinkBytes(client_up=3000, dc_up=1000))})
    (row,), claims = judge(cell)
    assert (row.n, row.unanswered, row.p99_at_least, claims) == (2, 1, True, [])
    assert (row.client_bytes, row.uplink_bytes) == (1500.0, 500.0)
    assert (row.shed_share, row.p999.at_least, row.p999.few) == (0.5, True, True)


def round_of(first_ms: float) -> Run:
    outcomes = [answer(due_s, first_ms) for due_s in (1.0, 3.0, 9.0)]
    links = (LinkSample(0.0, "edge-dc", 5.0, 10.0, 0.0), LinkSample(4.0, "edge-dc", 1.0, 10.0, 0.0))
    return run_of(outcomes, warm_up_s=2.0, duration_s=10.0, links=links)


def test_rounds_follow_one_another_and_only_the_first_has_a_warm_up() -> None:
    together = merged([round_of(10.0), round_of(20.0), round_of(30.0)])
    assert [each.due_s for each in together.outcomes] == [1.0, 3.0, 9.0, 11.0, 17.0, 19.0, 25.0]
    assert [round(each.latency_s * 1e3) for each in together.outcomes] == [10, 10, 10, 20, 20, 30, 30]
    assert (together.duration_s, together.warm_up_s) == (26.0, 2.0)
    assert len(together.counted()) == 6


@pytest.mark.parametrize(
    ("rounds", "together"),
    [([True, True], True), ([True, False], False), ([None, False], False), ([True, None], None), ([False], False)],
)
def test_rounds_are_steady_together_if_each_was(rounds: list[bool | None], together: bool | None) -> None:
    run = merged([msgspec.structs.replace(round_of(10.0), steady=steady) for steady in rounds])
    assert run.steady is together
    (row,), _ = judge(PolicyCell("a link", 8.0, {"static": PolicyResult(run, LinkBytes())}))
    assert row.steady == rounds


def test_rounds_that_were_not_steady_are_named_below_the_table() -> None:
    run = merged([msgspec.structs.replace(round_of(10.0), steady=steady) for steady in (True, False, False)])
    rows, _ = judge(
        PolicyCell("a link", 8.0, {"static": PolicyResult(run, LinkBytes()), "split": result("split", 10.0)})
    )
    shown = Console(file=io.StringIO(), width=180, record=True)
    show_rows(rows, "a link", shown)
    assert shown.export_text().splitlines()[-1] == "rounds that were not steady: static in 2 of 3"


def test_links_are_shown_as_they_were_when_each_round_began_to_count() -> None:
    together = merged([round_of(10.0), round_of(20.0)])
    assert [(each.at_s, each.rate_mbit_s) for each in together.links] == [
        (0.0, 5.0),
        (4.0, 1.0),
        (10.0, 5.0),
        (12.0, 1.0),
    ]


def test_rounds_of_one_schedule_stay_comparable_in_pairs() -> None:
    def due(run: Run) -> list[tuple[float, int]]:
        return [(each.due_s, each.image) for each in run.counted()]

    def slower(each: RequestOutcome) -> RequestOutcome:
        return msgspec.structs.replace(each, done_s=each.done_s + 5.0)

    rounds = [round_of(10.0), round_of(20.0)]
    others = [msgspec.structs.replace(run, outcomes=list(map(slower, run.outcomes))) for run in rounds]
    assert due(merged(rounds)) == due(merged(others))
