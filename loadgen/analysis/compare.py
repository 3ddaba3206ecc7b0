"""Two or more runs side by side: every later one against the first, as ratios that say how sure they are.

Runs that sent the same images at the same moments are compared in pairs: a resample draws the same stretches of time
from both, so what the schedule did to both cancels out. Others are resampled each by itself, which needs a larger
difference to show one. A difference is called one when the 95 % interval of the ratio does not contain 1; with several
rows, about one in twenty does so by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np

from hawkvision.core.errors import ConfigError
from loadgen.analysis.bootstrap import Floats, Places, bootstrap, interval, quantiles
from loadgen.analysis.samples import CountedRequests, counted_of
from loadgen.workload.record import Run

LATENCIES: Final = {"P50": 0.5, "P90": 0.9, "P99": 0.99}
MOST_RUNS: Final = 12
"""A page tells so many apart by colour and dash."""

Statistic: TypeAlias = Callable[[Places], Floats]


class RatioVerdict(StrEnum):
    """What a ratio shows."""

    SAME = "no difference shown"
    FASTER = "faster"
    SLOWER = "slower"
    BETTER = "more accurate"
    WORSE = "less accurate"
    FEWER = "fewer"
    MORE = "more"
    UNKNOWN = "cannot be compared"


class Ratio(msgspec.Struct, frozen=True):
    """One figure of a run over that of the first."""

    figure: str
    first: float
    other: float
    ratio: float | None
    """None if there is nothing to divide by, or one was not measured."""
    low: float | None
    high: float | None
    verdict: RatioVerdict
    first_at_least: bool = False
    """Requests without an answer reach this percentile; the true one is larger, and the ratio cannot say how much."""
    other_at_least: bool = False
    few: bool = False
    """This percentile rests on too little in one of the runs; the interval is probably too narrow."""


class RunComparison(msgspec.Struct, frozen=True):
    """One run against the first."""

    first: str
    other: str
    paired: bool
    first_link: str
    """`lte`, or `no link`; likewise the next."""
    other_link: str
    ratios: tuple[Ratio, ...]

    def ratio(self, figure: str) -> Ratio:
        """The one of a figure of `FIGURES`."""
        return self.ratios[FIGURES.index(figure)]


_WORDS: Final = {
    **dict.fromkeys(LATENCIES, (RatioVerdict.FASTER, RatioVerdict.SLOWER)),
    "answered": (RatioVerdict.FEWER, RatioVerdict.MORE),
    "effective accuracy": (RatioVerdict.WORSE, RatioVerdict.BETTER),
    "accuracy": (RatioVerdict.WORSE, RatioVerdict.BETTER),
    "escalated": (RatioVerdict.FEWER, RatioVerdict.MORE),
    "bytes sent": (RatioVerdict.FEWER, RatioVerdict.MORE),
}
"""What a ratio below and above 1 means."""

FIGURES: Final = tuple(_WORDS)


def compare(first: Run, other: Run) -> RunComparison:
    """Every figure of one run over that of the first; the same for the same runs.

    Raises:
        ConfigError: if no request of either counts.
    """
    ours, theirs = counted_of(first), counted_of(other)
    paired = same_schedule(first, other, ours, theirs)
    one, two = _statistic(ours, labelled=first.labelled), _statistic(theirs, labelled=other.labelled)
    (values,), (other_values,) = (
        statistic(np.arange(len(counted.outcomes))[None, :]) for statistic, counted in ((one, ours), (two, theirs))
    )
    if paired:
        block = max(ours.block(), theirs.block())
        resampled = bootstrap(
            len(ours.outcomes), block, first.origin.seed, lambda places: _divided(two(places), one(places))
        )
    else:
        resampled = _unpaired(ours, theirs, one, two, first.origin.seed)
    ratios = []
    for place, figure in enumerate(FIGURES):
        found = _ratio_of(figure, float(values[place]), float(other_values[place]), resampled[:, place])
        if figure in LATENCIES:
            found = _qualified(found, ours, theirs)
        ratios.append(found)
    return RunComparison(first.name, other.name, paired, first.link_words, other.link_words, tuple(ratios))


def compare_all(runs: Sequence[Run]) -> tuple[RunComparison, ...]:
    """Every later run against the first.

    Raises:
        ConfigError: for fewer than two runs or more than `MOST_RUNS`.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"compare: expected 2 to {MOST_RUNS} runs, got {len(runs)}")
    return tuple(compare(runs[0], other) for other in runs[1:])


def same_schedule(first: Run, other: Run, ours: CountedRequests, theirs: CountedRequests) -> bool:
    """Whether both sent the same images with the same targets at the same moments, to a microsecond.

    Callers in a closed loop wait for answers, so no two such runs send at the same moments.
    """
    if (first.schedule, first.origin.seed, first.targets) != (other.schedule, other.origin.seed, other.targets):
        return False
    sent, also_sent = (
        [(round(each.due_s, 6), each.image, each.target) for each in counted.outcomes] for counted in (ours, theirs)
    )
    return sent == also_sent


