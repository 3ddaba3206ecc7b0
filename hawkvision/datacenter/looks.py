"""Looking at a picture with one rung, or with a second one where the first is not sure enough.

    first rung ── score ≥ accept_score ──► its answer
        └─────── less ──► second rung ──► the second's answer, whatever its score

A look asks all members of a rung at once; the second look begins when the first has ended, under the same deadline.
Asking both rungs at once would answer sooner where the second is needed, and waste the second's work where it is not,
which is what a middle rung is there to save.

Of members that have looked already, the second look asks only for what is missing: nothing if the views are the same,
the mirror image alone if the first look was at the upright picture. ImageNet's committee takes 36 ms of processor time
(three members, two views each, one thread), of which 8.5 ms for the largest member's upright view are saved.

Who cannot wait for all of a rung may hear of what there is so far: the same average over those members and views that
have answered, an anytime answer (Dean and Boddy, "An Analysis of Time-Dependent Planning", AAAI 1988). Over the 272 of
1,360 ImageNet pictures of which the edge is least sure, the edge is right about 48.5 %, the committee about 63.2 %, and
its largest member's upright view, which comes first, about 61.0 %.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hawkvision.cascade.scores import Probabilities, Score, average, score
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.replica import VariantAnswer, Views


class Variants(Protocol):
    """The way to the variants' replicas."""

    def ask(
        self, wanted: Mapping[str, Views], picture: bytes, expires_at: float, *, piecemeal: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """What each of a rung's variants makes of its views; `expires_at` is `time.time()`'s. Closing ends the work.

        `piecemeal` asks for what is ready as soon as it says something, with both views of a variant apart; else all
        answers come at once.

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


Seen: TypeAlias = dict[Views, Probabilities]
"""What a member saw in the upright picture, in its mirror image, or in both at once."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a rung saw: its probabilities (1, classes), what its members saw, and the answers that were asked for it."""

    rung: ServedRung
    probabilities: Probabilities
    members: Mapping[str, Seen]
    asked: tuple[VariantAnswer, ...]
    """None of members whose earlier answers sufficed."""
    complete: bool = True
    """Whether all members saw all that the rung wants of them."""

    def score(self, kind: Score) -> float:
        """How sure the rung is: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])


Hearer: TypeAlias = Callable[[tuple[Look, ...]], None]
"""Told of looks of which the last is not complete."""


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
    # What part of a first look says is not asked for where only its whole decides who answers.
    seen = await _look(variants, first, picture, expires_at, None, hear if second is None else None)
    if second is None or seen.score(second.score) >= second.accept_score:
        return (seen,)
    if hear is not None:
        known = _known(second.rung, seen)
        so_far = _looked(second.rung, known, ()) if known else Look(second.rung, seen.probabilities, {}, (), False)
        if not so_far.complete:
            hear((seen, so_far))
    return (seen, await _look(variants, second.rung, picture, expires_at, seen, hear))


async def _look(
    variants: Variants,
    rung: ServedRung,
    picture: bytes,
    expires_at: float,
    before: Look | None,
    hear: Hearer | None,
) -> Look:
    known = {} if before is None else _known(rung, before)
    wanted = {m: views for m in rung.members if (views := _missing(rung, known.get(m, {}))) is not None}
    asked: list[VariantAnswer] = []
    if wanted:
        asking = variants.ask(wanted, picture, expires_at, piecemeal=hear is not None)
        async with aclosing(asking) as parts:
            async for part in parts:
                asked.extend(part)
                for answer in part:
                    known.setdefault(answer.variant, {})[answer.views] = answer.probabilities
                if hear is not None and not (look := _looked(rung, known, asked)).complete:
                    hear((look,) if before is None else (before, look))
    look = _looked(rung, known, asked)
    assert look.complete, f"{rung.name}: {sorted(wanted)} were asked, and not all have answered"
    return look


def _known(rung: ServedRung, before: Look) -> dict[str, Seen]:
    """What an earlier look says of this rung's members, of views that the rung wants."""
    known = {m: dict(before.members[m]) for m in rung.members if m in before.members}
    # An average of both views does not tell what the upright picture alone looked like.
    return known if rung.mirrored else {m: seen for m, seen in known.items() if Views.UPRIGHT in seen}


def _missing(rung: ServedRung, seen: Seen) -> Views | None:
    """What a member must still look at."""
    if not rung.mirrored:
        return None if Views.UPRIGHT in seen else Views.UPRIGHT
    if Views.BOTH in seen or len(seen) == 2:
        return None
    return Views.MIRROR if Views.UPRIGHT in seen else Views.BOTH


def _looked(
    rung: ServedRung, known: Mapping[str, Seen], asked: tuple[VariantAnswer, ...] | list[VariantAnswer]
) -> Look:
    """The rung's opinion from what is known, which is something; members count alike, whatever they have seen."""
    opinions = [_opinion(rung, known[m]) for m in rung.members if m in known]
    complete = all(_missing(rung, known.get(m, {})) is None for m in rung.members)
    members = {member: dict(seen) for member, seen in known.items()}
    return Look(rung, average(opinions, rung.temperature), members, tuple(asked), complete)


def _opinion(rung: ServedRung, seen: Seen) -> Probabilities:
    if not rung.mirrored:
        return seen[Views.UPRIGHT]
    if Views.BOTH in seen:
        return seen[Views.BOTH]
    views = [seen[view] for view in (Views.UPRIGHT, Views.MIRROR) if view in seen]
    return views[0] if len(views) == 1 else average(views)
