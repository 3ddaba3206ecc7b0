"""Looking at a picture with one rung, or with a second one where the first is not sure enough.

    first rung ── score ≥ accept_score ──► its answer
        └─────── less ──► second rung ──► the second's answer, whatever its score

A look asks all members of a rung at once; the second look begins when the first has ended, under the same deadline.
Asking both rungs at once answers sooner where the second is needed, and wastes the second's work where it is not, which
is what a middle rung is there to save. So that is done only where one after the other would hardly be in time, by how
long such looks took lately (`Pace`), and nobody else is inside the tier, whom the wasted work would hold up.

Of members that have looked already, the second look asks only for what is missing: nothing if the views are the same,
the mirror image alone if the first look was at the upright picture. ImageNet's committee takes 36 ms of processor time
(three members, two views each, one thread), of which 8.5 ms for the largest member's upright view are saved.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Final, Protocol

from hawkvision.cascade.scores import Probabilities, Score, average, score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.replica import VariantAnswer, Views

NEWEST: Final = 0.1
"""What the newest look weighs in the mean."""
MARGIN: Final = 1.25
"""Looks may take so many times their mean to be expected in time."""


class Variants(Protocol):
    """The way to the variants' replicas."""

    async def classify(self, variant: str, picture: bytes, views: Views, expires_at: float) -> VariantAnswer:
        """One variant's answer; `expires_at` is `time.time()`'s. Cancelling cancels the work.

        Raises:
            RequestError: for a picture that cannot be read.
            Overloaded, DeadlineMissed, NotReady: as their names say.
        """
        ...


@dataclass(frozen=True, slots=True)
class Second:
    """Who answers if the first rung's score of this kind is below `accept_score`."""

    rung: ServedRung
    score: Score
    accept_score: float


@dataclass(frozen=True, slots=True)
class Look:
    """What a rung saw: its probabilities (1, classes), its members', and the answers that were asked for it."""

    rung: ServedRung
    probabilities: Probabilities
    members: Mapping[str, Probabilities]
    """By member, over the views that the rung takes."""
    asked: Mapping[str, VariantAnswer]
    """By member; none for those whose earlier answers sufficed."""
    hurried: bool = False
    """Whether the second look was asked for together with this one."""

    def score(self, kind: Score) -> float:
        """How sure the rung is: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])


class Pace:
    """How long looks took lately, of one tier: exponentially weighted means of those that had the tier's whole mind.

    Looks that were asked for at once hold each other up, and are not learned from.
    """

    def __init__(self) -> None:
        self._means_s: dict[tuple[str, str | None], float] = {}

    def saw(self, rung: ServedRung, after: ServedRung | None, seconds: float) -> None:
        """A look by `rung` took so long, which had another's look before it."""
        key = (rung.name, None if after is None else after.name)
        mean_s = self._means_s.get(key, seconds)
        self._means_s[key] = mean_s + NEWEST * (seconds - mean_s)

    @contextmanager
    def timing(self, rung: ServedRung, after: ServedRung | None) -> Iterator[None]:
        """See how long a look takes. One that the deadline breaks off counts if it has taken longer than usual."""
        started = time.perf_counter()
        try:
            yield
        except asyncio.CancelledError:
            seconds = time.perf_counter() - started
            if seconds > self._means_s.get((rung.name, None if after is None else after.name), 0.0):
                self.saw(rung, after, seconds)
            raise
        self.saw(rung, after, time.perf_counter() - started)

    def too_slow(self, first: ServedRung, second: ServedRung, left_s: float) -> bool:
        """Whether one look after the other would hardly be done in the time left; False while that is not known."""
        means_s = self._means_s.get((first.name, None)), self._means_s.get((second.name, first.name))
        return left_s < MARGIN * sum(mean_s if mean_s is not None else -math.inf for mean_s in means_s)


async def look_up_to_twice(
    variants: Variants,
    first: ServedRung,
    second: Second | None,
    picture: bytes,
    expires_at: float,
    *,
    pace: Pace,
    alone: bool = False,
) -> tuple[Look, ...]:
    """One look or two; the last is the one that counts. `alone`: nobody else is inside the tier.

    Raises:
        HawkVisionError: as `Variants.classify`. A failed second look fails the whole: the first was not sure enough.
    """
    ahead: asyncio.Future[dict[str, VariantAnswer]] | None = None
    if second is not None and alone and pace.too_slow(first, second.rung, expires_at - time.time()):
        ahead = asyncio.ensure_future(_ask(variants, _views(second.rung, first), picture, expires_at))
        ahead.add_done_callback(_heard)
    try:
        with nullcontext() if ahead is not None else pace.timing(first, None):
            asked = await _ask(variants, _views(first, None), picture, expires_at)
        seen = replace(_look(first, asked, None), hurried=ahead is not None)
        if second is None or seen.score(second.score) >= second.accept_score:
            return (seen,)
        if ahead is not None:
            return seen, _look(second.rung, await ahead, seen)
        with pace.timing(second.rung, first):
            again = await _ask(variants, _views(second.rung, first), picture, expires_at)
        return seen, _look(second.rung, again, seen)
    finally:
        if ahead is not None:
            ahead.cancel()


def _heard(ahead: asyncio.Future[dict[str, VariantAnswer]]) -> None:
    """Whether it failed is of no interest unless its answer is needed; asyncio would log what nobody asked for."""
    if not ahead.cancelled():
        ahead.exception()


def _look(rung: ServedRung, asked: Mapping[str, VariantAnswer], before: Look | None) -> Look:
    """What members say now, and said before where that was a view that the rung takes."""
    known = {member: answer.probabilities for member, answer in asked.items()}
    if before is not None:
        views = _views(rung, before.rung)
        for member in rung.members:
            if member not in views:
                known[member] = before.members[member]
            elif views[member] is Views.MIRROR:
                known[member] = average((before.members[member], known[member]))
    return Look(rung, average([known[member] for member in rung.members], rung.temperature), known, asked)


def _views(rung: ServedRung, before: ServedRung | None) -> dict[str, Views]:
    """What the rung's members must look at, if that other rung's have looked before; none whose answer is there."""
    missing: dict[str, Views] = {}
    for member in rung.members:
        if before is None or member not in before.members:
            missing[member] = Views.BOTH if rung.mirrored else Views.UPRIGHT
        elif rung.mirrored and not before.mirrored:
            missing[member] = Views.MIRROR
        elif before.mirrored and not rung.mirrored:
            missing[member] = Views.UPRIGHT
    return missing


async def _ask(
    variants: Variants, wanted: Mapping[str, Views], picture: bytes, expires_at: float
) -> dict[str, VariantAnswer]:
    """Every member's answer; the first failure cancels the others, whose work would be wasted."""
    tasks = [
        asyncio.ensure_future(variants.classify(member, picture, views, expires_at)) for member, views in wanted.items()
    ]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
