"""From a target and a profile to a route. Everything here is pure.

A `Route` says what a target means on this cascade. `decision.decide` applies it to an image once the edge has a score.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Final

from hawkvision.cascade.certification.profile import Certificate, Condition, Pair, Profile, threshold_value
from hawkvision.cascade.certification.site_certificates import SiteCertificates, site_conditions
from hawkvision.cascade.degraded_input import received_route
from hawkvision.cascade.route import (
    IntermediateRoute,
    Route,
    StageClaims,
    certificates_name,
    guaranteed,
    source_of,
    without_guarantee,
)
from hawkvision.core.errors import TargetUnreachable
from hawkvision.core.types import (
    WHOLE,
    AccuracyGuarantee,
    AccuracyStatus,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    Quality,
    Received,
    StatusReason,
    Target,
)
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.bets import Claim, Claims, claims_of

CACHED_TARGETS: Final = 256
"""Targets whose route for whole images is cached; callers use a handful."""


class Policy:
    """Maps targets to routes for one edge stage backed by one reference stage."""

    def __init__(
        self,
        profile: Profile,
        edge: str,
        best: str,
        *,
        alone: bool = False,
        site: SiteCertificates | None = None,
        first: str | None = None,
        agreement_bounds_drop: bool = True,
    ) -> None:
        """Map targets for `edge` backed by `best`.

        Args:
            profile: of the cascade.
            edge: the edge stage.
            best: the stage that certificates compare with.
            alone: whether there is no datacenter to run `best`.
            site: certificates that replace the profile's.
            first: the first member of `edge` if that is a conditional ensemble. It answers `fast` alone if the profile
                has certificates for it and there are no site certificates.
            agreement_bounds_drop: of the task's kind.

        Raises:
            ManifestError: if profile or site has no such pair, or the site's certificates were made for other models
                or another kind of score.
        """
        self.alone = alone
        self.shrinks_images = profile.shrinks_images
        """Whether the certificates were made with images that are made smaller before they are sent."""
        self.pair: Pair = profile.pair(edge, best)
        self.edge_accuracy = profile.stage(edge).accuracy
        self.best_accuracy = profile.stage(best).datacenter_accuracy
        self.accuracy_known = True
        """Whether absolute accuracies were measured on the images of the certificates."""
        conditions = self.pair.conditions
        if site is not None:
            conditions = site_conditions(profile, self.pair, site)
            self._use_accuracies_of(site)
        self.source = source_of(profile, site)
        """The images behind the certificates."""
        self._guaranteed = functools.partial(
            guaranteed, source=self.source, agreement_bounds_drop=agreement_bounds_drop
        )
        self._condition: Condition = conditions[0]
        stages = (edge, best, *(() if self.pair.intermediate is None else (self.pair.intermediate.name,)))
        self._models = tuple(profile.stage(stage).fingerprint for stage in stages)
        self._name = certificates_name(self._models, conditions)
        self._intermediate_certificates = self._count_intermediate_certificates()
        self._edge_claims = _edge_claims(self._name, edge, self._condition)
        self._certified_parts = {
            each: self._parts_of(each) for each in (self._condition.balanced, *self._condition.certificates)
        }
        self._routes: dict[Target, Route] = {quality: self._quality(quality) for quality in Quality}
        known = any((pair.edge, pair.best) == (first, best) for pair in profile.pairs)
        if first is not None and first != edge and known and site is None:
            self._routes[Quality.FAST] = self._first_alone(profile, first, best)
        every = (self._routes[Quality.FAST].claims, *(claims for _, claims in self._certified_parts.values()))
        self.claims_in_force = frozenset(claims.key for found in filter(None, every) for claims in found.all)
        """The names of its claims."""
        self._whole = functools.lru_cache(CACHED_TARGETS)(self._find)

    def _use_accuracies_of(self, site: SiteCertificates) -> None:
        """Take the accuracies measured at the site; without labels there are none."""
        edge, best = site.stage(self.pair.edge), site.stage(self.pair.best)
        if edge is None or best is None or edge.accuracy is None or best.accuracy is None:
            self.accuracy_known = False
        self.edge_accuracy = (edge and edge.accuracy) or self.edge_accuracy
        self.best_accuracy = (best and best.datacenter_accuracy) or self.best_accuracy

    def _count_intermediate_certificates(self) -> int:
        """The number of logs of the intermediate stage, among which the probability of a false alarm is divided."""
        condition = self._condition
        certificates = (condition.balanced, condition.fast, *condition.certificates)
        between = {each for each in certificates if each.intermediate_disagreement is not None}
        return max(1, sum(each.basis != "profile" for each in between))

    def _first_alone(self, profile: Profile, first: str, best: str) -> Route:
        """The route of `fast` by the first member of the edge's conditional ensemble."""
        pair = profile.pair(first, best)
        fast = pair.conditions[0].fast
        name = certificates_name((profile.stage(first).fingerprint, self._models), fast)
        claim = Claim(-math.inf, fast.edge_disagreement)
        claims = None if fast.basis == "profile" else claims_of(name, first, [claim], fast.delta)
        return replace(
            self._edge_alone(self._guaranteed(Quality.FAST, fast), claims),
            temperature=profile.stage(first).temperature,
            first_only=True,
        )

    def datacenter_is_better(self, at_edge: Received, at_datacenter: Received) -> bool | None:
        """Whether the reference stage was measured to be right oftener than the edge stage, each on what it received.

        None if nothing was measured of such images.
        """
        there = self.pair.condition(at_datacenter)
        here = None if at_edge == WHOLE else self.pair.condition(at_edge)
        if there is None or not there.thresholds or (here is None and at_edge != WHOLE):
            return None
        edge = self.edge_accuracy.value if here is None else here.edge_accuracy
        return self.best_accuracy.value - there.thresholds[0].max_drop > edge

    def route(self, target: Target, received: Received = WHOLE) -> Route:
        """The route of a target for an image that was received as far as `received` says.

        Raises:
            TargetUnreachable: if even the reference stage misses the target; says what it reaches.
        """
        if received != WHOLE:
            if isinstance(target, MinAccuracy):
                self._check_reachable(target.value)
            return received_route(self.pair, self.best_accuracy, target, received)
        return self._whole(target)

    def _find(self, target: Target) -> Route:
        """The route of a target for whole images."""
        known = self._routes.get(target)
        if known is not None:
            return known
        match target:
            case MaxAccuracyDrop(value):
                return self._drop(target, value)
            case MinAccuracy(value):
                return self._accuracy(target, value)
            case MinConfidence(value):
                return self._confidence(target, value)
            case Quality():  # pragma: no cover - all are in _routes
                raise AssertionError(target)

    def _quality(self, quality: Quality) -> Route:
        match quality:
            case Quality.FAST:
                guarantee = self._guaranteed(quality, self._condition.fast)
                certified = guarantee.status is AccuracyStatus.CERTIFIED
                return self._edge_alone(guarantee, self._edge_claims if certified else None)
            case Quality.BALANCED:
                return self._certified(quality, self._condition.balanced)
            case Quality.BEST:
                return _best(quality)

    def _drop(self, target: Target, max_drop: float) -> Route:
        """By the certificate with the largest ε of which answers may state no more than the target."""
        # ε alone may decide: choosing by results on the certification images would spend δ twice.
        certificates = filter(_accepts_below_reference, self._condition.certificates)
        usable = [c for c in certificates if stated_drop(c.max_drop) <= max_drop]
        if not usable:
            return _best(target)
        return self._certified(target, max(usable, key=lambda c: c.max_drop))

    @property
    def certificate(self) -> Certificate:
        """The certificate of never escalating, which every pair has. All certificates have its images and basis."""
        return self._condition.fast

    @property
    def balanced(self) -> Certificate:
        """The thresholds of `balanced` and the drop that they aim for, certified or not."""
        return self._condition.balanced

    @property
    def maximum_accuracy(self) -> float:
        """The largest `min_accuracy` that is accepted: the measured accuracy of the best stage within reach."""
        return (self.edge_accuracy if self.alone else self.best_accuracy).value

    def _check_reachable(self, accuracy: float) -> None:
        if accuracy > self.maximum_accuracy:
            stage, measured = (
                (self.pair.edge, self.edge_accuracy) if self.alone else (self.pair.best, self.best_accuracy)
            )
            raise TargetUnreachable(
                f"min_accuracy {accuracy:g} cannot be reached here: the reference stage {stage} was measured at "
                f"{measured.value:.4f} on {measured.n} images",
                maximum=measured.value,
            )

    def accuracy_with(self, max_drop: float) -> float:
        """The `min_accuracy` that is routed like a target of this drop."""
        return round(self.best_accuracy.low - max_drop, 6)

    def _accuracy(self, target: Target, accuracy: float) -> Route:
        """By the drop below the reference stage that this accuracy allows; best effort.

        Audits compare both stages and see no labels. If the traffic becomes harder for both, nobody notices.
        """
        self._check_reachable(accuracy)
        guarantee = without_guarantee(target, StatusReason.MIN_ACCURACY)
        if accuracy <= self.edge_accuracy.value:
            return self._edge_alone(guarantee, self._edge_claims)
        # Rounded, so that an accuracy from the list of targets maps back to the drop that it was computed from.
        certain, estimated = (round(a - accuracy, 9) for a in (self.best_accuracy.low, self.best_accuracy.value))
        route = self._drop(target, certain)
        if route.claims is None or not self.accuracy_known:
            # Nothing is left to give up below the lower end of the interval. Aim for the measured accuracy.
            route = self._drop(target, estimated)
        return replace(route, guarantee=guarantee)

    def _confidence(self, target: Target, confidence: float) -> Route:
        """Per answer: calibrated but not certified, because probabilities are right on average only.

        Where the pair compares margins, which never exceed confidences, the escalation is an upper estimate.
        """
        guarantee = without_guarantee(target, StatusReason.NO_CERTIFICATE)
        escalation = next(
            (p.escalation for p in reversed(self.pair.path) if threshold_value(p.threshold) >= confidence), 1.0
        )
        return Route(confidence, guarantee, escalation, by_confidence=True, to_best=escalation)

    def _certified(self, target: Target, certificate: Certificate) -> Route:
        intermediate, claims = self._certified_parts[certificate]
        return Route(
            threshold_value(certificate.threshold),
            self._guaranteed(target, certificate),
            certificate.escalation,
            to_best=certificate.to_best,
            intermediate=intermediate,
            claims=claims,
        )

    @staticmethod
    def _edge_alone(guarantee: AccuracyGuarantee, claims: Claims | None) -> Route:
        """The edge's answer, whatever its score."""
        return Route(-math.inf, guarantee, 0.0, to_best=0.0, claims=StageClaims(claims) if claims else None)

    def _parts_of(self, certificate: Certificate) -> tuple[IntermediateRoute | None, StageClaims | None]:
        threshold, bar = threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold)
        stage, most, intermediate, claims = self.pair.intermediate, certificate.intermediate_disagreement, None, None
        certified = certificate.basis != "profile"  # without a certificate there is nothing to monitor
        edge = self._edge_claims if certified and threshold < math.inf else None
        if stage is not None and most is not None and bar < math.inf:
            intermediate = IntermediateRoute(stage.name, stage.score, bar)
            if certified:
                # The edge's threshold decides which images reach it, so each certificate has a log of its own.
                log = f"{stage.name} at a drop of {certificate.max_drop}"
                delta = certificate.delta / self._intermediate_certificates
                claims = claims_of(self._name, log, [Claim(bar, most)], delta)
        return intermediate, None if edge is None and claims is None else StageClaims(edge, claims)


def _accepts_below_reference(certificate: Certificate) -> bool:
    """Whether a stage below the reference stage answers any image."""
    return certificate.threshold != "always" or certificate.intermediate_threshold != "always"


def _edge_claims(name: str, edge: str, condition: Condition) -> Claims | None:
    """The claims of all certificates about the edge; None if no certificate accepts its answers."""
    certificates = [
        certificate
        for certificate in (condition.fast, condition.balanced, *condition.certificates)
        if certificate.basis != "profile" and threshold_value(certificate.threshold) < math.inf
    ]
    found = [Claim(threshold_value(each.threshold), each.edge_disagreement) for each in certificates]
    return claims_of(name, edge, found, min(each.delta for each in certificates)) if found else None


def _best(target: Target) -> Route:
    """Everything goes to the reference stage, so there is no drop to certify."""
    return Route(math.inf, AccuracyGuarantee(target, AccuracyStatus.CERTIFIED, max_drop=0.0), 1.0)
