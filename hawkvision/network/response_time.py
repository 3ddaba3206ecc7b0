"""Response times of a link: how long a caller waits for the datacenter.

A caller waits while the probability of a reply within its remaining time is at least p_min. An observation is (x_i,
answered or given up): a round trip of x_i ms, or one that had not ended after x_i ms (right censored). T is a round
trip, D a caller's remaining time in ms, t the time it has waited. A miss of D is an observation with x_i > D, or one
that was given up after at least D / 2.

     1  weight       w_i = (1 - g)^(number sent later) 2^(-age_i / H)
     2  runs         misses of D sent one after the other; M is the run after the last reply on time, with those under
                     way that have waited for D / 2; K weighs the earlier runs of three or more: outages
     3  survival     S(t) = product over answered x_i <= t of 1 - w_i / (sum of w_j, x_j >= x_i), outages and M left out
                                                                                                  (Kaplan-Meier)
                     a request that was cancelled after x_i counts here alone, as censored
     4  on time, up  p(D | t) = (N (1 - S(D) / S(t)) + a + 1/2) / n,   n = N + a + 1,   N = sum of w_i with x_i > t
     5  unchanged    L = product over M, j = 0, 1, ... of 1 - p(min(x_j, D) | 0) n / (n + j),
                     q = L / (L + h),   h = 1 / (s + a)
     6  up or out    U = B(u + a + 1/2, v + 1/2) / B(a + 1/2, 1/2) g^(2 K) (L + h)
     7  by chance    C = c B(s + 1/2, f + 1/2) / B(1/2, 1/2)
     8  on time      P_U = q p(D | t) n / (n + |M|) + (1 - q) r,   P_C = e / (e + f + 1),   e = s (s_t + 1) / (s + 1)
     9  reply        P(T <= D | T > t) = (U P_U + C P_C) / (U + C),   r = 0 if D <= 2 max x_j of M, else 1/2
    10  rule         wait at t while P(T <= D | T > t) >= p_min

s and f are the weights of all replies on time and misses, s_t that of replies after t; u and v are those outside
outages and M. Two models compete: a link that is up or out (line 6), where an outage begins or
ends once in 1/g observations, and a link on which each reply is on time independently (line 7). Both
are Beta-Bernoulli likelihoods with Jeffreys' prior. A link that is up has a prior of a replies on time.
The rules of succession give h for an outage, and e for a reply later than all observed. The factor 2 is the back-off of
RFC 6298 §5.5: a wait gives no evidence about one twice as long. By line 10 at most a share of p_min of the callers
misses a reply that would have been on time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

GAIN: Final = 1 / 32
"""g: the newest observation has at most this share of all weight, so about 63 of them count."""
HALF_LIFE_S: Final = 300.0
"""H: ten of the longest intervals between probes, so that an outage is remembered while it is probed."""
CHANCE: Final = 0.1
"""c: prior odds that replies are on time by chance; most links are up or out."""
PRIOR: Final = 4.0
"""a. With p_min = 0.05, the third miss in a row ends the waiting, on an unknown link and on one that was always on
time."""
MIN_ON_TIME_PROBABILITY: Final = 0.05
"""p_min by default. A caller that does not wait loses at most this share of the datacenter's advantage in accuracy; a
missed wait costs time only, because the edge's answer is at hand."""
REMEMBERED: Final = 96
"""Number of observations; older ones would have at most 5 % of the newest one's weight."""
PROBES: Final = 16
"""Consecutive missed probes that are kept, so that a long outage does not displace earlier observations."""
BACK_OFF: Final = 2.0
OUTAGE: Final = 3
"""Consecutive misses that count as an outage afterwards."""
SUSPECTED: Final = 0.5
"""q below which (and before the first reply) outstanding requests count as missed, which limits concurrent waits."""
TIMEOUT_DEVIATIONS: Final = 4.0
"""RFC 6298 §2: a timeout of the mean plus four mean deviations."""
MAX_EXPONENT: Final = 700.0
"""Largest exponent of e in a double."""


