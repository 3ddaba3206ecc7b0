"""Bets of one stage's audits against its certificates: when an alarm begins, and when it ends.

A certificate says of images like its own: the mean of Z = 1{score ≥ τ} · disagreement with the reference stage is at
most d. A stage has several such claims (τ_k, d_k). Audits are images drawn at random and sent to the reference stage
whatever their answer was, so each gives every claim a value Z_k in [0, 1].

*Alarm.* Under claim k, E Z_k ≤ d_k. For p > d the factor L = Z · p/d + (1 − Z) · (1 − p)/(1 − d) has mean at most 1, so
a product of factors is a bet that does not grow on average (Waudby-Smith and Ramdas, JRSS-B 2024). A bet of 1 on each p
in `BETS` starts at every block of `BLOCK` audits, for every claim. Let R be the mean over claims and p of the
sums of all bets so far (Shiryaev and Roberts). E R is at most the number of blocks, and R is a submartingale, so it
reaches `HORIZON` / `BLOCK` / δ within `HORIZON` audits with probability at most δ (Doob). A quiet past costs nothing:
its bets are lost, and new ones start.

*Renewal.* Other certificates of a stage take its bets over: each bet passes to the claim of the nearest threshold, and
R stays as it was. Given the past, whatever claims were chosen by it, a factor has mean at most 1 as long as the claim
in force holds, so the level is that of one certificate, and claims as strict as those before delay no alarm; bets
against stricter ones are lost while laxer ones are in force. An alarm passes likewise; what counts for its end is what
passes for the new claims. Where the new certificates say nothing about the stage, its alarm becomes one of every stage
whose audits count while it stands, and ends when they have all ended it.

*Restoration* is the same test in the other direction, on audits since the alarm: p < d against "E Z_k ≥ d_k". It
must succeed for every claim at once, with at least `LEAST_RETURN` audits. The j-th has δ / 2^min(j, 3). An audit that
is missing counts as a disagreement here. A certificate whose images are all later than the last alarm ends the node's,
too, and that of a stream or caller if they are all its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 16
"""Audits after which new bets start."""
HORIZON: Final = 4096
"""Audits of a log within which a false alarm has at most the probability δ."""
BETS: Final = (1.5, 2.0, 4.0, 16.0)
"""Multiples of the certified disagreement that an alarm bets on. A restoration divides it by them."""
LEAST_RETURN: Final = 100
MOST_DOUBLINGS: Final = 3
SUSPICION: Final = 4.0
"""Evidence against a claim from which on the share of audits grows with it."""
MOST_SHARE: Final = 0.2
"""The largest share of audits."""
WINDOW: Final = 200
"""The last audits of a log."""
LARGEST: Final = 1e30
"""Stands for infinity in files."""


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
    """Name of the certificates and models."""
    stage: str
    """The stage and the kind of images that reach it."""
    claims: tuple[Claim, ...]
    delta: float
    """Probability of a false alarm within `HORIZON` audits, for all logs of a request together."""

    @property
    def key(self) -> str:
        """Name of the log."""
        return f"{self.profile}/{self.stage}"

    def disagreement(self, threshold: float) -> float:
        """What is certified at this threshold; the strictest claim's if there is none."""
        at = [claim.disagreement for claim in self.claims if claim.threshold == threshold]
        return min(at or [claim.disagreement for claim in self.claims])


def claims_of(profile: str, stage: str, found: list[Claim], delta: float) -> Claims:
    """The claims in order; of several with one threshold the strictest."""
    strictest: dict[float, float] = {}
    for claim in found:
        strictest[claim.threshold] = min(claim.disagreement, strictest.get(claim.threshold, 1.0))
    return Claims(profile, stage, tuple(Claim(*pair) for pair in sorted(strictest.items())), delta)


class LogState(msgspec.Struct):
    """A log, as a file keeps it."""

    evidence: list[float] = msgspec.field(default_factory=list)
    """The sum of the bets, by claim and alternative. Against the claims, or for them while there is an alarm."""
    counted: int = 0
    """Audits since these bets began."""
    alarm: bool = False
    alarms: int = 0
    audits: int = 0
    disagreements: float = 0.0
    claims: list[tuple[float, float]] = msgspec.field(default_factory=list)
    """Threshold and disagreement of those that the bets are about."""


