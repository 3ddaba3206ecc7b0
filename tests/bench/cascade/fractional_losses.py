"""`python -m tests.bench.cascade.fractional_losses`: how often certificates of kinds with fractional losses are wrong.

A population of images is made for each kind: detection (1 − F1), counting and multi-label outputs of an edge and of
a reference stage, through the kinds of the product. Others are made to defeat the tests (`ADVERSARIES`). Samples of n
images are drawn with replacement, so the population is the truth. Each sample is certified by the product's tests, with
labels and without, and routed by its policy. What each draw states is compared with the truth:

    drop          a certificate of a fixed ε whose threshold gives up ε or more; of all ε, the one that is wrong most
    fast          the bound on the drop of never escalating is below the true one
    min_accuracy  a certified absolute accuracy is not reached; of several targets, the one that is wrong most often
    agreement     without labels: the mean disagreement is ε or more, or where that bounds the drop, the drop is
    interval      the reference stage's accuracy lies outside of its interval
    claim         what monitoring takes as the most disagreement of certified traffic is less than the true one

Each may happen in the share of draws that the statement itself says, and three standard errors. Exit status 1 if one
happens more often.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from hawkvision.cascade.certification.certificate import (
    Method,
    Sample,
    StageOutcomes,
    Thresholds,
    ThresholdStep,
    certify,
    drop_bound,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.cascade.certification.certificate_rounding import write_certificate
from hawkvision.cascade.certification.predictions import measure_accuracy
from hawkvision.cascade.certification.profile import (
    CERTIFIED_DROPS,
    Certificate,
    Condition,
    Profile,
    threshold_value,
)
from hawkvision.cascade.certification.profiling import rounded_path
from hawkvision.cascade.certification.threshold_order import Path
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import INTERVAL_DELTA
from hawkvision.core.types import AccuracyStatus, MinAccuracy
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import task_kind
from tests.hawkvision.cascade.synthetic import SHA, make_profile

DELTA: Final = 0.05
SIZES: Final = (50, 200, 1000)
MOST_DROPS: Final = 5
"""Of `CERTIFIED_DROPS`, so many are certified: around the gap of both stages."""
STEPS: Final = 40
"""Thresholds of a path."""
LABELS: Final = tuple("abcdef")
ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Population:
    """All images, as a sample; and the path, whose thresholds are quantiles of other images' scores."""

    name: str
    images: Sample
    path: Path
    bounds_drop: bool

    def drawn(self, n: int, rng: np.random.Generator) -> Sample:
        """n images, with replacement."""
        chosen = rng.integers(len(self.images), size=n)
        edge = self.images.edge
        stage = StageOutcomes(edge.scores[chosen], edge.losses[chosen], edge.disagreements[chosen])
        return Sample(stage, self.images.reference_losses[chosen], binary=False)

    def truth(self) -> dict[Thresholds, tuple[float, float]]:
        """The drop and the mean disagreement at each threshold."""
        n = len(self.images)
        return {step.thresholds: (step.drop, step.differing / n) for step in sweep(self.images, self.path)}


# ------------------------------------------------------------------------------------------------ populations of kinds


def _boxes(rng: np.random.Generator, truth: Output, skill: float, hard: float) -> Output:
    """Boxes (k, 6) of a detector: right ones jittered and sure, some missed, some invented."""
    found = truth[rng.random(len(truth)) < skill * (1.0 - 0.6 * hard)].copy()
    found[:, :4] += rng.normal(0.0, 0.02 + 0.06 * hard, (len(found), 4)) * (1.1 - skill)
    found[:, 4] = np.clip(rng.beta(6.0, 1.0 + 4.0 * hard, len(found)), 0.05, 0.99)
    false = rng.poisson(0.8 * hard * (1.2 - skill))
    corners = rng.uniform(0.0, 0.6, (false, 2))
    ghosts = np.column_stack(
        [corners, corners + rng.uniform(0.1, 0.4, (false, 2)), rng.beta(2.0, 3.0, false), rng.integers(0, 3, false)]
    ).reshape(-1, 6)
    rows = np.concatenate([found, ghosts])
    rows[:, :4] = np.clip(rows[:, :4], 0.0, 1.0)
    rows = rows[(rows[:, 2] > rows[:, 0] + 1e-3) & (rows[:, 3] > rows[:, 1] + 1e-3)]
    return rows[np.argsort(-rows[:, 4], kind="stable")].astype(np.float32)


