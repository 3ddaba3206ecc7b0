"""The decision about one image: accept the edge's answer, escalate, or report a missed deadline."""

from __future__ import annotations

from dataclasses import dataclass

from hawkvision.cascade.route import Route
from hawkvision.core.types import OnMiss, Reason


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target, because time, link or load forced it."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the reference stage; if `cutoff_ms` is given, stop waiting that many milliseconds from now."""

    reason: Reason
    cutoff_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass and the caller asked to be told (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss

ANSWER_MARGIN_MS = 5.0
"""The timer fires this long before the deadline. At one millisecond, as first designed, three of eight answers came
after the deadline on two busy cores: waking up and writing takes that long by itself."""


def decide(
    route: Route,
    score: float,
    *,
    slack_ms: float | None,
    reachable: bool,
    on_miss: OnMiss,
    threshold: float | None = None,
) -> Decision:
    """Accept the edge's answer or escalate.

    Args:
        route: of the request's target.
        score: the edge's score of this image (its confidence, if `route.by_confidence`).
        slack_ms: time left before the deadline; None without one.
        reachable: whether the datacenter is; whether it would answer in time is another question (`network`).
        on_miss: what the caller wants when the deadline would pass.
        threshold: in place of the route's, where a controller asks for more.
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
