"""What variants compute of an image, and the stage result that follows.

    VariantAnswer (the views that a variant evaluated) ──► StageResult (a stage's output, perhaps incomplete)

Pure functions: nothing here sends, waits or runs a model. Replicas and the server use the same functions, so that both
know when a stage has enough views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.tasks.kind import Output, TaskKind


class Augmentation(StrEnum):
    """The views of an image that a variant evaluates; for both, the outputs are combined."""

    UPRIGHT = "upright"
    MIRROR = "mirror"
    BOTH = "both"


_VIEWS: Final = {Augmentation.UPRIGHT: 1, Augmentation.MIRROR: 1, Augmentation.BOTH: 2}


@dataclass(frozen=True, slots=True)
class VariantAnswer:
    """A variant's output for these views, and where the time went, in milliseconds."""

    variant: str
    augmentation: Augmentation
    output: Output
    decode_ms: float
    queue_ms: float
    infer_ms: float
    batch_size: int
    statement: str = ""
    """What the process that ran it states of all its variants (`hawkvision.models.fingerprints.statement`)."""


ViewOutputs: TypeAlias = dict[Augmentation, Output]
"""A member's outputs for the upright image, its mirror image, or both at once."""


@dataclass(frozen=True, slots=True)
class AcceptThreshold:
    """A stage's answer counts if this score of it is at least `accept_score`."""

    score: str
    accept_score: float


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The evaluation of an image by one stage.

    It ends as soon as the prediction is decided. With a threshold it ends only when all views are evaluated, because a
    decided prediction has no score; if the score reaches the threshold, no later stage runs.
    """

    stage: ServedStage
    wanted: Mapping[str, Augmentation]
    """The views per member that no earlier request covers; not empty."""
    threshold: AcceptThreshold | None = None


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage's output, those of its members, and the answers that this evaluation needed."""

    kind: TaskKind[Any]
    stage: ServedStage
    output: Output
    members: Mapping[str, ViewOutputs]
    answers: tuple[VariantAnswer, ...]
    """Without members whose earlier answers sufficed."""
    missing: int = 0
    """Views that the stage uses and that no member has evaluated."""
    decided: bool = True
    """Whether the missing views cannot change the prediction."""

    def score(self, name: str) -> float:
        """The stage's score of that name."""
        return self.kind.score(self.output, name)

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


def usable_views(stage: ServedStage, members: Mapping[str, ViewOutputs]) -> dict[str, ViewOutputs]:
    """What any stage's members have computed, as far as this stage can use it."""
    known = {m: {v: members[m][v] for v in _usable(stage, members[m])} for m in stage.members if m in members}
    return {member: views for member, views in known.items() if views}


def stage_result(
    kind: TaskKind[Any],
    stage: ServedStage,
    known: Mapping[str, ViewOutputs],
    answers: Sequence[VariantAnswer] = (),
    *,
    margin: float = 1.0,
) -> StageResult:
    """The stage's result from the known views, at least one; a member weighs the same, whatever views it evaluated.

    `margin` is that of `TaskKind.decided`.
    """
    names = [member for member in stage.members if member in known]
    views = [each for member in names for each in _single_views(stage, known[member])]
    outputs = [_member_output(kind, stage, known[member]) for member in names]
    output = outputs[0]
    if len(stage.members) > 1:
        output = kind.combine(outputs, stage.weights_of(names), stage.temperature)
    members = {member: dict(each) for member, each in known.items()}
    missing = view_count(stage) - len(views)
    return StageResult(kind, stage, output, members, tuple(answers), missing, kind.decided(views, missing, margin))


def enough(kind: TaskKind[Any], evaluation: EvaluationRequest, known: Mapping[str, ViewOutputs]) -> bool:
    """Whether the evaluation can end.

    A replica stops by this and the server checks the result, so this allows for twice the rounding.
    """
    usable = usable_views(evaluation.stage, known)
    if not usable:
        return False
    result = stage_result(kind, evaluation.stage, usable, margin=2.0)
    if evaluation.threshold is None:
        return result.decided
    return not result.missing and result.reaches(evaluation.threshold)


def likely_enough(
    kind: TaskKind[Any],
    evaluation: EvaluationRequest,
    known: Mapping[str, ViewOutputs],
    more: Mapping[str, Augmentation],
) -> bool:
    """Whether the prediction would be decided if `more` is as the known views are together; true if none is known.

    If so, it pays to evaluate `more` first. Otherwise all remaining views may run at once.
    """
    usable = usable_views(evaluation.stage, known)
    if not usable:
        return True
    views = [each for known_views in usable.values() for each in _single_views(evaluation.stage, known_views)]
    expected = kind.combine(views, (1.0,) * len(views), 1.0)
    then = [*views, *[expected] * sum(_VIEWS[each] for each in more.values())]
    return kind.decided(then, view_count(evaluation.stage) - len(then))


def view_count(stage: ServedStage) -> int:
    """The views of an image that a stage uses, over all its members."""
    return (2 if stage.mirrored else 1) * len(stage.members)


def _usable(stage: ServedStage, views: Collection[Augmentation]) -> tuple[Augmentation, ...]:
    """The views that a stage can use; a combination of both does not tell the upright image's output."""
    return tuple(views) if stage.mirrored else tuple(v for v in views if v is Augmentation.UPRIGHT)


def _missing_views(stage: ServedStage, known: Collection[Augmentation]) -> Augmentation | None:
    """The views that a member must still evaluate."""
    if not stage.mirrored:
        return None if Augmentation.UPRIGHT in known else Augmentation.UPRIGHT
    if Augmentation.BOTH in known or len(known) == 2:
        return None
    return Augmentation.MIRROR if Augmentation.UPRIGHT in known else Augmentation.BOTH


def _single_views(stage: ServedStage, views: ViewOutputs) -> list[Output]:
    """One output per evaluated view; that of both stands for each of them.

    Once they decide the prediction, the combination over members has the same one: it is what all views would give if
    each missing view equalled its member's other view, or without one, the combination of the other members.
    """
    return [views[each] for each in _usable(stage, views) for _ in range(_VIEWS[each])]


def _member_output(kind: TaskKind[Any], stage: ServedStage, views: ViewOutputs) -> Output:
    if not stage.mirrored:
        return views[Augmentation.UPRIGHT]
    if Augmentation.BOTH in views:
        return views[Augmentation.BOTH]
    known = [views[each] for each in (Augmentation.UPRIGHT, Augmentation.MIRROR) if each in views]
    return known[0] if len(known) == 1 else kind.combine(known, (1.0, 1.0), 1.0)