def _scenes(count: int, rng: np.random.Generator) -> Iterator[tuple[Output, Output, Output]]:
    """True boxes (k, 6), and those of the edge and of the reference stage."""
    for _ in range(count):
        k, hard = rng.poisson(2.5), float(rng.beta(1.2, 2.0))
        corners = rng.uniform(0.0, 0.6, (k, 2))
        truth = np.column_stack([corners, corners + rng.uniform(0.1, 0.4, (k, 2)), np.ones(k), rng.integers(0, 3, k)])
        yield truth, _boxes(rng, truth, 0.85, hard), _boxes(rng, truth, 0.97, 0.6 * hard)


def _label_sets(count: int, rng: np.random.Generator) -> Iterator[tuple[list[int], Output, Output]]:
    """True labels, and the logits (labels,) of both stages."""
    for _ in range(count):
        applies, hard = rng.random(len(LABELS)) < 0.3, rng.gamma(2.0, 0.7)
        clear = np.where(applies, 2.5, -2.5)
        edge, best = (clear + noise * hard * rng.normal(size=len(LABELS)) for noise in (2.0, 1.1))
        yield np.flatnonzero(applies).tolist(), edge.astype(np.float32), best.astype(np.float32)


def of_kind(name: str, count: int, seed: int = 1) -> Population:
    """The population of a kind of task."""
    rng = np.random.default_rng(seed)
    options: dict[str, dict[str, Any]] = {
        "counting": {"groups": {"first": ["a"], "others": ["b", "c"]}, "max_error": 5.0},
        "detection": {}, "multi_label": {},
    }  # fmt: skip
    kind = task_kind(name, LABELS, options[name])
    scenes = list(_label_sets(count, rng) if name == "multi_label" else _scenes(count, rng))
    edge, best = ([scene[place] for scene in scenes] for place in (1, 2))
    if name == "multi_label":
        truths: list[Any] = [truth for truth, _, _ in scenes]
        edge, best = kind.calibrated(edge, 1.0), kind.calibrated(best, 1.0)
    else:
        truths = [(truth[:, :4], truth[:, 5].astype(np.intp)) for truth, _, _ in scenes]  # type: ignore[call-overload]
    return _population(name, kind, edge, best, truths)


def _population(
    name: str, kind: TaskKind[Any], edge: Sequence[Output], best: Sequence[Output], truths: Sequence[Any]
) -> Population:
    scores = kind.score_all(edge, kind.scores[0])
    outcomes = StageOutcomes(scores, kind.losses(edge, truths), kind.disagreements(edge, best))
    images = Sample(outcomes, kind.losses(best, truths), binary=False)
    path = rounded_path(two_levels(threshold_grid(scores, STEPS)))
    return Population(name, images, path, kind.agreement_bounds_drop)


# --------------------------------------------------------------------------------------------------------- adversaries


def _adversary(name: str, scores: Floats, lost: Floats) -> Population:
    """Images with scores (n,) and drops ℓ (n,) in −1..1; they disagree as much as they lose or gain."""
    edge = StageOutcomes(scores, np.maximum(lost, 0.0), np.abs(lost))
    images = Sample(edge, np.maximum(-lost, 0.0), binary=False)
    return Population(name, images, rounded_path(two_levels(threshold_grid(scores, STEPS))), bounds_drop=True)


def _constant(rng: np.random.Generator, count: int) -> Population:
    """Every accepted image loses the same, so that one certified ε is met exactly."""
    return _adversary("every image loses 0.1", rng.random(count).round(2), np.full(count, 0.1))


def _rare(rng: np.random.Generator, count: int) -> Population:
    """One image in ten loses everything, the others nothing; all scores are equal."""
    return _adversary(
        "one in ten loses all, ties", np.full(count, 0.5), (np.arange(count) % 10 == 0).astype(np.float64)
    )


