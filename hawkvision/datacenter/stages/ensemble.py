"""What variants compute of an image, and the stage result that follows.

    VariantAnswer (the views that a variant evaluated) ──► StageResult (a stage's probabilities, perhaps incomplete)

Pure functions: nothing here sends, waits or runs a model. Replicas and the server use the same functions, so that both
know when a stage has enough views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from hawkvision.core.types import Score
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.tasks.class_scores import ROUNDING, Probabilities, average, decided, score


class Augmentation(StrEnum):
    """The views of an image that a variant evaluates; for both, the probabilities are averaged."""

    UPRIGHT = "upright"
    MIRROR = "mirror"
    BOTH = "both"


_VIEWS: Final = {Augmentation.UPRIGHT: 1, Augmentation.MIRROR: 1, Augmentation.BOTH: 2}


@dataclass(frozen=True, slots=True)
class VariantAnswer:
    """A variant's probabilities (1, classes) for these views, and where the time went, in milliseconds."""

    variant: str
    augmentation: Augmentation
    probabilities: Probabilities
    decode_ms: float
    queue_ms: float
    infer_ms: float
    batch_size: int
    statement: str = ""
    """What the process that ran it states of all its variants (`hawkvision.models.fingerprints.statement`)."""


ViewProbabilities: TypeAlias = dict[Augmentation, Probabilities]
"""A member's probabilities (1, classes) for the upright image, its mirror image, or both at once."""


@dataclass(frozen=True, slots=True)
class AcceptThreshold:
    """A stage's answer counts if its score of this kind is at least `accept_score`."""

    score: Score
    accept_score: float


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The evaluation of an image by one stage.

    It ends as soon as the class is decided. With a threshold it ends only when all views are evaluated, because a
    decided class has no score; if the score reaches the threshold, no later stage runs.
    """

    stage: ServedStage
    wanted: Mapping[str, Augmentation]
    """The views per member that no earlier request covers; not empty."""
    threshold: AcceptThreshold | None = None


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage's probabilities (1, classes), those of its members, and the answers that this evaluation needed."""

    stage: ServedStage
    probabilities: Probabilities
    members: Mapping[str, ViewProbabilities]
    answers: tuple[VariantAnswer, ...]
    """Without members whose earlier answers sufficed."""
    missing: int = 0
    """Views that the stage uses and that no member has evaluated."""
    decided: bool = True
    """Whether the missing views cannot change the most probable class."""

    def score(self, kind: Score) -> float:
        """The stage's score: a float32 number, widened."""
        return float(score(self.probabilities, kind)[0])

    def reaches(self, threshold: AcceptThreshold) -> bool:
        """Whether the score is at least the threshold."""
        return self.score(threshold.score) >= threshold.accept_score


def evaluation_requests(
    first: ServedStage, second: ServedStage | None = None, threshold: AcceptThreshold | None = None
) -> tuple[EvaluationRequest, ...]:
    """The first stage's evaluation, and the second stage's for the views that the first does not cover.

    `threshold` is the first stage's.
    """
    whole = Augmentation.BOTH if first.mirrored else Augmentation.UPRIGHT
    requests = (EvaluationRequest(first, dict.fromkeys(first.members, whole), threshold),)
    if second is None:
        return requests
    before = dict.fromkeys(first.members, (whole,))
    wanted = {
        member: views
        for member in second.members
        if (views := _missing_views(second, _usable(second, before.get(member, ()))))
    }
    return (*requests, EvaluationRequest(second, wanted)) if wanted else requests


def usable_views(stage: ServedStage, members: Mapping[str, ViewProbabilities]) -> dict[str, ViewProbabilities]:
    """What any stage's members have computed, as far as this stage can use it."""
    known = {m: {v: members[m][v] for v in _usable(stage, members[m])} for m in stage.members if m in members}
    return {member: views for member, views in known.items() if views}


