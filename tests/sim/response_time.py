"""Callers, a link and the wait cutoff in simulated time, as in `edge.escalation.client`, without sockets."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from hawkvision.network.circuit_breaker import CircuitBreaker
from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY, ResponseTimes

RoundTrip = Callable[[float, random.Random], float]
"""From the time at which a request is sent, in seconds, to its round trip in milliseconds; infinite if none comes."""


@dataclass(slots=True)
class Outcome:
    """Of the callers of a simulation."""

    callers: int = 0
    possible: int = 0
    """Callers for whom the reply would have been on time."""
    both: int = 0
    """Callers who got it."""
    missed: int = 0
    """Callers who waited, and got none."""
    missed_in_a_row: int = 0
    """The most of them without one in between whose reply would have been on time."""
    probes: int = 0


def simulate(
    round_trip: RoundTrip,
    deadline_ms: float,
    *,
    callers: int = 600,
    rate_hz: float = 10.0,
    min_on_time_probability: float = MIN_ON_TIME_PROBABILITY,
    seed: int = 0,
    spent: float = 0.1,
) -> Outcome:
    """Callers come at random, `rate_hz` on average; each has spent a share of up to `spent` of its `deadline_ms`."""
    rng, outcome, order = random.Random(seed), Outcome(), itertools.count()
    breaker = CircuitBreaker(ResponseTimes(min_on_time_probability))
    pending: list[tuple[float, int, Callable[[float], None]]] = []
    row = 0

    def at(when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(pending, (when, next(order), act))

    def send(now: float, within_ms: float, *, probe: bool) -> float:
        took_ms, request = round_trip(now, rng), breaker.times.sent(now)

        def ended(then: float) -> None:
            if took_ms <= within_ms:
                breaker.times.answered(request, took_ms, then)
            else:
                breaker.times.given_up(request, within_ms, then, probe=probe)
            if probe:
                breaker.end_probe(then)
            elif took_ms > within_ms and breaker.times.on_time(within_ms, then) < min_on_time_probability:
                try_out(then)

        at(now + min(took_ms, within_ms) * 1e-3, ended)
        return took_ms

    def try_out(now: float) -> None:
        if breaker.begin_probe(now):
            outcome.probes += 1
            send(now, breaker.longest_ms, probe=True)

    def call(now: float) -> None:
        nonlocal row
        within_ms = deadline_ms * rng.uniform(1.0 - spent, 1.0)
        outcome.callers += 1
        if breaker.admits(within_ms, now):
            worth_ms = breaker.times.worth_ms(within_ms, now)
            took_ms = send(now, within_ms, probe=False)
            outcome.both += took_ms <= worth_ms
            outcome.missed += took_ms > worth_ms
            row = row + 1 if took_ms > worth_ms else row
        else:
            took_ms = round_trip(now, rng)
            try_out(now)
        outcome.possible += took_ms <= within_ms
        row = 0 if took_ms <= within_ms else row
        outcome.missed_in_a_row = max(outcome.missed_in_a_row, row)

    when = 0.0
    for _ in range(callers):
        when += rng.expovariate(rate_hz)
        at(when, call)
    while pending:
        when, _, act = heapq.heappop(pending)
        act(when)
    return outcome
