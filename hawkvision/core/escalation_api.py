"""Requests and replies between an edge node and the datacenter tier, as they travel.

    POST /v1/infer
        X-HawkVision-Wire: 2                   the version of this wire; another is refused
        X-HawkVision-Task: imagenet            default: the tier's own task
        X-HawkVision-Variant: ensemble         a stage of the cascade; default: the best served
        X-HawkVision-Deadline-Ms: 180.0        time left when sent; absent: no deadline
        X-HawkVision-Top-K: 5
        X-HawkVision-Progressive: 1            accept replies by some members of an ensemble meanwhile
        X-HawkVision-Accept-Score: 0.913       these three together: the variant runs first; if its score
        X-HawkVision-Score: margin             of this name is below the accept score, the otherwise-stage
        X-HawkVision-Otherwise: ensemble       answers
        traceparent: 00-…                      W3C trace context
        X-Request-Id: …                        the caller's, or the trace id (`core.logs`); not over datagrams
        Authorization: Bearer KEY              if the tier has a key
        <the encoded image: the caller's own bytes, or a smaller image made from it (`imaging.downscale`)>

    200 {"top_k": [{"index": 281, "confidence": 0.83}, …],     first the fields of the task's kind
         "model": "ensemble",
         "timing_ms": {"decode": …, "queue": …, "infer": …, "total": …, "first": …}, "batch_size": 3,
         "score": null, "passed_over": null, "part": null, "fingerprint": "…/int8"}

    GET /v1/transport
    200 {"datagram": {"port": 8091, "certificate": "-----BEGIN CERTIFICATE-----…", "name": "…", "version": 2}}
                                               null if the tier does not listen for datagrams

    GET /v1/stages
    200 {"task": "imagenet", "best": "ensemble",
         "stages": [{"name": "ensemble", "members": [{"name": "resnet50", "sha256": "…"}, …],
                     "fingerprint": "…", "ran": "…/int8"}, …]}

Errors are `{"error", "code"}` with the statuses of `hawkvision.core.errors`. A deadline is sent as remaining time,
because the clocks of edge and datacenter need not agree. The edge subtracts the time on the link.

A certificate may cover three levels: edge stage, intermediate stage, reference stage. The tier then takes the second
decision within one round trip:

    score of the variant ≥ Accept-Score ──►  200, "model": the variant,         "score": its own
    else, within the same deadline      ──►  200, "model": the otherwise-stage, "score": its own,
                                             "passed_over": {"index": 282, "score": 0.41}   the variant's result

`fingerprint` states what computed the answer, as stamped by the replicas that ran the models
(`hawkvision.models.fingerprints`); `passed_over` has its own. An answer without one is never certified. In
`/v1/stages`, `fingerprint` follows from the tier's settings, and `ran` is what the replicas state.

A score is one of the task's kind (`TaskKind.scores`), computed in float32. The comparison widens it to float64, and the
header writes the threshold with enough digits to restore the same float64, so the tier accepts exactly the images that
an offline computation accepts. An intermediate stage whose answers must not count has the Accept-Score `inf`.

A progressive request accepts replies by some members of an ensemble before its deadline. The body may then have several
such objects, one per line (`application/jsonl`), each from more members and views than the one before. The last one is
`"complete": true`, unless an error occurred after the first, or the deadline passed. Certificates do not cover
incomplete replies. `first` says when the first reply was ready.

Over the datagram transport (`hawkvision.transport`) a request has the same fields. The fields that many images share
are its template, a JSON object with `task`, `variant` and, for an intermediate stage, `score` and `otherwise`. The
fields of one image are its meta, big-endian:

     0        1        2                 4           20          28       29                    37
    ┌────────┬────────┬─────────────────┬───────────┬───────────┬────────┬─────────────────────┐
    │version │ flags  │ top_k           │ trace id  │ span id   │ trace  │ accept score        │
    │ 1      │ 1: int │ u16             │ 16 bytes  │ 8 bytes   │ flags  │ float64, if flag 1  │
    │        │ 2: prg │                 │           │           │        │                     │
    └────────┴────────┴─────────────────┴───────────┴───────────┴────────┴─────────────────────┘

The fragments carry the deadline. Incomplete replies to a progressive request (flag 2) come as interims of at most one
datagram, with some twenty classes. The answer is the complete reply, or the last one just before the deadline. Replies
and errors have the same bodies; errors add their `status`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from hawkvision.core.errors import MALFORMED, BadField
from hawkvision.core.trace_context import TraceContext
from hawkvision.core.types import Output, Prediction

INFER_PATH: Final = "/v1/infer"
WIRE_HEADER: Final = "X-HawkVision-Wire"
WIRE_VERSION: Final = 2
"""Requests of another version are refused; one without the header is taken to speak this version."""
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


# ---------------------------------------------------------------------------------------------------------------- reply


class EscalationTiming(msgspec.Struct, frozen=True):
    """Milliseconds in the datacenter tier. An ensemble reports its slowest member; two inferences add up."""

    decode: float
    queue: float
    infer: float
    total: float
    first: float | None = None
    """When the first reply was ready, complete or not."""


class IntermediateResult(msgspec.Struct, frozen=True):
    """The result of an intermediate stage whose score did not suffice.

    Together with the answer it shows whether the two stages agree, which the intermediate stage's log records.
    """

    prediction: Prediction
    """As much of it as a comparison needs (`TaskKind.decode_compared`)."""
    score: float
    fingerprint: str | None = None
    """See `EscalationReply.fingerprint`."""


@dataclass(frozen=True, slots=True)
class PartialEnsemble:
    """What members of a stage say of an image, for an ensemble with others."""

    members: tuple[str, ...]
    output: Output
    """Of these together; as much of it as an ensemble with others needs (`TaskKind.pack`)."""
    decided: bool = False
    """Whether no member is missing that could change the stage's prediction."""


