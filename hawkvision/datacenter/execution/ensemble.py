"""What variants saw of an image, and what a stage makes of it: nothing is asked here, and nobody waits.

    VariantAnswer (a variant's views) ──► Look (a stage's opinion, perhaps not yet of all its views)

Whoever looks and whoever asked compute the same, so that both know when there is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from hawkvision.cascade.confidence.scores import ROUNDING, Probabilities, average, decided, score
from hawkvision.core.types import Score
from hawkvision.datacenter.catalog import ServedStage


class Views(StrEnum):
    """Which images of an image a variant looks at; of both, the probabilities are averaged."""

    UPRIGHT = "upright"
    MIRROR = "mirror"
    BOTH = "both"


_VIEWS: Final = {Views.UPRIGHT: 1, Views.MIRROR: 1, Views.BOTH: 2}


@dataclass(frozen=True, slots=True)
class VariantAnswer:
    """A variant's probabilities (1, classes) for these views, and where the time went, in milliseconds."""

    variant: str
    views: Views
    probabilities: Probabilities
    decode_ms: float
    queue_ms: float
    infer_ms: float
    batch_size: int
    stated: str = ""
    """What the process that ran it states of all of its variants (`hawkvision.models.fingerprints.statement`)."""


Seen: TypeAlias = dict[Views, Probabilities]
"""What a member saw in the upright image, in its mirror image, or in both at once."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The score that a stage's answer must reach to be the one that counts."""

    score: Score
    accept_score: float


@dataclass(frozen=True, slots=True)
class Errand:
    """One stage's look at an image, as it is asked for.

    It ends as soon as the class is settled; with a bar only with all views, because a settled class has no score, and
    if that reaches the bar, nobody looks any more.
    """

    stage: ServedStage
    wanted: Mapping[str, Views]
    """Of its members, what no errand before saw: not empty."""
    bar: Bar | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What a stage found: its probabilities (1, classes), what its members found, and the answers that were used."""

    stage: ServedStage
    probabilities: Probabilities
    members: Mapping[str, Seen]
    asked: tuple[VariantAnswer, ...]
    """None of members whose earlier answers sufficed."""
    missing: int = 0
    """Views that the stage wants, and no member has seen."""
    decided: bool = True
    """Whether the most probable class is the stage's, whatever they would show."""

    def score(self, kind: Score) -> float:
        """How sure the stage is: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])

    def reaches(self, bar: Bar) -> bool:
        """Whether it is as sure as that."""
        return self.score(bar.score) >= bar.accept_score


def errands_of(first: ServedStage, second: ServedStage | None = None, bar: Bar | None = None) -> tuple[Errand, ...]:
    """The look of the first stage, and if that does not reach the bar, the second's at what is still missing."""
    whole = Views.BOTH if first.mirrored else Views.UPRIGHT
    errands = (Errand(first, dict.fromkeys(first.members, whole), bar),)
    if second is None:
        return errands
    before = dict.fromkeys(first.members, (whole,))
    wanted = {m: views for m in second.members if (views := _missing(second, _counted(second, before.get(m, ()))))}
    return (*errands, Errand(second, wanted)) if wanted else errands


def known_of(stage: ServedStage, members: Mapping[str, Seen]) -> dict[str, Seen]:
    """What was seen before, by whatever stage's members, as far as it counts for this one."""
    known = {m: {v: members[m][v] for v in _counted(stage, members[m])} for m in stage.members if m in members}
    return {member: seen for member, seen in known.items() if seen}


def looked(
    stage: ServedStage, known: Mapping[str, Seen], asked: Sequence[VariantAnswer] = (), *, rounding: float = ROUNDING
) -> Look:
    """The stage's opinion from what is known, which is something; members count alike, whatever they have seen."""
    seen = [known[m] for m in stage.members if m in known]
    probabilities = average([_opinion(stage, its) for its in seen], stage.temperature)
    members = {member: dict(its) for member, its in known.items()}
    missing = views_of(stage) - sum(_count(stage, its) for its in seen)
    is_decided = decided(_total(stage, seen), missing, rounding)
    return Look(stage, probabilities, members, tuple(asked), missing, is_decided)


def enough(errand: Errand, seen: Mapping[str, Seen]) -> bool:
    """Whether nobody need look any more; who stops for a settled class allows for more rounding than who checks."""
    known = known_of(errand.stage, seen)
    if not known:
        return False
    look = looked(errand.stage, known, rounding=2.0 * ROUNDING)
    return look.decided if errand.bar is None else not look.missing and look.reaches(errand.bar)


def likely_enough(errand: Errand, seen: Mapping[str, Seen], more: Mapping[str, Views]) -> bool:
    """Whether the class would be settled once `more` is seen too, if that spoke for it as what is seen does.

    Then, and while nothing is seen, it pays to look at that first; else all that is left may as well be asked at once.
    """
    known = known_of(errand.stage, seen)
    if not known:
        return True
    views = [known[m] for m in errand.stage.members if m in known]
    total, count = _total(errand.stage, views)[0], sum(_count(errand.stage, its) for its in views)
    second, first = np.partition(total, -2)[-2:]
    then = count + sum(_VIEWS[its] for its in more.values())
    return float(first - second) / count * then > views_of(errand.stage) - then


def views_of(stage: ServedStage) -> int:
    """How many a stage wants of an image, over all its members."""
    return (2 if stage.mirrored else 1) * len(stage.members)


def _counted(stage: ServedStage, views: Collection[Views]) -> tuple[Views, ...]:
    """An average of both views does not tell what the upright image alone looked like."""
    return tuple(views) if stage.mirrored else tuple(v for v in views if v is Views.UPRIGHT)


def _missing(stage: ServedStage, seen: Collection[Views]) -> Views | None:
    """What a member must still look at."""
    if not stage.mirrored:
        return None if Views.UPRIGHT in seen else Views.UPRIGHT
    if Views.BOTH in seen or len(seen) == 2:
        return None
    return Views.MIRROR if Views.UPRIGHT in seen else Views.BOTH


def _count(stage: ServedStage, seen: Seen) -> int:
    """Views among what a member saw."""
    return sum(_VIEWS[its] for its in _counted(stage, seen))


def _total(stage: ServedStage, seen: Sequence[Seen]) -> Probabilities:
    """The sum over all views (1, classes).

    An opinion that counts members alike has the same first class once that is settled: it is what the sum would come
    to if each missing view showed what its member's other view did, or without one, what the others did on average.
    """
    total: Probabilities = np.sum([_count(stage, its) * _opinion(stage, its) for its in seen], axis=0, dtype=np.float32)
    return total


def _opinion(stage: ServedStage, seen: Seen) -> Probabilities:
    if not stage.mirrored:
        return seen[Views.UPRIGHT]
    if Views.BOTH in seen:
        return seen[Views.BOTH]
    views = [seen[view] for view in (Views.UPRIGHT, Views.MIRROR) if view in seen]
    return views[0] if len(views) == 1 else average(views)
