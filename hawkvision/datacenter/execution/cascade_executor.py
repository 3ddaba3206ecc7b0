"""Looking at a picture with one rung, or with a second one where the first is not sure enough.

    first rung ── score ≥ accept_score ──► its answer
        └─────── less ──► second rung ──► the second's answer, whatever its score

Both looks are asked for at once, under the same deadline; the second begins when the first has ended below the bar, in
the same visit to the replica if that has the models of both rungs. To begin it at once would answer sooner where it is
needed, and waste its work where it is not, which is what a middle rung is there to save.

Of members that have looked already, the second look asks only for what is missing: nothing if the views are the same,
the mirror image alone if the first look was at the upright picture. So ImageNet's middle rung, its committee of upright
views alone, is the first half of the committee's work, and none of it is done twice where the committee must answer.

A look ends as soon as its answer is settled: once the most probable class leads by more than all views that are still
missing could make up, for each could take at most 1 from that lead. The label is the whole rung's, whatever the missing
views would have said; the probabilities are those of the views that were seen. ImageNet's committee settles 79 % of
1,360 pictures with four of its six views (34 % of the 418 of which the edge is less than 82 % sure).

Who cannot wait for all of a rung may hear of what there is so far: the same average over those members and views that
have answered, an anytime answer (Dean and Boddy, "An Analysis of Time-Dependent Planning", AAAI 1988). Over the 272 of
1,360 ImageNet pictures of which the edge is least sure, the edge is right about 48.5 %, the committee about 63.2 %, and
its largest member's upright view, which comes first, about 61.0 %.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hawkvision.cascade.scores import Score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.execution.ensemble import (
    Bar,
    Errand,
    Look,
    Seen,
    VariantAnswer,
    errands_of,
    known_of,
    looked,
    views_of,
)

Parts: TypeAlias = AsyncGenerator[tuple[VariantAnswer, ...]]


class Variants(Protocol):
    """The way to the variants' replicas."""

    def ask(self, errands: Sequence[Errand], picture: bytes, expires_at: float, *, piecemeal: bool) -> Parts:
        """What the variants make of a picture, errand by errand; `expires_at` is `time.time()`'s. Closing ends it.

        No part belongs to two errands, and both views of a variant may come apart. `piecemeal` asks for parts as soon
        as they say something. What need not be looked at any more, for the errands say so, may come all the same.

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


Hearer: TypeAlias = Callable[[tuple[Look, ...]], None]
"""Told of looks of which the last is not settled."""


async def look_up_to_twice(
    variants: Variants,
    first: ServedRung,
    second: Second | None,
    picture: bytes,
    expires_at: float,
    hear: Hearer | None = None,
) -> tuple[Look, ...]:
    """One look or two; the last is the one that counts. `hear` is told meanwhile what there is so far.

    Raises:
        HawkVisionError: as `Variants.ask`. A failed second look fails the whole: the first was not sure enough.
    """
    bar = None if second is None else Bar(second.score, second.accept_score)
    errands = errands_of(first, None if second is None else second.rung, bar)
    async with aclosing(variants.ask(errands, picture, expires_at, piecemeal=hear is not None)) as parts:
        if second is None or bar is None:
            return (await _look(parts, first, None, hear),)
        seen = await _look(parts, first, None, None, whole=True)  # its score decides, and a settled class has none
        if seen.reaches(bar):
            return (seen,)
        known = known_of(second.rung, seen.members)
        so_far = looked(second.rung, known) if known else _borrowed(second.rung, seen)
        if so_far.settled:
            return (seen, so_far)
        if hear is not None:
            hear((seen, so_far))
        return (seen, await _look(parts, second.rung, seen, hear))


async def _look(
    parts: Parts, rung: ServedRung, before: Look | None, hear: Hearer | None, *, whole: bool = False
) -> Look:
    """The look that these parts come to; `whole` waits for all views, even if the class is settled."""
    known: dict[str, Seen] = {} if before is None else known_of(rung, before.members)
    asked: list[VariantAnswer] = []
    async for part in parts:
        asked.extend(part)
        for answer in part:
            known.setdefault(answer.variant, {})[answer.views] = answer.probabilities
        look = looked(rung, known, asked)
        if not look.missing or (look.settled and not whole):
            return look
        if hear is not None:
            hear((look,) if before is None else (before, look))
    raise AssertionError(f"{rung.name}: only {len(asked)} answers came, which do not settle it")


def _borrowed(rung: ServedRung, of: Look) -> Look:
    """Another rung's opinion, while there is none of the rung's own members."""
    return Look(rung, of.probabilities, {}, (), views_of(rung), settled=False)
