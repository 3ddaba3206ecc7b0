"""How often certificates of kinds with fractional losses are wrong: `python -m tests.bench.guarantee fractions`.

A population of images is made for each kind: detection (1 − F1), counting and multi-label outputs of an edge and of
a reference stage, through the kinds of the product. Others are made to defeat the tests (`ADVERSARIES`). Samples of n
images are drawn with replacement, so the population is the truth. Samples are certified by the product's bets, many at
once, with labels and without; a test compares with what the product itself certifies. What each draw states is compared
with the truth:

    drop          a certificate of a fixed ε whose threshold gives up ε or more; of all ε, the one that is wrong most
    fast          the bound on the drop of never escalating is below the true one
    agreement     without labels: the mean disagreement is ε or more, or where that bounds the drop, the drop is
    interval      the reference stage's accuracy lies outside of its interval
    claim         what monitoring takes as the most disagreement of certified traffic is less than the true one

Each may happen in the share of draws that the statement itself says, and three standard errors; exit status 1 if one
happens more often. A claim says no such share: its interval is for a threshold that was chosen on the same images. One
that is too low makes alarms false, and nothing certified.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.profile import CERTIFIED_DROPS
from hawkvision.cascade.certification.profiling import rounded_path
from hawkvision.cascade.certification.threshold_order import Path
from hawkvision.guarantee.bounds import PRECISION, deviations, log_wealth
from hawkvision.guarantee.evidence import Evidence, StageEvidence, Thresholds, sweep, threshold_grid, two_levels
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import task_kind

SUMMARY: Final = "how often certificates of losses that are fractions are wrong"
Flags: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.intp]
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
    images: Evidence
    path: Path
    bounds_drop: bool

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
    made = _label_sets if name == "multi_label" else _scenes
    scenes: list[tuple[Any, Output, Output]] = list(made(count, rng))
    edge, best = [edge for _, edge, _ in scenes], [best for _, _, best in scenes]
    if name == "multi_label":
        truths: list[Any] = [truth for truth, _, _ in scenes]
        edge, best = kind.calibrated(edge, 1.0), kind.calibrated(best, 1.0)
    else:
        truths = [(truth[:, :4], truth[:, 5].astype(np.intp)) for truth, _, _ in scenes]
    return _population(name, kind, edge, best, truths)


def _population(
    name: str, kind: TaskKind[Any], edge: Sequence[Output], best: Sequence[Output], truths: Sequence[Any]
) -> Population:
    scores = kind.score_all(edge, kind.scores[0])
    outcomes = StageEvidence(scores, kind.losses(edge, truths), kind.disagreements(edge, best))
    images = Evidence(outcomes, kind.losses(best, truths), binary=False)
    path = rounded_path(two_levels(threshold_grid(scores, STEPS)))
    return Population(name, images, path, kind.agreement_bounds_drop)


# --------------------------------------------------------------------------------------------------------- adversaries


def _adversary(name: str, scores: Floats, lost: Floats) -> Population:
    """Images with scores (n,) and drops ℓ (n,) in −1..1; they disagree as much as they lose or gain."""
    edge = StageEvidence(scores, np.maximum(lost, 0.0), np.abs(lost))
    images = Evidence(edge, np.maximum(-lost, 0.0), binary=False)
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
    """The probability of being wrong that the statement itself says; 1 if it says none."""

    @property
    def allowed(self) -> float:
        """What is stated, and three standard errors."""
        return self.stated + 3.0 * math.sqrt(self.stated * (1.0 - self.stated) / self.draws)

    @property
    def broken(self) -> bool:
        """Whether it was wrong more often than that."""
        return self.wrong / self.draws > self.allowed


@dataclass(frozen=True, slots=True)
class Draws:
    """Samples (draws, n): the edge's scores, what its answers lose, their disagreements, and both stages' losses."""

    scores: Floats
    lost: Floats
    disagreements: Floats
    edge_losses: Floats
    reference_losses: Floats


def draw(population: Population, n: int, draws: int, rng: np.random.Generator) -> Draws:
    """So many samples of n images, with replacement."""
    images, chosen = population.images, rng.integers(len(population.images), size=(draws, n))
    edge, reference = images.edge.losses[chosen], images.reference_losses[chosen]
    return Draws(images.edge.scores[chosen], edge - reference, images.edge.disagreements[chosen], edge, reference)


def kept(draws: Draws, values: Floats, path: Path, limit: float) -> Counts:
    """The last step of the path (draws,) up to which every step passes the test of E ℓ < limit: `certificate.certify`.

    `values` (draws, n) are ℓ if the edge answers.
    """
    found, alive = np.zeros(len(values), np.intp), np.arange(len(values))
    for number, step in enumerate(path[1:], 1):
        accepted = draws.scores[alive] >= step.edge
        tested, differing = (np.where(accepted, each[alive], 0.0) for each in (values, draws.disagreements))
        alive = alive[log_wealth(tested, limit, DELTA, differing**2) >= math.log(1.0 / DELTA)]
        if not len(alive):
            break
        found[alive] = number
    return found


def upper(values: Floats, delta: float, squares: Floats | None = None) -> Floats:
    """The bound (draws,) of `bounds.mean_upper_bound`, or with `squares` that of `mean_drop_upper_bound`."""
    spread = deviations(values) if squares is None else squares
    low, high = np.zeros((len(values), 1)), np.ones((len(values), 1))
    while float((high - low).max()) > PRECISION:
        between = (low + high) / 2.0
        passed = (log_wealth(values, between, delta, spread) >= math.log(1.0 / delta))[:, np.newaxis]
        low, high = np.where(passed, low, between), np.where(passed, between, high)
    return high[:, 0]


class _Study:
    """All draws of one population at one n, against its truth."""

    def __init__(self, population: Population, n: int, draws: Draws) -> None:
        self.population, self.n, self.draws = population, n, draws
        self._truth = np.array([population.truth()[step] for step in population.path])
        """The drop and the mean disagreement of each step."""
        self._best = 1.0 - float(population.images.reference_losses.mean())
        self._edge = 1.0 - float(population.images.edge.losses.mean())
        self._gap = max(self._best - self._edge, 0.02)
        usable = [d for d in CERTIFIED_DROPS if 0.2 * self._gap <= d <= 1.2 * max(self._truth[-1, 1], self._gap)]
        self.drops = sorted({usable[round(at)] for at in np.linspace(0, len(usable) - 1, MOST_DROPS)})
        self.by_drop = {drop: kept(draws, draws.lost, population.path, drop) for drop in self.drops}
        self.fast = upper(draws.lost, DELTA, draws.disagreements**2)

    def cells(self) -> Iterator[Cell]:
        """Of each statement, the ε or target that was wrong most often."""
        yield self._worst("drop", DELTA, [self._of(steps, drop, 0) for drop, steps in self.by_drop.items()])
        yield self._worst("fast", DELTA, [(np.ones(len(self.fast), bool), self.fast < self._truth[-1, 0] - ROUNDING)])
        yield self._worst("agreement", DELTA, [self._agreement(drop) for drop in self.drops])
        yield self._worst("claim", 1.0, [self._claim(steps) for steps in self.by_drop.values()])
        low, high = self._interval(self.draws.reference_losses)
        outside = (self._best < low - ROUNDING) | (self._best > high + ROUNDING)
        yield self._worst("interval", DELTA, [(np.ones(len(low), bool), outside)])

    def _of(self, steps: Counts, limit: float, column: int) -> tuple[Flags, Flags]:
        return steps > 0, (steps > 0) & (self._truth[steps, column] >= limit - ROUNDING)

    def _agreement(self, drop: float) -> tuple[Flags, Flags]:
        steps = kept(self.draws, self.draws.disagreements, self.population.path, drop)
        made, wrong = self._of(steps, drop, 1)
        return made, wrong | (self._of(steps, drop, 0)[1] if self.population.bounds_drop else False)

    def _claim(self, steps: Counts) -> tuple[Flags, Flags]:
        bars = np.array([step.edge for step in self.population.path])[steps][:, np.newaxis]
        answered = np.where(self.draws.scores >= bars, self.draws.disagreements, 0.0)
        return steps > 0, (steps > 0) & (upper(answered, DELTA / 2.0) < self._truth[steps, 1] - ROUNDING)

    def _interval(self, losses: Floats) -> tuple[Floats, Floats]:
        """`bounds.mean_interval` of 1 − losses."""
        return 1.0 - upper(losses, DELTA / 2.0), upper(1.0 - losses, DELTA / 2.0)

    def _worst(self, statement: str, stated: float, found: Sequence[tuple[Flags, Flags]]) -> Cell:
        made, wrong = max(found, key=lambda each: (int(each[1].sum()), int(each[0].sum())))
        return Cell(
            self.population.name, self.n, statement, len(made), int(made.sum()), int(wrong.sum()), stated
        )  # fmt: skip


def study(population: Population, n: int, draws: int, seed: int) -> list[Cell]:
    """Certify so many samples of n images and count what is wrong."""
    rng = np.random.default_rng([seed, n])
    return list(_Study(population, n, draw(population, n, draws, rng)).cells())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--draws", type=int, default=2_000)
    parser.add_argument("--images", type=int, default=4_000, help="of a population")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["kinds", "adversaries"])


def run(given: argparse.Namespace) -> int:
    """Run the study; see the module's text."""
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
