"""Looking at a picture with one rung, or with a second one where the first is not sure enough.

    first rung ── score ≥ accept_score ──► its answer
        └─────── less ──► second rung ──► the second's answer, whatever its score

A look asks all members of a rung at once; the second look begins when the first has ended, under the same deadline.
Asking both rungs at once would answer sooner where the second is needed, and waste the second's work where it is not,
which is what a middle rung is there to save.

Of members that have looked already, the second look asks only for what is missing: nothing if the views are the same,
the mirror image alone if the first look was at the upright picture. ImageNet's committee takes 36 ms of processor time
(three members, two views each, one thread), of which 8.5 ms for the largest member's upright view are saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hawkvision.cascade.scores import Probabilities, Score, average, score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.replica import VariantAnswer, Views


class Variants(Protocol):
    """The way to the variants' replicas."""

    async def classify(
        self, variant: str, picture: bytes, views: Views, expires_at: float, *, alone: bool = True
    ) -> VariantAnswer:
        """One variant's answer; `expires_at` is `time.time()`'s. Cancelling cancels the work.

        `alone` says that no other variant looks at the picture meanwhile, so that this one may take more cores.

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

    def score(self, kind: Score) -> float:
        """How sure the rung is: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])


async def look_up_to_twice(
    variants: Variants, first: ServedRung, second: Second | None, picture: bytes, expires_at: float
) -> tuple[Look, ...]:
    """One look or two; the last is the one that counts.

    Raises:
        HawkVisionError: as `Variants.classify`. A failed second look fails the whole: the first was not sure enough.
    """
    seen = await _look(variants, first, picture, expires_at, None)
    if second is None or seen.score(second.score) >= second.accept_score:
        return (seen,)
    return (seen, await _look(variants, second.rung, picture, expires_at, seen))


async def _look(variants: Variants, rung: ServedRung, picture: bytes, expires_at: float, before: Look | None) -> Look:
    wanted: dict[str, Views] = {}
    known: dict[str, Probabilities] = {}
    for member in rung.members:
        missing = _missing(rung, member, before)
        if missing is not None:
            wanted[member] = missing
        if before is not None and missing in (None, Views.MIRROR):
            known[member] = before.members[member]
    asked = await _ask(variants, wanted, picture, expires_at)
    for member, answer in asked.items():
        upright = known.get(member)
        known[member] = answer.probabilities if upright is None else average((upright, answer.probabilities))
    probabilities = average([known[member] for member in rung.members], rung.temperature)
    return Look(rung, probabilities, known, asked)


def _missing(rung: ServedRung, member: str, before: Look | None) -> Views | None:
    """What a member must still look at; None if its earlier answer is the very one that the rung needs."""
    if before is not None and member in before.members:
        if before.rung.mirrored == rung.mirrored:
            return None
        if rung.mirrored:
            return Views.MIRROR
    return Views.BOTH if rung.mirrored else Views.UPRIGHT


async def _ask(
    variants: Variants, wanted: Mapping[str, Views], picture: bytes, expires_at: float
) -> dict[str, VariantAnswer]:
    """Every member's answer; the first failure cancels the others, whose work would be wasted."""
    alone = len(wanted) == 1
    tasks = [
        asyncio.ensure_future(variants.classify(member, picture, views, expires_at, alone=alone))
        for member, views in wanted.items()
    ]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
