"""A route: what a target means on a ladder, for pictures of one kind, with what stands behind it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hawkvision.cascade.certification.profile import Certificate, ScoreCurve, Watch
from hawkvision.cascade.drift.monitor import Claims
from hawkvision.cascade.drift.online import Terms
from hawkvision.cascade.scores import Score
from hawkvision.core.types import AccuracyPromise, Basis, PromiseStatus, Target

INTERVAL_DELTA: Final = 0.025
"""Probability that an accuracy lies below the lower end of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class MiddleRoute:
    """A datacenter rung that is asked before the best one, and believed from `threshold` on."""

    rung: str
    score: Score
    threshold: float


@dataclass(frozen=True, slots=True)
class Controls:
    """How a certificate is watched: what each stage below the reference claims, and what its threshold follows.

    Every target that rests on a certificate has one; without it nothing is certified.
    """

    edge_claims: Claims | None
    """None where the edge is not asked."""
    edge: Terms | None = None
    """None where the threshold is not to move: the edge is not asked, or the caller asked for its answer alone."""
    middle_claims: Claims | None = None
    middle: Terms | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """What a target means on a ladder, for pictures received as this one was.

    The edge's own answer is accepted when its score is at least `threshold`; +∞ sends the picture straight to the best
    rung, −∞ never escalates. `by_confidence` compares the calibrated top-1 probability instead of the pair's score.
    """

    threshold: float
    promise: AccuracyPromise
    escalation: float
    """Expected share of escalations, 0..1."""
    by_confidence: bool = False
    to_best: float = 1.0
    """Expected share that the best rung answers, 0..1."""
    middle: MiddleRoute | None = None
    controls: Controls | None = None
    """None where no certificate stands behind the target, or its certificate accepts only the best rung's answers."""
    temperature: float | None = None
    """Of the edge rung, for `Look`; None: its own, of whole pictures."""
    first_only: bool = False
    """Whether the edge's first model answers alone, where more of them make up the edge rung."""
    short: bool = False
    """Whether not even the best rung is known to keep the target for pictures received like this one: more of the
    picture is needed, or the answer is below target."""

    @property
    def direct(self) -> bool:
        """Whether the edge rung is not asked at all."""
        return self.threshold == math.inf


def weakened(promise: AccuracyPromise) -> AccuracyPromise:
    """The promise of an answer that had to fall short: the target stands, the certificate is not claimed."""
    return AccuracyPromise(promise.target, PromiseStatus.BEST_EFFORT, Basis.PROFILE)


def unmonitored(promise: AccuracyPromise) -> AccuracyPromise:
    """The promise while nobody knows whether the certificate is still true of the traffic."""
    return AccuracyPromise(promise.target, PromiseStatus.BEST_EFFORT, Basis.UNMONITORED)


def uncertified(promise: AccuracyPromise) -> AccuracyPromise:
    """The promise where something else computed the answer, or its reference, than what was certified."""
    return AccuracyPromise(promise.target, PromiseStatus.BEST_EFFORT, Basis.UNCERTIFIED_VERSION)


def promised(target: Target, certificate: Certificate) -> AccuracyPromise:
    """The promise that a certificate keeps; none, if the basis of its thresholds is the profile alone."""
    if certificate.basis == "profile":
        return AccuracyPromise(target, PromiseStatus.BEST_EFFORT, Basis.PROFILE, n=certificate.n)
    return AccuracyPromise(
        target,
        PromiseStatus.HELD,
        Basis(certificate.basis),
        max_drop=certificate.max_drop,
        delta=certificate.delta,
        n=certificate.n,
    )


def certificates_name(models: Any, certificates: Any, curve: ScoreCurve) -> str:
    """Names what the claims of a stage were made from: the same as long as models, certificates and curve are."""
    facts = [models, msgspec.to_builtins(certificates), msgspec.to_builtins(curve)]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]


def terms(
    place: str, models: Any, certificate: Certificate, threshold: float, watch: Watch, curve: ScoreCurve
) -> Terms:
    """What a controller is to keep; its key is the same as long as place, models, certificate and curve are."""
    facts = [place, models, msgspec.to_builtins(certificate), msgspec.to_builtins(curve)]
    return Terms(
        key=hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32],
        threshold=threshold,
        max_drop=watch.max_drop,
        disagreement=watch.disagreement,
        scores=curve.scores,
        disagreements=curve.disagreement,
        drops=curve.drop,
    )
