"""Deadlines are kept as moments, and converted where they travel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.clock import Deadline

times = st.floats(0.0, 1e6)


@given(st.floats(-1e6, 1e6), times, times)
def test_what_remains_is_what_was_given_less_what_went_by(given_ms: float, now: float, later: float) -> None:
    deadline = Deadline.after_ms(given_ms, now)
    assert abs(deadline.remaining_ms(now + later) - (given_ms - later * 1e3)) < 1e-3
    assert abs(deadline.remaining_s(now) - given_ms * 1e-3) < 1e-6
    assert deadline.passed(now) == (deadline.remaining_s(now) <= 0.0)


@given(times, times, times)
def test_the_earlier_of_two_is_the_less(now: float, one: float, other: float) -> None:
    earlier = min(Deadline.after_s(one, now), Deadline.after_s(other, now))
    assert earlier.at == now + min(one, other)
