"""How long a caller waits for the datacenter: while a reply within its remaining time is likely enough.

An observation is (x_i, answered or given up): a round trip of x_i ms, or one that had not ended after x_i ms (right
censored). T is a round trip, D the time that a caller has in ms, t what it has waited, p_min the one knob. A miss of D
is an observation with x_i > D, or given up after at least D / 2.

     1  weight       w_i = (1 - g)^(number sent later) 2^(-age_i / H)
     2  runs         misses of D sent one after the other; M is the run after the last reply on time, with those under
                     way that have waited for D / 2; K weighs the earlier runs of three or more: outages
     3  survival     S(t) = product over answered x_i <= t of 1 - w_i / (sum of w_j, x_j >= x_i), outages and M left out
                                                                                                  (Kaplan-Meier)
     4  on time, up  p(D | t) = (N (1 - S(D) / S(t)) + a + 1/2) / n,   n = N + a + 1,   N = sum of w_i with x_i > t
     5  unchanged    L = product over M, j = 0, 1, ... of 1 - p(min(x_j, D) | 0) n / (n + j),
                     q = L / (L + h),   h = 1 / (s + a)
     6  up or out    U = B(u + a + 1/2, v + 1/2) / B(a + 1/2, 1/2) g^(2 K) (L + h)
     7  by chance    C = c B(s + 1/2, f + 1/2) / B(1/2, 1/2)
     8  on time      P_U = q p(D | t) n / (n + |M|) + (1 - q) r,   P_C = e / (e + f + 1),   e = s (s_t + 1) / (s + 1)
     9  reply        P(T <= D | T > t) = (U P_U + C P_C) / (U + C),   r = 0 if D <= 2 max x_j of M, else 1/2
    10  rule         wait at t while P(T <= D | T > t) >= p_min

s and f are the weights of all replies on time and misses, s_t that of replies after t; u and v are those outside
outages and M. Two explanations of what was seen compete: a link that is up or out (line 6), where an outage begins or
ends once in 1/g observations, and one on which each reply is on time by chance, misses in a row or not (line 7). Both
are Beta-Bernoulli likelihoods with Jeffreys' prior. A link that is up is taken to have had a replies on time before;
the rules of succession give h for an outage, and e for a reply that is later than those seen. The factor 2 is the
back-off of RFC 6298 §5.5: what is known of a wait says nothing of one twice as long. By line 10 a share of p_min of the
callers at most goes without a reply on time; of right answers, p_min times what the datacenter is more accurate.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

GAIN: Final = 1 / 32
"""g: the newest observation has at most this share of all weight, so about 63 of them count."""
HALF_LIFE_S: Final = 300.0
"""H: ten of the longest intervals between probes, so that an outage is remembered while it is probed."""
CHANCE: Final = 0.1
"""c: prior odds that replies are on time by chance; most links are up or out."""
PRIOR: Final = 4.0
"""a. With p_min = 0.05, the third miss in a row then ends the waiting, and not the second, over an unknown link as over
one that is always on time."""
MIN_ON_TIME_PROBABILITY: Final = 0.05
"""p_min by default. Whoever does not wait forgoes at most this share of what the datacenter is more accurate than the
edge; a wait in vain costs time only, for the edge's answer stands by."""
REMEMBERED: Final = 96
"""Observations; older ones would have 5 % of the newest one's weight at most."""
PROBES: Final = 16
"""Misses of probes in a row that are remembered, so that a long outage does not displace what was before it."""
BACK_OFF: Final = 2.0
OUTAGE: Final = 3
"""Misses in a row that are taken for an outage afterwards."""
SUSPECTED: Final = 0.5
"""q below which, as before the first reply, requests under way count as missed: no more callers are let wait at a time
than may be in vain."""
TIMEOUT_DEVIATIONS: Final = 4.0
"""RFC 6298 §2: a round trip hardly exceeds the mean by more than four mean deviations."""
MAX_EXPONENT: Final = 700.0
"""Of e, in a double."""


class _Observation(NamedTuple):
    sent: float
    at: float
    ms: float
    answered: bool
    probe: bool


class OutstandingRequest(NamedTuple):
    """One that is under way."""

    number: int
    sent: float


