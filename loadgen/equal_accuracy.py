"""A rival's latency at our accuracy: which version of it is compared, and diluted with what.

Who answers less accurately may be faster for that alone, so a claim on latency holds only at equal accuracy, and a
rival that is more accurate than ours must be given the chance to trade that for speed. There are two ways:

- *Another version.* A rival with a setting may be tested with several (`static@0.55`).
- *Dilution.* A share q of its requests is answered as a less accurate contender answered the very same requests:
  `all-edge`, which any node can do, or another version of itself. So each request counts twice, with weight 1 - q as
  the rival and with weight q as the other answered it; q is the smallest share at which the answers of this mixture are
  right as often as ours. That is a policy that could be built: it throws a coin. Its percentiles are weighted ones.
  Where the other is more accurate than ours as well, q is 1: what any node can do is compared in the rival's place.

Of all ways to be at least as accurate as ours, the fastest is compared: best for the rival, so that nobody can say it
was badly set. What a mixture does not know is that a rival which sends less also burdens its link less; its latencies
stay those of its full traffic. A version that was tested as such leaves no such doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from loadgen.bootstrap import Floats, Places, bootstrap, occasions, quantiles
from loadgen.compare import LATENCIES, Ratio, compare, divided, limited, ratio_of, same_schedule
from loadgen.counted import FEWEST_BEYOND, Counted, counted_of
from loadgen.record import Run

EQUAL_ACCURACY: Final = 0.002
"""Accuracies that differ by no more are equal."""
ROUNDING: Final = 1e-9
"""Of a sum of weights, in requests: as in `bootstrap.place_of`."""


class Dilution(msgspec.Struct, frozen=True):
    """With what a rival was diluted until it was as accurate as ours."""

    by: str
    """The contender that answers in its place."""
    share: float
    """Of requests, 0..1: q."""
    accuracy: float
    """Of the mixture's answers."""


@dataclass(frozen=True, slots=True)
class Opponent:
    """A rival as it is compared."""

    name: str
    """The version that was chosen."""
    ratio: Ratio
    """Its latency over ours, diluted if it is."""
    dilution: Dilution | None
    unequal: str
    """Why it, more accurate, cannot be made equal to ours; empty where it can, or where it is less accurate anyway."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to compare a rival: as it was tested, or diluted."""

    rival: Run
    by: Run | None
    share: float
    accuracy: float
    ms: float


def opponent(figure: str, ours: Run, versions: Sequence[Run], edge: Run | None) -> Opponent:
    """The rival, one or more versions of it, as its figure of `LATENCIES` is compared with ours.

    Taken is the fastest way to be at least as accurate as ours (less `EQUAL_ACCURACY`). If all versions are less
    accurate, it is the most accurate one as it was tested. If nothing can be made equal, it is the fastest of those
    that are more accurate, as it was tested, and `unequal` says why: diluted, it might be faster still. The interval is
    that of the way taken, as if it was the only one.

    Args:
        figure: a key of `LATENCIES`.
        ours: what they are compared with.
        versions: at least one.
        edge: the run of `all-edge`, if there is one; taken for dilution, as are other versions.

    Raises:
        ConfigError: if no request of a run counts.
    """
    accuracy = accuracy_of(counted_of(ours))
    plain = [_as_tested(figure, version) for version in versions]
    if math.isnan(accuracy) or any(math.isnan(way.accuracy) for way in plain):
        return _opponent(figure, ours, min(plain, key=_speed), "accuracy was not measured")
    equal = [way for way in plain if accuracy - EQUAL_ACCURACY <= way.accuracy <= accuracy + EQUAL_ACCURACY]
    above = [way for way in plain if way.accuracy > accuracy + EQUAL_ACCURACY]
    others = [*versions, *([] if edge is None else [edge])]
    mixed = [mixture for way in above for mixture in _mixtures(figure, ours, way.rival, others)]
    # A version that would take another's place altogether is compared as itself.
    equal += [way for way in mixed if way.share < 1.0 or way.by is edge]
    if equal:
        return _opponent(figure, ours, min([*equal, *above], key=_speed))
    if above:
        fastest = min(above, key=_speed)
        return _opponent(figure, ours, fastest, f"theirs is more accurate, and {_lacking(ours, fastest.rival, edge)}")
    return _opponent(figure, ours, max(plain, key=lambda way: way.accuracy))