def _statistic(counted: CountedRequests, *, labelled: bool) -> Statistic:
    """The figures of `FIGURES`, a row for each of some resamples; NaN where there is none."""
    latency, answered, judged, right = counted.latency_ms, counted.answered, counted.labelled, counted.right
    effective = counted.effective
    escalated = counted.answered & np.array([each.escalated for each in counted.outcomes])
    sent = np.array([each.sent_bytes for each in counted.outcomes], np.float64)
    shares = tuple(LATENCIES.values())
    # Of images without labels nothing is known; of those that have some, one without an answer is not right.
    judging = 1.0 if labelled else math.nan

    def statistic(places: Places) -> Floats:
        return np.column_stack(
            [
                quantiles(latency[places], shares),
                answered[places].mean(axis=1),
                judging * effective[places].mean(axis=1),
                _divided(right[places].sum(axis=1), judged[places].sum(axis=1)),
                _divided(escalated[places].sum(axis=1), answered[places].sum(axis=1)),
                sent[places].mean(axis=1),
            ]
        )

    return statistic


def _unpaired(ours: CountedRequests, theirs: CountedRequests, one: Statistic, two: Statistic, seed: int) -> Floats:
    # Two seeds, or runs of equal length would be drawn alike as if they were paired.
    our_seed, their_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    first = bootstrap(len(ours.outcomes), ours.block(), our_seed, one)
    other = bootstrap(len(theirs.outcomes), theirs.block(), their_seed, two)
    rows = min(len(first), len(other))
    return _divided(other[:rows], first[:rows])


def _divided(top: Floats, bottom: Floats) -> Floats:
    """One over the other; NaN where there is nothing to divide by."""
    ratio: Floats = np.full(top.shape, math.nan)
    np.divide(top, bottom, out=ratio, where=bottom != 0)
    return ratio


def _ratio_of(figure: str, first: float, other: float, resampled: Floats) -> Ratio:
    """A figure of another run over that of the first, with the interval of its resamples."""
    low, high = interval(resampled)
    if first == other == 0.0:
        return Ratio(figure, first, other, None, None, None, RatioVerdict.SAME)
    if first == 0.0 or not math.isfinite(low + first + other):
        return Ratio(figure, first, other, None, None, None, RatioVerdict.UNKNOWN)
    below, above = _WORDS[figure]
    verdict = below if high < 1.0 else above if low > 1.0 else RatioVerdict.SAME
    return Ratio(figure, first, other, other / first, low, high, verdict)


def _qualified(found: Ratio, ours: CountedRequests, theirs: CountedRequests) -> Ratio:
    """A ratio of latencies with what limits it; where an unknown end leaves open who is faster, nothing is shown.

    Where requests without an answer reach the first run's percentile, the true ratio is smaller than this one, so the
    other may be called faster and nothing else; and the other way round.
    """
    share = LATENCIES[found.figure]
    first_at_least, other_at_least = (not counted.true_percentile(share) for counted in (ours, theirs))
    open_ends = {RatioVerdict.SLOWER: first_at_least, RatioVerdict.FASTER: other_at_least}
    unknown = open_ends.get(found.verdict, first_at_least or other_at_least)
    return msgspec.structs.replace(
        found,
        verdict=RatioVerdict.UNKNOWN if unknown else found.verdict,
        first_at_least=first_at_least,
        other_at_least=other_at_least,
        few=any(counted.few(share, counted.block()) for counted in (ours, theirs)),
    )


def slower(comparisons: Sequence[RunComparison], percent: float) -> list[str]:
    """What is shown to be slower than in the first run, by more than so many percent; a sentence each.

    A server that answers less must not pass for it, so percentiles that requests without an answer reach, and did not
    in the first run, count as slower, and a smaller share of answers that is shown does as well.
    """
    found = (_slower(one, ratio, percent) for one in comparisons for ratio in one.ratios)
    return [sentence for sentence in found if sentence]


def _slower(one: RunComparison, ratio: Ratio, percent: float) -> str:
    """Empty if it is not."""
    said = f"{one.other}: {ratio.figure} is"
    if ratio.verdict is RatioVerdict.SLOWER and ratio.ratio is not None and ratio.ratio > 1.0 + percent / 100.0:
        return f"{said} {ratio.ratio:.2f}x that of {one.first} ({ratio.low:.2f}–{ratio.high:.2f})"
    if ratio.other_at_least and not ratio.first_at_least:
        known = written(ratio.figure, ratio.first)
        return f"{said} unknown, since requests without an answer reach it; that of {one.first} is {known}"
    if ratio.figure == "answered" and ratio.verdict is RatioVerdict.FEWER:
        return f"{one.other}: {ratio.other:.1%} of its requests were answered, {ratio.first:.1%} of {one.first}’s"
    return ""


def written(figure: str, value: float, *, at_least: bool = False) -> str:
    """A figure with its unit; empty if it was not measured."""
    if not math.isfinite(value):
        return ""
    if figure in LATENCIES:
        return f"{'≥ ' if at_least else ''}{value:.1f} ms"
    return f"{value / 1024:.1f} KiB" if figure == "bytes sent" else f"{value:.1%}"