class Log:
    """The audits of one stage in one stream."""

    def __init__(self, claims: Claims, part: float, state: LogState | None = None) -> None:
        """Begin, or go on from a state; `part` of the claims' δ is this log's."""
        self.claims = claims
        self._thresholds = np.array([[claim.threshold] for claim in claims.claims])
        d = np.array([[min(max(claim.disagreement, 1e-6), 1.0 - 1e-9)] for claim in claims.claims])
        more, less = np.minimum(d * np.array(BETS), (1.0 + d) / 2.0), d / np.array(BETS)
        self.alarm_bets = more / d, (1.0 - more) / (1.0 - d)
        """What an audit with Z = 1, and one with Z = 0, multiplies a bet by."""
        self._return_bets = less / d, (1.0 - less) / (1.0 - d)
        self.alarm_at = HORIZON / BLOCK / (claims.delta * part)
        """The mean of all sums that raises the alarm."""
        self.state = state or LogState()
        self._evidence = self._taken_over()
        self._last = np.zeros((2, WINDOW), np.float32)
        """Score and disagreement of the last audits since the start, in a ring."""
        self._seen = 0

    @property
    def alarm(self) -> bool:
        """Whether it suspends its stream."""
        return self.state.alarm

    @property
    def suspicion(self) -> float:
        """How many times the usual share of its images should be audited, if that is at most `MOST_SHARE`."""
        return math.inf if self.state.alarm else max(float(self._evidence.mean(1).max()) / SUSPICION, 1.0)

    def differing(self, threshold: float) -> tuple[float, int]:
        """The sum of Z at this threshold over the last audits since the start, `WINDOW` at most, and their number."""
        number = min(self._seen, WINDOW)
        scores, disagreements = self._last[:, :number]
        return float(disagreements[scores >= np.float32(threshold)].sum()), number

    def record(self, score: float, disagreement: float) -> str | None:
        """Count the outcome of an audit; `alarm` may change. Why it begins, in a sentence; None if it does not."""
        state, evidence = self.state, self._evidence
        self._last[:, self._seen % WINDOW] = score, disagreement
        self._seen += 1
        on, off = self._return_bets if state.alarm else self.alarm_bets
        z = np.where(self._thresholds <= score, disagreement, 0.0)
        if state.counted % BLOCK == 0:
            evidence += 1.0
        evidence *= z * on + (1.0 - z) * off
        np.minimum(evidence, LARGEST, out=evidence)
        state.counted += 1
        state.audits += 1
        state.disagreements += disagreement
        if not state.alarm:
            if evidence.mean() >= self.alarm_at:
                cause = self._cause(self.claims.claims[int(evidence.mean(1).argmax())])
                self.suspend()
                return cause
        elif state.counted >= LEAST_RETURN:
            doublings = min(state.alarms, MOST_DOUBLINGS)
            if evidence.mean(1).min() >= self.alarm_at * 2.0**doublings:
                self._begin(alarm=False)
        return None

    def _cause(self, claim: Claim) -> str:
        differing, number = self.differing(claim.threshold)
        scored = "" if math.isinf(claim.threshold) else f" with a score of at least {claim.threshold:.3g}"
        return (
            f"{self.claims.stage} differs from the reference stage in {differing:.3g} of the last {number} audits"
            f"{scored}, more often than certified: {100.0 * claim.disagreement:.3g} %"
        )

    def _taken_over(self) -> NDArray[np.float64]:
        """The bets of the state. If they are about other claims, those against the nearest threshold, of the same mean;
        while there is an alarm none, as they are for other claims.
        """
        state, claims = self.state, [(max(each.threshold, -LARGEST), each.disagreement) for each in self.claims.claims]
        evidence, before, state.claims = np.zeros((len(claims), len(BETS))), state.claims, claims
        if len(state.evidence) != len(before) * len(BETS) or (state.alarm and before != claims):
            state.counted = 0
        elif before:
            from_, to = (np.array(each)[:, 0] for each in (before, claims))
            bets = np.array(state.evidence).reshape(-1, len(BETS)) * len(claims) / len(before)
            np.add.at(evidence, np.abs(np.subtract.outer(from_, to)).argmin(1), bets)
        return evidence

    def suspend(self) -> None:
        """Raise the alarm."""
        self.state.alarms += 1
        self._begin(alarm=True)

    def lift(self) -> None:
        """End the alarm."""
        if self.state.alarm:
            self._begin(alarm=False)

    def kept(self) -> LogState:
        """The state that a file keeps."""
        self.state.evidence = self._evidence.ravel().tolist()
        return self.state

    def _begin(self, *, alarm: bool) -> None:
        self.state.alarm, self.state.counted = alarm, 0
        self._evidence = np.zeros_like(self._evidence)
