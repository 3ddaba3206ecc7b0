"""What a comparison claims: rounds put together without their warm-ups, ratios the right way round, equal accuracy."""

import io

import msgspec
import pytest
from rich.console import Console

from hawkvision.types import PromiseStatus
from loadgen.claims import Cell, Claim, Result, Traffic, judge, merged, show_rows
from loadgen.compare import Verdict
from loadgen.record import LinkSample, Outcome, Run, TargetClass
from tests.loadgen.runs import answer, refusal, run_of


def result(name: str, ms: float, *, wrong: int = 0, uplink: int = 0, honest: bool = True) -> Result:
    """Two hundred requests of one latency, the first few of them wrong."""
    promise = PromiseStatus.BEST_EFFORT if honest else PromiseStatus.HELD
    outcomes = [
        answer(n / 20, ms + n % 3, right=n >= wrong, picture=n, promise=promise, max_drop=0.01) for n in range(200)
    ]
    target = TargetClass({"max_accuracy_drop": "0.01"}, 1.0)
    run = run_of(outcomes, name=name, targets=(target,), reference=dict.fromkeys(range(200), True))
    return Result(run, Traffic(dc_up=uplink))


def claims_of(steady: bool, *results: Result) -> dict[tuple[str, str], Claim]:
    _, claims = judge(Cell("a link", 20.0, steady, {each.run.name: each for each in results}))
    return {(claim.what.split(",")[0], claim.against): claim for claim in claims}


def test_a_rival_four_times_as_slow_bears_the_claim_out() -> None:
    claim = claims_of(False, result("hawkvision", 50.0), result("infaas", 200.0))["P99", "infaas"]
    assert claim.value == pytest.approx(202 / 52)
    assert claim.low is not None
    assert claim.met is True
    assert claim.ratio is not None
    assert (claim.ratio.first, claim.ratio.other, claim.ratio.verdict) == (52.0, 202.0, Verdict.SLOWER)
    assert "accuracy 100.0% and 100.0%" in claim.note


def test_beside_a_ratio_stands_what_the_best_choice_for_each_request_would_have_had() -> None:
    everybody = (result("hawkvision", 50.0), result("infaas", 200.0), result("all-edge", 20.0))
    claim = claims_of(False, *everybody)["P99", "infaas"]
    assert claim.hindsight_ms == 22.0
    assert "; the quickest of all for each request 22.0 ms; " in claim.note


def test_a_rival_twice_as_slow_does_not() -> None:
    claim = claims_of(False, result("hawkvision", 50.0), result("infaas", 100.0))["P99", "infaas"]
    assert claim.value == pytest.approx(102 / 52)
    assert claim.met is False


def test_being_fast_and_less_accurate_bears_nothing_out() -> None:
    claim = claims_of(False, result("hawkvision", 50.0, wrong=2), result("static", 500.0))["P99", "static"]
    assert claim.value is not None
    assert claim.value > 2.0
    assert (claim.met, claim.met_in_time) == (None, True), "theirs is right, and comes after the deadline"
    assert claim.unequal == "theirs is more accurate, and all-edge was not tested"
    assert (
        "accuracy 99.0% and 100.0% (theirs is more accurate, and all-edge was not tested); "
        "right in time 99.0% and 0.0%" in claim.note
    )


def test_a_rival_that_is_fast_enough_without_giving_up_accuracy_needs_no_dilution_to_refute_a_claim() -> None:
    claim = claims_of(False, result("hawkvision", 50.0, wrong=2), result("static", 60.0))["P99", "static"]
    assert (claim.met, claim.dilution) == (False, None)


def test_a_more_accurate_rival_is_compared_when_diluted_to_our_accuracy() -> None:
    ours, rival, edge = (
        result("hawkvision", 50.0, wrong=10),
        result("infaas", 500.0),
        result("all-edge", 20.0, wrong=40),
    )
    claim = claims_of(False, ours, rival, edge)["P99", "infaas"]
    assert (claim.met, claim.met_in_time) == (True, True)
    assert claim.dilution is not None
    assert claim.dilution.by == "all-edge"
    assert claim.dilution.share == pytest.approx(0.25)
    assert "accuracy 95.0% and 100.0%, 95.0% with 25.0% of requests answered as all-edge did" in claim.note


