"""What a run at one rate says about a server's capacity: whether the rate holds, and how sure that is.

A rate holds when all of this is true. A request without an answer counts as infinitely late and as wrong.

- The P99 is within its bound.
- The second half of the run looked like the first, and no backlog grew (`loadgen.analysis.steady_state`). With a loose
  bound, a server beyond saturation keeps its P99 for a while.
- The accuracy is not missed. It is missed if its whole 95 % interval is below what is wanted. It is also missed if the
  accuracy is below and load is the cause: fewer of the same images were right than at the lowest rate, by more than
  chance explains.

The accuracy alone would not do: 300 images are too few to tell a server that is slightly better than it must be from
one that is slightly worse. Every run sends the same images, so the effect of load is measured in pairs.

`RateSearch` says which rate to try next. It knows no servers; it is told what held and what failed.

    bracket   double until a rate fails, or halve until one holds; then halve the bracket, geometrically
    confirm   a long run at the highest rate that held; if it fails, 15 % less, `STEPS_DOWN` times at most

A probe that fails is repeated once with other arrivals, because one hiccup of a shared machine is not the server's
limit. A probe that holds is not repeated, so the bracket is too high as a rule. The confirming run corrects that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.accuracy import IntervalEstimate, mean_difference
from loadgen.analysis.bootstrap import (
    CONFIDENCE,
    Floats,
    Places,
    block_length,
    bootstrap,
    clustered_interval,
    occasions,
    quantiles,
    ranks,
)
from loadgen.analysis.samples import FEWEST_BEYOND
from loadgen.analysis.steady_state import is_growing, is_steady
from loadgen.workload.record import INTERRUPTED, RequestOutcome

LEAST_RATE: Final = 0.1
"""Below it even a confirming run has less than a request in ten seconds."""
STEP_DOWN: Final = 0.85
"""Of a rate that was not confirmed is tried next."""
STEPS_DOWN: Final = 5
"""At most: down to 44 % of what the probes found, which was never as much as twice too high (see above). What is not
confirmed by then was not found."""


@dataclass(frozen=True, slots=True)
class RateTrial:
    """One run at one rate."""

    rate: float
    confirming: bool = False
    again: bool = False
    """Whether the rate failed once before."""


@dataclass(slots=True)
class RateSearch:
    """First a bracket, then a confirmation."""

    first: float
    precision: float
    """The bracket is narrow enough when its ends differ by this share."""
    most: float
    """No rate above it is tried."""
    probes_left: int
    """Confirming runs are not counted among these."""
    low: float = field(default=0.0, init=False)
    """The highest rate that held in a probe."""
    high: float = field(default=math.inf, init=False)
    """The lowest rate that failed, twice in probes or once in a confirming run."""
    confirmed: float | None = field(default=None, init=False)
    refuted: list[float] = field(default_factory=list, init=False)
    """Rates whose confirming runs failed, falling."""
    doubted: float | None = field(default=None, init=False)
    """A rate that failed once."""

    def next(self) -> RateTrial | None:
        """What to try next, or None when the search is over."""
        if self.confirmed is not None:
            return None
        if self.refuted:
            rate = STEP_DOWN * self.refuted[-1]
            return RateTrial(rate, confirming=True) if len(self.refuted) <= STEPS_DOWN and rate >= LEAST_RATE else None
        rate_or_none = self._bracketing() if self.probes_left > 0 else None
        if rate_or_none is not None:
            return RateTrial(rate_or_none, again=rate_or_none == self.doubted)
        return RateTrial(self.low, confirming=True) if self.low > 0.0 else None

    def record(self, tried: RateTrial, held: bool) -> None:
        """What came of it."""
        if tried.confirming:
            if held:
                self.confirmed = tried.rate
            else:
                self.refuted.append(tried.rate)
                self.high = min(self.high, tried.rate)
            return
        self.probes_left -= 1
        if held:
            self.low, self.doubted = max(self.low, tried.rate), None
        elif self.doubted is None:
            self.doubted = tried.rate
        else:
            self.high, self.doubted = min(self.high, tried.rate), None

    def _bracketing(self) -> float | None:
        if self.doubted is not None:
            return self.doubted
        if self.high == math.inf:
            if self.low >= self.most:
                return None
            return min(self.most, 2.0 * self.low if self.low else self.first)
        if self.low == 0.0:
            return self.high / 2.0 if self.high / 2.0 >= LEAST_RATE else None
        if self.high <= self.low * (1.0 + self.precision):
            return None
        return math.sqrt(self.low * self.high)


SHARE: Final = 0.99


class Failing(StrEnum):
    """Why a rate did not hold."""

    P99 = "P99"
    UNSTEADY = "not steady"
    BACKLOG = "the backlog grew"
    ACCURACY = "accuracy"


class Standing(StrEnum):
    """How an accuracy stands to what is wanted."""

    SHOWN = "shown"
    """The whole 95 % interval is at least what is wanted."""
    KEPT = "kept, not shown"
    """It is at least what is wanted, and could be so by chance."""
    CHANCE = "missed within chance"
    """It is below, and could be so by chance."""
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class CapacityGoal:
    """What is to be kept."""

    p99_ms: float
    min_accuracy: float | None

    def standing(self, accuracy: IntervalEstimate) -> Standing | None:
        """How an accuracy stands to it; None if none is wanted."""
        wanted = self.min_accuracy
        if wanted is None:
            return None
        if accuracy.value >= wanted:
            return Standing.SHOWN if accuracy.low >= wanted else Standing.KEPT
        return Standing.CHANCE if accuracy.high >= wanted else Standing.MISSED


class Probe(msgspec.Struct, frozen=True):
    """One rate, tried once."""

    rate: float
    confirming: bool
    n: int
    p50_ms: float | None
    """None: half of the requests were not answered at all."""
    p99_ms: float | None
    """None: more than one request in a hundred was not answered at all."""
    goodput: float
    """Requests answered within the bound of the P99, and right where that is known, per second."""
    accuracy: float | None
    """Right answers over all requests; None without labels."""
    late_ms: float
    """P99 of how late the generator itself was."""
    failing: list[Failing]
    held: bool
    interrupted: bool = False
    """Then it held nothing, whatever it was like so far."""
    errors: dict[str, int] = {}
    """Requests that were not answered, by code."""


class Confirmation(msgspec.Struct, frozen=True):
    """A long run, and how sure its figures are."""

    rate: float
    n: int
    wanted: int
    """Requests; more than `n` where the time was cut."""
    seconds: float
    p99_ms: float | None
    """None, as the next two: more requests than that were not answered at all."""
    p99_low: float | None
    p99_high: float | None
    occasions: int
    """Separate occasions on which the P99 was reached."""
    few: bool
    """Fewer than `FEWEST_BEYOND` of these or of requests beyond it: its interval is probably too narrow."""
    accuracy: IntervalEstimate | None
    """Right answers over all requests; None without labels."""
    standing: Standing | None
    """How the accuracy stands to what is wanted; None if nothing is."""


@dataclass(frozen=True, slots=True)
class CountedAnswers:
    """What came of the counted requests of a run, in the order in which they were due."""

    outcomes: Sequence[RequestOutcome]
    start_s: float
    end_s: float
    latency_ms: Floats
    right: Floats | None
    """How right each is; None without labels."""
    image: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.outcomes)

    def percentile_ms(self, share: float = SHARE) -> float:
        """Infinite if nothing was asked."""
        return float(quantiles(self.latency_ms, [share])[0]) if len(self) else math.inf

    def goodput(self, within_ms: float) -> float:
        """Answers within a time, and right where that is known, per second."""
        good = (self.latency_ms <= within_ms) * (1.0 if self.right is None else self.right)
        return float(good.sum()) / max(self.end_s - self.start_s, 1e-9)

    def accuracy(self) -> IntervalEstimate | None:
        """With its interval."""
        if self.right is None or not len(self):
            return None
        return IntervalEstimate(float(self.right.mean()), *clustered_interval(self.right, self.image))


def counted(outcomes: Sequence[RequestOutcome], start_s: float, end_s: float, *, labelled: bool) -> CountedAnswers:
    """The requests due from `start_s` to `end_s`, but those that were still unanswered when an interrupt came."""
    kept = sorted(
        (each for each in outcomes if start_s <= each.due_s < end_s and each.error != INTERRUPTED),
        key=lambda each: each.due_s,
    )
    return CountedAnswers(
        kept,
        start_s,
        end_s,
        np.array([each.latency_s * 1e3 if each.answered else math.inf for each in kept], np.float64),
        np.array([float(each.right or 0.0) if each.answered else 0.0 for each in kept]) if labelled else None,
        np.array([each.image for each in kept], np.int64),
    )


def judge(
    tried: RateTrial,
    answers: CountedAnswers,
    goal: CapacityGoal,
    least: CountedAnswers | None,
    *,
    interrupted: bool = False,
) -> Probe:
    """Whether a rate held; `least` is what came of the lowest rate, whose images were the same."""
    p99_ms, accuracy = answers.percentile_ms(), answers.accuracy()
    failing: list[Failing] = []
    if not p99_ms <= goal.p99_ms:
        failing.append(Failing.P99)
    if is_steady(answers.outcomes, answers.start_s, answers.end_s) is False:
        failing.append(Failing.UNSTEADY)
    if is_growing(answers.outcomes, answers.start_s, answers.end_s):
        failing.append(Failing.BACKLOG)
    if _too_wrong(answers, accuracy, goal, least):
        failing.append(Failing.ACCURACY)
    return Probe(
        rate=tried.rate,
        confirming=tried.confirming,
        n=len(answers),
        p50_ms=_finite(answers.percentile_ms(0.5)),
        p99_ms=_finite(p99_ms),
        goodput=answers.goodput(goal.p99_ms),
        accuracy=None if accuracy is None else accuracy.value,
        late_ms=_late_ms(answers.outcomes),
        failing=failing,
        held=not failing and not interrupted,
        interrupted=interrupted,
        errors=dict(Counter(each.error for each in answers.outcomes if not each.answered).most_common()),
    )


def confirmation(rate: float, answers: CountedAnswers, goal: CapacityGoal, wanted: int, seed: int) -> Confirmation:
    """The figures of a long run, of at least one request. Its P99's interval is by a block bootstrap."""
    n, latency_ms = len(answers), answers.latency_ms
    block = block_length(ranks(latency_ms))

    def statistic(places: Places) -> Floats:
        return quantiles(latency_ms[places], [SHARE])

    tail = (1.0 - CONFIDENCE) / 2.0
    # Not `bootstrap.interval`, which leaves out what is infinite.
    low, high = np.quantile(bootstrap(n, block, seed, statistic)[:, 0], (tail, 1.0 - tail), method="higher")
    reached = occasions(latency_ms, answers.percentile_ms(), block)
    accuracy = answers.accuracy()
    return Confirmation(
        rate=rate,
        n=n,
        wanted=max(wanted, n),
        seconds=answers.end_s - answers.start_s,
        p99_ms=_finite(answers.percentile_ms()),
        p99_low=_finite(float(low)),
        p99_high=_finite(float(high)),
        occasions=reached,
        few=min((1.0 - SHARE) * n + 1e-9, reached) < FEWEST_BEYOND,
        accuracy=accuracy,
        standing=None if accuracy is None else goal.standing(accuracy),
    )


