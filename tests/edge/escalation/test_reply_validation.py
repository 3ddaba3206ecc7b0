"""Malformed replies do no harm."""

from __future__ import annotations

import pytest

from edge.escalation.reply_validation import checked, refused
from hawkvision.client.response import BadReply, object_of
from hawkvision.core.errors import BadField, EscalationFailed
from hawkvision.core.escalation_api import EscalationRequest, parse_escalation_datagram
from tests.hawkvision.tasks.classes import TEN

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