def _returning(rng: np.random.Generator, count: int) -> Population:
    """Sure images lose, less sure ones gain: the drop exceeds ε first, and comes back below it."""
    scores = rng.random(count)
    lost = np.where(scores > 0.8, 1.0 * (rng.random(count) < 0.55), -1.0 * (rng.random(count) < 0.1))
    return _adversary("drop rises and falls", scores, lost)


def _wild(rng: np.random.Generator, count: int) -> Population:
    """Losses and gains of everything, nearly balanced: the largest variance there is."""
    lost = np.where(rng.random(count) < 0.55, 1.0, -1.0)
    return _adversary("all or nothing, nearly balanced", rng.random(count), lost)


ADVERSARIES: Final[tuple[Callable[[np.random.Generator, int], Population], ...]] = (
    _constant, _rare, _returning, _wild,
)  # fmt: skip
KINDS: Final = ("detection", "counting", "multi_label")


# --------------------------------------------------------------------------------------------------------------- draws


@dataclass(frozen=True, slots=True)
class Cell:
    """How often one statement was wrong at one n."""

    population: str
    n: int
    statement: str
    draws: int
    made: int
    """Draws in which the statement was made."""
    wrong: int
    stated: float
    """The probability of being wrong that the statement itself says."""

    @property
    def allowed(self) -> float:
        """What is stated, and three standard errors."""
        return self.stated + 3.0 * math.sqrt(self.stated * (1.0 - self.stated) / self.draws)

    @property
    def broken(self) -> bool:
        """Whether it was wrong more often than that."""
        return self.wrong / self.draws > self.allowed


class _Tally:
    """Counts the statements of draws from one population against its truth."""

    def __init__(self, population: Population, n: int) -> None:
        self.population, self.n = population, n
        self._truth = population.truth()
        self._never = self._truth[Thresholds(-math.inf)]
        self._best = 1.0 - float(population.images.reference_losses.mean())
        self._gap = max(self._never[0], 0.02)
        most = max(self._never[1], self._gap)
        usable = [drop for drop in CERTIFIED_DROPS if 0.2 * self._gap <= drop <= 1.2 * most]
        self._drops = sorted({usable[round(at)] for at in np.linspace(0, len(usable) - 1, MOST_DROPS)})
        self._profile = _plain_profile()
        self.made, self.wrong = Counter[tuple[str, float]](), Counter[tuple[str, float]]()

    def record(self, sample: Sample) -> None:
        """Certify one sample in every way, and compare with the truth."""
        labelled = self._certified(sample, Method.BETTING)
        for each in labelled.certificates:
            drop, disagreement = self._of(each)
            self._note("drop", each.max_drop, each.to_best < 1.0, drop >= each.max_drop - ROUNDING)
            bound = each.edge_watch.disagreement
            self._note("claim", each.max_drop, each.to_best < 1.0, disagreement > bound + 1e-6)
        self._note("fast", 0.0, True, self._never[0] > labelled.fast.max_drop + ROUNDING)
        without = Sample(unlabelled(sample.edge), np.zeros(len(sample)), binary=False)
        for each in self._certified(without, Method.AGREEMENT).certificates:
            drop, disagreement = self._of(each)
            lost = max(drop, disagreement) if self.population.bounds_drop else disagreement
            self._note("agreement", each.max_drop, each.to_best < 1.0, lost >= each.max_drop - ROUNDING)
        measured = measure_accuracy(1.0 - sample.reference_losses, SHA, DELTA)
        self._note("interval", 0.0, True, not measured.low - 1e-6 <= self._best <= measured.high + 1e-6)
        self._absolute(sample, labelled)

    def _absolute(self, sample: Sample, condition: Condition) -> None:
        policy = Policy(self._profiled(sample, condition), "small", "large")
        for share in (0.25, 0.5, 0.75, 1.5):
            target = round(self._best - share * self._gap, 6)
            if not 0.0 < target <= policy.maximum_accuracy:
                continue
            route = policy.route(MinAccuracy(target))
            certified = route.guarantee.status is AccuracyStatus.CERTIFIED
            drop = self._truth.get(Thresholds(route.threshold), (0.0, 0.0))[0]
            self._note("min_accuracy", share, certified, self._best - drop < target - 1e-6)

    def _profiled(self, sample: Sample, condition: Condition) -> Profile:
        pair = msgspec.structs.replace(self._profile.pairs[0], conditions=(condition,))
        accuracies = {
            "small": measure_accuracy(1.0 - sample.edge.losses, SHA, DELTA),
            "large": measure_accuracy(1.0 - sample.reference_losses, SHA, DELTA),
        }
        stages = tuple(
            msgspec.structs.replace(stage, accuracy=accuracies.get(stage.name, stage.accuracy))
            for stage in self._profile.stages
        )
        return msgspec.structs.replace(self._profile, pairs=(pair,), stages=stages)

    def _certified(self, sample: Sample, method: Method) -> Condition:
        bounds = self.population.bounds_drop

        def write(step: ThresholdStep, max_drop: float) -> Certificate:
            return write_certificate(sample, step, max_drop, DELTA, method, bounds_drop=bounds)

        never = next(sweep(sample, (Thresholds(-math.inf),)))
        found = tuple(write(certify(sample, self.population.path, drop, DELTA, method), drop) for drop in self._drops)
        bound = math.ceil(drop_bound(sample, never, DELTA, method) * 1e4) / 1e4
        return Condition(
            min_received_fraction=1.0, balanced=found[0], fast=write(never, bound), certificates=found
        )  # fmt: skip

    def _of(self, certificate: Certificate) -> tuple[float, float]:
        return self._truth[Thresholds(threshold_value(certificate.threshold))]

    def _note(self, statement: str, which: float, made: bool, wrong: bool) -> None:
        self.made[statement, which] += made
        self.wrong[statement, which] += made and wrong

    def cells(self, draws: int) -> Iterator[Cell]:
        """Of each statement, the ε or target that was wrong most often."""
        stated = {"claim": DELTA / 2.0, "min_accuracy": DELTA + INTERVAL_DELTA}
        for statement in dict.fromkeys(name for name, _ in self.made):
            keys = [key for key in self.made if key[0] == statement]
            worst = max(keys, key=lambda key: (self.wrong[key], self.made[key]))
            yield Cell(
                self.population.name, self.n, statement, draws, self.made[worst], self.wrong[worst],
                stated.get(statement, DELTA),
            )  # fmt: skip


