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
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateOffer,
    IntermediateResult,
    check_wire_version,
    parse_escalation_datagram,
    parse_escalation_headers,
)
from hawkvision.core.trace_context import TraceContext, start_trace
from hawkvision.tasks.class_scores import Score
from hawkvision.transport.protocol.frames import MAX_META
from tests.hawkvision.tasks.classes import predicted, read_reply, write_reply

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)
INTERMEDIATE = {
    "X-HawkVision-Variant": "medium",
    "X-HawkVision-Accept-Score": "0.913",
    "X-HawkVision-Score": "margin",
    "X-HawkVision-Otherwise": "committee",
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


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_header_text_is_read_or_refused_as_bad_field(deadline: str, top_k: str) -> None:
    try:
        read = parse_escalation_headers({"X-HawkVision-Deadline-Ms": deadline, "X-HawkVision-Top-K": top_k})
    except BadField:
        return
    assert read.deadline_ms is not None
    assert read.deadline_ms <= MAX_DEADLINE_MS
    assert 1 <= read.top_k <= MAX_TOP_K


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1e9"])
def test_a_deadline_that_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadField, match="X-HawkVision-Deadline-Ms"):
        parse_escalation_headers({"X-HawkVision-Deadline-Ms": text})


@pytest.mark.parametrize("text", ["", "0", "-1", "1001", "5.0", "²"])
def test_a_top_k_outside_its_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadField, match="X-HawkVision-Top-K"):
        parse_escalation_headers({"X-HawkVision-Top-K": text})


@pytest.mark.parametrize("text", ["", "yes", "2"])
def test_progressive_is_one_or_nought_or_refused_by_name(text: str) -> None:
    with pytest.raises(BadField, match="X-HawkVision-Progressive"):
        parse_escalation_headers({"X-HawkVision-Progressive": text})


def test_absent_headers_leave_the_choice_to_the_tier() -> None:
    assert parse_escalation_headers({}) == EscalationRequest(task=None, variant=None, deadline_ms=None, top_k=5)


def test_an_intermediate_stage_is_read_from_its_three_headers() -> None:
    assert parse_escalation_headers(INTERMEDIATE) == EscalationRequest(
        variant="medium", intermediate=IntermediateOffer(Score.MARGIN, accept_score=0.913, otherwise="committee")
    )


@pytest.mark.parametrize("absent", ["Accept-Score", "Score", "Otherwise", "Variant"])
def test_an_intermediate_stage_with_a_header_missing_is_refused_by_its_name(absent: str) -> None:
    name = f"X-HawkVision-{absent}"
    with pytest.raises(BadField, match=f"^{name}: missing"):
        parse_escalation_headers({k: v for k, v in INTERMEDIATE.items() if k != name})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("X-HawkVision-Accept-Score", text) for text in ("", "sure", "nan", "-inf", "-0.1", "1.0000001")),
        *(("X-HawkVision-Score", text) for text in ("", "not a name", "TOP1")),
        *(("X-HawkVision-Otherwise", text) for text in ("", "medium")),
    ],
)
def test_an_intermediate_stage_with_a_wrong_header_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(BadField, match=f"^{name}: expected"):
        parse_escalation_headers({**INTERMEDIATE, name: text})


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_any_text_about_an_intermediate_stage_is_read_or_refused_as_bad_field(
    score: str, kind: str, otherwise: str
) -> None:
    texts = {"X-HawkVision-Accept-Score": score, "X-HawkVision-Score": kind, "X-HawkVision-Otherwise": otherwise}
    try:
        read = parse_escalation_headers({**INTERMEDIATE, **texts}).intermediate
    except BadField:
        return
    assert read is not None
    assert 0.0 <= read.accept_score <= 1.0 or read.accept_score == math.inf


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


@given(st.binary(max_size=80), st.binary(max_size=64))
def test_any_template_and_meta_are_read_or_refused_as_bad_field(template: bytes, meta: bytes) -> None:
    for body in (template, EscalationRequest().template(), PLAIN.template()):
        for own in (meta, EscalationRequest().meta(start_trace()), PLAIN.meta(start_trace())[: len(meta)]):
            try:
                read, _ = parse_escalation_datagram(body, own)
            except BadField:
                continue
            assert 1 <= read.top_k <= MAX_TOP_K


PLAIN = EscalationRequest(variant="medium", intermediate=IntermediateOffer(Score.TOP1, 0.5, "committee"))


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


class _ClassOfBefore(msgspec.Struct, frozen=True):
    index: int
    confidence: float


class _ReplyOfBefore(msgspec.Struct, frozen=True):
    """What the release before states and reads of a reply."""

    top_k: tuple[_ClassOfBefore, ...]
    model: str
    timing_ms: EscalationTiming
    batch_size: int
    complete: bool = True


def test_the_release_before_reads_a_reply_that_states_what_computed_it_and_states_nothing_itself() -> None:
    stated = f"{'a' * 64}/int8"
    passed = IntermediateResult(predicted((3, 0.0)), 0.5, stated)
    reply = EscalationReply(
        predicted((1, 0.5)), "best", EscalationTiming(1.0, 2.0, 3.0, 6.0), 1, 0.5, passed, fingerprint=stated
    )
    assert read_reply(write_reply(reply)) == reply
    before = msgspec.json.decode(write_reply(reply), type=_ReplyOfBefore)
    assert (before.model, before.top_k) == (reply.model, (_ClassOfBefore(1, 0.5),))
    assert read_reply(msgspec.json.encode(before)).fingerprint is None
