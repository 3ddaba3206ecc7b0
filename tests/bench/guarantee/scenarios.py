"""Who is seen, what lifts an alarm, and what deadlines choose: the product's monitor in virtual time, many seeds.

    python -m tests.bench.guarantee scenarios [--seeds 50]

*Names*: the reference stage disagrees four times as often as certified (d = 5 %), or always, and requests come under
one name or many. *Missing*: half of the answers are wrong, and of just these every audit is missing, after 20,000 quiet
requests. For both, the 95th percentile of the delay is derived before the run (`delays`; for *missing* from the number
of missing audits, which is negative binomial); then 200 more requests are made, and a seed counts if one is certified.

*Never*: nothing is certified from an alarm on, for 5,000 requests: other certificates are put in force and the former
again, or 20,000 while the claim that failed is kept and another one is broken twice over.

*Deadlines*: the requests of CIFAR-10's certification and test images for one target, at the threshold with the largest
true drop that a certificate may have, 0.95 ε. Escalated images may be too late, in several patterns. What is lost among
those that say certified, as a multiple of ε, over all seeds together; and the share of seeds in which it is more than ε
by three standard errors. Without the rule of `hawkvision.guarantee.answered`, all would say certified.

Exit status 1 if a count is above 5 % of the seeds, or more is lost than ε.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from scipy.stats import nbinom

from hawkvision.guarantee.answered import USED_SHARE, AnsweredRequests
from hawkvision.guarantee.bets import WINDOW, Claim, Claims
from hawkvision.tasks.class_scores import Floats
from tests.bench.guarantee.certificates import Population, load
from tests.bench.guarantee.delays import derived, written
from tests.bench.guarantee.node import CALLERS_PART, NAMES, NODES_PART, Who
from tests.bench.guarantee.rules import sweep_grid
from tests.hawkvision.guarantee.simulated import CLAIMS, NAMED_PART, SHARE, Node

SUMMARY: Final = "who is seen, what lifts an alarm, what deadlines choose: in virtual time, many seeds"
D: Final = 0.05
ONE: Final = Claims("p", "edge", (Claim(-math.inf, D),), 0.05)
TIMES: Final = (4.0, math.inf)
AFTER: Final = 200
"""Requests after the derived delay, none of which may be certified."""
QUIET: Final = 20_000
REQUESTS: Final = 20_000
"""Of each seed, with deadlines."""
DROPS: Final = (0.01, 0.02, 0.03)

WHO: Final[tuple[tuple[str, Who, float, int], ...]] = (
    ("one caller", lambda n: ("me", None), CALLERS_PART, 1_000),
    ("one named stream", lambda n: ("me", "yard"), NAMED_PART, 1_000),
    *((name, who, part, 1_000) for name, who, part in NAMES),
    ("200 cameras, room for four", lambda n: ("me", f"camera {n % 200}"), CALLERS_PART, 4),
    ("a caller per visit, room for four", lambda n: (f"caller {n // 50}", None), NODES_PART, 4),
    ("a stream whose name others use", lambda n: ("me" if n % 2 else "other", "yard"), NAMED_PART, 1_000),
)
"""Names, callers and streams by the number of the request, the part of δ of the log that sees them, and the limit of
streams."""


class Row(NamedTuple):
    """What a scenario gave."""

    limit: float
    """Requests after which nothing may be certified."""
    delays: list[int]
    """Requests until the first that is not, by seed."""
    seeds: int
    """Seeds in which one was certified afterwards."""


def names(who: Who, part: float, limit: int, times: float, seeds: int) -> Row:
    """Requests under these names; where others use the name, their images are in order."""
    rate = min(1.0, D * times)
    late, first, wrong = derived(ONE, [rate], SHARE, part), [], 0
    for seed in range(seeds):
        node, number = Node(seed, limit=limit, claims=ONE), 0
        said: list[bool] = []
        while len(said) < late + AFTER:
            caller, stream = who(number)
            number += 1
            if caller == "other":
                node.request(0.0, caller, stream)
            else:
                said.append(node.request(rate, caller, stream))
        first.append(said.index(True) if True in said else len(said))
        wrong += not all(said[-AFTER:])
    return Row(late, first, wrong)


def missing(seeds: int) -> Row:
    """Audits of wrong answers alone are missing."""
    most = math.floor(D * WINDOW)
    late = float(nbinom.ppf(0.95, most + 1, 0.5 * SHARE)) + most + 1
    first, wrong = [], 0
    for seed in range(seeds):
        node = Node(seed, claims=ONE)
        certified: list[bool] = []
        for _ in range(QUIET):
            node.request(0.0)
        while len(certified) < late + AFTER:
            watched = node.watched()
            certified.append(not watched.suspended and watched.monitored(D))
            due = node.monitor.draw(watched)
            if due is not None:
                node.monitor.settle(due, None if node.rng.random() < 0.5 else [(ONE, 0.9, 0.0)])
        first.append(certified.index(False) if False in certified else len(certified))
        wrong += any(certified[-AFTER:])
    return Row(late, first, wrong)


def reloaded(seeds: int) -> Row:
    """An alarm; other certificates in force for 50 requests, which are not audited, then the former."""
    wrong = 0
    for seed in range(seeds):
        node, said = Node(seed), []
        node.suspend()
        for _ in range(50):
            for profile in ("q", "p"):
                node.monitor.adopt({f"{profile}/edge"})
                said += [node.watched().suspended for _ in range(50)]
        wrong += not all(said)
    return Row(0.0, [0] * seeds, wrong)


def other_claim(seeds: int) -> Row:
    """The claim of sure answers has failed and is kept; that of all answers is broken twice over."""
    wrong = 0
    for seed in range(seeds):
        node = Node(seed)
        node.suspend()
        said = [node.request(*((0.2, "me", None, 0.2) if n % 2 else (0.0, "me", None, 0.9))) for n in range(20_000)]
        wrong += not all(said)
    assert [claim.disagreement for claim in CLAIMS.claims] == [0.05, 0.02]
    return Row(0.0, [0] * seeds, wrong)


Pattern = Callable[[int], tuple[str, float]]
"""By the number of a request its caller, and how likely it is too late if it is escalated."""
PATTERNS: Final[dict[str, Pattern]] = {
    "one escalation in twenty": lambda n: ("me", 0.05),
    "a quarter": lambda n: ("me", 0.25),
    "half": lambda n: ("me", 0.5),
    "all": lambda n: ("me", 1.0),
    "all, in 100 of 1,000 requests": lambda n: ("me", float(n % 1_000 < 100)),
    "all, in the second half": lambda n: ("me", float(n >= REQUESTS // 2)),
    "all, of callers with 50 requests each": lambda n: (f"caller {n // 50}", 1.0),
    "all, of every other such caller": lambda n: (f"caller {n // 50}", float(n // 50 % 2)),
}


class Late(NamedTuple):
    """ℓ of the answers of one seed, or of several."""

    certified: Floats
    """Of those that say so."""
    everything: Floats

    def lost(self, drop: float) -> float:
        """The mean of what is certified, as a multiple of ε; 0 if nothing is."""
        return float(self.certified.mean()) / drop if len(self.certified) else 0.0

    def above(self, drop: float) -> bool:
        """Whether that is more than 1 by three standard errors, of the answers or of ε if they are few."""
        n = max(len(self.certified), 1)
        return (self.lost(drop) - 1.0) * drop > 3.0 * max(float(self.everything.std()), math.sqrt(drop)) / math.sqrt(n)


def deadlines(population: Population, drop: float, pattern: Pattern, seed: int) -> Late:
    """Requests of one seed."""
    truth = sweep_grid(population.pool, population.grid)
    usable = np.flatnonzero(truth.drop <= USED_SHARE * drop)
    threshold = population.grid[usable[truth.drop[usable].argmax()]]
    rng, windows = np.random.default_rng([seed, round(1e4 * drop)]), AnsweredRequests()
    sample = population.pool.taken(rng.integers(len(population.pool), size=REQUESTS))
    lost = sample.best_right.astype(np.float64) - sample.edge_right
    said: list[float] = []
    every: list[float] = []
    for number, accepted in enumerate((sample.scores >= threshold).tolist()):
        caller, chance = pattern(number)
        certified = windows.enough(caller, "target")
        answered = accepted or rng.random() >= chance
        windows.add(caller, "target", as_routed=answered)
        if answered:
            loss = float(lost[number]) if accepted else 0.0
            every.append(loss)
            if certified:
                said.append(loss)
    return Late(np.array(said), np.array(every))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--seeds", type=int, default=50)


def run(given: argparse.Namespace) -> int:
    """Run all scenarios and print two tables in Markdown."""
    seeds, broken = given.seeds, False
    scenarios: list[tuple[str, str, Callable[[], Row]]] = [
        (name, written(times), functools.partial(names, who, part, limit, times, seeds))
        for times in TIMES
        for name, who, part, limit in WHO
    ]
    scenarios += [
        ("audits of wrong answers are missing", "half", functools.partial(missing, seeds)),
        ("other certificates, and the former", "after an alarm", functools.partial(reloaded, seeds)),
        ("another claim twice over", "after an alarm", functools.partial(other_claim, seeds)),
    ]
    print(
        "| scenario | the stages differ | derived | median | most | seeds certified after |\n|---|---|---|---|---|---|"
    )
    for name, what, scenario in scenarios:
        row = scenario()
        broken |= row.seeds > 0.05 * seeds
        print(
            f"| {name} | {what} | {row.limit:,.0f} | {np.median(row.delays):,.0f} | {max(row.delays):,} "
            f"| {row.seeds} of {seeds} |",
            flush=True,
        )
    population = load("cifar10:small")
    print("\n| too late | ε | lost, of what is certified | of all | certified | seeds above ε |")
    print("|---|---|---|---|---|---|")
    for name, pattern in PATTERNS.items():
        for drop in DROPS:
            found = [deadlines(population, drop, pattern, seed) for seed in range(seeds)]
            above = sum(each.above(drop) for each in found)
            together = Late(*(np.concatenate(each) for each in zip(*found, strict=True)))
            broken |= above > 0.05 * seeds or together.above(drop)
            share, every = len(together.certified) / len(together.everything), together.everything.mean() / drop
            print(
                f"| {name} | {drop:.0%} | {together.lost(drop):.2f} ε | {every:.2f} ε | {share:.1%} "
                f"| {above} of {seeds} |",
                flush=True,
            )
    return int(broken)
