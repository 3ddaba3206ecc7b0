"""A route: what a target means on a cascade, for images of one kind, with what stands behind it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hawkvision.cascade.certification.file_keys import in_first_words
from hawkvision.cascade.certification.profile import Certificate, ScoreCurve, Watch
from hawkvision.cascade.drift.monitor import Claims
from hawkvision.cascade.drift.online import ControllerSpec
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Basis, Score, Target

INTERVAL_DELTA: Final = 0.025
"""Probability that an accuracy lies below the lower end of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class IntermediateRoute:
    """A datacenter stage that is asked before the best one, and believed from `threshold` on."""

    stage: str
    score: Score
    threshold: float


@dataclass(frozen=True, slots=True)
class Controls:
    """How a certificate is watched: what each stage below the reference claims, and what its threshold follows.

    Every target that rests on a certificate has one; without it nothing is certified.
    """

    edge_claims: Claims | None
    """None where the edge is not asked."""
    edge: ControllerSpec | None = None
    """None where the threshold is not to move: the edge is not asked, or the caller asked for its answer alone."""
    intermediate_claims: Claims | None = None
    intermediate: ControllerSpec | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """What a target means on a cascade, for images received as this one was.

    The edge's own answer is accepted when its score is at least `threshold`; +∞ sends the image straight to the best
    stage, −∞ never escalates. `by_confidence` compares the calibrated top-1 probability instead of the pair's score.
    """

    threshold: float
    guarantee: AccuracyGuarantee
    escalation: float
    """Expected share of escalations, 0..1."""
    by_confidence: bool = False
    to_best: float = 1.0
    """Expected share that the reference stage answers, 0..1."""
    intermediate: IntermediateRoute | None = None
    controls: Controls | None = None
    """None where no certificate stands behind the target, or its certificate accepts only the reference stage's
    answers."""
    temperature: float | None = None
    """Of the edge stage, for `Look`; None: its own, of whole images."""
    first_only: bool = False
    """Whether the edge's first model answers alone, where more of them make up the edge stage."""
    below_target: bool = False
    """Whether not even the reference stage is known to keep the target for images received like this one: more of the
    image is needed, or the answer is below target."""

    @property
    def direct(self) -> bool:
        """Whether the edge stage is not asked at all."""
        return self.threshold == math.inf


def without_guarantee(guarantee: AccuracyGuarantee) -> AccuracyGuarantee:
    """The guarantee of an answer that had to fall short: the target stands, the certificate is not claimed."""
    return AccuracyGuarantee(guarantee.target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE)


def unmonitored(guarantee: AccuracyGuarantee) -> AccuracyGuarantee:
    """The guarantee while nobody knows whether the certificate is still true of the traffic."""
    return AccuracyGuarantee(guarantee.target, AccuracyStatus.BEST_EFFORT, Basis.UNMONITORED)


def uncertified(guarantee: AccuracyGuarantee) -> AccuracyGuarantee:
    """The guarantee where something else computed the answer, or its reference, than what was certified."""
    return AccuracyGuarantee(guarantee.target, AccuracyStatus.BEST_EFFORT, Basis.UNCERTIFIED_VERSION)


def guaranteed(target: Target, certificate: Certificate) -> AccuracyGuarantee:
    """The guarantee that a certificate keeps; none, if the basis of its thresholds is the profile alone."""
    if certificate.basis == "profile":
        return AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE, n=certificate.n)
    return AccuracyGuarantee(
        target,
        AccuracyStatus.CERTIFIED,
        Basis(certificate.basis),
        max_drop=certificate.max_drop,
        delta=certificate.delta,
        n=certificate.n,
    )


def certificates_name(models: Any, certificates: Any, curve: ScoreCurve) -> str:
    """Names what the claims of a stage were made from: the same as long as models, certificates and curve are."""
    facts = in_first_words([models, msgspec.to_builtins(certificates), msgspec.to_builtins(curve)])
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]


def controller_spec(
    place: str, models: Any, certificate: Certificate, threshold: float, watch: Watch, curve: ScoreCurve
) -> ControllerSpec:
    """What a controller is to keep; its key is the same as long as place, models, certificate and curve are."""
    facts = in_first_words([place, models, msgspec.to_builtins(certificate), msgspec.to_builtins(curve)])
    return ControllerSpec(
        key=hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32],
        threshold=threshold,
        max_drop=watch.max_drop,
        disagreement=watch.disagreement,
        scores=curve.scores,
        disagreements=curve.disagreement,
        drops=curve.drop,
    )