_plain_profile = functools.cache(make_profile)


def unlabelled(stage: StageOutcomes) -> StageOutcomes:
    """The stage without labels."""
    return StageOutcomes(stage.scores, np.zeros(len(stage.scores)), stage.disagreements)


def study(population: Population, n: int, draws: int, seed: int) -> list[Cell]:
    """Certify so many samples of n images and count what is wrong."""
    tally, rng = _Tally(population, n), np.random.default_rng([seed, n])
    for _ in range(draws):
        tally.record(population.drawn(n, rng))
    return list(tally.cells(draws))


def main() -> int:
    """Run the study; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2_000)
    parser.add_argument("--images", type=int, default=4_000, help="of a population")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["kinds", "adversaries"])
    given = parser.parse_args()
    rng, broken = np.random.default_rng(given.seed), 0
    populations = [] if given.only == "adversaries" else [of_kind(name, given.images) for name in KINDS]
    populations += [] if given.only == "kinds" else [make(rng, given.images) for make in ADVERSARIES]
    print(f"{'population':32} {'n':>5} {'statement':13} {'made %':>7} {'wrong %':>8} {'stated %':>9} {'allowed %':>10}")
    began = time.process_time()
    for population, n in itertools.product(populations, given.sizes):
        for cell in study(population, n, given.draws, given.seed):
            mark = "  BROKEN" if cell.broken else ""
            broken += cell.broken
            print(
                f"{cell.population:32} {n:5} {cell.statement:13} {100 * cell.made / cell.draws:7.1f} "
                f"{100 * cell.wrong / cell.draws:8.2f} {100 * cell.stated:9.1f} {100 * cell.allowed:10.2f}{mark}",
                flush=True,
            )
    print(f"{time.process_time() - began:.0f} s of processor time")
    print("every statement is wrong as seldom as it says" if not broken else f"{broken} statements are wrong too often")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