class ResponseTimes:
    """Round trips of one link over one transport. Times are seconds of a monotonic clock, durations milliseconds."""

    def __init__(self, min_on_time_probability: float = MIN_ON_TIME_PROBABILITY) -> None:
        """Begin with nothing known, which is worth a wait; `min_on_time_probability` is p_min, 0..1."""
        self.min_on_time_probability = min_on_time_probability
        self._seen: list[_Observation] = []
        """In the order of sending."""
        self._under_way: dict[int, float] = {}
        """When each was sent. As many as the caller has under way, who bounds them."""
        self._numbers = itertools.count()

    def sent(self, now: float) -> OutstandingRequest:
        """A request is sent; `answered`, `given_up` or `dropped` must follow."""
        request = OutstandingRequest(next(self._numbers), now)
        self._under_way[request.number] = now
        return request

    def answered(self, request: OutstandingRequest, ms: float, now: float) -> None:
        """Learn from a reply, on time or not, after `ms`."""
        self._saw(_Observation(request.sent, now, ms, answered=True, probe=False), request)

    def given_up(self, request: OutstandingRequest, ms: float, now: float, *, probe: bool = False) -> None:
        """Learn that no reply had come after `ms`."""
        self._saw(_Observation(request.sent, now, ms, answered=False, probe=probe), request)

    def _saw(self, observation: _Observation, request: OutstandingRequest) -> None:
        self.dropped(request)
        insort(self._seen, observation)
        latest = self._seen[-PROBES - 1 :]
        if len(latest) > PROBES and all(each.probe for each in latest):
            self._seen.remove(latest[0])
        elif len(self._seen) > REMEMBERED:
            del self._seen[0]

    def dropped(self, request: OutstandingRequest) -> None:
        """Nothing is learned from it."""
        self._under_way.pop(request.number, None)

    def forget(self) -> None:
        """The link is another one from now on."""
        self._seen.clear()

    def on_time(self, within_ms: float, now: float) -> float:
        """P(reply within `within_ms` of sending a request now)."""
        return self._estimate(within_ms, now).probability

    def worth_ms(self, within_ms: float, now: float) -> float:
        """How long the rule waits for a reply within `within_ms`: all of that, part of it, or not at all."""
        return self._estimate(within_ms, now).worth_ms(self.min_on_time_probability)

    def bound_ms(self) -> float | None:
        """What a round trip hardly exceeds, by RFC 6298 over all remembered; None before the first reply."""
        mean_ms = self.mean_ms
        if mean_ms is None:
            return None
        return mean_ms + TIMEOUT_DEVIATIONS * _recent_mean([abs(each.ms - mean_ms) for each in self._seen])

    @property
    def mean_ms(self) -> float | None:
        """Mean round trip, of those given up what was waited; None before the first reply."""
        if not any(each.answered for each in self._seen):
            return None
        return _recent_mean([each.ms for each in self._seen])

    def _estimate(self, within_ms: float, now: float) -> _Estimate:
        """In one pass over what was seen, that sent last first."""
        found = _Estimate(within_ms)
        up, misses = found.up, list[tuple[float, bool, float]]()
        known_ms = within_ms / BACK_OFF
        rank_weight, last = 1.0, -math.inf
        for sent, at, ms, answered, _ in reversed(self._seen):
            age_weight = 0.5 ** ((now - at) / HALF_LIFE_S)
            weight = rank_weight * age_weight
            rank_weight *= 1.0 - GAIN
            if answered and ms <= within_ms:
                if last == -math.inf:
                    last = sent
                found.end_run(misses)
                found.on_time += weight
                up.append((ms, True, weight))
                continue
            if answered or ms >= known_ms:
                found.missed += weight
            if last == -math.inf:
                found.run.append((ms, age_weight))
            else:
                misses.append((ms, answered, weight))
        found.end_run(misses)
        found.end([(now - sent) * 1e3 for sent in self._under_way.values() if sent > last], unknown=last == -math.inf)
        return found


def _recent_mean(values: Sequence[float]) -> float:
    """With the weights of line 1, whatever their age; the newest is the last."""
    weights = [(1.0 - GAIN) ** rank for rank in reversed(range(len(values)))]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


