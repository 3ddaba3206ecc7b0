"""Keeping a promise while traffic changes: one controller per stream and target, fed by agreement, without labels.

A certificate holds for traffic like its certification pictures. Rain, a dirty lens or a new camera make other traffic;
then a fixed threshold silently gives up more than was promised. The controller watches two things that cost little:

*Agreement.* Of the answers that the edge gives alone, about one in fifty is checked: the picture is also sent to the
best rung, in the background (an audit). An answer that agrees gives nothing up, so the share of accepted answers that
differ bounds the drop. Audits fall where they tell most, with probability π ∝ √m for a predicted disagreement m (Neyman
1934), and the estimate ℓ̃ = m + 1{audited}(ℓ − m)/π is right on average whether the prediction is or not (doubly
robust; Robins, Rotnitzky and Zhao, JASA 1994). Escalated pictures refresh the prediction for free.

*Difficulty.* The share of pictures whose score is below the certified threshold needs no audit at all.

The threshold follows θ ← θ + η (ℓ̃ − goal), in ranks of the profile's scores: integral control, whose average of ℓ̃
over T requests cannot exceed the goal by more than 1/(ηT), plus one audit's weight, whatever the traffic does (Gibbs
and Candès, NeurIPS 2021; Angelopoulos, Candès and Tibshirani, NeurIPS 2023). Above rank 1 nothing is accepted, and θ
may rise so far above it as one audit can push it: cut off sooner, an adversary of surely wrong answers would get half
of them past the controller (at ε = 0.02), for each audit would pay for 50 requests and stand for 200. It never goes
below the certified threshold.

*The alarm* is a bet against "traffic is as certified": wealth that multiplies by 1 + λ(x − x₀), with λ from the past
only, cannot be expected to grow while the mean of x stays within its certified bound x₀, so P(it ever exceeds 1/δ) ≤ δ
(Ville 1939; Waudby-Smith and Ramdas, JRSS-B 2024). New bets start with every block of requests, with weights that sum
to one, so that a long quiet past does not delay it. Until then the goal is the disagreement that was certified along
with the drop, or ε if that is more. After the alarm the promise is void, and the goal is ε itself, the label-free
target, until traffic looks as certified again: difficulty by a bet the other way round, and agreement on average over
all requests since the alarm, at least `LEAST_VOID` and twice as many after each further alarm. That is a judgement and
no proof; doubling keeps traffic at the edge of what was certified from going to and fro.

What agreement cannot tell is who is right where two rungs differ. Some shifts hurt the best rung more than the edge's;
then control escalates to the rung that is worse, and only labels, or a certificate of the site's own, can say so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

import msgspec

AUDIT_SHARE: Final = 0.02
"""Share of accepted answers that are audited, on average."""

LEAST_AUDITED: Final = 0.25
"""Of that share, what even the surest answer keeps: nothing is believed unseen, and no audit weighs too much."""

GAIN: Final = 0.002
"""η, ranks per unit of loss: an unexpected disagreement raises the threshold past 0.2 % of the traffic."""

SMALLEST_PREDICTION: Final = 2e-3
"""Of a disagreement: surer than one in 500 is no prediction's to claim."""

PREDICTION_GAIN: Final = 0.01
PREDICTION_RANGE: Final = (0.3, 6.0)
"""How fast and how far escalations may correct the profile's predictions, as a factor."""

BLOCK: Final = 1_000
"""Requests after which another bet starts."""

MEMORY: Final = 1_000.0
"""Requests over which the stakes remember."""

WARM_UP: Final = 100
"""Requests' worth of certainty that a new bet starts with: that the mean lies on its bound."""

BOLDEST: Final = 0.5
"""Share of the wealth that one request may cost."""

LEAST_VOID: Final = 2_000
"""Requests for which a promise stays void at least, after the first alarm."""

MOST_DOUBLINGS: Final = 6
"""Of `LEAST_VOID`: up to 128,000 requests."""

RETURN_MARGIN: Final = 1.25
"""Traffic is as certified again when the share of difficult pictures is shown to be below this times its bound."""

