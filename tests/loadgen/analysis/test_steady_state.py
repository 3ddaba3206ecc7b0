"""Steady or not: halves of a run compared."""

import numpy as np
import pytest

from loadgen.analysis.steady_state import is_growing, is_steady
from loadgen.workload.record import RequestOutcome


def outcomes(latency: np.ndarray, status: np.ndarray | None = None) -> list[RequestOutcome]:
    """One request each 10 ms."""
    found = np.full(len(latency), 200) if status is None else status
    due = np.arange(len(latency)) / 100
    return [
        RequestOutcome(at, at, at + took, 0, 0, code)
        for at, took, code in zip(due.tolist(), latency.tolist(), found.tolist(), strict=True)
    ]


def exponential(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(0.02, n)


def test_what_stays_alike_is_steady_for_nearly_all_seeds() -> None:
    assert sum(is_steady(outcomes(exponential(1000, seed)), 0.0, 10.0) is True for seed in range(50)) >= 49


def test_a_queue_that_grows_is_not_steady() -> None:
    assert is_steady(outcomes(exponential(1000, 1) + np.linspace(0, 0.2, 1000)), 0.0, 10.0) is False


def test_a_server_that_never_answered_did_so_steadily() -> None:
    assert is_steady(outcomes(exponential(1000, 1), np.zeros(1000, int)), 0.0, 10.0) is True


def test_half_a_millisecond_more_of_a_server_that_takes_one_does_not_count_and_two_more_do() -> None:
    for slower, steady in ((0.0015, True), (0.003, False)):
        latency = np.where(np.arange(1000) < 500, 0.001, slower) + exponential(1000, 3) / 1e4
        assert is_steady(outcomes(latency), 0.0, 10.0) is steady


def test_warm_up_does_not_count() -> None:
    latency = exponential(1000, 1)
    latency[:300] += 1.0
    assert is_steady(outcomes(latency), 0.0, 10.0) is not True or is_steady(outcomes(latency), 3.0, 10.0) is True
    assert is_steady(outcomes(latency), 3.0, 10.0) is True


@pytest.mark.parametrize(("n", "end_s"), [(50, 10.0), (0, 10.0), (1000, 0.0)])
def test_too_little_says_nothing(n: int, end_s: float) -> None:
    assert is_steady(outcomes(exponential(n, 1)), 0.0, end_s) is None
    assert is_growing(outcomes(exponential(n, 1)), 0.0, end_s) is None


def test_backlog_of_a_minority_is_seen_where_medians_see_nothing() -> None:
    """One in ten waits in a queue of its own, which grows by a tenth of a second with each of them."""
    latency = np.full(1000, 0.02)
    latency[::10] += np.arange(100) / 10
    assert is_steady(outcomes(latency), 0.0, 10.0) is True
    assert is_growing(outcomes(latency), 0.0, 10.0) is True


def test_what_stays_alike_has_no_growing_backlog_for_nearly_all_seeds() -> None:
    assert sum(is_growing(outcomes(10 * exponential(1000, seed)), 0.0, 10.0) is False for seed in range(50)) >= 49
