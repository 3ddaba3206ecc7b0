"""The bounds on handshakes with strangers: in parallel, and per second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.protocol.handshake_limits import (
    HANDSHAKES_AT_ONCE,
    HANDSHAKES_PER_S,
    MAX_NETWORKS,
    RETRIES_PER_S,
    Bucket,
    HandshakeLimits,
)


@given(
    rate=st.floats(0.1, 1000.0),
    burst=st.floats(1.0, 100.0),
    waits=st.lists(st.floats(0.0, 10.0), max_size=200),
)
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(rate: float, burst: float, waits: list[float]) -> None:
    bucket, now, taken = Bucket(rate, burst, 0.0), 0.0, 0
    for wait in waits:
        now += wait
        taken += bucket.take(now)
        assert taken <= burst + rate * now + 1e-6
    assert Bucket(rate, burst, 0.0).take(0.0), "nobody is turned away for ever"
    assert bucket.take(now + 2.0 / rate)


def test_all_networks_together_may_begin_so_many() -> None:
    gate = HandshakeLimits(0.0)
    assert sum(gate.may_begin(f"network {n}", 0.0) for n in range(10_000)) == HANDSHAKES_AT_ONCE
    assert sum(gate.may_begin(f"network {n}", 1.0) for n in range(10_000)) == HANDSHAKES_PER_S
    assert len(gate._each) == MAX_NETWORKS


def test_so_many_retries_are_sent() -> None:
    gate = HandshakeLimits(0.0)
    sent = sum(gate.may_retry(n / 100_000) for n in range(200_000))
    assert sent <= RETRIES_PER_S * 2 + RETRIES_PER_S / 10
    assert gate.may_begin("192.0.2.1", 2.0), "Retries use up no handshakes"
