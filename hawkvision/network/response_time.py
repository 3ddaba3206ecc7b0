"""How long a caller waits for the datacenter: while a reply within its remaining time is likely enough.

An observation is (x_i, answered or given up): a round trip of x_i ms, or one that had not ended after x_i ms (right
censored). T is a round trip, D the time that a caller has in ms, t what it has waited, p_min the one knob.

     1  weight       w_i = (1 - g)^(number of newer ones) 2^(-age_i / H)
     2  at risk      R(x) = sum of w_i over x_i >= x
     3  survival     S(t) = product over answered x_i <= t of 1 - w_i / R(x_i)                       (Kaplan-Meier)
     4  known        N(t) = sum of w_i over x_i > t, if answered or 2 x_i >= D
     5  on time      p(D | t) = (N(t) (1 - S(D) / S(t)) + a + 1/2) / (N(t) + a + 1),   a = 4 (1 - g sum of w_i)
     6  run          M = misses of D sent after the last reply within D, left out above; also who has waited for D / 2
                     since then, or, once M has two misses, at all (x_i = D)
     7  likelihood   L = product over M of (1 - p(min(x_i, D) | 0))^(2^(-age_i / H))
     8  unchanged    q = L / (L + h), or 1 if M is empty: the probability that the link is as it was before M
     9  reply        P(T <= D | T > t) = q p(D | t) + (1 - q) r,   r = 0 if D <= 2 max x_i of M, else 1/2
    10  rule         wait at t while P(T <= D | T > t) >= p_min

Line 5 is Jeffreys' estimate of a share, with four replies on time seen in advance, which fade as others are seen.
Lines 6 to 9 are a change point with prior odds h: a run of misses that the link as it was would hardly yield is an
outage. The factor 2 is the back-off of RFC 6298 §5.5: what is known of a wait says nothing of one twice as long.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

GAIN: Final = 1 / 16
"""g: the newest observation has at most this share of all weight, so about 31 of them count."""
HALF_LIFE_S: Final = 300.0
"""H: ten of the longest intervals between probes, so that an outage is remembered while it is probed."""
OUTAGE_ODDS: Final = 0.03
"""h: prior odds that a miss begins an outage. With p_min = 0.05, three misses in a row then end the waiting over a link
that was on time in 88 % or more, where 0.12^3, one caller in 580, sees that by chance."""
PRIOR: Final = 4.0
"""Replies on time that are taken to have been seen: three misses in a row end the waiting over an unknown link, too."""
MIN_ON_TIME_PROBABILITY: Final = 0.05
"""p_min by default. Whoever does not wait forgoes at most this share of what the datacenter is more accurate than the
edge; a wait in vain costs time only, for the edge's answer stands by."""
REMEMBERED: Final = 64
"""Observations; older ones would have 2 % of the newest one's weight at most."""
BACK_OFF: Final = 2.0
SUSPECTED: Final = 2
"""Misses in a row after which no more callers are let wait at a time than would be after a third."""
NEGLIGIBLE: Final = 1e-9
TIMEOUT_DEVIATIONS: Final = 4.0
"""RFC 6298 §2: a round trip hardly exceeds the mean by more than four mean deviations."""


class _Observation(NamedTuple):
    sent: float
    at: float
    ms: float
    answered: bool
    probe: bool


class _Weighed(NamedTuple):
    ms: float
    answered: bool
    weight: float


class Request(NamedTuple):
    """One that is under way."""

    number: int
    sent: float


