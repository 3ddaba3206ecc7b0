"""Decodes the datacenter's replies and checks them before they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hawkvision.core import errors
from hawkvision.core.errors import MALFORMED, EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.serving import decode_reply

CALLERS_FAULT: Final = {kind.code: kind for kind in (errors.BadImage, errors.UnsupportedMedia)}
"""Faults of the image itself. The datacenter's own limits (413, 429) are not the caller's fault."""


class ListingRefused(EscalationFailed):
    """The datacenter answers, but does not say what was asked: it is loading, or serves another task."""


class _ErrorBody(msgspec.Struct):
    error: str = ""
    code: str = ""


_error_decoder = msgspec.json.Decoder(_ErrorBody)


@dataclass(frozen=True, slots=True)
class Escalated:
    """The datacenter's answer and the whole round trip in milliseconds."""

    reply: EscalationReply
    round_trip_ms: float
    edge: str | None = None
    """The edge's model, if the reply's prediction is that of both tiers together."""

    @property
    def until_first_ms(self) -> float:
        """Milliseconds until the first answer, which may not yet include all members of the ensemble."""
        first_ms = self.reply.timing_ms.first
        rest_ms = 0.0 if first_ms is None else max(0.0, self.datacenter_ms - first_ms)
        return self.round_trip_ms - rest_ms

    @property
    def datacenter_ms(self) -> float:
        """Milliseconds in the datacenter tier, as it states them; at most the round trip."""
        return min(self.reply.timing_ms.total, self.round_trip_ms)


def checked(payload: bytes, request: EscalationRequest, kind: TaskKind[Any], url: str) -> EscalationReply:
    """Decode and check the reply to a request.

    Args:
        payload: body of a reply with status 200.
        request: what was asked.
        kind: of the task.
        url: the datacenter, for errors.

    Raises:
        EscalationFailed: if it is malformed, contains impossible values, or names a stage that was not asked.
    """
    try:
        reply = decode_reply(kind, payload, request.top_k)
    except (*MALFORMED, ValueError) as error:
        raise EscalationFailed(f"{url} sent a malformed reply: {error}") from None
    sound = reply.passed_over is None or 0.0 <= reply.passed_over.score <= 1.0
    timing = reply.timing_ms
    sound = sound and min(timing.decode, timing.queue, timing.infer, timing.total, timing.first or 0.0) >= 0.0
    sound = sound and 0.0 <= reply.received_fraction <= 1.0 and (reply.quality is None or 0 < reply.quality <= 100)
    if not sound or not (reply.complete or request.progressive) or not _answers(reply, request):
        raise EscalationFailed(f"{url} sent an impossible reply: {payload[:200]!r}")
    return reply


def refused(status: int, payload: bytes) -> tuple[RequestError | None, str]:
    """Decode a reply other than 200: the fault of the caller's image, if that is the reason, and the error message."""
    try:
        body = _error_decoder.decode(payload)
    except MALFORMED:
        body = _ErrorBody(error=f"HTTP {status}")
    fault = CALLERS_FAULT.get(body.code)
    return (fault(body.error) if fault is not None and fault.status == status else None), body.error


def _answers(reply: EscalationReply, request: EscalationRequest) -> bool:
    """Whether the stage that answered may answer: the one asked for, or the intermediate one if it is confident enough.

    A datacenter without support for intermediate stages states no score; its answer is not what was certified.
    """
    intermediate = request.intermediate
    if intermediate is None:
        return reply.model == request.variant
    if reply.score is None or not 0.0 <= reply.score <= 1.0:
        return False
    if reply.model == request.variant:
        return reply.score >= intermediate.accept_score
    passed_over = reply.passed_over
    return (
        reply.model == intermediate.otherwise
        and passed_over is not None
        and passed_over.score < intermediate.accept_score
    )
