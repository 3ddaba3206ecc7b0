"""A request to the datacenter tier for one image, and how it travels: as headers, or as a template and metadata."""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from hawkvision.core.trace_context import TraceContext

INFER_PATH: Final = "/v1/infer"
WIRE_HEADER: Final = "X-HawkVision-Wire"
WIRE_VERSION: Final = 2
"""Of this HTTP wire. A request of another version is refused; one without the header is taken to speak this one."""
TASK_HEADER: Final = "X-HawkVision-Task"
VARIANT_HEADER: Final = "X-HawkVision-Variant"
DEADLINE_HEADER: Final = "X-HawkVision-Deadline-Ms"
TOP_K_HEADER: Final = "X-HawkVision-Top-K"
ACCEPT_SCORE_HEADER: Final = "X-HawkVision-Accept-Score"
SCORE_HEADER: Final = "X-HawkVision-Score"
OTHERWISE_HEADER: Final = "X-HawkVision-Otherwise"
PROGRESSIVE_HEADER: Final = "X-HawkVision-Progressive"
PROGRESSIVE_TYPE: Final = "application/jsonl"
TRACE_HEADER: Final = "traceparent"
SCORE_NAME: Final = "^[a-z][a-z0-9_]{0,39}$"
"""The form of names in `TaskKind.scores`; the task knows which there are."""
MAX_TOP_K: Final = 1000
MAX_DEADLINE_MS: Final = 3_600_000.0
META_VERSION: Final = 1

META: Final = struct.Struct(">BBH16s8sB")
"""The metadata of an image without the accept score."""
ACCEPT: Final = struct.Struct(">d")
HAS_INTERMEDIATE: Final = 1
PROGRESSIVE: Final = 2
"""Flags."""


class IntermediateOffer(msgspec.Struct, frozen=True):
    """The requested variant is an intermediate stage. Its answer counts if its score suffices; else another stage's."""

    score: str
    """One of `TaskKind.scores`."""
    accept_score: float
    """0..1, or +∞. The intermediate stage's answer is accepted if its score is at least this."""
    otherwise: str
    """The stage that answers otherwise."""


class EscalationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An escalation of one image. None leaves the choice to the datacenter tier."""

    task: str | None = None
    variant: str | None = None
    deadline_ms: float | None = None
    """Time left when the request was sent; zero or less has expired."""
    top_k: int = 5
    intermediate: IntermediateOffer | None = None
    """If set, `variant` must name the intermediate stage, which differs from `intermediate.otherwise`."""
    progressive: bool = False
    """Whether a reply by some members of an ensemble is accepted if there is no time for all."""

    def headers(self) -> dict[str, str]:
        """The request as headers, which `parse_escalation_headers` reads."""
        headers = {TOP_K_HEADER: str(self.top_k)}
        if self.task is not None:
            headers[TASK_HEADER] = self.task
        if self.variant is not None:
            headers[VARIANT_HEADER] = self.variant
        if self.deadline_ms is not None:
            headers[DEADLINE_HEADER] = repr(float(self.deadline_ms))
        if self.intermediate is not None:
            headers[ACCEPT_SCORE_HEADER] = repr(float(self.intermediate.accept_score))
            headers[SCORE_HEADER] = str(self.intermediate.score)
            headers[OTHERWISE_HEADER] = self.intermediate.otherwise
        if self.progressive:
            headers[PROGRESSIVE_HEADER] = "1"
        return headers

    def template(self) -> bytes:
        """The fields that many images share, for the datagram transport."""
        intermediate = self.intermediate
        score, otherwise = (None, None) if intermediate is None else (intermediate.score, intermediate.otherwise)
        return template_encoder.encode(SharedFields(self.task, self.variant, score, otherwise))

    def meta(self, trace: TraceContext) -> bytes:
        """The fields of this image except the deadline, for the datagram transport."""
        flags = (0 if self.intermediate is None else HAS_INTERMEDIATE) | (PROGRESSIVE if self.progressive else 0)
        ids = bytes.fromhex(trace.trace_id), bytes.fromhex(trace.span_id)
        packed = META.pack(META_VERSION, flags, self.top_k, *ids, int(trace.flags, 16))
        return packed if self.intermediate is None else packed + ACCEPT.pack(self.intermediate.accept_score)


class SharedFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that many images share, as JSON."""

    task: str | None = None
    variant: str | None = None
    score: Annotated[str, msgspec.Meta(pattern=SCORE_NAME)] | None = None
    otherwise: str | None = None


template_encoder = msgspec.json.Encoder()
template_decoder = msgspec.json.Decoder(SharedFields)
