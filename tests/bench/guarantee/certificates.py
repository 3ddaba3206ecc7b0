"""How often certificates are wrong, and what they cost, with labels on any part of the images.

    python -m tests.bench.guarantee certificates [--pairs cifar10:tiny cifar10:small imagenet] [--n 500 2000]

Samples of n images are drawn with replacement from a pool: CIFAR-10's certification and test images, which neither
trained a network nor chose a threshold, or all of ImageNet's design images. So the pool is the population, and the
truth is exact. The order of thresholds is that of the shipped profile, along its path of two levels; each ε is tested
at 0.95 ε, as the product does (`certify` of `hawkvision.guarantee`; a test compares). Which labels there are:

    disagreements    all labels; or those of the disagreements only, which is the same, since no other label counts
    half             of a random half of the disagreements
    none
    until certified  the disagreements in the order that `certify --to-label` lists them, ten at a time, until the
                     target is certified: anything may be answered below the reference stage
    while it helps   the same, until no further label would help (`labels.label_needs`)

*Violated*: the share of samples whose threshold gives up 0.95 ε or more; where somebody looks again and again, at any
look. Allowed are 5 % and three standard errors.
*Escalated*: what the threshold costs over the whole pool. *Perfect*: the least that any threshold escalates whose true
drop is at most ε. Other rules (`rules`) get all labels, and ε. Exit status 1 if a certificate is wrong more often than
allowed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hawkvision.cascade.certification.profile import Pair
from hawkvision.cascade.certification.profiling import paths_of
from hawkvision.guarantee.answered import USED_SHARE
from hawkvision.guarantee.evidence import Evidence
from hawkvision.tasks.class_scores import Floats
from tests.bench.cascade import Cascade
from tests.bench.guarantee.rules import OTHERS, Flags, Goal, Pool, exact, perfect_escalation, sweep_grid

SUMMARY: Final = "how often certificates are wrong, and what they cost"
PAIRS: Final = ("cifar10:tiny", "cifar10:small", "imagenet")
DROPS: Final = {"cifar10": (0.01, 0.02, 0.05), "imagenet": (0.005, 0.01, 0.02)}
DELTA: Final = 0.05
LABELLED_AT_ONCE: Final = 10


@dataclass(frozen=True, slots=True)
class Population:
    """A pool, and the thresholds that certificates try in turn."""

    pool: Pool
    grid: Floats
    drops: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of evidence, or one other rule, at one n and ε."""

    pair: str
    evidence: str
    max_drop: float
    n: int
    draws: int
    violated: int
    escalation: float
    perfect: float
    labels: float
    """Of disagreements, in the mean of the draws."""
    ours: bool

    @property
    def rate(self) -> float:
        """Share of draws whose threshold gives up too much."""
        return self.violated / self.draws

    @property
    def broken(self) -> bool:
        """Whether a guarantee was broken more often than chance explains."""
        return self.ours and self.rate > DELTA + 3.0 * math.sqrt(DELTA * (1.0 - DELTA) / self.draws)


def everything(differs: Flags, _: np.random.Generator) -> Flags:
    """All labels."""
    return np.ones(len(differs), np.bool_)


def a_half(differs: Flags, rng: np.random.Generator) -> Flags:
    """A random half of the disagreements."""
    return differs & (rng.random(len(differs)) < 0.5)


def nothing(differs: Flags, _: np.random.Generator) -> Flags:
    """No labels."""
    return np.zeros(len(differs), np.bool_)


EVIDENCE: Final[dict[str, Callable[[Flags, np.random.Generator], Flags]]] = {
    "disagreements": everything, "half": a_half, "none": nothing,
}  # fmt: skip
STOPPING: Final = ("until certified", "while it helps")


def labelled_in_turn(sample: Pool, grid: Floats, goal: Goal, *, first: bool) -> Iterator[tuple[int, int]]:
    """Label what helps, the surest answers first: at each look, after every ten, the threshold certified and the
    labels. Ends when nothing helps, or with `first` when anything is certified.
    """
    places = np.searchsorted(-grid, -sample.scores, side="left")
    known = np.zeros(len(sample), np.bool_)
    while True:
        now = exact(sweep_grid(sample, grid, known), goal)
        yield now, int(known.sum())
        hopeful = replace(sample, differs=sample.differs & known)
        then = exact(sweep_grid(hopeful, grid, known), goal)
        helps = np.flatnonzero(sample.differs & ~known & (places <= then)) if then > now else np.zeros(0, np.intp)
        if not len(helps) or (first and now):
            return
        known[helps[np.argsort(-sample.scores[helps], kind="stable")][:LABELLED_AT_ONCE]] = True


