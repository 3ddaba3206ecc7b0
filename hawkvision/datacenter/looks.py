"""Looking at a picture with one rung, or with a second one where the first is not sure enough.

    first rung ── score ≥ accept_score ──► its answer
        └─────── less ──► second rung ──► the second's answer, whatever its score

All members of a rung are asked in one call; the second look begins when the first has ended, under the same deadline.
Asking both rungs at once would answer sooner where the second is needed, and waste the second's work where it is not,
which is what a middle rung is there to save.

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

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from hawkvision.cascade.scores import Probabilities, Score, average, score, settled
from hawkvision.datacenter.catalog import ServedRung
from hawkvision.datacenter.replica import VariantAnswer, Views

NOTHING: Final = np.zeros((1, 1), np.float32)
"""What was seen before a first look, of however many classes."""


class Variants(Protocol):
    """The way to the variants' replicas."""

    def ask(
        self,
        wanted: Mapping[str, Views],
        picture: bytes,
        expires_at: float,
        *,
        piecemeal: bool,
        so_far: Probabilities | None,
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """What each of a rung's variants makes of its views; `expires_at` is `time.time()`'s. Closing ends the work.

        `piecemeal` asks for what is ready as soon as it says something; else all answers come at once. Both views of a
        variant may come apart. `so_far` is the sum (1, classes) of what was seen before of the rung's views: once the
        first class is settled, no more views are asked for. None asks for all of them.

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
    missing: int = 0
    """Views that the rung wants, and no member has seen."""
    settled: bool = True
    """Whether the most probable class is the rung's, whatever they would show."""

    def score(self, kind: Score) -> float:
        """How sure the rung is: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])


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
    if second is None:
        return (await _look(variants, first, picture, expires_at, None, hear),)
    # All of it: its score decides who answers, and a settled class has none.
    seen = await _look(variants, first, picture, expires_at, None, None, whole=True)
    if seen.score(second.score) >= second.accept_score:
        return (seen,)
    if hear is not None:
        known = _known(second.rung, seen)
        so_far = _looked(second.rung, known, ()) if known else _borrowed(second.rung, seen)
        if not so_far.settled:
            hear((seen, so_far))
    return (seen, await _look(variants, second.rung, picture, expires_at, seen, hear))


async def _look(
    variants: Variants,
    rung: ServedRung,
    picture: bytes,
    expires_at: float,
    before: Look | None,
    hear: Hearer | None,
    *,
    whole: bool = False,
) -> Look:
    known = {} if before is None else _known(rung, before)
    if known and (look := _looked(rung, known, ())).settled:
        return look
    wanted = {m: views for m in rung.members if (views := _missing(rung, known.get(m, {}))) is not None}
    asked: list[VariantAnswer] = []
    so_far = None if whole else _total(rung, [*known.values()]) if known else NOTHING
    asking = variants.ask(wanted, picture, expires_at, piecemeal=hear is not None, so_far=so_far)
    async with aclosing(asking) as parts:
        async for part in parts:
            asked.extend(part)
            for answer in part:
                known.setdefault(answer.variant, {})[answer.views] = answer.probabilities
            look = _looked(rung, known, asked)
            if look.settled:
                return look
            if hear is not None:
                hear((look,) if before is None else (before, look))
    raise AssertionError(f"{rung.name}: {sorted(wanted)} were asked, and not all have answered")


def _views(rung: ServedRung) -> int:
    """How many a rung wants of a picture, over all its members."""
    return (2 if rung.mirrored else 1) * len(rung.members)


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
    seen = [known[m] for m in rung.members if m in known]
    probabilities = average([_opinion(rung, its) for its in seen], rung.temperature)
    members = {member: dict(its) for member, its in known.items()}
    missing = _views(rung) - sum(_count(rung, its) for its in seen)
    return Look(rung, probabilities, members, tuple(asked), missing, settled(_total(rung, seen), missing))


def _borrowed(rung: ServedRung, of: Look) -> Look:
    """Another rung's opinion, while there is none of the rung's own members."""
    return Look(rung, of.probabilities, {}, (), _views(rung), settled=False)


def _count(rung: ServedRung, seen: Seen) -> int:
    """Views among what a member saw."""
    if not rung.mirrored:
        return 1
    return 2 if Views.BOTH in seen else len(seen)


def _total(rung: ServedRung, seen: Sequence[Seen]) -> Probabilities:
    """The sum over all views (1, classes).

    An opinion that counts members alike has the same first class once that is settled: it is what the sum would come
    to if each missing view showed what its member's other view did, or without one, what the others did on average.
    """
    total: Probabilities = np.sum([_count(rung, its) * _opinion(rung, its) for its in seen], axis=0, dtype=np.float32)
    return total


def _opinion(rung: ServedRung, seen: Seen) -> Probabilities:
    if not rung.mirrored:
        return seen[Views.UPRIGHT]
    if Views.BOTH in seen:
        return seen[Views.BOTH]
    views = [seen[view] for view in (Views.UPRIGHT, Views.MIRROR) if view in seen]
    return views[0] if len(views) == 1 else average(views)
