from __future__ import annotations

import pytest

from loadgen.workload.record import RequestOutcome
from tests.bench.cluster.faults import Readiness, outcome_of
from tests.bench.cluster.load import Load


def request(sent_s: float, done_s: float, status: int = 200) -> RequestOutcome:
    return RequestOutcome(due_s=sent_s, sent_s=sent_s, done_s=done_s, target=0, image=0, status=status)


def test_a_failure_counts_as_in_flight_only_if_the_kill_was_within_it() -> None:
    failed = [request(4.9, 5.0, 503), request(4.9, 5.1, 503), request(5.1, 5.2, 503)]
    row = outcome_of("kill", 1.0, Load([request(4.0, 6.0), *failed], 100.0, 9.0), Readiness(), since=105.05)
    assert (row.requests, row.in_flight_failed, row.failed) == (4, 1, 2)
    assert row.last_failure_s == pytest.approx(0.15)


def test_readiness_counts_from_each_refusal_to_the_next_answer() -> None:
    asked = Readiness([(1.0, True), (2.0, False), (2.5, False), (3.0, True), (4.0, False), (4.5, True)])
    assert asked.red_s(since=0.0) == pytest.approx(1.5)
    assert asked.first_red_s(since=2.25) == pytest.approx(0.25)
    assert asked.first_red_s(since=4.2) is None
