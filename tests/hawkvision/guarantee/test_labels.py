"""Labels that would help are those that do, and labels that are wrong are refused while right ones are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.guarantee.certificate import certify
from hawkvision.guarantee.evidence import Evidence, StageEvidence, threshold_grid, two_levels
from hawkvision.guarantee.labels import LEVEL, better_explanation, chance_rate, label_needs, measurably_oftener, worse

Classes = NDArray[np.int64]
DROPS = (0.01, 0.02, 0.05)


def cascade(rng: np.random.Generator, n: int, known: float) -> tuple[Evidence, Evidence]:
    """An edge that differs from the reference stage where it is unsure, with some labels and with all of them."""
    scores = rng.random(n)
    differs = rng.random(n) < 0.3 * (1.0 - scores)
    better = rng.random(n) < 0.6
    edge, best = (differs & better).astype(np.float64), (differs & ~better).astype(np.float64)
    hidden = np.where(rng.random(n) < known, 0.0, np.nan)
    stage = StageEvidence(scores, edge, differs.astype(np.float64))
    some = StageEvidence(scores, edge + hidden, stage.disagreements)
    return Evidence(some, best + hidden), Evidence(stage, best)


@pytest.mark.parametrize("known", [0.0, 0.3, 1.0])
def test_labels_that_would_help_do_and_others_do_not(known: float) -> None:
    rng = np.random.default_rng(4)
    some, every = cascade(rng, 1_500, known)
    path = two_levels(threshold_grid(rng.random(500), 60))
    needs = label_needs(some, [path], DROPS, 0.05, lambda step: step.escalation)
    for drop, need in needs.items():
        now, most = (certify(each, path, drop).escalation for each in (some, every))
        assert need.to_best <= most <= now
        useful = need.helps
        assert not (useful & some.labelled).any()
        assert (some.edge.disagreements[useful] == 1.0).all()
        assert need.used <= some.labelled.sum()
        # Without those no labels change anything: each of the others is told the truth.
        told = np.where(useful, np.nan, 0.0) + np.where(some.labelled, 0.0, 0.0)
        others = Evidence(
            StageEvidence(every.edge.scores, every.edge.losses + told, every.edge.disagreements),
            every.reference_losses + told,
        )
        assert certify(others, path, drop).escalation >= most
    assert (needs[0.02].helps.sum() > 0) == (known < 1.0)
    assert needs[0.02].to_best < certify(some, path, 0.02).escalation or known == 1.0


def classified(rng: np.random.Generator, n: int, classes: int, accuracy: float, skew: float) -> tuple[Classes, Classes]:
    """True classes, of which the first has the share `skew` or more, and a stage's answers."""
    labels = np.where(rng.random(n) < skew, 0, rng.integers(0, classes, n))
    wrong = (labels + rng.integers(1, classes, n)) % classes
    return labels, np.where(rng.random(n) < accuracy, labels, wrong)


def doubted(labels: Classes, answers: Classes, classes: int) -> bool:
    return better_explanation(labels, answers, classes) is not None or chance_rate(labels, answers) is not None


CASES = pytest.mark.parametrize(
    ("n", "classes", "accuracy", "skew"),
    [(30, 10, 0.88, 0.0), (30, 1000, 0.7, 0.0), (30, 2, 0.97, 0.9), (1_000, 10, 0.8, 0.3), (500, 3, 0.6, 0.5)],
)


@CASES
def test_right_labels_are_hardly_ever_doubted(n: int, classes: int, accuracy: float, skew: float) -> None:
    rng, runs = np.random.default_rng(1), 300
    found = sum(doubted(*classified(rng, n, classes, accuracy, skew), classes) for _ in range(runs))
    assert found <= runs * 0.02 + 2 * math.sqrt(runs * 0.02 * 0.98)


def shifted(rng: np.random.Generator, labels: Classes, classes: int) -> Classes:
    return (labels + 1) % classes


def exchanged(rng: np.random.Generator, labels: Classes, classes: int) -> Classes:
    return rng.permutation(classes)[labels]


def of_other_images(rng: np.random.Generator, labels: Classes, classes: int) -> Classes:
    return rng.permutation(labels)


@pytest.mark.parametrize("spoil", [shifted, exchanged, of_other_images])
@pytest.mark.parametrize("n", [30, 1_000])
def test_wrong_labels_are_doubted(spoil: Callable[..., Classes], n: int) -> None:
    rng, runs = np.random.default_rng(2), 100
    found = 0
    for _ in range(runs):
        labels, answers = classified(rng, n, 10, 0.88, 0.0)
        found += doubted(spoil(rng, labels, 10), answers, 10)
    assert found >= 0.9 * runs, "some permutations leave many classes where they are"


def test_a_shift_and_an_exchange_are_named_with_what_they_would_explain() -> None:
    rng = np.random.default_rng(3)
    labels, answers = classified(rng, 1_000, 10, 0.88, 0.0)
    how, share = better_explanation((labels + 1) % 10, answers, 10) or ("", 0.0)
    assert how == "shifted by +1"
    assert share == pytest.approx(0.88, abs=0.03)
    how, share = better_explanation(np.array([0, 2, 1, *range(3, 10)])[labels], answers, 10) or ("", 0.0)
    assert how == "exchanged between some classes"
    assert share == pytest.approx(0.88, abs=0.03)


@pytest.mark.parametrize("binary", [True, False])
def test_a_reference_stage_is_worse_if_it_is_measurably_worse(binary: bool) -> None:
    rng, runs = np.random.default_rng(5), 300
    alike = [worse(*(rng.random((2, 200)) < 0.1).astype(np.float64), binary=binary) for _ in range(runs)]
    assert sum(alike) <= runs * 0.01 + 2 * math.sqrt(runs * 0.01 * 0.99)
    edge, best = (rng.random(400) < 0.1).astype(np.float64), (rng.random(400) < 0.3).astype(np.float64)
    assert worse(edge, best, binary=binary)
    assert not worse(best, edge, binary=binary)
    assert not worse(edge, edge, binary=binary)


def test_a_share_is_taken_for_larger_no_oftener_than_stated_and_twice_to_four_times_as_many_are_seen() -> None:
    rng = np.random.default_rng(0)
    same = [measurably_oftener(int(rng.binomial(30, 0.12)), 30, int(rng.binomial(700, 0.12)), 700) for _ in range(2000)]
    assert np.mean(same) <= LEVEL + 3.0 * math.sqrt(LEVEL / 2000)
    blurred = [measurably_oftener(int(rng.binomial(30, 0.48)), 30, 84, 700) for _ in range(200)]
    assert np.mean(blurred) > 0.9
    assert measurably_oftener(12, 30, 84, 700)
    assert not measurably_oftener(1, 30, 0, 700)
    assert not measurably_oftener(0, 80, 548, 6000), "of numbers that no float holds, too"