def accuracy_of(counted: Counted) -> float:
    """The share of answers that are right; NaN without labels or answers."""
    return float(counted.right.sum() / counted.labelled.sum()) if counted.labelled.any() else math.nan


def share_needed(accuracy: Floats, right: Floats, answers: Floats, by_right: Floats, by_answers: Floats) -> Floats:
    """The smallest share q of others' answers at which a mixture is right as often as `accuracy` says.

    With weights, (1 - q) · right + q · by_right = accuracy · ((1 - q) · answers + q · by_answers). Where all requests
    are answered that is q = (a_rival - a_ours) / (a_rival - a_other). 0 where the rival is no more accurate anyway; NaN
    where the others are more accurate as well, or where there are no answers.

    Args:
        accuracy: to reach, 0..1; NaN if unknown.
        right: how many of the rival's answers are right.
        answers: of how many.
        by_right: likewise, of those who answer in its place.
        by_answers: likewise.
    """
    spare, short = right - accuracy * answers, accuracy * by_answers - by_right
    share = np.where(short >= 0.0, divided(spare, spare + short), math.nan)
    found: Floats = np.where(spare <= 0.0, 0.0, share)
    return found


def weighted_quantile(values: Floats, weights: Floats, share: float) -> Floats:
    """The smallest value that at least this share of all weight does not exceed, along the last axis.

    With whole weights, what `quantiles` gives for each value repeated as often.
    """
    order = np.argsort(values, axis=-1)
    weight = np.cumsum(np.take_along_axis(weights, order, axis=-1), axis=-1)
    reached = weight >= share * weight[..., -1:] - ROUNDING
    place = np.take_along_axis(order, reached.argmax(axis=-1)[..., None], axis=-1)
    found: Floats = np.take_along_axis(values, place, axis=-1)[..., 0]
    return found


def _speed(way: _Way) -> float:
    return way.ms


def _as_tested(figure: str, run: Run) -> _Way:
    counted = counted_of(run)
    ms = float(quantiles(counted.latency_ms, [LATENCIES[figure]])[0])
    return _Way(run, None, 0.0, accuracy_of(counted), ms)


def _mixtures(figure: str, ours: Run, rival: Run, others: Sequence[Run]) -> Iterator[_Way]:
    """The rival diluted to our accuracy with each of the others; a more accurate one takes its place altogether."""
    for by in others:
        if by is rival or not _aligned(ours, rival, by):
            continue
        mixture = _Mixture(*(counted_of(run) for run in (ours, rival, by)))
        if math.isnan(accuracy_of(mixture.by)):
            continue
        share = float(np.nan_to_num(mixture.share(mixture.whole), nan=1.0)[0])
        ms = float(mixture.latency(mixture.whole, np.array([share]), LATENCIES[figure])[0])
        yield _Way(rival, by, share, mixture.accuracy(share), ms)


def _aligned(ours: Run, *others: Run) -> bool:
    """Whether all were sent the same requests."""
    counted = counted_of(ours)
    return all(same_schedule(ours, other, counted, counted_of(other)) for other in others)


