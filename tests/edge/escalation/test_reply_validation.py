"""Malformed replies do no harm."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge.escalation.reply_validation import Escalated, checked, refused
from hawkvision.client.response import BadReply, object_of
from hawkvision.core.errors import BadField, EscalationFailed
from hawkvision.core.escalation_api import (
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    parse_escalation_datagram,
)
from hawkvision.network.response_time import ResponseTimes
from tests.fuzz.json_documents import altered
from tests.hawkvision.tasks.classes import TEN, predicted, write_reply

DEEP = [b"[" * 100_000, b'{"top_k": ' + b"[" * 100_000, b'{"unknown": ' + b'{"a":' * 100_000]


@pytest.mark.parametrize("payload", DEEP)
def test_deeply_nested_json_is_malformed(payload: bytes) -> None:
    with pytest.raises(EscalationFailed):
        checked(payload, EscalationRequest(), TEN, "http://dc")
    fault, said = refused(400, payload)
    assert (fault, said) == (None, "HTTP 400")
    with pytest.raises(BadReply):
        object_of(payload, "http://edge")
    with pytest.raises(BadField):
        parse_escalation_datagram(payload, b"")


REPLY = EscalationReply(predicted((3, 0.75)), "large", EscalationTiming(1.5, 0.25, 30.0, 32.0, 12.5), 3)
ASKED = EscalationRequest(variant="large")


def with_timing(**changes: float) -> dict[str, object]:
    reply = msgspec.structs.replace(REPLY, timing_ms=msgspec.structs.replace(REPLY.timing_ms, **changes))
    fields: dict[str, object] = msgspec.json.decode(write_reply(reply))
    return fields


@given(altered(with_timing()), st.floats(0.0, 1e5))
@example(with_timing(total=1e308, first=0.0), 20.0)
@example(with_timing(total=1e-3, first=1e308), 20.0)
def test_whatever_a_datacenter_states_the_times_of_its_link_are_possible(
    fields: dict[str, object], round_trip_ms: float
) -> None:
    try:
        reply = checked(msgspec.json.encode(fields), ASKED, TEN, "http://dc")
    except EscalationFailed:
        return
    answer = Escalated(reply, round_trip_ms)
    assert 0.0 <= answer.until_first_ms <= round_trip_ms
    assert 0.0 <= answer.datacenter_ms <= round_trip_ms
    times = ResponseTimes()
    times.answered(times.sent(0.0), answer.until_first_ms, 1.0)
    assert math.isfinite(times.bound_ms() or 0.0)
    assert 0.0 <= times.on_time(100.0, 1.0) <= 1.0


@pytest.mark.parametrize("name", ["decode", "queue", "infer", "total", "first"])
def test_a_time_below_zero_is_impossible(name: str) -> None:
    with pytest.raises(EscalationFailed, match="impossible reply"):
        checked(msgspec.json.encode(with_timing(**{name: -0.5})), ASKED, TEN, "http://dc")
