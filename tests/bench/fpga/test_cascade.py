"""When a measured drop breaks a promise: only where it is more than chance explains."""

from __future__ import annotations

import pytest

from hawkvision.types import PromiseStatus
from loadgen.evaluate import Row
from tests.bench.fpga.cascade import is_kept, margin


def row(lost: int, gained: int, promised: float | None, n: int = 1000) -> Row:
    return Row(
        target="t", n=n, accuracy=0.9, low=0.8, high=1.0, lost=lost, gained=gained, drop=(lost - gained) / n,
        promised_drop=promised, status={PromiseStatus.HELD: n}, escalated=0.1, degraded=0, p50_ms=1.0, p99_ms=2.0,
    )  # fmt: skip


def test_margin_is_that_of_a_paired_difference() -> None:
    assert margin(row(30, 10, 0.01)) == pytest.approx(1.96 * ((0.04 - 0.02**2) / 1000) ** 0.5)
    assert margin(row(0, 0, 0.01)) == 0.0


def test_a_promise_is_broken_by_more_than_chance() -> None:
    assert is_kept(row(30, 10, 0.01))
    assert not is_kept(row(60, 10, 0.01))
    assert is_kept(row(900, 0, None)), "nothing was promised"
