"""Monitoring: does a certificate still hold for this traffic? One log of audits, and tests that suspend and restore it.

A certificate says of images like its own: the mean of 1{score ≥ τ} · disagreement with the reference stage is at most
d. A stage has several such claims (τ_k, d_k), one per certificate. A fixed share of the images that the stage scores is
audited: drawn at random, whatever their answer, and sent to the reference stage. So audited outcomes are a uniform
sample of the traffic, and each gives every claim a value Z_k = 1{score ≥ τ_k} · disagreement in [0, 1]; for classes it
is 0 or 1. An audit that failed is no outcome: it counts neither for nor against a claim.

*Alarm.* Under claim k, E Z_k ≤ d_k. For an alternative a > d the payment for one outcome,

    L = Z · a/d + (1 − Z) · (1 − a)/(1 − d),

which for Z of 0 or 1 is a likelihood ratio, has mean at most 1, so a product of such ratios is a bet whose expected
value does not grow (Ville 1939; Waudby-Smith and Ramdas, JRSS-B 2024). New bets start at each block of `BLOCK`
outcomes, on each alternative a = 2d, 4d, 16d, for each of the K claims. The sum of all bets would grow by at most their
number, so the probability that any of them reaches

    T = (LOG / BLOCK) · A · K · 2 / δ     (A alternatives; half of δ each for the caller's own and the shared log)

within any `LOG` outcomes (200,000 images at 2 %) is at most δ / 2 (the Shiryaev-Roberts argument; Shin, Ramdas and
Rinaldo, "E-detectors", 2023). This holds from any time on: a long quiet past does not delay the alarm.

*Restoration* is the same test in the other direction, on outcomes since the alarm: alternatives a = d/2, d/4, d/16 of
the failed claim, against "E Z ≥ d", with at least `LEAST_RETURN` outcomes. The j-th restoration is wrong with
probability δ / 2^min(j, 3), so that traffic at the limit of a claim does not alternate.

*Weight of a caller.* In a log that several callers share, the product of one caller's outcomes is capped at T^0.4.
Capped factors never exceed the whole ones, so the error bound holds. Two callers reach T^0.8 < T. So an alarm of a
shared log needs outcomes of three callers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

LOG: Final = 4096
"""Outcomes in the log, two bytes each."""

BLOCK: Final = 16
"""Outcomes after which new bets start."""

ALTERNATIVES: Final = (2.0, 4.0, 16.0)
"""Multiples of the claimed disagreement that an alarm bets on. A restoration bets on the inverse of each."""

LEAST_RETURN: Final = 100
"""Minimum number of audited outcomes since the alarm for a restoration."""

MOST_DOUBLINGS: Final = 3

SHARED_CAP: Final = 0.4
"""Upper limit of one caller's part of an alarm's logarithm, so that an alarm needs three callers."""

MOST_CALLERS: Final = 32
"""Callers that a shared log distinguishes; further ones count as one until others' outcomes have left the log."""

RECENT: Final = 1_000
"""Answers over which the share of completed audits is measured."""

LEAST_COMPLETED: Final = 0.5
"""Share of the due audits that must be completed for the guarantee to count as monitored."""

_BUCKETS: Final = 127

UNITS: Final = 65_535
"""Of disagreements that are fractions. Rounded by one unit to the safe side, so that the tests stay valid."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The mean over images of their disagreement with the reference's answer, where the score is at least `threshold`,
    else 0, is at most `disagreement`.
    """

    threshold: float
    disagreement: float


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of all certificates of one stage, by rising threshold, without duplicates."""

    profile: str
    """Name of the certificates and models; state saved under another name is not restored."""
    stage: str
    """The stage and the kind of images that reach it."""
    claims: tuple[Claim, ...]
    delta: float
    """Probability of a false alarm within `LOG` outcomes, for a caller's own log and the shared one together."""

    @property
    def key(self) -> str:
        """Name of the log."""
        return f"{self.profile}/{self.stage}"


def claims_of(profile: str, stage: str, found: list[Claim], delta: float) -> Claims:
    """The claims in order; of several with one threshold the strictest."""
    strictest: dict[float, float] = {}
    for claim in found:
        strictest[claim.threshold] = min(claim.disagreement, strictest.get(claim.threshold, 1.0))
    return Claims(profile, stage, tuple(Claim(*pair) for pair in sorted(strictest.items())), delta)


class MonitorState(msgspec.Struct):
    """The state of a monitor, as a store keeps it."""

    key: str
    outcomes: bytearray = msgspec.field(default_factory=bytearray)
    """Two bytes per outcome, oldest first. First the caller's place in `callers`, from 1, or 0 for further callers;
    then twice the number of claims that accepted, plus 1 if the answers differed."""
    fractions: bytearray = msgspec.field(default_factory=bytearray)
    """Two bytes per outcome, little-endian: the disagreement in units of 1 / `UNITS`, rounded down. Empty while all are
    0 or 1."""
    callers: list[str] = msgspec.field(default_factory=list)
    failed: int | None = None
    """Index of the claim that raised the alarm; None without an alarm."""
    alarms: int = 0
    audits: int = 0
    """Completed in total."""
    disagreements: float = 0