def test_a_rival_that_is_slow_only_where_it_need_not_be_does_not_bear_the_claim_out() -> None:
    """It must be diluted so much that its slow answers are fewer than one in a hundred."""
    ours, edge = result("hawkvision", 50.0, wrong=40), result("all-edge", 20.0, wrong=40)
    claim = claims_of(False, ours, result("infaas", 500.0), edge)["P99", "infaas"]
    assert claim.value == pytest.approx(22 / 52)
    assert (claim.met, claim.met_in_time) == (False, True)


def test_any_threshold_of_static_is_static_and_the_best_for_it_is_compared() -> None:
    versions = [result("static", 500.0), result("static@0.3", 90.0, wrong=10), result("static@0.1", 20.0, wrong=40)]
    claims = claims_of(False, result("hawkvision", 50.0, wrong=10), *versions)
    assert [against for what, against in claims if what == "P99"] == ["static@0.3"]
    assert claims["P99", "static@0.3"].met is False


def test_the_bytes_to_the_datacenter_are_those_of_the_link() -> None:
    ours, split = result("hawkvision", 50.0, uplink=400_000), result("split", 50.0, uplink=2_000_000)
    claim = claims_of(False, ours, split)["uplink bytes", "split"]
    assert (claim.value, claim.met, claim.note) == (5.0, True, "2.0 kB and 10.0 kB per request")


def test_a_steady_link_is_compared_with_split_instead() -> None:
    claims = claims_of(True, result("hawkvision", 50.0), result("split", 46.0), result("infaas", 500.0))
    assert ("P99", "infaas") not in claims
    assert claims["P50", "split"].met is False
    assert claims["P99", "split"].met is True, "48 / 52 is within 1.15"


def test_missing_accuracy_is_forgiven_only_with_a_flag() -> None:
    flagged = claims_of(False, result("hawkvision", 50.0, wrong=40))["accuracy missing without a flag", "its targets"]
    silent = claims_of(False, result("hawkvision", 50.0, wrong=40, honest=False))[
        "accuracy missing without a flag", "its targets"
    ]
    assert (flagged.met, silent.met) == (True, False)
    assert silent.value == pytest.approx(0.19)


def test_both_ways_of_hawkvision_have_claims_of_their_own() -> None:
    results = [result(name, 50.0) for name in ("hawkvision", "hawkvision-tcp", "infaas")]
    _, claims = judge(Cell("a link", 20.0, False, {each.run.name: each for each in results}))
    assert {claim.ours for claim in claims} == {"hawkvision", "hawkvision-tcp"}


def test_a_row_counts_what_was_not_answered_and_the_bytes_of_each() -> None:
    run = run_of([answer(0.1, 10.0), refusal(0.2, 5.0)], name="infaas")
    cell = Cell("a link", 8.0, False, {"infaas": Result(run, Traffic(client_up=3000, dc_up=1000))})
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
    (row,), _ = judge(Cell("a link", 8.0, False, {"static": Result(run, Traffic())}))
    assert row.steady == rounds


def test_rounds_that_were_not_steady_are_named_below_the_table() -> None:
    run = merged([msgspec.structs.replace(round_of(10.0), steady=steady) for steady in (True, False, False)])
    rows, _ = judge(Cell("a link", 8.0, False, {"static": Result(run, Traffic()), "split": result("split", 10.0)}))
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
        return [(each.due_s, each.picture) for each in run.counted()]

    def slower(each: Outcome) -> Outcome:
        return msgspec.structs.replace(each, done_s=each.done_s + 5.0)

    rounds = [round_of(10.0), round_of(20.0)]
    others = [msgspec.structs.replace(run, outcomes=list(map(slower, run.outcomes))) for run in rounds]
    assert due(merged(rounds)) == due(merged(others))
