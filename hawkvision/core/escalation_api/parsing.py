"""Reads requests to the datacenter tier from headers and from datagrams, and refuses malformed ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from hawkvision.core.errors import MALFORMED, BadField
from hawkvision.core.escalation_api.request import (
    ACCEPT,
    ACCEPT_SCORE_HEADER,
    DEADLINE_HEADER,
    HAS_INTERMEDIATE,
    MAX_DEADLINE_MS,
    MAX_TOP_K,
    META,
    META_VERSION,
    OTHERWISE_HEADER,
    PROGRESSIVE,
    PROGRESSIVE_HEADER,
    SCORE_HEADER,
    SCORE_NAME,
    TASK_HEADER,
    TOP_K_HEADER,
    VARIANT_HEADER,
    WIRE_HEADER,
    WIRE_VERSION,
    EscalationRequest,
    IntermediateOffer,
    template_decoder,
)
from hawkvision.core.trace_context import TraceContext


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
        raise BadField(f"{variant_field}: missing; an accept score needs it to name the stage that looks first")
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
