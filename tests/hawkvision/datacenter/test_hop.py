from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.errors import BadField
from hawkvision.hop import MAX_DEADLINE_MS, MAX_TOP_K, HopRequest, parse_hop_headers

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,20}", fullmatch=True)


@given(
    st.builds(
        HopRequest,
        task=st.none() | NAMES,
        variant=st.none() | NAMES,
        deadline_ms=st.none() | st.floats(-1e6, MAX_DEADLINE_MS),
        top_k=st.integers(1, MAX_TOP_K),
    )
)
def test_headers_carry_every_request_back(request: HopRequest) -> None:
    assert parse_hop_headers(request.headers()) == request


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_header_text_is_read_or_refused_as_bad_field(deadline: str, top_k: str) -> None:
    try:
        read = parse_hop_headers({"X-HawkVision-Deadline-Ms": deadline, "X-HawkVision-Top-K": top_k})
    except BadField:
        return
    assert read.deadline_ms is not None
    assert read.deadline_ms <= MAX_DEADLINE_MS
    assert 1 <= read.top_k <= MAX_TOP_K


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1e9"])
def test_a_deadline_that_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadField, match="X-HawkVision-Deadline-Ms"):
        parse_hop_headers({"X-HawkVision-Deadline-Ms": text})


@pytest.mark.parametrize("text", ["", "0", "-1", "1001", "5.0", "²"])
def test_a_top_k_outside_its_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadField, match="X-HawkVision-Top-K"):
        parse_hop_headers({"X-HawkVision-Top-K": text})


def test_absent_headers_leave_the_choice_to_the_tier() -> None:
    assert parse_hop_headers({}) == HopRequest(task=None, variant=None, deadline_ms=None, top_k=5)
