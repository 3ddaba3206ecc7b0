"""A route: the meaning of a target on a cascade, for images of one kind, and the certificate behind it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from hawkvision.cascade.certification.profile import Certificate
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Basis, Quality, StatusReason, Target
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.monitor import Claims


@dataclass(frozen=True, slots=True)
class IntermediateRoute:
    """A datacenter stage that runs before the reference stage; its answer is accepted from `threshold` on."""

    stage: str
    score: str
    threshold: float


@dataclass(frozen=True, slots=True)
class Controls:
    """How a certificate is monitored: the claims about each stage below the reference.

    Every certified target has one.
    """

    edge_claims: Claims | None
    """None if the edge does not run."""
    intermediate_claims: Claims | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of a target on a cascade, for images received like this one.

    The edge's answer is accepted if its score is at least `threshold`. +∞ sends the image to the reference stage
    directly, −∞ never escalates. `by_confidence` compares the calibrated top-1 probability instead of the pair's score.
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
    """None if the target has no certificate, or its certificate accepts the reference stage's answers only."""
    temperature: float | None = None
    """Of the edge stage; None means its own, for whole images."""
    first_only: bool = False
    """Whether the first member of the edge's ensemble answers alone."""
    below_target: bool = False
    """Whether not even the reference stage is known to meet the target for images received like this one. More of the
    image is needed, or the answer is below target."""

    @property
    def counted_as(self) -> str | None:
        """The target by which a caller's requests are counted (`guarantee.answered`); None if nothing is given up."""
        target, guarantee = self.guarantee.target, self.guarantee
        if self.controls is None or guarantee.status is not AccuracyStatus.CERTIFIED:
            return None
        return target.value if isinstance(target, Quality) else f"drop {guarantee.max_drop}"

    @property
    def direct(self) -> bool:
        """Whether the edge stage does not run."""
        return self.threshold == math.inf

    @property
    def disagreement(self) -> float:
        """The certified disagreement of the stages below the reference stage; the smaller of two."""
        controls = self.controls
        if controls is None:
            return 0.0
        claims = [claims for claims in (controls.edge_claims, controls.intermediate_claims) if claims is not None]
        return min((each.disagreement(self.threshold) for each in claims), default=0.0)


def without_guarantee(target: Target, reason: StatusReason) -> AccuracyGuarantee:
    """Nothing is certified, for this reason."""
    status = AccuracyStatus.SUSPENDED if reason is StatusReason.ALARM else AccuracyStatus.BEST_EFFORT
    return AccuracyGuarantee(target, status, Basis.PROFILE, status_reason=reason)


def guaranteed(target: Target, certificate: Certificate) -> AccuracyGuarantee:
    """The guarantee of a certificate; best effort if its basis is the profile alone.

    A certificate of disagreement says nothing about accuracies, and certifies no target that names one.
    """
    if certificate.basis == "profile":
        return without_guarantee(target, StatusReason.NO_CERTIFICATE)
    if certificate.basis == "disagreement":
        reason = None if isinstance(target, Quality) else StatusReason.AGREEMENT_ONLY
        return AccuracyGuarantee(
            target,
            AccuracyStatus.CERTIFIED if reason is None else AccuracyStatus.BEST_EFFORT,
            Basis.AGREEMENT,
            status_reason=reason,
            delta=certificate.delta,
            n=certificate.n,
            max_disagreement=stated_drop(certificate.max_drop),
        )
    return AccuracyGuarantee(
        target,
        AccuracyStatus.CERTIFIED,
        Basis(certificate.basis),
        max_drop=stated_drop(certificate.max_drop),
        delta=certificate.delta,
        n=certificate.n,
    )


def certificates_name(models: Any, certificates: Any) -> str:
    """A name for the origin of a stage's claims: equal if models and certificates are."""
    facts = [models, msgspec.to_builtins(certificates)]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]