def is_lightly_loaded(probe: Probe) -> bool:
    """Whether answers were as accurate as without load, as far as latency tells: others are compared with these."""
    return not probe.interrupted and set(probe.failing) <= {Failing.ACCURACY}


def _too_wrong(
    answers: CountedAnswers, accuracy: IntervalEstimate | None, goal: CapacityGoal, least: CountedAnswers | None
) -> bool:
    if goal.min_accuracy is None:
        return False
    if accuracy is None:
        return True  # nothing was answered, or the labels are unknown
    standing = goal.standing(accuracy)
    if standing is Standing.CHANCE:
        return least is not None and _lost_by_load(answers, least)
    return standing is Standing.MISSED


def _lost_by_load(answers: CountedAnswers, least: CountedAnswers) -> bool:
    """Whether fewer of the same images were right than at the lowest rate, by more than chance explains."""
    n = min(len(answers), len(least))
    if answers.right is None or least.right is None or n == 0:
        return False
    assert (answers.image[:n] == least.image[:n]).all(), "runs of one search send the same images"
    lost = least.right[:n] - answers.right[:n]
    found = mean_difference(lost, answers.image[:n], np.ones(n, np.bool_))
    return found is not None and found.low > 0.0


def _late_ms(outcomes: Sequence[RequestOutcome]) -> float:
    late = np.array([(each.sent_s - each.due_s) * 1e3 for each in outcomes], np.float64)
    return float(quantiles(late, [SHARE])[0]) if len(late) else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
