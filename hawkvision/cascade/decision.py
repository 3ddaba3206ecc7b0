"""The decision about one image: accept the edge's answer, escalate, or report a missed deadline."""

from __future__ import annotations

from dataclasses import dataclass

from hawkvision.cascade.route import Route
from hawkvision.core.clock import Deadline
from hawkvision.core.types import OnMiss, Reason


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target because of time, link or load."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the reference stage; stop waiting at `cutoff`, if it is given."""

    reason: Reason
    cutoff: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass, and the caller asked for an error (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss


def decide(
    route: Route,
    score: float,
    *,
    cutoff: Deadline | None,
    now: float,
    reachable: bool,
    on_miss: OnMiss,
    suspended: bool = False,
) -> Decision:
    """Accept the edge's answer, escalate, or report a miss.

    Args:
        route: of the request's target.
        score: the edge's score of this image (its confidence, if `route.by_confidence`).
        cutoff: when the wait for a reply would end (`Cutoffs`); None without a deadline.
        now: the time, on the cutoff's clock.
        reachable: whether the datacenter is reachable; `network` estimates whether it would be on time.
        on_miss: what the caller wants when the deadline would pass.
        suspended: whether the reference stage must answer whatever the score, because an alarm stands.
    """
    if score >= route.threshold and not suspended:
        return Accept()
    reason = Reason.TARGET if route.direct else Reason.SUSPENDED if suspended else Reason.LOW_CONFIDENCE
    if not reachable:
        return Accept(degraded=True)
    if cutoff is None or on_miss is OnMiss.WAIT:
        return Escalate(reason)
    if now > cutoff.at:
        return Miss() if on_miss is OnMiss.FAIL else Accept(degraded=True)
    return Escalate(reason, cutoff)
