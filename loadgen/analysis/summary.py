"""The summary of a run: latencies, accuracies and targets kept, in all and per target, with intervals; as text too.

- Every request due after the warm-up counts. One that was refused, broken off or timed out is never right and never in
  time; its latency is at least the time to its failure and at least its deadline. A percentile that such requests reach
  is a lower bound (`at_least`).
- Effective accuracy is the share of all requests that were answered right and within the deadline. Accuracy is the
  share of the answers that are right, whenever they came. Of kinds of tasks whose answers can be partly right, both are
  means of 1 − the loss (`TaskKind.loss`).
- An answer is *flagged* when it does not claim to keep its accuracy target: its status is not `certified`, or it is
  `degraded`. Answers of servers that give no guarantee are all flagged.
- A drop is paired: on the same images, the share that the reference stage gets right less the share answered right.
- Percentiles are measured values: the smallest that so many of all do not exceed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.analysis.accuracy import (
    IntervalEstimate,
    TargetJudgement,
    TargetVerdict,
    bound_field,
    drops_of,
    judge,
    mean_difference,
)
from loadgen.analysis.bootstrap import (
    Floats,
    Places,
    bootstrap,
    clustered_interval,
    exact_interval,
    interval,
    quantiles,
)
from loadgen.analysis.samples import CountedRequests, counted_of, counted_seconds, deadline_of, error_code, is_flagged
from loadgen.workload.record import Run, TargetClass

__all__ = [
    "ClassSummary",
    "Figures",
    "IntervalEstimate",
    "Percentile",
    "RunSummary",
    "TargetJudgement",
    "TargetVerdict",
    "summarise",
]

SHARES: Final = (0.5, 0.9, 0.99, 0.999)
SHED: Final = (429, 503)


class Percentile(msgspec.Struct, frozen=True):
    """A latency that a share of all requests did not exceed."""

    share: float
    ms: float
    low: float
    high: float
    at_least: bool
    """Requests without an answer reach it, so the true one is larger."""
    occasions: int
    """Separate occasions on which it was reached."""
    few: bool
    """It rests on fewer than `FEWEST_BEYOND` requests or occasions; its interval is probably too narrow."""

    @property
    def name(self) -> str:
        """`P99.9`."""
        return f"P{100 * self.share:g}"


class Figures(msgspec.Struct, frozen=True):
    """What is said of any set of requests. Shares are 0..1, those of answers where it says so."""

    n: int
    answered: int
    offered_per_s: float
    answered_per_s: float
    """Answers that came while the schedule ran, per second of it."""
    percentiles: tuple[Percentile, ...]
    """At `SHARES`."""
    max_ms: float
    """Without an interval: resampling cannot tell of what is slower than the slowest (Bickel and Freedman, 1981)."""
    accuracy: IntervalEstimate | None
    """Of answers; None without labels or answers."""
    effective: IntervalEstimate | None
    """Right and in time, of all requests; None without labels."""
    in_time: IntervalEstimate | None
    """Answered in time, of all requests; None without a deadline."""
    escalated: float
    """Of answers."""
    degraded: float
    """Of answers."""
    flagged: float
    """Of answers."""
    shed: int
    """Refused with 429 or 503."""
    shed_share: float
    """Of all requests."""
    errors: dict[str, int]
    """Requests without an answer, by code, the most frequent first."""
    sent_bytes: float
    """Per request."""
    received_fraction: float
    """Mean over answers."""

    def percentile(self, share: float) -> Percentile:
        """The one at a share of `SHARES`."""
        return self.percentiles[SHARES.index(share)]


class ClassSummary(msgspec.Struct, frozen=True):
    """One class of requests."""

    target: str
    share: float
    """Of all counted requests."""
    figures: Figures
    drop: IntervalEstimate | None
    """Against the reference stage, over answers; None if that was not measured."""
    unflagged: int
    """Answers that claim to keep the target."""
    unflagged_drop: IntervalEstimate | None
    guaranteed_drop: float | None
    """The largest drop that any of them allows itself; None where any states none."""
    numeric: bool
    """Whether its target says in numbers what accuracy is wanted."""
    kept: TargetJudgement | None
    """None where it does not, or where that was not measured."""


class RunSummary(msgspec.Struct, frozen=True):
    """A run, said in numbers."""

    name: str
    url: str
    protocol: str
    schedule: str
    link: str
    """As in `Run`; empty without one."""
    deadline_ms: float | None
    total: Figures
    classes: tuple[ClassSummary, ...]
    """Those with requests, in the order of `Run.targets`."""
    block: int
    """Neighbouring requests that were resampled together for the intervals of `total`."""
    per_image: float
    """How often an image was sent on average."""
    steady: bool | None
    interrupted: bool
    kind: str = ""
    """The kind of task, as in `Run`."""
    partly: bool = False
    """Whether some answers are partly right, so that shares of right answers are means of 1 − the loss."""

    @property
    def conditions(self) -> str:
        """`poisson:8 behind lte`: the schedule, and the link if there was one."""
        return f"{self.schedule} behind {self.link}" if self.link else self.schedule


def summarise(run: Run) -> RunSummary:
    """Everything that is said about a run; the same for the same run, since resampling is seeded with its seed.

    Raises:
        ConfigError: if no request counts.
    """
    counted = counted_of(run)
    total = _figures(run, counted)
    classes = []
    for number, target in enumerate(run.targets):
        places = np.flatnonzero(counted.target == number)
        if len(places):
            classes.append(_class_summary(run, target, counted.subset(places), len(counted.outcomes)))
    return RunSummary(
        name=run.name,
        url=run.url,
        protocol=run.protocol,
        schedule=run.schedule,
        link=run.link,
        deadline_ms=run.deadline_ms,
        total=total,
        classes=tuple(classes),
        block=counted.block(),
        per_image=len(counted.outcomes) / len(np.unique(counted.image)),
        steady=run.steady,
        interrupted=run.interrupted,
        kind=run.kind,
        partly=bool(((counted.right > 0.0) & (counted.right < 1.0)).any()),
    )


def _figures(run: Run, counted: CountedRequests) -> Figures:
    outcomes, answered = counted.outcomes, counted.answered
    n, answers = len(outcomes), int(answered.sum())
    seconds = counted_seconds(run, outcomes)
    end = run.warm_up_s + seconds
    deadlines = [deadline_of(run, target) for target in run.targets]
    replies = [each for each in outcomes if each.answered]
    shed = sum(each.status in SHED for each in outcomes)
    block = counted.block()
    resampled = _resampled(run, counted, block)
    return Figures(
        n=n,
        answered=answers,
        offered_per_s=n / seconds,
        answered_per_s=sum(each.done_s <= end for each in replies) / seconds,
        percentiles=tuple(_percentile(counted, share, resampled[:, k], block) for k, share in enumerate(SHARES)),
        max_ms=float(counted.latency_ms.max()),
        accuracy=_accuracy(counted),
        effective=_share(counted.effective, resampled[:, -1]) if run.labelled else None,
        in_time=_share(counted.in_time, resampled[:, -2]) if np.isfinite(deadlines).any() else None,
        escalated=_mean([each.escalated for each in replies]),
        degraded=_mean([each.degraded for each in replies]),
        flagged=_mean([is_flagged(each) for each in replies]),
        shed=shed,
        shed_share=shed / n,
        errors=dict(Counter(error_code(each) for each in outcomes if not each.answered).most_common()),
        sent_bytes=_mean([each.sent_bytes for each in outcomes]),
        received_fraction=_mean([each.received_fraction for each in replies]),
    )


def _resampled(run: Run, counted: CountedRequests, block: int) -> Floats:
    """Per resample: the latencies at `SHARES`, the share in time, and the share right and in time."""
    effective = counted.effective

    def statistic(places: Places) -> Floats:
        shares = (counted.in_time[places].mean(axis=1), effective[places].mean(axis=1))
        return np.column_stack([quantiles(counted.latency_ms[places], SHARES), *shares])

    return bootstrap(len(counted.outcomes), block, run.origin.seed, statistic)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _percentile(counted: CountedRequests, share: float, resampled: Floats, block: int) -> Percentile:
    low, high = interval(resampled)
    return Percentile(
        share=share,
        ms=float(quantiles(counted.latency_ms, [share])[0]),
        low=low,
        high=high,
        at_least=not counted.true_percentile(share),
        occasions=counted.occasions(share, block),
        few=counted.few(share, block),
    )


def _accuracy(counted: CountedRequests) -> IntervalEstimate | None:
    if not counted.labelled.any():
        return None
    right = counted.right[counted.labelled]
    low, high = clustered_interval(right, counted.image[counted.labelled])
    return IntervalEstimate(float(right.mean()), low, high)


def _share(flags: NDArray[np.bool_] | Floats, resampled: Floats) -> IntervalEstimate:
    """A share of requests whose neighbours depend on each other, or a mean of values from 0 to 1.

    At least as wide as if they were not: resamples of nothing but successes would call the next one certain.
    """
    low, high = interval(resampled)
    exact_low, exact_high = exact_interval(float(flags.sum()), len(flags))
    return IntervalEstimate(float(flags.mean()), min(low, exact_low), max(high, exact_high))


def _class_summary(run: Run, target: TargetClass, counted: CountedRequests, all_requests: int) -> ClassSummary:
    unflagged = counted.labelled & ~np.array([is_flagged(each) for each in counted.outcomes])
    drops = drops_of(run, counted)
    known = np.isfinite(drops)
    bounds = [each.max_drop for each in counted.outcomes if each.answered and not is_flagged(each)]
    stated = [bound for bound in bounds if bound is not None]
    return ClassSummary(
        target=target.name,
        share=len(counted.outcomes) / all_requests,
        figures=_figures(run, counted),
        drop=mean_difference(drops, counted.image, known & counted.labelled),
        unflagged=int(unflagged.sum()),
        unflagged_drop=mean_difference(drops, counted.image, known & unflagged),
        guaranteed_drop=max(stated) if stated and len(stated) == len(bounds) else None,
        numeric=bound_field(target) is not None,
        kept=judge(run, target, counted, drops, unflagged),
    )


NAMED_CODES: Final = 3
"""Error codes that a sentence names; a server may invent any number."""


def show(summary: RunSummary, console: Console) -> None:
    """Print a block for all requests and one per target, for a person; each fits 80 columns."""
    deadline = "no deadline" if summary.deadline_ms is None else f"deadline {summary.deadline_ms:g} ms"
    console.print(escape(f"{summary.name} at {summary.url}, {summary.conditions}, {deadline}"), style="bold")
    _show_block("all", summary.total, ("targets kept", targets_kept(summary)), console)
    for one in summary.classes:
        _show_block(one.target, one.figures, ("target", _standing(one)), console)
    console.print("\nlatency from when a request was due; 95 % intervals by block bootstrap; " + _caution(summary))
    if meaning := meaning_of_right([summary]):
        console.print(meaning)


def _show_block(name: str, figures: Figures, last: tuple[str, str], console: Console) -> None:
    p50, p99, slowest = (figures.percentile(share) for share in (0.5, 0.99, 0.999))
    tail = f"P99 {_milliseconds(p99)} ({p99.low:.3g}–{p99.high:.3g}), P99.9 {_milliseconds(slowest)}"
    missing = f"{figures.n - figures.answered} ({figures.shed_share:.1%} shed): {failures(figures)}"
    block = Table.grid(padding=(0, 2))
    for title, told in (
        ("latency, ms", f"P50 {_milliseconds(p50)}, {tail}"),
        ("in time", "" if figures.in_time is None else f"{figures.in_time.value:.1%}"),
        ("right, in time", _percent(figures.effective)),
        ("accuracy", _percent(figures.accuracy)),
        ("escalated", f"{figures.escalated:.1%}, {figures.sent_bytes / 1024:.1f} KiB sent each"),
        ("flagged", f"{figures.flagged:.1%}"),
        ("no answer", missing if figures.errors else ""),
        last,
    ):
        if told:
            block.add_row(f"  {title}", escape(told))
    console.print(f"\n[bold]{escape(name)}[/]: {figures.n} requests", highlight=False)
    console.print(block)


def meaning_of_right(summaries: Sequence[RunSummary]) -> str:
    """What `right` means where answers can be partly right; empty where they cannot."""
    kinds = sorted({each.kind for each in summaries if each.partly})
    return f"right: the mean of 1 − the loss of {', '.join(kinds)}" if kinds else ""


def _percent(estimate: IntervalEstimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.1%} ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})"


def _milliseconds(percentile: Percentile) -> str:
    return f"{'≥' if percentile.at_least else ''}{percentile.ms:.1f}{'?' if percentile.few else ''}"


def targets_kept(summary: RunSummary) -> str:
    """`4 of 5 (1 not shown; 1 missed silently)`: how the targets with a number fared; empty if there are none."""
    verdicts = Counter(one.kept.verdict for one in summary.classes if one.kept is not None)
    total = sum(verdicts.values())
    if not total:
        return ""
    words = {one: str(one) for one in TargetVerdict if one is not TargetVerdict.KEPT} | {
        TargetVerdict.UNSHOWN: "not shown"
    }
    others = [f"{verdicts[one]} {word}" for one, word in words.items() if verdicts[one]]
    kept = verdicts[TargetVerdict.KEPT] + verdicts[TargetVerdict.UNSHOWN]
    return f"{kept} of {total}" + (f" ({'; '.join(others)})" if others else "")


def failures(figures: Figures) -> str:
    """`148 unreachable, 2 timeout`: how many requests got no answer, by the most frequent codes."""
    codes = list(figures.errors.items())
    named = [f"{found} {code}" for code, found in codes[:NAMED_CODES]]
    others = sum(found for _, found in codes[NAMED_CODES:])
    return ", ".join([*named, *([f"{others} others"] if others else [])])


def _standing(one: ClassSummary) -> str:
    if one.kept is None:
        if one.drop is not None:
            return f"drop {100 * one.drop.value:+.1f} ± {50 * (one.drop.high - one.drop.low):.1f} pt"
        return "not measured" if one.numeric else ""
    missing = one.kept.shortfall
    side = "short by" if missing.value > 0 else "spare"
    error = 100 * (missing.high - missing.low) / 2
    return f"{one.kept.verdict} ({side} {100 * abs(missing.value):.1f} ± {error:.1f} pt)"


def _caution(summary: RunSummary) -> str:
    found = ["? rests on few requests or few occasions"]
    if any(one.at_least for one in summary.total.percentiles):
        found.append("≥ requests without an answer reach it")
    found += ["the run was interrupted"] if summary.interrupted else []
    found += ["the run was not steady"] if summary.steady is False else []
    return escape("; ".join(found))