class EscalationReply(msgspec.Struct, frozen=True):
    """The reply. `hawkvision.tasks.serving` writes and reads its JSON."""

    prediction: Prediction
    model: str
    """The stage that answered: the one asked for, or with an intermediate stage possibly
    `IntermediateOffer.otherwise`."""
    timing_ms: EscalationTiming
    batch_size: int
    """The most images that were inferred together."""
    score: float | None = None
    """The answering stage's own score, the one that `IntermediateOffer.score` asked for; None if no intermediate
    stage was named."""
    passed_over: IntermediateResult | None = None
    """The intermediate stage's result, if the otherwise-stage answered."""
    received_fraction: float = 1.0
    """Share of the image that reached the tier; the rest was concealed."""
    quality: int | None = None
    """JPEG quality at which the transport encoded the image; None if it was sent unchanged."""
    part: PartialEnsemble | None = None
    """Set if members of the stage are missing that could change the prediction (`datacenter.stages.cascade_executor`),
    which only replies to progressive requests lack, and if the transport encoded the image anew: the edge's models saw
    more of it."""
    fingerprint: str | None = None
    """What computed the answer, as stated by the replicas that ran the models
    (`hawkvision.models.fingerprints.stage_fingerprint`). None for incomplete replies and for tiers that state
    nothing."""

    @property
    def complete(self) -> bool:
        """Whether this is the prediction of all members of the stage."""
        return self.part is None or self.part.decided

    @property
    def whole(self) -> bool:
        """Whether the tier answered exactly the image that the edge sent."""
        return self.received_fraction == 1.0 and self.quality is None

    @property
    def comparable(self) -> bool:
        """Whether this is the stage's complete answer to exactly the image that the edge sent."""
        return self.whole and self.complete


# ------------------------------------------------------------------------------------------------- what the tier serves


STAGES_PATH: Final = "/v1/stages"
CERTIFICATES_PATH: Final = "/v1/certificates"
COMPARE_PATH: Final = "/v1/compare"
"""Of an edge node, where its audits become certificates."""
TRANSPORT_PATH: Final = "/v1/transport"


class StageMember(msgspec.Struct, frozen=True):
    """A variant and the hash of the loaded file; None for a backend without a file (`noop`)."""

    name: str
    sha256: str | None


class ListedStage(msgspec.Struct, frozen=True):
    """One stage that can be requested: a variant, or an ensemble."""

    name: str
    members: tuple[StageMember, ...]
    fingerprint: str | None = None
    """`Manifest.fingerprint` of the configured files, inputs, temperatures and averaging. None without files, or with
    an execution that certificates do not cover."""
    ran: str | None = None
    """`hawkvision.models.fingerprints.stage_fingerprint` of the newest statement of a replica; None before the first.
    """


class StageList(msgspec.Struct, frozen=True):
    """The stages that the tier serves, cheapest first."""

    task: str
    best: str
    stages: tuple[ListedStage, ...]


class DatagramEndpoint(msgspec.Struct, frozen=True):
    """Where the datagram transport listens, on the host that sent this document."""

    port: Annotated[int, Meta(description="UDP port.")]
    certificate: Annotated[str, Meta(description="PEM; the first is what the server must present, bit for bit.")]
    name: Annotated[str, Meta(description="The server name for the handshake.")]
    version: Annotated[int, Meta(description="Version of the wire format, `hawkvision/transport/WIRE.md`.")]


class Transports(msgspec.Struct, frozen=True):
    """The reply to `GET /v1/transport`."""

    datagram: Annotated[DatagramEndpoint | None, Meta(description="Null if the server takes no datagrams.")] = None


# ----------------------------------------------------------------------------------------------------- reading requests


def check_wire_version(headers: Mapping[str, str]) -> None:
    """Check the version that a request over HTTP speaks.

    Raises:
        BadField: if this release does not serve it.
    """
    text = headers.get(WIRE_HEADER)
    if text is not None and text != str(WIRE_VERSION):
        raise BadField(
            f"{WIRE_HEADER}: expected {WIRE_VERSION}, got {text[:40]!r}; update the older of edge and datacenter"
        )


