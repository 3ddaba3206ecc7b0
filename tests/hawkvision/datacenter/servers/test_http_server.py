from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hawkvision.core.errors import BadField
from hawkvision.core.escalation_api import (
    MAX_DEADLINE_MS,
    MAX_TOP_K,
    WIRE_HEADER,
    WIRE_VERSION,
    EscalationRequest,
    IntermediateOffer,
    check_wire_version,
    parse_escalation_datagram,
    parse_escalation_headers,
)
from hawkvision.core.trace_context import TraceContext, start_trace
from hawkvision.tasks.class_scores import Score
from hawkvision.transport.protocol.frames import MAX_META

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
INTERMEDIATE = {
    "X-HawkVision-Variant": "medium",
    "X-HawkVision-Accept-Score": "0.913",
    "X-HawkVision-Score": "margin",
    "X-HawkVision-Otherwise": "reference",
}
INTERMEDIATES = st.builds(IntermediateOffer, st.sampled_from(Score), st.floats(0.0, 1.0) | st.just(math.inf), NAMES)


REQUESTS = st.builds(
    EscalationRequest,
    task=st.none() | NAMES,
    variant=st.none() | NAMES,
    deadline_ms=st.none() | st.floats(-1e6, MAX_DEADLINE_MS),
    top_k=st.integers(1, MAX_TOP_K),
    intermediate=st.none() | INTERMEDIATES,
    progressive=st.booleans(),
)
TRACES = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1).map("{:032x}".format),
    st.integers(1, 2**64 - 1).map("{:016x}".format),
    st.integers(0, 255).map("{:02x}".format),
)


@given(REQUESTS)
def test_headers_carry_every_request_back(request: EscalationRequest) -> None:
    assume(request.intermediate is None or request.variant not in (None, request.intermediate.otherwise))
    assert parse_escalation_headers(request.headers()) == request


@pytest.mark.parametrize("version", ["0", "1", "3", "two", ""])
def test_another_wire_version_is_refused_with_the_one_that_is_spoken(version: str) -> None:
    check_wire_version({WIRE_HEADER: str(WIRE_VERSION)})
    with pytest.raises(BadField, match=f"X-HawkVision-Wire: expected 2, got {version!r}; update the older"):
        check_wire_version({WIRE_HEADER: version})


WRONG = {
    "Deadline-Ms": ("", "soon", "nan", "inf", "1e9"),
    "Top-K": ("", "0", "-1", "1001", "5.0", "²"),
    "Progressive": ("", "yes", "2"),
    "Accept-Score": ("", "sure", "nan", "-inf", "-0.1", "1.0000001", None),
    "Score": ("", "not a name", "TOP1", None),
    "Otherwise": ("", "medium", None),
    "Variant": (None,),
}
"""Values that a header may not have; None stands for a missing one."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_wrong_header_is_refused_by_its_name(name: str, text: str | None) -> None:
    headers = {**INTERMEDIATE, f"X-HawkVision-{name}": text}
    with pytest.raises(BadField, match=f"^X-HawkVision-{name}: {'missing' if text is None else 'expected'}"):
        parse_escalation_headers({name: value for name, value in headers.items() if value is not None})


@given(REQUESTS, TRACES)
def test_template_and_meta_carry_every_request_back_but_its_deadline(
    request: EscalationRequest, trace: TraceContext
) -> None:
    assume(request.intermediate is None or request.variant not in (None, request.intermediate.otherwise))
    read = parse_escalation_datagram(request.template(), request.meta(trace))
    assert read == (msgspec.structs.replace(request, deadline_ms=None), trace)
    assert len(request.meta(trace)) <= MAX_META


@given(REQUESTS, st.integers(1, MAX_TOP_K), st.floats(0.0, 1.0))
def test_what_differs_from_image_to_image_is_not_in_the_template(r: EscalationRequest, top_k: int, sure: float) -> None:
    intermediate = None if r.intermediate is None else msgspec.structs.replace(r.intermediate, accept_score=sure)
    other = msgspec.structs.replace(r, top_k=top_k, deadline_ms=1.0, intermediate=intermediate)
    assert other.template() == r.template()


PLAIN = EscalationRequest(variant="medium", intermediate=IntermediateOffer(Score.TOP1, 0.5, "reference"))


@pytest.mark.parametrize(
    ("template", "meta", "field"),
    [
        (b"{", EscalationRequest().meta(start_trace()), "template"),
        (b'{"top_k": 5}', EscalationRequest().meta(start_trace()), "template"),
        (EscalationRequest().template(), b"", "meta"),
        (
            EscalationRequest().template(),
            b"\x02" + EscalationRequest().meta(start_trace())[1:],
            "meta: expected version 1",
        ),
        (EscalationRequest().template(), EscalationRequest().meta(start_trace()) + b"x", "meta: flags"),
        (EscalationRequest().template(), EscalationRequest(top_k=0).meta(start_trace()), "meta: top_k is 0"),
        (EscalationRequest().template(), PLAIN.meta(start_trace()), "template: score or otherwise is missing"),
        (PLAIN.template(), EscalationRequest().meta(start_trace()), "meta: accept score is missing"),
        (PLAIN.template(), PLAIN.meta(start_trace())[:-8] + b"\xff" * 8, "meta: accept score: expected"),
    ],
    ids=range(9),  # what is generated anew must not be in a test's name
)
def test_a_datagrams_request_is_refused_by_the_field_that_is_wrong(template: bytes, meta: bytes, field: str) -> None:
    with pytest.raises(BadField, match=f"^{field}"):
        parse_escalation_datagram(template, meta)