class ResponseTimes:
    """Round trips of one link over one transport. Times are seconds of a monotonic clock, durations milliseconds."""

    def __init__(self, min_on_time_probability: float = MIN_ON_TIME_PROBABILITY) -> None:
        """Begin with nothing known, which is worth a wait; `min_on_time_probability` is p_min, 0..1."""
        self.min_on_time_probability = min_on_time_probability
        self._seen: deque[_Observation] = deque(maxlen=REMEMBERED)
        self._under_way: dict[int, float] = {}
        """When each was sent. As many as the caller has under way, who bounds them."""
        self._numbers = itertools.count()

    def sent(self, now: float) -> Request:
        """A request is sent; `answered`, `given_up` or `dropped` must follow."""
        request = Request(next(self._numbers), now)
        self._under_way[request.number] = now
        return request

    def answered(self, request: Request, ms: float, now: float) -> None:
        """Learn from a reply, on time or not, after `ms`."""
        self.dropped(request)
        self._seen.append(_Observation(request.sent, now, ms, answered=True, probe=False))

    def given_up(self, request: Request, ms: float, now: float, *, probe: bool = False) -> None:
        """Learn that no reply had come after `ms`. A `probe` prolongs a run of misses, and is forgotten with it."""
        self.dropped(request)
        self._seen.append(_Observation(request.sent, now, ms, answered=False, probe=probe))

    def dropped(self, request: Request) -> None:
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
        last = max((each.sent for each in self._seen if each.answered and each.ms <= within_ms), default=-math.inf)
        run: list[tuple[float, float]] = []
        before: list[_Weighed] = []
        rank_weight = 1.0
        for each in reversed(self._seen):
            age_weight = 0.5 ** ((now - each.at) / HALF_LIFE_S)
            if each.sent > last:
                run.append((each.ms, age_weight))
            elif each.answered or not each.probe:
                before.append(_Weighed(each.ms, each.answered, rank_weight * age_weight))
                rank_weight *= 1.0 - GAIN
        before.sort()
        longest_ms = max((ms for ms, _ in run), default=0.0)
        suspected = len(run) >= SUSPECTED
        for sent in self._under_way.values():
            waited_ms = (now - sent) * 1e3
            if sent > last and (suspected or BACK_OFF * waited_ms >= within_ms):
                run.append((within_ms if suspected else waited_ms, 1.0))
        return _Estimate(before, run, within_ms, longest_ms)


def _recent_mean(values: Sequence[float]) -> float:
    """With the weights of line 1, whatever their age; the newest is the last."""
    weights = [(1.0 - GAIN) ** rank for rank in reversed(range(len(values)))]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


class _Estimate:
    """P(T <= D | T > t) of one D, from what was seen before a run of misses (ascending) and that run."""

    def __init__(
        self, before: Sequence[_Weighed], run: Sequence[tuple[float, float]], within_ms: float, longest_ms: float
    ) -> None:
        self._before = before
        self._within_ms = within_ms
        weight = sum(each.weight for each in before)
        self._prior = PRIOR * (1.0 - GAIN * weight)
        self._survival = [1.0]
        """S just after each of `before`, and first S(0)."""
        for each in before:
            falls = each.weight / weight if each.answered and weight > 0.0 else 0.0
            self._survival.append(self._survival[-1] * max(0.0, 1.0 - falls))
            weight -= each.weight
        likelihood = 1.0
        for ms, age_weight in run:
            likelihood *= (1.0 - self._at_start(min(ms, within_ms))) ** age_weight
            if likelihood < NEGLIGIBLE:
                break
        self._unchanged = likelihood / (likelihood + OUTAGE_ODDS) if run else 1.0
        self._changed = 0.5 if within_ms > BACK_OFF * longest_ms else 0.0

    @property
    def probability(self) -> float:
        """Line 9 at t = 0."""
        return self._mixed(self._at_start(self._within_ms))

    def worth_ms(self, least: float) -> float:
        """The first time at which the probability is below `least`; only where a reply came on time can it fall."""
        if self.probability < least:
            return 0.0
        end = self._survives(self._within_ms)
        known = self._known(self._within_ms)
        for each, survival in zip(self._before, self._survival[1:], strict=True):
            if each.ms > self._within_ms:
                break
            known -= each.weight if self._is_known(each, self._within_ms) else 0.0
            if each.answered and self._mixed(self._share(known, end, survival)) < least:
                return each.ms
        return self._within_ms

    def _mixed(self, share: float) -> float:
        return self._unchanged * share + (1.0 - self._unchanged) * self._changed

    def _at_start(self, within_ms: float) -> float:
        """Line 5 at t = 0, of any D."""
        return self._share(self._known(within_ms), self._survives(within_ms), 1.0)

    def _share(self, known: float, end: float, survival: float) -> float:
        """Line 5, of N(t), S(D) and S(t)."""
        replied = 1.0 - end / survival if survival > 0.0 else 0.0
        return (max(0.0, known) * replied + self._prior + 0.5) / (max(0.0, known) + self._prior + 1.0)

    def _known(self, within_ms: float) -> float:
        """N(0)."""
        return sum(each.weight for each in self._before if self._is_known(each, within_ms))

    @staticmethod
    def _is_known(each: _Weighed, within_ms: float) -> bool:
        return each.answered or BACK_OFF * each.ms >= within_ms

    def _survives(self, ms: float) -> float:
        """S."""
        return self._survival[bisect_right(self._before, ms, key=_ms_of)]


def _ms_of(each: _Weighed) -> float:
    return each.ms