class _Observation(NamedTuple):
    sent: float
    at: float
    ms: float
    answered: bool
    probe: bool = False
    cancelled: bool = False
    """Whether the caller withdrew it, which says nothing about when the reply would have come."""


class OutstandingRequest(NamedTuple):
    """A request without a reply yet."""

    number: int
    sent: float


class ResponseTimes:
    """Round trips of one link over one transport. Times are seconds of a monotonic clock, durations milliseconds."""

    def __init__(self, min_on_time_probability: float = MIN_ON_TIME_PROBABILITY) -> None:
        """Start without observations, which admits callers; `min_on_time_probability` is p_min, 0..1."""
        self.min_on_time_probability = min_on_time_probability
        self._observations: list[_Observation] = []
        """In the order of sending."""
        self._under_way: dict[int, float] = {}
        """When each was sent. The caller bounds their number."""
        self._numbers = itertools.count()
        self._bound_ms: float | None = None
        """See `bound_ms`; None before the first reply, and until it is computed again."""

    def sent(self, now: float) -> OutstandingRequest:
        """Record a sent request; `answered`, `given_up`, `cancelled` or `dropped` must follow."""
        request = OutstandingRequest(next(self._numbers), now)
        self._under_way[request.number] = now
        return request

    def answered(self, request: OutstandingRequest, ms: float, now: float) -> None:
        """Record a reply after `ms`, on time or not."""
        self._add(_Observation(request.sent, now, ms, answered=True), request)

    def given_up(self, request: OutstandingRequest, ms: float, now: float, *, probe: bool = False) -> None:
        """Record that no reply had come after `ms`."""
        self._add(_Observation(request.sent, now, ms, answered=False, probe=probe), request)

    def cancelled(self, request: OutstandingRequest, now: float) -> None:
        """Record that the request was withdrawn before its reply; nothing if it has ended."""
        if request.number in self._under_way:
            ms = (now - request.sent) * 1e3
            self._add(_Observation(request.sent, now, ms, answered=False, cancelled=True), request)

    def _add(self, observation: _Observation, request: OutstandingRequest) -> None:
        self.dropped(request)
        self._bound_ms = None
        insort(self._observations, observation)
        latest = self._observations[-PROBES - 1 :]
        if len(latest) > PROBES and all(each.probe for each in latest):
            self._observations.remove(latest[0])
        elif len(self._observations) > REMEMBERED:
            del self._observations[0]

    def dropped(self, request: OutstandingRequest) -> None:
        """Discard a request without an observation."""
        self._under_way.pop(request.number, None)

    def forget(self) -> None:
        """Discard all observations, because the link has changed."""
        self._observations.clear()
        self._bound_ms = None

    def on_time(self, within_ms: float, now: float) -> float:
        """P(reply within `within_ms` of sending a request now)."""
        return self._estimate(within_ms, now).probability

    def gain(self, within_ms: float, later_ms: Sequence[float], now: float) -> float:
        """P(reply within `within_ms`), less the mean for what would remain if the request left later (one or more).

        0 without an estimate, if usual replies are in time with the least of them.
        """
        bound_ms = self.bound_ms()
        if bound_ms is not None and bound_ms <= min(later_ms):
            return 0.0
        later = sum(self.on_time(ms, now) for ms in later_ms if ms > 0.0) / len(later_ms)
        return self.on_time(within_ms, now) - later

    def worth_ms(self, within_ms: float, now: float) -> float:
        """The wait cutoff for a reply within `within_ms`: all of that, part of it, or 0."""
        return self._estimate(within_ms, now).worth_ms(self.min_on_time_probability)

    def bound_ms(self) -> float | None:
        """The timeout of RFC 6298 over all observations; None before the first reply."""
        mean_ms = self.mean_ms if self._bound_ms is None else None
        if mean_ms is not None:
            deviations = [abs(each.ms - mean_ms) for each in self._observations if not each.cancelled]
            self._bound_ms = mean_ms + TIMEOUT_DEVIATIONS * _recent_mean(deviations)
        return self._bound_ms

    @property
    def mean_ms(self) -> float | None:
        """Mean round trip, with the waited time of abandoned requests; None before the first reply."""
        if not any(each.answered for each in self._observations):
            return None
        return _recent_mean([each.ms for each in self._observations if not each.cancelled])

    def _estimate(self, within_ms: float, now: float) -> _Estimate:
        """One pass over the observations, latest request first."""
        found = _Estimate(within_ms)
        up, misses = found.up, list[_Weighted]()
        known_ms = within_ms / BACK_OFF
        rank_weight, last = 1.0, -math.inf
        for sent, at, ms, answered, _, cancelled in reversed(self._observations):
            age_weight = 0.5 ** ((now - at) / HALF_LIFE_S)
            weight = rank_weight * age_weight
            rank_weight *= 1.0 - GAIN
            if cancelled:
                up.append((ms, False, weight, 0.0))
                continue
            if answered and ms <= within_ms:
                if last == -math.inf:
                    last = sent
                found.end_run(misses)
                found.on_time += weight
                up.append((ms, True, weight, weight))
                continue
            known = answered or ms >= known_ms
            if known:
                found.missed += weight
            if last == -math.inf:
                found.run.append((ms, age_weight))
            else:
                misses.append((ms, answered, weight, weight if known else 0.0))
        found.end_run(misses)
        found.end([(now - sent) * 1e3 for sent in self._under_way.values() if sent > last], unknown=last == -math.inf)
        return found