class Study:
    """Draws from one population."""

    def __init__(self, population: Population, draws: int, seed: int) -> None:
        self._population = population
        self._draws = draws
        self._seed = seed
        self._truth = sweep_grid(population.pool, population.grid)

    def cells(self, n: int, evidence: Sequence[str], others: Sequence[str] = ()) -> Iterator[Cell]:
        """One cell for each ε and evidence, and for each of the other rules."""
        for drop in self._population.drops:
            for name in evidence:
                yield self._cell(n, drop, name)
            for name in others:
                yield self._cell(n, drop, name, ours=False)

    def _cell(self, n: int, drop: float, name: str, *, ours: bool = True) -> Cell:
        pool, limit = self._population.pool, USED_SHARE * drop if ours else drop
        goal = Goal(limit, float(pool.best_right.mean()) - limit, DELTA)
        violated, escalated, labels = 0, 0.0, 0
        for draw in range(self._draws):
            rng = np.random.default_rng([self._seed, n, draw])
            sample = pool.taken(rng.integers(len(pool), size=n))
            looks = list(self._looks(sample, goal, name, rng))
            kept, used = looks[-1]
            violated += any(self._truth.drop[each] >= limit for each, _ in looks)
            escalated += float(self._truth.escalation[kept])
            labels += used
        perfect = perfect_escalation(pool, drop)
        share = escalated / self._draws
        return Cell(pool.name, name, drop, n, self._draws, violated, share, perfect, labels / self._draws, ours)

    def _looks(self, sample: Pool, goal: Goal, name: str, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """The thresholds chosen, and the labels that they rest on."""
        grid = self._population.grid
        if name in STOPPING:
            yield from labelled_in_turn(sample, grid, goal, first=name == STOPPING[0])
            return
        known = EVIDENCE.get(name, everything)(sample.differs, rng)
        swept = sweep_grid(sample, grid, known)
        yield OTHERS.get(name, exact)(swept, goal), int((known & sample.differs).sum())


def pool_of(name: str, evidence: Evidence) -> Pool:
    """A fully labelled sample of losses 0 and 1 as a pool."""
    edge = evidence.edge
    return Pool(name, edge.scores, edge.losses == 0.0, evidence.reference_losses == 0.0, edge.disagreements == 1.0)


def images_of(name: str) -> tuple[Pair, Evidence]:
    """The images of the population of `TASK[:EDGE]`, of the default edge stage if none is named, as evidence.

    Raises:
        HawkVisionError: for an unknown task or stage, missing models or images.
    """
    task, _, edge = name.partition(":")
    cascade = Cascade(task, edge)
    return cascade.pair, cascade.population().evidence


def load(name: str) -> Population:
    """The population of `TASK[:EDGE]`, without an intermediate stage.

    Raises:
        HawkVisionError: as `images_of`.
    """
    pair, evidence = images_of(name)
    task = name.partition(":")[0]
    grid = np.array([step.edge for step in paths_of(pair)[0]])
    return Population(pool_of(f"{task} {pair.edge} below {pair.best}", evidence), grid, DROPS[task])


def show(population: Population, cells: Sequence[Cell]) -> None:
    """The table of one pair, in Markdown."""
    pool = population.pool
    print(
        f"\n**{pool.name}**: {len(pool):,} images, {pool.edge_right.mean():.1%} and {pool.best_right.mean():.1%} "
        f"right, {pool.differs.mean():.1%} differ\n\n| ε | n | evidence | violated | escalated | perfect | labels |\n"
        "|---|---|---|---|---|---|---|"
    )
    for cell in cells:
        mark = " **BROKEN**" if cell.broken else ""
        print(
            f"| {cell.max_drop:.1%} | {cell.n:,} | {cell.evidence} | {cell.rate:.1%}{mark} | {cell.escalation:.1%} "
            f"| {cell.perfect:.1%} | {cell.labels:.0f} |"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), metavar="TASK[:EDGE]")
    parser.add_argument("--n", nargs="+", type=int, default=[500, 2_000])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--evidence", nargs="*", default=[*EVIDENCE, *STOPPING], choices=[*EVIDENCE, *STOPPING])
    parser.add_argument("--others", nargs="*", default=[], choices=list(OTHERS))
    parser.add_argument("--drops", nargs="*", type=float, help="ε; default: three for each task")
    parser.add_argument("--seed", type=int, default=2405)


def run(given: argparse.Namespace) -> int:
    """Draw, certify, and print tables and the worst."""
    every: list[Cell] = []
    for name in given.pairs:
        population = load(name)
        population = replace(population, drops=tuple(given.drops or population.drops))
        study = Study(population, given.draws, given.seed)
        cells = [cell for n in given.n for cell in study.cells(n, given.evidence, given.others)]
        show(population, sorted(cells, key=lambda cell: cell.max_drop))
        every += cells
    ours = [cell for cell in every if cell.ours]
    worst = max(ours, key=lambda cell: cell.rate)
    print(f"\nworst of {len(ours)} cells: {worst.rate:.1%} violated ({worst.pair}, {worst.max_drop:.1%}, "
          f"n = {worst.n}, {worst.evidence}); {sum(cell.broken for cell in ours)} more often than allowed")  # fmt: skip
    return int(any(cell.broken for cell in ours))
