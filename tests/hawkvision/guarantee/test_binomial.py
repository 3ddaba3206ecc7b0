"""Tails, bounds and assignments without SciPy are SciPy's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.stats import beta, binom

from hawkvision.guarantee.binomial import at_least, at_most, best_assignment, clopper_pearson, pmf, proportion_upper
from tests.fuzz.examples import examples


@given(st.integers(1, 5_000), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=examples(300), deadline=None)
def test_tails_are_those_of_scipy(n: int, share: float, p: float) -> None:
    k = round(share * n)
    assert at_most(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-8, abs=1e-12)
    assert at_least(k, n, p) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8, abs=1e-12)
    assert (at_most(-1, n, p), at_most(n, n, p), at_least(0, n, p)) == (0.0, 1.0, 1.0)


@given(st.integers(0, 3_000), st.floats(0.0, 1.0), st.floats(1e-6, 1.0))
@settings(max_examples=examples(300), deadline=None)
def test_probabilities_are_those_of_scipy(n: int, share: float, p: float) -> None:
    k = np.array([-1, 0, round(share * n), n])
    assert pmf(k, n, np.array([[p]]))[0] == pytest.approx(binom.pmf(k, n, p), rel=1e-8, abs=1e-12)


@given(st.integers(1, 5_000), st.floats(0.0, 1.0), st.sampled_from([0.05, 0.004, 1e-4]))
@settings(max_examples=examples(200), deadline=None)
def test_bounds_are_those_of_scipy(n: int, share: float, delta: float) -> None:
    k = round(share * n)
    upper = 1.0 if k == n else beta.ppf(1 - delta, k + 1, n - k)
    lower = 0.0 if k == 0 else beta.ppf(delta / 2, k, n - k + 1)
    assert proportion_upper(k, n, delta) == pytest.approx(upper, rel=1e-9)
    assert clopper_pearson(k, n, delta)[0] == pytest.approx(lower, rel=1e-9, abs=1e-12)


@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_an_assignment_is_worth_as_much_as_that_of_scipy(n: int, seed: int, counts: bool) -> None:
    rng = np.random.default_rng(seed)
    worth = rng.integers(0, 4, (n, n)).astype(np.float64) if counts else rng.random((n, n))
    found = best_assignment(worth)
    assert sorted(found.tolist()) == list(range(n))
    assert worth[np.arange(n), found].sum() == pytest.approx(worth[linear_sum_assignment(worth, maximize=True)].sum())


def test_labels_are_checked_and_images_certified_without_scipy() -> None:
    program = """
import sys
sys.modules["scipy"] = None
import numpy as np
from hawkvision.cascade.certification.profiling import certify_condition
from hawkvision.cascade.certification.threshold_order import Costs
from hawkvision.guarantee.evidence import Evidence, StageEvidence, threshold_grid, two_levels
from hawkvision.guarantee.labels import better_explanation, chance_rate
rng = np.random.default_rng(1)
scores, none = rng.random(900), np.zeros(900)
path = two_levels(threshold_grid(scores, 20))
for planned in (None, 1_000):
    evidence = Evidence(StageEvidence(scores, none, none), none, planned=planned)
    found = certify_condition(evidence, [path], Costs(1.0, 10.0, 5.0), 0.05, 0.05)
    assert found.balanced.threshold == "never", found.balanced
labels = rng.integers(0, 10, 30)
assert chance_rate(labels, labels) is None and better_explanation(labels, (labels + 1) % 10, 10)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