def stage_result(
    stage: ServedStage,
    known: Mapping[str, ViewProbabilities],
    answers: Sequence[VariantAnswer] = (),
    *,
    rounding: float = ROUNDING,
) -> StageResult:
    """The stage's result from the known views, at least one; members weigh the same, whatever views they evaluated."""
    views = [known[member] for member in stage.members if member in known]
    probabilities = average([_member_mean(stage, each) for each in views], stage.temperature)
    members = {member: dict(each) for member, each in known.items()}
    missing = view_count(stage) - sum(_count(stage, each) for each in views)
    is_decided = decided(_view_sum(stage, views), missing, rounding)
    return StageResult(stage, probabilities, members, tuple(answers), missing, is_decided)


def enough(evaluation: EvaluationRequest, known: Mapping[str, ViewProbabilities]) -> bool:
    """Whether the evaluation can end.

    A replica stops by this and the server checks the result, so this allows for twice the rounding.
    """
    usable = usable_views(evaluation.stage, known)
    if not usable:
        return False
    result = stage_result(evaluation.stage, usable, rounding=2.0 * ROUNDING)
    if evaluation.threshold is None:
        return result.decided
    return not result.missing and result.reaches(evaluation.threshold)


def likely_enough(
    evaluation: EvaluationRequest, known: Mapping[str, ViewProbabilities], more: Mapping[str, Augmentation]
) -> bool:
    """Whether the class would be decided if `more` favours it as the known views do; true if none is known.

    If so, it pays to evaluate `more` first. Otherwise all remaining views may run at once.
    """
    usable = usable_views(evaluation.stage, known)
    if not usable:
        return True
    views = [usable[member] for member in evaluation.stage.members if member in usable]
    total, count = _view_sum(evaluation.stage, views)[0], sum(_count(evaluation.stage, each) for each in views)
    second, first = np.partition(total, -2)[-2:]
    then = count + sum(_VIEWS[each] for each in more.values())
    return float(first - second) / count * then > view_count(evaluation.stage) - then


def view_count(stage: ServedStage) -> int:
    """The views of an image that a stage uses, over all its members."""
    return (2 if stage.mirrored else 1) * len(stage.members)


def _usable(stage: ServedStage, views: Collection[Augmentation]) -> tuple[Augmentation, ...]:
    """The views that a stage can use; an average of both does not tell the upright image's probabilities."""
    return tuple(views) if stage.mirrored else tuple(v for v in views if v is Augmentation.UPRIGHT)


def _missing_views(stage: ServedStage, known: Collection[Augmentation]) -> Augmentation | None:
    """The views that a member must still evaluate."""
    if not stage.mirrored:
        return None if Augmentation.UPRIGHT in known else Augmentation.UPRIGHT
    if Augmentation.BOTH in known or len(known) == 2:
        return None
    return Augmentation.MIRROR if Augmentation.UPRIGHT in known else Augmentation.BOTH


def _count(stage: ServedStage, views: ViewProbabilities) -> int:
    return sum(_VIEWS[each] for each in _usable(stage, views))


def _view_sum(stage: ServedStage, members: Sequence[ViewProbabilities]) -> Probabilities:
    """The sum over all known views (1, classes).

    Once this sum decides the class, the mean over members has the same first class: the mean is what the sum would
    become if each missing view equalled its member's other view, or without one, the mean of the other members.
    """
    total: Probabilities = np.sum(
        [_count(stage, views) * _member_mean(stage, views) for views in members], axis=0, dtype=np.float32
    )
    return total


def _member_mean(stage: ServedStage, views: ViewProbabilities) -> Probabilities:
    if not stage.mirrored:
        return views[Augmentation.UPRIGHT]
    if Augmentation.BOTH in views:
        return views[Augmentation.BOTH]
    known = [views[each] for each in (Augmentation.UPRIGHT, Augmentation.MIRROR) if each in views]
    return known[0] if len(known) == 1 else average(known)
