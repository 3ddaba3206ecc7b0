"""The decision about one image: accept the edge's answer, escalate, or report a missed deadline."""

from __future__ import annotations

from dataclasses import dataclass

from hawkvision.cascade.route import Route
from hawkvision.core.clock import Deadline
from hawkvision.core.types import OnMiss, Reason


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target, because time, link or load forced it."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the reference stage; stop waiting at `cutoff`, if it is given."""

    reason: Reason
    cutoff: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass and the caller asked to be told (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss

ANSWER_MARGIN_MS = 5.0
"""The timer fires this long before the deadline. On busy cores, waking up and writing the answer take so long."""


def cutoff_before(deadline: Deadline) -> Deadline:
    """When to stop waiting, so that an answer leaves before the deadline."""
    return Deadline(deadline.at - ANSWER_MARGIN_MS * 1e-3)


def decide(
    route: Route,
    score: float,
    *,
    deadline: Deadline | None,
    now: float,
    reachable: bool,
    on_miss: OnMiss,
    threshold: float | None = None,
) -> Decision:
    """Accept the edge's answer or escalate.

    Args:
        route: of the request's target.
        score: the edge's score of this image (its confidence, if `route.by_confidence`).
        deadline: of the request; None without one.
        now: the time, on the deadline's clock.
        reachable: whether the datacenter is; whether it would answer in time is another question (`network`).
        on_miss: what the caller wants when the deadline would pass.
        threshold: in place of the route's, where a controller asks for more.
    """
    if score >= (route.threshold if threshold is None else threshold):
        return Accept()
    reason = Reason.TARGET if route.direct else Reason.LOW_CONFIDENCE
    if not reachable:
        return Accept(degraded=True)
    if deadline is None or on_miss is OnMiss.WAIT:
        return Escalate(reason)
    cutoff = cutoff_before(deadline)
    if now > cutoff.at:
        return Miss() if on_miss is OnMiss.FAIL else Accept(degraded=True)
    return Escalate(reason, cutoff)
