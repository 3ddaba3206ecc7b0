"""Looking at an image with one stage, or with a second one where the first is not sure enough.

    first stage ── score ≥ accept_score ──► its answer
        └─────── less ──► second stage ──► the second's answer, whatever its score

Both looks are asked for at once, under the same deadline; the second begins when the first has ended below the bar, in
the same visit to the replica if that has the models of both stages. To begin it at once would answer sooner where it is
needed, and waste its work where it is not, which is what an intermediate stage is there to save.

Of members that have looked already, the second look asks only for what is missing: nothing if the views are the same,
the mirror image alone if the first look was at the upright image. So ImageNet's intermediate stage, its ensemble of
upright views alone, is the first half of the committee's work, and none of it is done twice where the ensemble must
answer.

A look ends as soon as its answer is settled: once the most probable class leads by more than all views that are still
missing could make up, for each could take at most 1 from that lead. The label is the whole stage's, whatever the
missing views would have said; the probabilities are those of the views that were seen. ImageNet's ensemble settles 79 %
of 1,360 images with four of its six views (34 % of the 418 of which the edge is less than 82 % sure).

Who cannot wait for all of a stage may hear of what there is so far: the same average over those members and views that
have answered, an anytime answer (Dean and Boddy, "An Analysis of Time-Dependent Planning", AAAI 1988). Over the 272 of
1,360 ImageNet images of which the edge is least sure, the edge is right about 48.5 %, the ensemble about 63.2 %, and
its largest member's upright view, which comes first, about 61.0 %.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hawkvision.core.types import Score
from hawkvision.datacenter.catalog import ServedStage
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

    def ask(self, errands: Sequence[Errand], image: bytes, expires_at: float, *, piecemeal: bool) -> Parts:
        """What the variants make of an image, errand by errand; `expires_at` is `time.time()`'s. Closing ends it.

        No part belongs to two errands, and both views of a variant may come apart. `piecemeal` asks for parts as soon
        as they say something. What need not be looked at any more, for the errands say so, may come all the same.

        Raises:
            RequestError: for an image that cannot be read.
            Overloaded, DeadlineMissed, NotReady: as their names say.
        """
        ...


@dataclass(frozen=True, slots=True)
class Second:
    """Who answers if the first stage's score of this kind is below `accept_score`."""

    stage: ServedStage
    score: Score
    accept_score: float


Hearer: TypeAlias = Callable[[tuple[Look, ...]], None]
"""Told of looks of which the last is not settled."""


async def run_two_stages(
    variants: Variants,
    first: ServedStage,
    second: Second | None,
    image: bytes,
    expires_at: float,
    hear: Hearer | None = None,
) -> tuple[Look, ...]:
    """One look or two; the last is the one that counts. `hear` is told meanwhile what there is so far.

    Raises:
        HawkVisionError: as `Variants.ask`. A failed second look fails the whole: the first was not sure enough.
    """
    bar = None if second is None else Bar(second.score, second.accept_score)
    errands = errands_of(first, None if second is None else second.stage, bar)
    async with aclosing(variants.ask(errands, image, expires_at, piecemeal=hear is not None)) as parts:
        if second is None or bar is None:
            return (await _look(parts, first, None, hear),)
        seen = await _look(parts, first, None, None, whole=True)  # its score decides, and a settled class has none
        if seen.reaches(bar):
            return (seen,)
        known = known_of(second.stage, seen.members)
        so_far = looked(second.stage, known) if known else _borrowed(second.stage, seen)
        if so_far.decided:
            return (seen, so_far)
        if hear is not None:
            hear((seen, so_far))
        return (seen, await _look(parts, second.stage, seen, hear))


async def _look(
    parts: Parts, stage: ServedStage, before: Look | None, hear: Hearer | None, *, whole: bool = False
) -> Look:
    """The look that these parts come to; `whole` waits for all views, even if the class is settled."""
    known: dict[str, Seen] = {} if before is None else known_of(stage, before.members)
    asked: list[VariantAnswer] = []
    async for part in parts:
        asked.extend(part)
        for answer in part:
            known.setdefault(answer.variant, {})[answer.views] = answer.probabilities
        look = looked(stage, known, asked)
        if not look.missing or (look.decided and not whole):
            return look
        if hear is not None:
            hear((look,) if before is None else (before, look))
    raise AssertionError(f"{stage.name}: only {len(asked)} answers came, which do not settle it")


def _borrowed(stage: ServedStage, of: Look) -> Look:
    """Another stage's opinion, while there is none of the stage's own members."""
    return Look(stage, of.probabilities, {}, (), views_of(stage), decided=False)
