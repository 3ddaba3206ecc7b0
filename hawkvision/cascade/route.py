"""A route: the meaning of a target on a cascade, for images of one kind, and the certificate behind it."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from hawkvision.cascade.certification.profile import Certificate, Profile
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.core.types import AccuracyGuarantee, AccuracyStatus, Basis, Quality, StatusReason, Target
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.bets import Claims
from hawkvision.guarantee.monitor import Dates


@dataclass(frozen=True)
class Source:
    """The images that certificates were made from."""

    name: str
    sha256: str
    basis: Basis
    labels: int | None = None
    """How many have labels; None: all, or none, as each certificate says."""
    since: datetime | None = None
    """Time of the oldest; None where it is not known."""
    until: datetime | None = None
    """Time of the newest; None for those that came with the profile."""
    stream: str | None = None
    """See `SiteData.stream`."""

    @functools.cached_property
    def dates(self) -> Dates:
        """Times in seconds since 1970. Those of a folder's files are no evidence that its images are no older."""
        since = self.since if self.basis is Basis.REVIEW else None
        begin, end = (-math.inf if each is None else each.timestamp() for each in (since, self.until))
        return Dates(begin, end) if self.stream is None else Dates(begin, end, bytes.fromhex(self.stream))


def source_of(profile: Profile, site: SiteCertificates | None) -> Source:
    """The images behind a profile's certificates, or behind a site's in their place."""
    if site is None:
        return Source(*profile.certified_on, Basis.SHIPPED)
    data = site.data
    return Source(data.name, data.sha256, Basis(site.basis), data.labels, site.since, site.until, data.stream)


@dataclass(frozen=True, slots=True)
class IntermediateRoute:
    """A datacenter stage that runs before the reference stage; its answer is accepted from `threshold` on."""

    stage: str
    score: str
    threshold: float


@dataclass(frozen=True, slots=True)
class StageClaims:
    """What audits watch of a certificate: the claims about each stage below the reference stage."""

    edge: Claims | None
    """None if the edge does not run."""
    intermediate: Claims | None = None

    @property
    def all(self) -> tuple[Claims, ...]:
        """Those that there are."""
        return tuple(claims for claims in (self.edge, self.intermediate) if claims is not None)


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
    claims: StageClaims | None = None
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
        if self.claims is None or guarantee.status is not AccuracyStatus.CERTIFIED:
            return None
        return target.value if isinstance(target, Quality) else f"drop {guarantee.max_drop}"

    @property
    def direct(self) -> bool:
        """Whether the edge stage does not run."""
        return self.threshold == math.inf

    @property
    def disagreement(self) -> float:
        """The certified disagreement of the stages below the reference stage; the smaller of two."""
        claims = () if self.claims is None else self.claims.all
        return min((each.disagreement(self.threshold) for each in claims), default=0.0)


def without_guarantee(target: Target, reason: StatusReason) -> AccuracyGuarantee:
    """Nothing is certified, for this reason."""
    status = AccuracyStatus.SUSPENDED if reason is StatusReason.ALARM else AccuracyStatus.BEST_EFFORT
    return AccuracyGuarantee(target, status, status_reason=reason)


def guaranteed(
    target: Target, certificate: Certificate, source: Source, *, agreement_bounds_drop: bool
) -> AccuracyGuarantee:
    """The guarantee of a certificate; best effort if its basis is the profile alone.

    A certificate of disagreement says nothing about accuracies, and certifies no target that names one.

    Args:
        target: what the caller asks for.
        certificate: its certificate.
        source: the images that it was made from.
        agreement_bounds_drop: `TaskKind.agreement_bounds_drop`.
    """
    if certificate.basis == "profile":
        return without_guarantee(target, StatusReason.NO_CERTIFICATE)
    agreement, stated = certificate.basis == "disagreement", stated_drop(certificate.max_drop)
    reason = StatusReason.AGREEMENT_ONLY if agreement and not isinstance(target, Quality) else None
    labels = source.labels
    if labels is None:
        labels = certificate.n if certificate.basis == "labelled" else 0
    return AccuracyGuarantee(
        target,
        AccuracyStatus.CERTIFIED if reason is None else AccuracyStatus.BEST_EFFORT,
        Basis.AGREEMENT if agreement else source.basis,
        max_drop=None if agreement else stated,
        watched_max_drop=_watched_max_drop(certificate) if agreement_bounds_drop else None,
        delta=certificate.delta,
        n=certificate.n,
        labels=labels,
        since=source.since,
        until=source.until,
        max_disagreement=stated if agreement else None,
        status_reason=reason,
    )


def _watched_max_drop(certificate: Certificate) -> float:
    """What audits without labels hold the drop to: the disagreement of both stages, of which each is watched."""
    return stated_drop(certificate.edge_disagreement + (certificate.intermediate_disagreement or 0.0))


def certificates_name(models: Any, certificates: Any) -> str:
    """A name for the origin of a stage's claims: equal if models and certificates are."""
    facts = [models, msgspec.to_builtins(certificates)]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]
