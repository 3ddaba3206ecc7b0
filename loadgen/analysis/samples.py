"""The requests of a run that count, as columns in order of time. Summaries, comparisons and charts use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import AccuracyStatus
from loadgen.analysis.bootstrap import Floats, Places, block_length, occasions, quantiles, ranks
from loadgen.workload.record import RequestOutcome, Run, TargetClass

FEWEST_BEYOND: Final = 10
"""Requests that must lie beyond a percentile, and separate occasions on which it must have been reached, for it to say
more of the server than of luck: a P99 needs 1,000 requests, and more where slow ones come together."""


@dataclass(frozen=True, slots=True)
class CountedRequests:
    """Counted requests in order of time, as columns."""

    outcomes: tuple[RequestOutcome, ...]
    latency_ms: Floats
    answered: NDArray[np.bool_]
    in_time: NDArray[np.bool_]
    """Answered, and within the deadline if there is one."""
    right: Floats
    """How right: 1 − the loss, 0 without an answer or a label."""
    labelled: NDArray[np.bool_]
    """Answered, and known to be right or wrong."""
    target: NDArray[np.int64]
    image: NDArray[np.int64]

    @property
    def effective(self) -> Floats:
        """How right and in time: `right` of those in time, 0 of the others."""
        found: Floats = np.where(self.in_time, self.right, 0.0)
        return found

    def subset(self, places: Places) -> CountedRequests:
        """Some of them."""
        return CountedRequests(
            tuple(self.outcomes[place] for place in places.tolist()),
            self.latency_ms[places],
            self.answered[places],
            self.in_time[places],
            self.right[places],
            self.labelled[places],
            self.target[places],
            self.image[places],
        )

    def block(self) -> int:
        """How many neighbours must be resampled together, by their latencies and by whether they were in time.

        Latencies by rank: a single one of many seconds must not hide that all others come in waves.
        """
        return block_length(ranks(self.latency_ms), self.in_time.astype(np.float64))

    def occasions(self, share: float, block: int) -> int:
        """On how many separate occasions a percentile was reached."""
        return occasions(self.latency_ms, float(quantiles(self.latency_ms, [share])[0]), block)

    def few(self, share: float, block: int) -> bool:
        """Whether a percentile rests on too little."""
        beyond = (1.0 - share) * len(self.outcomes)
        return min(beyond + 1e-9, self.occasions(share, block)) < FEWEST_BEYOND

    def true_percentile(self, share: float) -> bool:
        """Whether a percentile of the latencies stays what it is if requests without an answer take for ever."""
        never = np.where(self.answered, self.latency_ms, np.inf)
        return bool(quantiles(never, [share])[0] == quantiles(self.latency_ms, [share])[0])


def counted_of(run: Run) -> CountedRequests:
    """The requests after warm-up.

    Raises:
        ConfigError: if there are none.
    """
    outcomes = tuple(sorted(run.counted(), key=lambda each: each.due_s))
    if not outcomes:
        raise ConfigError(
            f"run {run.name!r}: none of its {len(run.outcomes)} requests was due after the warm-up of "
            f"{run.warm_up_s:g} s; there is nothing to summarise"
        )
    deadlines = np.array([deadline_of(run, target) for target in run.targets])
    target = np.array([each.target for each in outcomes], np.int64)
    if target.min() < 0 or target.max() >= len(run.targets):
        raise ConfigError(f"run {run.name!r}: outcomes[].target: expected 0 to {len(run.targets) - 1}")
    deadline = deadlines[target]
    answered = np.array([each.answered for each in outcomes])
    # To a nanosecond: below that is only what is left of subtracting times, which would make equal latencies differ.
    latency = np.round(1e3 * np.array([each.latency_s for each in outcomes]), 6)
    return CountedRequests(
        outcomes=outcomes,
        latency_ms=np.where(answered | np.isinf(deadline), latency, np.maximum(latency, deadline)),
        answered=answered,
        in_time=answered & (latency <= deadline),
        right=np.where(answered, [float(each.right or 0.0) for each in outcomes], 0.0),
        labelled=answered & np.array([each.right is not None for each in outcomes]),
        target=target,
        image=np.array([each.image for each in outcomes], np.int64),
    )


def deadline_of(run: Run, target: TargetClass) -> float:
    """The deadline of a class in ms: its own, else the run's, else infinity.

    Raises:
        ConfigError: if it is no number.
    """
    own = number_of(run, target, "deadline_ms")
    return own if own is not None else math.inf if run.deadline_ms is None else run.deadline_ms


def number_of(run: Run, target: TargetClass, field: str) -> float | None:
    """A field of a target as a number; None if it has none."""
    given = target.fields.get(field)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise ConfigError(f"run {run.name!r}: target {target.name}: {field}: expected a number from 0, got {given!r}")
    return value


def counted_seconds(run: Run, outcomes: Sequence[RequestOutcome]) -> float:
    """How long the schedule ran after the warm-up: as planned, or to the last request if it was interrupted."""
    last = max(each.due_s for each in outcomes)
    return max((last if run.interrupted else max(run.duration_s, last)) - run.warm_up_s, 1e-9)


def is_flagged(outcome: RequestOutcome) -> bool:
    """Whether an answer does not claim to keep its accuracy target."""
    return outcome.degraded or outcome.guarantee is not AccuracyStatus.CERTIFIED


def error_code(outcome: RequestOutcome) -> str:
    """What a request without an answer is counted under."""
    return outcome.error or (f"http_{outcome.status}" if outcome.status else "unanswered")