def parse_escalation_headers(headers: Mapping[str, str]) -> EscalationRequest:
    """Read a request from headers. Names match as `headers` matches them (Starlette ignores case).

    Raises:
        BadField: naming the header, what was expected and what was found.
    """
    variant = headers.get(VARIANT_HEADER) or None
    return EscalationRequest(
        task=headers.get(TASK_HEADER) or None,
        variant=variant,
        deadline_ms=_deadline(headers.get(DEADLINE_HEADER)),
        top_k=_top_k(headers.get(TOP_K_HEADER)),
        intermediate=_intermediate(headers, variant),
        progressive=_progressive(headers.get(PROGRESSIVE_HEADER)),
    )


def parse_escalation_datagram(template: bytes, meta: bytes) -> tuple[EscalationRequest, TraceContext | None]:
    """Read a request without its deadline from the datagram transport, and its trace if that is valid.

    Raises:
        BadField: naming the field, what was expected and what was found.
    """
    try:
        shared = template_decoder.decode(template)
    except MALFORMED as error:
        raise BadField(f"template: {error}") from None
    if len(meta) < META.size or meta[0] != META_VERSION:
        raise BadField(f"meta: expected version {META_VERSION} and {META.size} bytes or more, got {meta[:8].hex()!r}…")
    _, flags, top_k, trace_id, span_id, trace_flags = META.unpack_from(meta)
    size = META.size + (ACCEPT.size if flags & HAS_INTERMEDIATE else 0)
    if flags & ~(HAS_INTERMEDIATE | PROGRESSIVE) or len(meta) != size:
        raise BadField(f"meta: flags {flags} and {len(meta)} bytes do not go together; expected {size} bytes")
    if not 1 <= top_k <= MAX_TOP_K:
        raise BadField(f"meta: top_k is {top_k}; expected 1 to {MAX_TOP_K}")
    intermediate = None
    if flags & HAS_INTERMEDIATE:
        if shared.score is None or shared.otherwise is None:
            raise BadField("template: score or otherwise is missing; the meta has an accept score")
        (accept_score,) = ACCEPT.unpack_from(meta, META.size)
        _check_intermediate(shared.variant, shared.otherwise, "template: variant", "template: otherwise")
        intermediate = IntermediateOffer(shared.score, _sure(accept_score, "meta: accept score"), shared.otherwise)
    elif shared.score is not None or shared.otherwise is not None:
        raise BadField("meta: accept score is missing; the template names an intermediate stage")
    request = EscalationRequest(
        task=shared.task or None,
        variant=shared.variant or None,
        top_k=top_k,
        intermediate=intermediate,
        progressive=bool(flags & PROGRESSIVE),
    )
    trace = None
    if any(trace_id) and any(span_id):
        trace = TraceContext(trace_id.hex(), span_id.hex(), f"{trace_flags:02x}")
    return request, trace


def _deadline(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value > MAX_DEADLINE_MS:
        raise BadField(f"{DEADLINE_HEADER}: expected milliseconds left, at most {MAX_DEADLINE_MS:g}, got {text[:40]!r}")
    return value


def _top_k(text: str | None) -> int:
    if text is None:
        return EscalationRequest().top_k
    # isascii, because str.isdigit also accepts digits that a header cannot carry, such as '²'.
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_TOP_K):
        raise BadField(f"{TOP_K_HEADER}: expected a whole number from 1 to {MAX_TOP_K}, got {text[:40]!r}")
    return int(text)


def _progressive(text: str | None) -> bool:
    if text not in (None, "0", "1"):
        raise BadField(f"{PROGRESSIVE_HEADER}: expected 0 or 1, got {text[:40]!r}")
    return text == "1"


def _intermediate(headers: Mapping[str, str], variant: str | None) -> IntermediateOffer | None:
    names = (ACCEPT_SCORE_HEADER, SCORE_HEADER, OTHERWISE_HEADER)
    given = [headers.get(name) for name in names]
    accept_score, score, otherwise = given
    if accept_score is None and score is None and otherwise is None:
        return None
    if accept_score is None or score is None or otherwise is None:
        absent = names[given.index(None)]
        raise BadField(f"{absent}: missing; {', '.join(names)} belong together, all or none")
    _check_intermediate(variant, otherwise, VARIANT_HEADER, OTHERWISE_HEADER)
    return IntermediateOffer(_score_name(score), _accept_score(accept_score), otherwise)


def _check_intermediate(variant: str | None, otherwise: str, variant_field: str, otherwise_field: str) -> None:
    if not variant:
        raise BadField(f"{variant_field}: missing; an accept score needs it to name the stage that runs first")
    if otherwise in ("", variant):
        raise BadField(
            f"{otherwise_field}: expected another stage than the {variant_field} {variant[:64]!r}, "
            f"got {otherwise[:64]!r}"
        )


def _score_name(text: str) -> str:
    if not re.fullmatch(SCORE_NAME, text):
        raise BadField(f"{SCORE_HEADER}: expected the name of a score, such as top1, got {text[:40]!r}")
    return text


def _accept_score(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return _sure(value, ACCEPT_SCORE_HEADER, text)


def _sure(value: float, field: str, shown: str | None = None) -> float:
    if not (0.0 <= value <= 1.0 or value == math.inf):  # false of nan, too
        found = str(value) if shown is None else shown[:40]
        raise BadField(f"{field}: expected a number from 0 to 1, or inf, got {found!r}")
    return value