def _recent_mean(values: Sequence[float]) -> float:
    """Mean with the weights of line 1 without age; the newest value is the last."""
    weights = [(1.0 - GAIN) ** rank for rank in reversed(range(len(values)))]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


_Weighted: TypeAlias = tuple[float, bool, float, float]
"""Duration, whether answered, weight, and what of the weight counts in N while x_i > t."""


class _Estimate:
    """P(T <= D | T > t) for one D."""

    def __init__(self, within_ms: float) -> None:
        self._within_ms = within_ms
        self.run: list[tuple[float, float]] = []
        """M: waited times, and weights by age."""
        self.up: list[_Weighted] = []
        """Observations outside M and outages."""
        self.outages = 0.0
        """K."""
        self.on_time = self.missed = 0.0
        """s and f."""

    def end_run(self, misses: list[_Weighted]) -> None:
        """End a run of misses (newest first) at a reply on time."""
        if len(misses) >= OUTAGE:
            self.outages += misses[0][2]
        else:
            self.up += misses
        misses.clear()

    def end(self, under_way_ms: Sequence[float], *, unknown: bool) -> None:
        """Compute the estimate. `under_way_ms` are the waits of requests sent after the last reply on time, if any."""
        up, run, within_ms = sorted(self.up), self.run, self._within_ms
        self.up = up
        self._survival = [1.0]
        """S just after each of `up`, and first S(0)."""
        known_ms, survival = within_ms / BACK_OFF, 1.0
        on_time = 0.0
        self._known = sum(counts for _, _, _, counts in up)
        at_risk = sum(weight for _, _, weight, _ in up)
        for ms, answered, weight, _ in up:
            if answered:
                survival *= max(0.0, 1.0 - weight / at_risk) if at_risk > 0.0 else 1.0
                on_time += weight if ms <= within_ms else 0.0
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
        """The first time at which the probability is below `least`; it can fall only at observed replies."""
        if self.probability < least:
            return 0.0
        end = self._survives(self._within_ms)
        known, on_time = self._known, self.on_time
        for (ms, answered, weight, counts), survival in zip(self.up, self._survival[1:], strict=True):
            if ms > self._within_ms:
                break
            known -= counts
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
    """Log likelihood of these counts, with Jeffreys' prior plus `prior` on time."""
    a, b = prior + 0.5, 0.5
    return _log_beta(on_time + a, missed + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