LARGEST_DEBT: Final = 50.0
"""Wrong answers, in expectation. A link that is down for a day must not make the next day escalate everything."""

HIGHEST_WEALTH: Final = 1e9


@dataclass(frozen=True, slots=True)
class Terms:
    """What a certificate says, in the controller's words. Shares are of the requests that this controller sees."""

    key: str
    """Names the certificate, models and curve; state kept under another key is not taken up."""
    threshold: float
    """Certified: accept from this score on."""
    max_drop: float
    """ε."""
    disagreement: float
    """Upper bound of P(accepted, and another label than the best rung's) in traffic as certified."""
    difficulty: float
    """Upper bound of P(score < threshold) in traffic as certified."""
    scores: tuple[float, ...]
    """Knots of equal share of the profile's traffic, rising."""
    disagreements: tuple[float, ...]
    drops: tuple[float, ...]
    delta: float


class Bet(msgspec.Struct):
    """An e-process for "the mean of x is at most `bound`" (or at least, with `sign` −1)."""

    bound: float
    sign: int = 1
    wealth: float = 0.5
    seen: int = 0
    mean: float = -1.0
    variance: float = 0.05

    def observe(self, x: float, least: float) -> None:
        """Take one value, of which it was known before that it cannot be below `least` (above it, with `sign` −1)."""
        if self.mean < 0.0:
            self.mean = self.bound
        advantage = self.sign * (self.mean - self.bound)
        if advantage > 0.0:
            stake = advantage / (self.variance + advantage * advantage)
            # What the worst value would cost must stay below the boldest share of the wealth.
            worst = self.sign * (self.bound - least)
            if worst > 0.0:
                stake = min(stake, BOLDEST / worst)
            growth = 1.0 + stake * self.sign * (x - self.bound)
            self.wealth = min(self.wealth * growth, HIGHEST_WEALTH)
        self.seen += 1
        if self.seen % BLOCK == 0:
            block = self.seen // BLOCK
            self.wealth += 1.0 / ((block + 1) * (block + 2))
        rate = max(1.0 / (self.seen + WARM_UP), 1.0 / MEMORY)
        deviation = x - self.mean
        self.mean += rate * deviation
        self.variance += rate * (deviation * deviation - self.variance)


class State(msgspec.Struct):
    """All that a controller remembers; what a store keeps."""

    key: str
    theta: float
    loss_bet: Bet
    difficulty_bet: Bet
    return_bet: Bet
    correction: float = 1.0
    root_mean: float = 0.1
    debt: float = 0.0
    void: bool = False
    void_since: int = 0
    void_loss: float = 0.0
    """Sum of what the certified threshold is estimated to have lost since the alarm, over `void_seen` requests."""
    void_seen: int = 0
    alarms: int = 0
    requests: int = 0
    accepted: int = 0
    audits: int = 0
    disagreements: int = 0
    escalations: int = 0
    degraded: int = 0