class Monitor:
    """The log of one stream at one stage, with its tests. Not thread-safe: for one event loop."""

    def __init__(self, claims: Claims, *, shared: bool) -> None:
        """Start with an empty log; `shared` if several callers' images enter it, so that none can raise an alarm
        alone.
        """
        assert 0 < len(claims.claims) <= _BUCKETS
        self.claims = claims
        self.shared = shared
        self.state = MonitorState(claims.key)
        self._thresholds = [claim.threshold for claim in claims.claims]
        bound = np.array([[min(claim.disagreement, 1.0 - 1e-9)] for claim in claims.claims])
        more = np.minimum(bound * np.array(ALTERNATIVES), (1.0 + bound) / 2.0)
        less = bound / np.array(ALTERNATIVES)
        self._alarm_bets = np.log(more / bound), np.log((1.0 - more) / (1.0 - bound))
        self._return_bets = np.log(less / bound), np.log((1.0 - less) / (1.0 - bound))

    @property
    def suspended(self) -> bool:
        """Whether an alarm stands."""
        return self.state.failed is not None

    @property
    def alarm_at(self) -> float:
        """The logarithm of T."""
        bets = LOG // BLOCK * len(ALTERNATIVES) * len(self.claims.claims)
        return math.log(bets * 2.0 / self.claims.delta)

    @property
    def return_at(self) -> float:
        """The logarithm of the threshold of a restoration."""
        doublings = min(self.state.alarms, MOST_DOUBLINGS)
        return math.log(LOG // BLOCK * len(ALTERNATIVES) / self.claims.delta) + doublings * math.log(2.0)

    def record(self, score: float, disagreement: float, caller: str = "") -> None:
        """Record the outcome of an audit of an image drawn at random; `suspended` may change.

        Args:
            score: of the stage.
            disagreement: of its answer with the reference stage's, 0..1.
            caller: who sent the image.
        """
        state = self.state
        accepting = bisect_right(self._thresholds, score)
        self._keep_fraction(disagreement)
        state.outcomes += bytes((self._place(caller), 2 * accepting + (disagreement > 0.0)))
        if len(state.outcomes) > 2 * LOG:
            del state.outcomes[: 2 * BLOCK]  # whole blocks, so that bets keep their starting points
            del state.fractions[: 2 * BLOCK]
        state.audits += 1
        state.disagreements += disagreement
        if not self.suspended:
            if disagreement > 0.0 and accepting:  # only this raises a bet
                self._maybe_alarm()
        elif len(state.outcomes) >= 2 * LEAST_RETURN:
            self._maybe_return()

    def suspend(self, failed: int = 0) -> None:
        """Raise the alarm for the claim of that index."""
        self.state.failed = failed
        self.state.alarms += 1
        self._begin_anew()

    def restore(self, state: MonitorState) -> bool:
        """Restore a saved state; False, without effect, if it is of other certificates or invalid."""
        count = len(self.claims.claims)
        sound = state.failed is None or 0 <= state.failed < count
        pairs = state.outcomes[::2], state.outcomes[1::2]
        sound = sound and len(state.fractions) in (0, len(state.outcomes))
        sound = sound and len(pairs[0]) == len(pairs[1]) <= LOG and len(state.callers) <= MOST_CALLERS
        sound = sound and max(pairs[0], default=0) <= len(state.callers) and max(pairs[1], default=0) <= 2 * count + 1
        if state.key != self.claims.key or not sound:
            return False
        self.state = state
        return True

    def _keep_fraction(self, disagreement: float) -> None:
        """Keep a disagreement next to the outcomes, from the first on that is neither 0 nor 1."""
        state = self.state
        if not state.fractions:
            if disagreement in (0.0, 1.0):
                return
            for each in state.outcomes[1::2]:
                state.fractions += (UNITS * (each & 1)).to_bytes(2, "little")
        state.fractions += int(UNITS * disagreement).to_bytes(2, "little")

    def _place(self, caller: str) -> int:
        if not self.shared:
            return 0
        callers = self.state.callers
        if caller in callers:
            return callers.index(caller) + 1
        if len(callers) < MOST_CALLERS:
            callers.append(caller)
            return len(callers)
        present = set(self.state.outcomes[::2])
        for place in range(1, MOST_CALLERS + 1):
            if place not in present:
                callers[place - 1] = caller
                return place
        return 0

    def _maybe_alarm(self) -> None:
        at = self.alarm_at
        found = self._evidence(*self._alarm_bets, SHARED_CAP * at if self.shared else math.inf)
        if found.max() >= at:
            self.suspend(int(found.argmax()))

    def _maybe_return(self) -> None:
        failed, at, cap = self.state.failed, self.return_at, math.inf
        assert failed is not None
        if self.shared:  # as many callers as for an alarm, or all if there are fewer
            callers = len(set(self.state.outcomes[::2]))
            cap = at * (1.0 if callers == 1 else 0.6 if callers == 2 else SHARED_CAP)
        if self._evidence(*self._return_bets, cap, rounding=1)[failed] >= at:
            self.state.failed = None
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.state.outcomes = bytearray()
        self.state.fractions = bytearray()
        self.state.callers = []

    def _evidence(
        self, on: NDArray[np.float64], off: NDArray[np.float64], cap: float, rounding: int = 0
    ) -> NDArray[np.float64]:
        """For each claim, the logarithm of the best bet on any alternative, from the start of any block.

        Of (claims, alternatives), `on` is the logarithm of what an outcome with Z = 1 multiplies by, `off` of Z = 0.
        `rounding` is added to fractions, in units: 1 where larger ones speak against the bet.
        """
        if self.state.fractions:
            fractions = np.frombuffer(bytes(self.state.fractions), "<u2").astype(np.float64)
            fractions = np.where(fractions > 0, np.minimum(fractions + rounding, UNITS), 0.0) / UNITS
            return fractional_evidence(bytes(self.state.outcomes), fractions, np.exp(on), np.exp(off), cap)
        pairs = np.frombuffer(bytes(self.state.outcomes), np.uint8).reshape(-1, 2)
        present, caller = np.unique(pairs[:, 0], return_inverse=True)
        claims, callers = len(self.claims.claims), len(present)
        blocks = (len(pairs) - 1) // BLOCK + 1
        cell = np.arange(len(pairs)) // BLOCK * callers + caller
        counts = np.bincount(cell, minlength=blocks * callers).reshape(blocks, callers)
        differs = (pairs[:, 1] & 1).astype(np.bool_)
        accepting = (cell * (claims + 1) + (pairs[:, 1] >> 1))[differs]
        found = np.bincount(accepting, minlength=blocks * callers * (claims + 1)).reshape(blocks, callers, claims + 1)
        # Claim k accepted the outcomes that more than k claims accepted. Sums run from each block to the end.
        found = found[:, :, :0:-1].cumsum(2)[::-1, :, ::-1].cumsum(0)[::-1, :, :, None]
        counts = counts[::-1].cumsum(0)[::-1, :, None, None]
        grown = np.minimum(found * on + (counts - found) * off, cap).sum(1)
        best: NDArray[np.float64] = grown.max(axis=(0, 2))
        return best


def fractional_evidence(
    outcomes: bytes, z: NDArray[np.float64], on: NDArray[np.float64], off: NDArray[np.float64], cap: float
) -> NDArray[np.float64]:
    """`Monitor._evidence` of outcomes with disagreements z (n,) in [0, 1]; `on` and `off` are factors."""
    pairs = np.frombuffer(outcomes, np.uint8).reshape(-1, 2)
    accepted = (pairs[:, 1:] >> 1) > np.arange(len(on))  # (n, claims)
    values = np.where(accepted, z[:, np.newaxis], 0.0)[:, :, np.newaxis]
    grown = np.log(values * on + (1.0 - values) * off)  # (n, claims, alternatives)
    present, caller = np.unique(pairs[:, 0], return_inverse=True)
    blocks, callers = (len(pairs) - 1) // BLOCK + 1, len(present)
    sums = np.zeros((blocks, callers, *on.shape))
    np.add.at(sums, (np.arange(len(pairs)) // BLOCK, caller), grown)
    since = sums[::-1].cumsum(0)[::-1]  # from each block to the end
    best: NDArray[np.float64] = np.minimum(since, cap).sum(1).max(axis=(0, 2))
    return best


class Coverage:
    """The due and the completed audits of the last `RECENT` answers."""

    __slots__ = ("_at", "_ring", "completed", "due")

    NOT_DUE: Final = 0
    COMPLETED: Final = 1
    MISSED: Final = 2

    def __init__(self) -> None:
        """Start without answers."""
        self._ring = bytearray()
        self._at = 0
        self.due = self.completed = 0

    def add(self, outcome: int) -> None:
        """Count an answer, once the outcome of its audit is known."""
        if len(self._ring) < RECENT:
            self._ring.append(outcome)
        else:
            before, self._ring[self._at] = self._ring[self._at], outcome
            self._at = (self._at + 1) % RECENT
            self.due -= before != self.NOT_DUE
            self.completed -= before == self.COMPLETED
        self.due += outcome != self.NOT_DUE
        self.completed += outcome == self.COMPLETED

    @property
    def share(self) -> float:
        """The share of due audits that were completed; 1 if none was due."""
        return self.completed / self.due if self.due else 1.0

    @property
    def enough(self) -> bool:
        """Whether enough audits were completed for the guarantee to count as monitored."""
        return self.share >= LEAST_COMPLETED
