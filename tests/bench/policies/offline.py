"""`python -m tests.bench.policies.offline`: escalations at equal targets, from scores and labels, without a server.

For each pair of stages and each accuracy drop ε, on images that certified nothing:

    certified    what the shipped profile routes `max_accuracy_drop` = ε to, which is tested at 0.95 ε
    undivided    the same test on the same images, two levels, as if no other design had been compared on them: δ is 5 %
    tuned        the lowest threshold at which the images of the certificates lose at most ε, without a test
    known        the lowest threshold at which the test images themselves lose at most ε: the least that one threshold
                 can escalate

*Below*: points of accuracy below the reference stage on the same images, with a 95 % interval. A target is `broken`
where the whole interval is above ε. Exit status 1 if one is that a certificate says is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.cascade.certification.profiling import paths_of
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import MaxAccuracyDrop
from hawkvision.guarantee.answered import USED_SHARE
from hawkvision.guarantee.certificate import certify
from hawkvision.guarantee.evidence import Evidence, Flags, Thresholds, losses
from hawkvision.tasks.class_scores import Floats
from loadgen.analysis.accuracy import IntervalEstimate, mean_difference
from tests.bench.cascade import DATA, Cascade
from tests.bench.policies.thresholds import lost, lowest_threshold

PAIRS: Final = ("imagenet:edge_ensemble", "imagenet:mobilenet_v2_int8", "imagenet:squeezenet1_1_int8",
                "cifar10:small", "cifar10:tiny")  # fmt: skip
DROPS: Final = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
DELTA: Final = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One way to keep one target, on the test images."""

    rule: str
    max_drop: float
    escalated: float
    """Share that leaves the edge, 0..1; then the share that the reference stage answers."""
    to_best: float
    drop: IntervalEstimate

    @property
    def broken(self) -> bool:
        """Whether more was lost than chance explains."""
        return self.drop.low > self.max_drop


def rows(policy: Policy, certifying: Evidence, test: Evidence, drops: Sequence[float]) -> Iterator[Row]:
    """Four rows for each drop."""
    for drop in drops:
        route = policy.route(MaxAccuracyDrop(drop))
        bar = np.inf if route.intermediate is None else route.intermediate.threshold
        below = losses(test, Thresholds(route.threshold, bar))
        answered = test.edge.scores >= route.threshold
        between = np.zeros(len(test), np.bool_) if test.intermediate is None else test.intermediate.scores >= bar
        yield _row("certified", drop, below, answered, answered | between)
        whole = certify(certifying, paths_of(policy.pair)[0], USED_SHARE * drop, DELTA).thresholds.edge
        thresholds = (whole, lowest_threshold(certifying, drop), lowest_threshold(test, drop))
        for rule, threshold in zip(("undivided", "tuned", "known"), thresholds, strict=True):
            answered = test.edge.scores >= threshold
            yield _row(rule, drop, lost(test, threshold), answered, answered)


def _row(rule: str, drop: float, below: Floats, at_edge: Flags, below_best: Flags) -> Row:
    every = np.ones(len(below), np.bool_)
    found = mean_difference(below, np.arange(len(below)), every)
    assert found is not None, "there are images"
    return Row(rule, drop, 1.0 - float(at_edge.mean()), 1.0 - float(below_best.mean()), found)


def show(title: str, found: Sequence[Row]) -> None:
    """A table of one pair, in Markdown."""
    print(
        f"\n**{title}**\n\n| ε | certified: escalated, below | undivided: escalated | tuned: escalated, below "
        "| known: escalated | certified, undivided / known |\n|---|---|---|---|---|---|"
    )
    for ours, whole, tuned, known in zip(*(found[part::4] for part in range(4)), strict=True):
        ratio = ", ".join(
            f"{each.escalated / known.escalated:.1f}" if known.escalated else "–" for each in (ours, whole)
        )
        print(
            f"| {ours.max_drop:.1%} | {_cell(ours)} | {whole.escalated:.1%} | {_cell(tuned)} | {known.escalated:.1%} "
            f"| {ratio} |"
        )


def _cell(row: Row) -> str:
    drop, best = row.drop, f" ({row.to_best:.1%} to the reference)" if row.to_best < row.escalated else ""
    mark = " **broken**" if row.broken else " (above ε)" if drop.value > row.max_drop else ""
    return f"{row.escalated:.1%}{best}, {drop.value:.2%} ({drop.low:.2%} to {drop.high:.2%}){mark}"


def main() -> int:
    """Print a table for each pair."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.policies.offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the images; default: %(default)s")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="TASK:EDGE")
    parser.add_argument("--drops", nargs="+", type=float, default=DROPS, help="ε")
    given = parser.parse_args()
    broken = False
    for name in given.pairs:
        task, _, edge = name.partition(":")
        cascade = Cascade(task, edge, given.data)
        certifying, test = cascade.certifying().evidence, cascade.test().evidence
        policy = Policy(cascade.profile, cascade.pair.edge, cascade.pair.best)
        found = list(rows(policy, certifying, test, given.drops))
        edge_right, best_right = (1.0 - float(each.mean()) for each in (test.edge.losses, test.reference_losses))
        show(
            f"{task}, {cascade.pair.edge} below {cascade.pair.best}: {edge_right:.1%} and {best_right:.1%} right of "
            f"{len(test):,} images, certified with {len(certifying):,}",
            found,
        )
        broken |= any(row.broken for row in found if row.rule == "certified")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
