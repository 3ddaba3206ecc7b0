"""Builds the reply to an escalation from the results of its stages."""

from __future__ import annotations

from hawkvision.core.escalation_api import (
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
)
from hawkvision.datacenter.stages.ensemble import StageResult, VariantAnswer


def reply_of(
    results: tuple[StageResult, ...], request: EscalationRequest, total_ms: float, first_ms: float
) -> EscalationReply:
    """The last result's answer, with the time that all stages took.

    Args:
        results: of the stages that ran, in their order.
        request: what was asked for.
        total_ms: milliseconds from the request to this reply.
        first_ms: milliseconds from the request to its first reply.
    """
    final = results[-1]
    intermediate = request.intermediate
    return EscalationReply(
        prediction=final.kind.predict(final.output, request.top_k),
        model=final.stage.name,
        timing_ms=_timing(results, total_ms, first_ms),
        batch_size=max(answer.batch_size for result in results for answer in result.answers),
        score=None if intermediate is None else final.score(intermediate.score),
        passed_over=None if intermediate is None or len(results) == 1 else _passed_over(results, intermediate.score),
        complete=final.decided,
        fingerprint=_fingerprint(final, results),
    )


def _timing(results: tuple[StageResult, ...], total_ms: float, first_ms: float) -> EscalationTiming:
    # The times of one answer per stage: one member's wait may overlap another one's inference.
    slowest = [max(result.answers, key=_duration_ms) for result in results if result.answers]
    return EscalationTiming(
        decode=round(sum(answer.decode_ms for answer in slowest), 3),
        queue=round(sum(answer.queue_ms for answer in slowest), 3),
        infer=round(sum(answer.infer_ms for answer in slowest), 3),
        total=round(total_ms, 3),
        first=round(first_ms, 3),
    )


def _fingerprint(result: StageResult, results: tuple[StageResult, ...]) -> str | None:
    """The fingerprint of a stage as the replicas stated it whose answers it used.

    None if they made different statements, and for an undecided result, which no certificate covers.
    """
    if not result.decided:
        return None
    members = result.stage.members
    statements = {answer.statement for each in results for answer in each.answers if answer.variant in members}
    return result.stage.ran(statements.pop()) if len(statements) == 1 else None


def _duration_ms(answer: VariantAnswer) -> float:
    return answer.decode_ms + answer.queue_ms + answer.infer_ms


def _passed_over(results: tuple[StageResult, ...], score: str) -> IntermediateResult:
    first = results[0]
    return IntermediateResult(first.kind.predict(first.output, 1), first.score(score), _fingerprint(first, results))