class _Estimate:
    """P(T <= D | T > t) of one D."""

    def __init__(self, within_ms: float) -> None:
        self._within_ms = within_ms
        self.run: list[tuple[float, float]] = []
        """M: what was waited, and the weight by age."""
        self.up: list[tuple[float, bool, float]] = []
        """What is neither of M nor of an outage: how long it took, whether it was answered, and its weight."""
        self.outages = 0.0
        """K."""
        self.on_time = self.missed = 0.0
        """s and f."""

    def end_run(self, misses: list[tuple[float, bool, float]]) -> None:
        """There was a reply on time before these, the newest first."""
        if len(misses) >= OUTAGE:
            self.outages += misses[0][2]
        else:
            self.up += misses
        misses.clear()

    def end(self, under_way_ms: Sequence[float], *, unknown: bool) -> None:
        """All is added; those under way since the last reply on time, if there was any, have waited for so long."""
        up, run, within_ms = sorted(self.up), self.run, self._within_ms
        self.up = up
        self._survival = [1.0]
        """S just after each of `up`, and first S(0)."""
        known_ms, survival = within_ms / BACK_OFF, 1.0
        self._known = on_time = 0.0
        at_risk = sum(weight for _, _, weight in up)
        for ms, answered, weight in up:
            if answered:
                survival *= max(0.0, 1.0 - weight / at_risk) if at_risk > 0.0 else 1.0
                self._known += weight
                on_time += weight if ms <= within_ms else 0.0
            elif ms >= known_ms:
                self._known += weight
            at_risk -= weight
            self._survival.append(survival)
        self._at_start = self._up_on_time(self._known, self._survives(within_ms), 1.0)
        odds = 1.0 / (self.on_time + PRIOR)
        likelihood = self._run_likelihood()
        suspected = unknown or likelihood / (likelihood + odds) < SUSPECTED
        waited = [ms for ms in under_way_ms if suspected or ms >= known_ms]
        if waited:
            run += [(within_ms if suspected else ms, 1.0) for ms in waited]
            self.missed += len(waited)
            likelihood = self._run_likelihood()
        size, longest_ms = self._known + PRIOR + 1.0, max((ms for ms, _ in run), default=0.0)
        self._changed = 0.5 if within_ms > BACK_OFF * longest_ms else 0.0
        self._unchanged = likelihood / (likelihood + odds) if run else 1.0
        self._fewer = size / (size + sum(weight for _, weight in run))
        up_or_out = _log_likelihood(on_time, self._known - on_time, PRIOR) + 2.0 * self.outages * math.log(GAIN)
        up_or_out += math.log(likelihood + odds) if run else 0.0
        chance = math.log(CHANCE) + _log_likelihood(self.on_time, self.missed, 0.0)
        self._chance = 1.0 / (1.0 + math.exp(min(MAX_EXPONENT, up_or_out - chance)))

    @property
    def probability(self) -> float:
        """Line 9 at t = 0."""
        return self._mixed(self._at_start, self.on_time)

    def worth_ms(self, least: float) -> float:
        """The first time at which the probability is below `least`; only where a reply came on time can it fall."""
        if self.probability < least:
            return 0.0
        end = self._survives(self._within_ms)
        known, on_time = self._known, self.on_time
        for (ms, answered, weight), survival in zip(self.up, self._survival[1:], strict=True):
            if ms > self._within_ms:
                break
            known -= weight if answered or BACK_OFF * ms >= self._within_ms else 0.0
            on_time -= weight if answered else 0.0
            if answered and self._mixed(self._up_on_time(known, end, survival), on_time) < least:
                return ms
        return self._within_ms

    def _mixed(self, share: float, on_time: float) -> float:
        """Line 9, of p(D | t) and s_t."""
        still = self.on_time * (on_time + 1.0) / (self.on_time + 1.0)
        by_chance = still / (still + self.missed + 1.0)
        up = self._unchanged * share * self._fewer + (1.0 - self._unchanged) * self._changed
        return (1.0 - self._chance) * up + self._chance * by_chance

    def _run_likelihood(self) -> float:
        """L."""
        likelihood, before, size = 1.0, 0.0, self._known + PRIOR + 1.0
        for ms, weight in self.run:
            share = self._up_on_time(self._known, self._survives(min(ms, self._within_ms)), 1.0)
            likelihood *= (1.0 - share * size / (size + before)) ** weight
            before += weight
        return likelihood

    @staticmethod
    def _up_on_time(known: float, end: float, survival: float) -> float:
        """Line 4, of N, S(D) and S(t)."""
        replied = 1.0 - end / survival if survival > 0.0 else 0.0
        return (max(0.0, known) * replied + PRIOR + 0.5) / (max(0.0, known) + PRIOR + 1.0)

    def _survives(self, ms: float) -> float:
        """S."""
        return self._survival[bisect_right(self.up, (ms, True, math.inf))]


def _log_likelihood(on_time: float, missed: float, prior: float) -> float:
    """Log likelihood of so many, with Jeffreys' prior and `prior` on time in advance."""
    a, b = prior + 0.5, 0.5
    return _log_beta(on_time + a, missed + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
