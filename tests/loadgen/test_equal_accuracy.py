"""A rival at our accuracy: weighted percentiles, the share that dilution needs, and the version that is compared."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadgen.bootstrap import quantiles
from loadgen.compare import Verdict, compare
from loadgen.counted import counted_of
from loadgen.equal_accuracy import Opponent, accuracy_of, opponent, share_needed, weighted_quantile
from loadgen.record import Run
from tests.loadgen.runs import answer, refusal, run_of

SHARES = st.floats(0.01, 1.0)
COUNTS = st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda pair: (min(pair), max(pair)))


def run(name: str, wrong: int, latencies: Sequence[float]) -> Run:
    """As many requests as latencies, the first few of them wrong."""
    return run_of([answer(n / 20, ms, right=n >= wrong, picture=n) for n, ms in enumerate(latencies)], name=name)


def steady(name: str, wrong: int, ms: float) -> Run:
    """A thousand requests, one in ten of them twice as slow."""
    return run(name, wrong, [ms * (2 if n % 10 == 9 else 1) for n in range(1_000)])


def silent(name: str) -> Run:
    """The same thousand, none of them answered."""
    return run_of([refusal(n / 20, 5.0, picture=n) for n in range(1_000)], name=name)


def against(ours: Run, *versions: Run, edge: Run | None = None) -> Opponent:
    return opponent("P99", ours, versions, edge)


def shares_of(accuracy: float, *counts: int) -> float:
    return float(share_needed(*(np.array([number], np.float64) for number in (accuracy, *counts)))[0])


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5)), min_size=1, max_size=40), SHARES)
def test_weighted_quantile_is_that_of_each_value_repeated_as_often(
    pairs: list[tuple[float, int]], share: float
) -> None:
    assume(any(times for _, times in pairs))
    values, weights = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
    expected = quantiles(np.repeat(values, weights.astype(int)), [share])[0]
    assert weighted_quantile(values, weights, share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), SHARES, st.floats(1e-3, 1e3))
def test_equal_weights_weigh_nothing(values: list[float], share: float, weight: float) -> None:
    given_ = np.array(values)
    assert weighted_quantile(given_, np.full(len(values), weight), share) in given_
    assert weighted_quantile(given_, np.ones(len(values)), share) == quantiles(given_, [share])[0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.lists(st.floats(0, 1e6), max_size=40), SHARES)
def test_a_rival_mixed_with_nothing_is_the_rival(rival: list[float], by: list[float], share: float) -> None:
    weights = np.repeat([1.0, 0.0], [len(rival), len(by)])
    assert weighted_quantile(np.array(rival + by), weights, share) == quantiles(np.array(rival), [share])[0]


@given(COUNTS, COUNTS, st.floats(0.0, 1.0))
def test_a_mixture_is_as_accurate_as_was_asked_or_the_rival_is_not_diluted(
    rival: tuple[int, int], by: tuple[int, int], accuracy: float
) -> None:
    share = shares_of(accuracy, *rival, *by)
    if share > 0.0:
        assert share <= 1.0
        right, answers = ((1 - share) * its + share * others for its, others in zip(rival, by, strict=True))
        assert right / answers == pytest.approx(accuracy, abs=1e-9)
    elif share == 0.0:
        assert rival[0] / rival[1] <= accuracy + 1e-9
    else:
        assert min(rival[0] / rival[1], by[0] / by[1]) >= accuracy - 1e-9


def test_half_is_needed_where_ours_is_halfway() -> None:
    assert shares_of(0.85, 88, 100, 82, 100) == pytest.approx(0.5)


def test_nobody_is_diluted_with_answers_as_accurate_as_its_own() -> None:
    assert math.isnan(shares_of(0.85, 88, 100, 86, 100))
    assert math.isnan(shares_of(math.nan, 88, 100, 82, 100))


def test_a_more_accurate_rival_is_diluted_to_our_accuracy() -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=steady("all-edge", 180, 20.0))
    assert found.dilution is not None
    assert (found.name, found.dilution.by, found.unequal) == ("static", "all-edge", "")
    assert found.dilution.share == pytest.approx(4 / 7)
    assert found.dilution.accuracy == pytest.approx(0.85)
    assert found.ratio.other == 800.0, "4.3 % of the mixture are that slow"
    assert found.ratio.ratio == 8.0


def test_dilution_lowers_a_percentile_that_few_slow_answers_hold_up() -> None:
    slow = run("static", 100, [1_000.0 if n % 50 == 49 else 30.0 for n in range(1_000)])
    ours, edge = steady("ours", 150, 25.0), steady("all-edge", 180, 20.0)
    found = against(ours, slow, edge=edge)
    assert compare(ours, slow).ratio("P99").other == 1_000.0
    assert found.ratio.other == 40.0, "0.75 % of the mixture are that slow"


def test_interval_knows_that_accuracies_are_not_certain() -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=steady("all-edge", 152, 20.0))
    assert found.dilution is not None
    assert found.dilution.share > 0.9
    assert found.ratio.low is not None
    assert found.ratio.low < 1.0 < 8.0 == found.ratio.high, "ours may be no more accurate than the edge"


@pytest.mark.parametrize("wrong", [148, 150, 152, 180])
def test_a_rival_no_more_accurate_is_compared_as_it_was_tested(wrong: int) -> None:
    ours, rival, edge = steady("ours", 150, 50.0), steady("static", wrong, 400.0), steady("all-edge", 190, 20.0)
    found = against(ours, rival, edge=edge)
    assert (found.dilution, found.unequal) == (None, "")
    assert found.ratio == compare(ours, rival).ratio("P99")


def test_the_version_that_is_fastest_at_our_accuracy_is_compared() -> None:
    ours = steady("ours", 150, 50.0)
    versions = [steady("static", 110, 400.0), steady("static@0.4", 149, 300.0), steady("static@0.1", 190, 30.0)]
    assert against(ours, *versions[:2]).name == "static@0.4"
    assert against(ours, *versions[:2]).dilution is None
    assert against(ours, versions[2]).name == "static@0.1", "less accurate than ours, and nothing else was tested"


def test_of_less_accurate_versions_the_most_accurate_is_compared() -> None:
    versions = [steady("static@0.1", 190, 30.0), steady("static@0.2", 180, 100.0)]
    assert against(steady("ours", 150, 50.0), *versions).name == "static@0.2"


def test_a_version_is_diluted_with_another_where_that_is_faster() -> None:
    versions = [steady("static", 110, 400.0), run("static@0.2", 156, [30.0] * 1_000)]
    found = against(steady("ours", 153, 50.0), *versions, edge=steady("all-edge", 300, 200.0))
    assert found.dilution is not None
    assert (found.name, found.dilution.by) == ("static", "static@0.2")


@pytest.mark.parametrize(
    ("edge", "why"),
    [
        (None, "all-edge was not tested"),
        (run("all-edge", 180, [20.0] * 999), "all-edge or it was not sent the same requests"),
        (silent("all-edge"), "all-edge answered nothing"),
    ],
)
def test_a_more_accurate_rival_that_cannot_be_diluted_cannot_be_compared(edge: Run | None, why: str) -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=edge)
    assert (found.dilution, found.unequal) == (None, f"theirs is more accurate, and {why}")
    assert found.ratio.ratio == 8.0


def test_a_rival_is_not_diluted_with_an_edge_that_is_slower() -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=steady("all-edge", 190, 900.0))
    assert (found.dilution, found.unequal, found.ratio.other) == (None, "", 800.0)


@pytest.mark.parametrize("wrong", [120, 148, 150])
def test_a_rival_is_replaced_altogether_where_the_edge_alone_is_as_accurate_as_ours(wrong: int) -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=steady("all-edge", wrong, 20.0))
    assert found.dilution is not None
    assert (found.dilution.share, found.unequal) == (1.0, "")
    assert found.dilution.accuracy == pytest.approx(1.0 - wrong / 1_000)
    assert found.ratio.other == 40.0


def test_a_rival_that_is_faster_than_an_edge_as_accurate_as_ours_is_compared_as_it_was_tested() -> None:
    found = against(steady("ours", 150, 50.0), steady("static", 110, 400.0), edge=steady("all-edge", 120, 900.0))
    assert (found.dilution, found.unequal, found.ratio.other) == (None, "", 800.0)


def test_a_version_that_is_faster_and_more_accurate_than_ours_is_compared_by_its_own_name() -> None:
    versions = [steady("static", 110, 400.0), steady("static@0.4", 120, 300.0)]
    found = against(steady("ours", 150, 50.0), *versions)
    assert (found.name, found.dilution) == ("static@0.4", None)


def test_nothing_is_equal_without_labels() -> None:
    unlabelled = run_of([answer(1.0, 20.0, right=None)], name="ours")
    assert math.isnan(accuracy_of(counted_of(unlabelled)))
    assert against(unlabelled, unlabelled).unequal == "accuracy was not measured"


def test_requests_without_an_answer_make_a_diluted_percentile_a_lower_bound() -> None:
    answers = [answer(n / 20, 30.0, right=n >= 100, picture=n) for n in range(900)]
    broken = run_of([*answers, *(refusal(n / 20, 30.0, picture=n) for n in range(900, 1_000))], name="static")
    found = against(steady("ours", 150, 300.0), broken, edge=steady("all-edge", 180, 20.0))
    assert found.dilution is not None
    assert found.ratio.other_at_least
    assert found.ratio.high is not None
    assert found.ratio.high < 1.0
    assert found.ratio.verdict is Verdict.UNKNOWN, "nobody knows how long they would have taken"