@dataclass(slots=True)
class StreamControl:
    """The controller of one stream and target. Not thread-safe: made and used on one event loop."""

    terms: Terms
    audit_share: float = AUDIT_SHARE
    """0 turns audits off: then only difficulty can raise the alarm."""
    state: State = field(init=False)
    _floor: float = field(init=False)
    _ceiling: float = field(init=False)
    _bar: float = field(init=False)
    _at_threshold: float = field(init=False)
    """The profile's disagreement of answers that are just sure enough."""

    def __post_init__(self) -> None:
        self._floor = self._rank(self.terms.threshold)
        self._ceiling = 1.0 + GAIN / (self.audit_share * LEAST_AUDITED or 1.0)
        self._at_threshold = self._profiled(self.terms.threshold)
        self.state = self._fresh()
        self._bar = self.terms.threshold

    @property
    def void(self) -> bool:
        """Whether traffic was found to be other than certified."""
        return self.state.void

    @property
    def bar(self) -> float:
        """The score from which on answers are accepted at present, without regard to debt."""
        return self._bar

    @property
    def threshold(self) -> float:
        """The score from which on answers are accepted now: `bar`, or more while there is debt to repay."""
        debt = self.state.debt
        if debt <= 0.0:
            return self._bar
        allowed = self.expected_drop(self._bar) * max(0.0, 1.0 - debt / 2.0)
        return max(self._bar, self._surest_with(allowed))

    def audit_probability(self, score: float) -> float:
        """With which probability to check an accepted answer of this score."""
        return self._audited(self._predicted(score))

    def estimate(self, score: float, probability: float, differs: bool | None) -> float:
        """ℓ̃ of an accepted answer: right on average over the draw of its audit, whatever was predicted."""
        predicted = self._predicted(score)
        return predicted if differs is None else predicted + (differs - predicted) / probability

    def accepted(self, score: float, probability: float, differs: bool | None) -> None:
        """An answer was accepted; `differs` says what its audit found, None that there was none.

        `probability` is that with which it was to be audited when it was accepted, 0 if it could not have been. Then
        the prediction alone moves the threshold, but is no evidence for an alarm.
        """
        state = self.state
        estimate = self.estimate(score, probability, differs)
        state.root_mean += (math.sqrt(self._predicted(score)) - state.root_mean) / MEMORY
        state.accepted += 1
        if differs is not None:
            state.audits += 1
            state.disagreements += differs
        self._observe(score, estimate if probability > 0.0 else None)
        self._move(estimate)

    def escalated(self, score: float, differs: bool | None) -> None:
        """A picture was escalated; `differs` compares edge and best rung, None if the best rung did not answer."""
        state = self.state
        predicted = self._predicted(score)
        state.escalations += 1
        if differs is not None:
            low, high = PREDICTION_RANGE
            factor = math.exp(PREDICTION_GAIN * (differs - predicted))
            state.correction = min(max(state.correction * factor, low), high)
        if score >= self._bar and state.debt > 0.0:
            state.debt = max(0.0, state.debt - self.expected_drop(score))
        self._observe(score, None if differs is None else float(differs))
        self._move(0.0)

    def fell_short(self, score: float) -> None:
        """An answer below the threshold was given because time, link or load forced it: a debt."""
        self.state.degraded += 1
        self.state.debt = min(LARGEST_DEBT, self.state.debt + self.expected_drop(score))
        # Seen all the same: with only the accepted ones counted, an outage would look like easy traffic. And without
        # audits of the accepted ones, what would have been escalated anyway must not make losses look rare.
        self._see_difficulty(score)

    def expected_drop(self, score: float) -> float:
        """What accepting an answer of this score gives up, on average."""
        return _interpolate(self.terms.scores, self.terms.drops, score)

    def restore(self, state: State) -> bool:
        """Take up a kept state; False, and nothing happens, if it was kept for another certificate."""
        if state.key != self.terms.key:
            return False
        self.state = state
        self._place()
        return True

    def _fresh(self) -> State:
        terms = self.terms
        return State(
            key=terms.key,
            theta=self._floor,
            loss_bet=Bet(terms.disagreement),
            difficulty_bet=Bet(terms.difficulty),
            return_bet=Bet(min(1.0, terms.difficulty * RETURN_MARGIN), sign=-1),
            root_mean=self._mean_root(),
        )

    def _observe(self, score: float, estimate: float | None) -> None:
        """Feed the bets: all of them are about what the certified threshold would have done."""
        at_threshold = 0.0 if score < self.terms.threshold else estimate
        if at_threshold is not None:
            self.state.loss_bet.observe(at_threshold, self._least_estimate())
            if self.state.void:
                self.state.void_loss += at_threshold
                self.state.void_seen += 1
        self._see_difficulty(score)

    def _see_difficulty(self, score: float) -> None:
        state, terms = self.state, self.terms
        state.requests += 1
        difficult = score < terms.threshold
        state.difficulty_bet.observe(float(difficult), 0.0)
        if state.void:
            state.return_bet.observe(float(difficult), 1.0)
            self._maybe_return()
        elif (state.loss_bet.wealth + state.difficulty_bet.wealth) / 2.0 >= 1.0 / terms.delta:
            state.void = True
            state.void_since = state.requests
            state.void_loss, state.void_seen = 0.0, 0
            state.alarms += 1
            state.return_bet = Bet(state.return_bet.bound, sign=-1)

    def _least_estimate(self) -> float:
        """The least that an estimate can be: of the least sure accepted answer, audited and found to agree.

        From the past alone, for a stake must not depend on the value it is laid on: that picture's own prediction is
        known only together with its score.
        """
        predicted = self._corrected(self._at_threshold)
        probability = self._audited(predicted)
        return predicted - predicted / probability if probability > 0.0 else 0.0

    def _maybe_return(self) -> None:
        state = self.state
        if (
            state.requests - state.void_since >= LEAST_VOID << min(state.alarms - 1, MOST_DOUBLINGS)
            and state.return_bet.wealth >= 1.0 / self.terms.delta
            and state.void_loss <= self.terms.disagreement * state.void_seen
        ):
            state.void = False
            # Unwinding at η · goal a request would keep escalating for thousands of them.
            state.theta = self._floor
            self._place()
            state.loss_bet = Bet(self.terms.disagreement)
            state.difficulty_bet = Bet(self.terms.difficulty)

    def _move(self, estimate: float) -> None:
        """Integral control; in traffic as certified, of the disagreement that was certified along with the drop."""
        terms = self.terms
        goal = terms.max_drop if self.state.void else max(terms.max_drop, terms.disagreement)
        self.state.theta = min(max(self.state.theta + GAIN * (estimate - goal), self._floor), self._ceiling)
        self._place()

    def _place(self) -> None:
        theta = self.state.theta
        self._bar = math.inf if theta > 1.0 else max(self.terms.threshold, self._score_of(theta))

    def _audited(self, predicted: float) -> float:
        share = self.audit_share * math.sqrt(predicted) / self.state.root_mean
        return min(1.0, max(self.audit_share * LEAST_AUDITED, share))

    def _predicted(self, score: float) -> float:
        return self._corrected(self._profiled(score))

    def _profiled(self, score: float) -> float:
        return _interpolate(self.terms.scores, self.terms.disagreements, score)

    def _corrected(self, profiled: float) -> float:
        return min(1.0, max(SMALLEST_PREDICTION, profiled * self.state.correction))

    def _rank(self, score: float) -> float:
        """Share of the profile's traffic with a smaller score."""
        knots = self.terms.scores
        if score <= knots[0]:
            return 0.0
        if score > knots[-1]:
            return 1.0
        right = bisect_left(knots, score)
        left = right - 1
        return (left + (score - knots[left]) / (knots[right] - knots[left])) / (len(knots) - 1)

    def _score_of(self, rank: float) -> float:
        if rank <= 0.0:
            return -math.inf
        knots = self.terms.scores
        place = rank * (len(knots) - 1)
        left = min(int(place), len(knots) - 2)
        return knots[left] + (place - left) * (knots[left + 1] - knots[left])

    def _surest_with(self, drop: float) -> float:
        """The smallest score at which accepting gives up at most `drop`; +∞ if none does."""
        scores, drops = self.terms.scores, self.terms.drops
        for index, expected in enumerate(drops):  # falling, and few
            if expected <= drop:
                return scores[index]
        return math.inf

    def _mean_root(self) -> float:
        """Mean of √m over the profile's accepted traffic, where audits start from."""
        accepted = [
            math.sqrt(max(SMALLEST_PREDICTION, d))
            for s, d in zip(self.terms.scores, self.terms.disagreements, strict=True)
            if s >= self.terms.threshold
        ]
        return sum(accepted) / len(accepted) if accepted else math.sqrt(SMALLEST_PREDICTION)


def _interpolate(knots: tuple[float, ...], values: tuple[float, ...], x: float) -> float:
    if x <= knots[0]:
        return values[0]
    if x >= knots[-1]:
        return values[-1]
    right = bisect_left(knots, x)
    left = right - 1
    share = (x - knots[left]) / (knots[right] - knots[left])
    return values[left] + share * (values[right] - values[left])