def _lacking(ours: Run, rival: Run, edge: Run | None) -> str:
    """Why a rival cannot be diluted."""
    if edge is None:
        return "all-edge was not tested"
    if not _aligned(ours, rival, edge):
        return "all-edge or it was not sent the same requests"
    return "all-edge answered nothing"


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A rival that is diluted to our accuracy; all three were sent the same requests."""

    ours: Counted
    rival: Counted
    by: Counted

    @property
    def whole(self) -> Places:
        """Every request once: a resample as it was measured, (1, n)."""
        return np.arange(len(self.ours.outcomes))[None, :]

    def share(self, places: Places) -> Floats:
        """q of each resample; see `share_needed`."""
        right, answers = (
            [part[places].sum(axis=1).astype(np.float64) for part in parts]
            for parts in (
                (self.ours.right, self.rival.right, self.by.right),
                (self.ours.labelled, self.rival.labelled, self.by.labelled),
            )
        )
        return share_needed(divided(right[0], answers[0]), right[1], answers[1], right[2], answers[2])

    def accuracy(self, share: float) -> float:
        """Of the mixture's answers."""
        right = (1.0 - share) * self.rival.right.sum() + share * self.by.right.sum()
        return float(right / ((1.0 - share) * self.rival.labelled.sum() + share * self.by.labelled.sum()))

    def latency(self, places: Places, shares: Floats, level: float) -> Floats:
        """The percentile of each resample's mixture, in ms, given its q."""
        return _mixed_quantile(self.rival.latency_ms[places], self.by.latency_ms[places], shares, level)

    def true_percentile(self, share: float, level: float) -> bool:
        """Whether it stays what it is if requests without an answer take for ever."""
        rival, by = (np.where(each.answered, each.latency_ms, math.inf)[None, :] for each in (self.rival, self.by))
        never = _mixed_quantile(rival, by, np.array([share]), level)
        return bool(never[0] == self.latency(self.whole, np.array([share]), level)[0])


def _mixed_quantile(rival: Floats, by: Floats, shares: Floats, level: float) -> Floats:
    weights = np.repeat(np.column_stack([1.0 - shares, shares]), rival.shape[1], axis=1)
    return weighted_quantile(np.concatenate([rival, by], axis=1), weights, level)


def _opponent(figure: str, ours: Run, way: _Way, unequal: str = "") -> Opponent:
    if way.by is None:
        return Opponent(way.rival.name, compare(ours, way.rival).ratio(figure), None, unequal)
    mixture = _Mixture(*(counted_of(run) for run in (ours, way.rival, way.by)))
    dilution = Dilution(way.by.name, way.share, way.accuracy)
    return Opponent(way.rival.name, _diluted_ratio(figure, mixture, way, ours.origin.seed), dilution, unequal)


def _diluted_ratio(figure: str, mixture: _Mixture, way: _Way, seed: int) -> Ratio:
    """The mixture's latency over ours. A resample draws the same stretches of time from all three, as `compare` does.

    q is found anew in each resample. Held at what it was, it would take both accuracies for certain, and q is the less
    certain the closer they are. Where a resample's rival is no more accurate than ours, it is not diluted; where even
    the other contender is more accurate, the rival is replaced by it altogether: it need not be slower.
    """
    level = LATENCIES[figure]
    ours, rival, by = mixture.ours, mixture.rival, mixture.by
    block = max(counted.block() for counted in (ours, rival, by))

    def statistic(places: Places) -> Floats:
        shares = np.nan_to_num(mixture.share(places), nan=1.0)
        first = quantiles(ours.latency_ms[places], [level])[:, 0]
        return divided(mixture.latency(places, shares, level), first)[:, None]

    first = float(quantiles(ours.latency_ms, [level])[0])
    resampled = bootstrap(len(ours.outcomes), block, seed, statistic)
    seen = occasions(np.maximum(rival.latency_ms, by.latency_ms), way.ms, block)
    return limited(
        ratio_of(figure, first, way.ms, resampled[:, 0]),
        first_at_least=not ours.true_percentile(level),
        other_at_least=not mixture.true_percentile(way.share, level),
        few=ours.few(level, block) or seen < FEWEST_BEYOND,
    )
