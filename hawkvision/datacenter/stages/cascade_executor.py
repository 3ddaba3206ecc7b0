"""Runs one stage on an image, or a second one if the first is not confident enough.

    first stage ── score ≥ accept_score ──► its answer
        └─────── less ──► second stage ──► its answer, whatever its score

Both stages are requested at once, under the same deadline. The second runs only after the first has scored below the
threshold, in the same replica call if that replica holds the models of both. The second stage requests only the views
that the first has not evaluated.

A stage ends as soon as its prediction is *decided*: the missing views cannot change it (`TaskKind.decided`). It is then
the whole stage's; how sure it is follows from the evaluated views.

A caller that cannot wait for a whole stage can have partial results: the same combination of the views so far, an
anytime answer (Dean and Boddy, "An Analysis of Time-Dependent Planning", AAAI 1988).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

from hawkvision.core.clock import Deadline
from hawkvision.datacenter.stages.catalog import ServedStage
from hawkvision.datacenter.stages.ensemble import (
    AcceptThreshold,
    EvaluationRequest,
    StageResult,
    VariantAnswer,
    ViewOutputs,
    evaluation_requests,
    stage_result,
    usable_views,
    view_count,
)
from hawkvision.tasks.kind import TaskKind

Parts: TypeAlias = AsyncGenerator[tuple[VariantAnswer, ...]]


class Variants(Protocol):
    """Access to the variants' replicas."""

    def ask(
        self, evaluations: Sequence[EvaluationRequest], image: bytes, deadline: Deadline | None, *, streaming: bool
    ) -> Parts:
        """The variants' answers to an image, one evaluation after the other; closing the generator ends the work.

        A part never belongs to two evaluations, and the two views of a variant may come in separate parts. Answers
        that are no longer needed may still come.

        Args:
            evaluations: what to run, in order.
            image: encoded.
            deadline: on `MonotonicClock`; it crosses to other processes as the time that is left.
            streaming: whether parts come as soon as each is useful.

        Raises:
            RequestError: for an image that cannot be read.
            Overloaded, DeadlineMissed, NotReady: as their names say.
        """
        ...


SecondStage: TypeAlias = tuple[ServedStage, AcceptThreshold]
"""The stage that answers if the first stage does not reach the threshold."""
OnPartialResult: TypeAlias = Callable[[tuple[StageResult, ...]], None]
"""Takes the results so far; the last is not decided yet."""


async def run_two_stages(
    variants: Variants,
    kind: TaskKind[Any],
    first: ServedStage,
    second: SecondStage | None,
    image: bytes,
    deadline: Deadline | None,
    on_partial: OnPartialResult | None = None,
) -> tuple[StageResult, ...]:
    """The results of one stage or two; the last one counts.

    `on_partial` gets the results so far in between.

    Raises:
        HawkVisionError: as `Variants.ask`. If the second stage fails, so does the request, because the first was not
            confident enough.
    """
    other, threshold = (None, None) if second is None else second
    evaluations = evaluation_requests(first, other, threshold)
    async with aclosing(variants.ask(evaluations, image, deadline, streaming=on_partial is not None)) as parts:
        if other is None or threshold is None:
            return (await _run_stage(parts, kind, first, None, on_partial),)
        # All views: the first stage's score is compared, and a decided prediction has no score.
        result = await _run_stage(parts, kind, first, None, None, all_views=True)
        if result.reaches(threshold):
            return (result,)
        known = usable_views(other, result.members)
        so_far = stage_result(kind, other, known) if known else _borrowed(other, result)
        if so_far.decided:
            return (result, so_far)
        if on_partial is not None:
            on_partial((result, so_far))
        return (result, await _run_stage(parts, kind, other, result, on_partial))


async def _run_stage(
    parts: Parts,
    kind: TaskKind[Any],
    stage: ServedStage,
    before: StageResult | None,
    on_partial: OnPartialResult | None,
    *,
    all_views: bool = False,
) -> StageResult:
    """The stage's result from these parts; `all_views` waits for all of them even if they decide before."""
    known: dict[str, ViewOutputs] = {} if before is None else usable_views(stage, before.members)
    answers: list[VariantAnswer] = []
    async for part in parts:
        answers.extend(part)
        for answer in part:
            known.setdefault(answer.variant, {})[answer.augmentation] = answer.output
        result = stage_result(kind, stage, known, answers)
        if not result.missing or (result.decided and not all_views):
            return result
        if on_partial is not None:
            on_partial((result,) if before is None else (before, result))
    raise AssertionError(f"{stage.name}: the {len(answers)} answers that came do not decide its prediction")


def _borrowed(stage: ServedStage, other: StageResult) -> StageResult:
    """Another stage's output, until a member of this stage has answered."""
    return StageResult(other.kind, stage, other.output, {}, (), view_count(stage), decided=False)
