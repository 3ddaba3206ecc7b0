"""The decision about one image: accept the edge's answer, escalate, or report a missed deadline."""

from __future__ import annotations

from dataclasses import dataclass

from hawkvision.cascade.route import Route
from hawkvision.core.types import OnMiss, Reason


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target because of time, link or load."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the reference stage. Stop waiting after `cutoff_ms`, if that is given."""

    reason: Reason
    cutoff_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass, and the caller asked for an error (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss

ANSWER_MARGIN_MS = 5.0
"""The timer fires this long before the deadline, which leaves time to wake up and to write the answer."""


def decide(
    route: Route,
    score: float,
    *,
    slack_ms: float | None,
    reachable: bool,
    on_miss: OnMiss,
    threshold: float | None = None,
) -> Decision:
    """Accept the edge's answer, escalate, or report a miss.

    Args:
        route: of the request's target.
        score: the edge's score of this image (its confidence, if `route.by_confidence`).
        slack_ms: time left before the deadline; None without one.
        reachable: whether the datacenter is reachable; `network` estimates whether it would be on time.
        on_miss: what the caller wants when the deadline would pass.
        threshold: of a controller, in place of the route's.
    """
    if score >= (route.threshold if threshold is None else threshold):
        return Accept()
    reason = Reason.TARGET if route.direct else Reason.LOW_CONFIDENCE
    if not reachable:
        return Accept(degraded=True)
    if slack_ms is None or on_miss is OnMiss.WAIT:
        return Escalate(reason)
    if slack_ms < ANSWER_MARGIN_MS:
        return Miss() if on_miss is OnMiss.FAIL else Accept(degraded=True)
    return Escalate(reason, cutoff_ms=slack_ms - ANSWER_MARGIN_MS)
