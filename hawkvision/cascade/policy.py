"""Who answers: from a target and a profile to a route, and from a score, a deadline and a prediction to a decision.

Everything here is pure. A `Route` says what the target means on this cascade; `decide` is asked once the edge has its
score. What happens after a decision (uploads, timers) is `edge.serving.node`'s affair.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Final

from hawkvision.cascade.certification.profile import (
    Certificate,
    Condition,
    Pair,
    Profile,
    SiteCertificates,
    threshold_value,
)
from hawkvision.cascade.degraded_input import ReceivedRoutes
from hawkvision.cascade.drift.monitor import Claim, Claims, claims_of
from hawkvision.cascade.route import (
    INTERVAL_DELTA,
    Controls,
    IntermediateRoute,
    certificates_name,
    controller_spec,
    guaranteed,
)
from hawkvision.cascade.route import Route as Route
from hawkvision.cascade.route import uncertified as uncertified
from hawkvision.cascade.route import unmonitored as unmonitored
from hawkvision.cascade.route import without_guarantee as without_guarantee
from hawkvision.core.advice import advise
from hawkvision.core.errors import ManifestError, TargetUnreachable
from hawkvision.core.types import (
    WHOLE,
    AccuracyGuarantee,
    AccuracyStatus,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    MinConfidence,
    OnMiss,
    Quality,
    Reason,
    Received,
    Target,
)


@dataclass(frozen=True, slots=True)
class Accept:
    """Answer with the edge's result. `degraded` means below target, because time, link or load forced it."""

    degraded: bool = False


@dataclass(frozen=True, slots=True)
class Escalate:
    """Ask the reference stage; if `cutoff_ms` is given, stop waiting that many milliseconds from now."""

    reason: Reason
    cutoff_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The deadline would pass and the caller asked to be told (`on_miss=fail`)."""


Decision = Accept | Escalate | Miss

ANSWER_MARGIN_MS = 5.0
"""The timer fires this long before the deadline. At one millisecond, as first designed, three of eight answers came
after the deadline on two busy cores: waking up and writing takes that long by itself."""


REMEMBERED: Final = 256
"""Targets whose route for whole images is found once; callers ask for a handful. Another takes 50 us in a node that
has just woken, a fiftieth of an answer."""


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
    ) -> None:
        """Map targets for `edge` backed by `best`.

        Args:
            profile: of the cascade.
            edge: the edge stage.
            best: the stage that certificates compare with.
            alone: whether there is no datacenter to run `best`.
            site: certificates that take the place of the profile's.
            first: the first member of `edge`, where that is a conditional ensemble. If the profile knows it by itself,
                it answers `fast` alone, and no site's certificates say otherwise.

        Raises:
            ManifestError: if profile or site has no such pair, or the site's certificates were made for other models
                or another way of scoring.
        """
        self.alone = alone
        self.pair: Pair = profile.pair(edge, best)
        self.edge_accuracy = profile.stage(edge).accuracy
        self.best_accuracy = profile.stage(best).accuracy
        self.accuracy_known = True
        """Whether absolute accuracies were measured where the certificates were."""
        conditions = self.pair.conditions
        if site is not None:
            conditions = _site_conditions(profile, self.pair, site)
            measured = [(site.stage(edge), "edge_accuracy"), (site.stage(best), "best_accuracy")]
            for stage, name in measured:
                if stage is None or stage.accuracy is None:
                    self.accuracy_known = False
                else:
                    setattr(self, name, stage.accuracy)
        self._condition: Condition = conditions[0]
        stages = (edge, best, *(() if self.pair.intermediate is None else (self.pair.intermediate.name,)))
        self._models = tuple(profile.stage(stage).fingerprint for stage in stages)
        self._name = certificates_name(self._models, conditions, self.pair.curve)
        certificates = (self._condition.balanced, self._condition.fast, *self._condition.certificates)
        # As many logs, among which the probability of a false alarm is divided.
        certified = {c for c in certificates if c.intermediate_watch is not None and c.basis != "profile"}
        self._intermediate_certificates = max(1, len(certified))
        self._edge_claims = _edge_claims(self._name, edge, self._condition)
        # Once per certificate: hashing its facts takes 16 µs and more, as long as the rest of a decision.
        self._decided: dict[Certificate, tuple[IntermediateRoute | None, Controls | None]] = {}
        self._routes: dict[Target, Route] = {quality: self._quality(quality) for quality in Quality}
        known = any((pair.edge, pair.best) == (first, best) for pair in profile.pairs)
        if first is not None and first != edge and known and site is None:
            alone_pair = profile.pair(first, best)
            fast = alone_pair.conditions[0].fast
            name = certificates_name((profile.stage(first).fingerprint, self._models), fast, alone_pair.curve)
            claim = Claim(-math.inf, fast.edge_watch.disagreement)
            self._routes[Quality.FAST] = replace(
                self._edge_alone(guaranteed(Quality.FAST, fast), claims_of(name, first, [claim], fast.delta)),
                temperature=profile.stage(first).temperature,
                first_only=True,
            )
        self.profiles = frozenset({self._name})
        """What its certificates are named in `Claims.profile`."""
        fast_controls = self._routes[Quality.FAST].controls
        if fast_controls is not None and fast_controls.edge_claims is not None:
            self.profiles |= {fast_controls.edge_claims.profile}
        self._whole = functools.lru_cache(REMEMBERED)(self._find)
        # A site's certificates are of whole images; how those arrive over its links was not measured there.
        self._received = ReceivedRoutes(self.pair, self._models, self.best_accuracy, elsewhere=site is not None)
        self.profiles |= self._received.profiles

    def route(self, target: Target, received: Received = WHOLE) -> Route:
        """What this target means here, for an image of which that much was received.

        Raises:
            TargetUnreachable: if even the cascade's reference stage misses the target; says what it reaches.
        """
        if received != WHOLE:
            if isinstance(target, MinAccuracy):
                self._check_reachable(target.value)
            return self._received.route(target, received)
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
                return self._edge_alone(guaranteed(quality, self._condition.fast), self._edge_claims)
            case Quality.BALANCED:
                return self._certified(quality, self._condition.balanced)
            case Quality.BEST:
                return _best(quality)

    def _drop(self, target: Target, max_drop: float) -> Route:
        """The certificate with the largest ε that does not exceed the target's."""
        # Chosen by ε alone, never by what the certification images showed: that would spend δ twice.
        usable = [c for c in self._condition.certificates if c.max_drop <= max_drop and _settles_something(c)]
        if not usable:
            return _best(target)
        return self._certified(target, max(usable, key=lambda c: c.max_drop))

    @property
    def certificate(self) -> Certificate:
        """The certificate of never escalating, which every pair has: it says what all of them rest on."""
        return self._condition.fast

    @property
    def balanced(self) -> Certificate:
        """The thresholds of `balanced`, and the drop that they are meant to keep, certified or not."""
        return self._condition.balanced

    @property
    def maximum_accuracy(self) -> float:
        """The largest `min_accuracy` that is not refused: what the reference stage within reach was measured at."""
        return (self.edge_accuracy if self.alone else self.best_accuracy).value

    def _check_reachable(self, accuracy: float) -> None:
        if accuracy > self.maximum_accuracy:
            stage, measured = (
                (self.pair.edge, self.edge_accuracy) if self.alone else (self.pair.best, self.best_accuracy)
            )
            raise TargetUnreachable(
                f"min_accuracy {accuracy:g} is more than can be reached here: the reference stage {stage} was "
                "measured at "
                f"{measured.value:.4f} on {measured.n} images",
                maximum=measured.value,
            )

    def certified_accuracy(self, max_drop: float) -> float:
        """The accuracy that a certified drop makes certain, counted from the lower end of the reference stage's
        interval.
        """
        return round(self.best_accuracy.low - max_drop, 6)

    def _accuracy(self, target: Target, accuracy: float) -> Route:
        """Certified relative to the reference stage; absolutely only as far as that stage's own interval reaches.

        The drop is what is certified. The reference stage's accuracy is an estimate with an error of its own, so a
        guarantee in absolute terms is `held` only from the lower end of its 95 % interval, whose 2.5 % add to the
        certificate's.
        """
        self._check_reachable(accuracy)
        if accuracy <= self.edge_accuracy.value:
            # Measured at the edge itself: no certificate is needed, and none is claimed near the measurement.
            guarantee = AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE, n=self.edge_accuracy.n)
            if accuracy <= self.edge_accuracy.low and self.accuracy_known:
                fast = self._condition.fast
                guarantee = replace(
                    guarantee, status=AccuracyStatus.CERTIFIED, basis=Basis.LABELLED, max_drop=fast.max_drop,
                    delta=round(INTERVAL_DELTA + fast.delta, 6),
                )  # fmt: skip
            return self._edge_alone(guarantee, self._edge_claims)
        # Rounded, so that an accuracy that was listed maps back to the very drop it was listed for.
        certain, estimated = (round(a - accuracy, 9) for a in (self.best_accuracy.low, self.best_accuracy.value))
        route = self._drop(target, certain) if self.accuracy_known and certain > 0.0 else None
        held = route is not None and route.controls is not None
        if route is None or not held:
            # What would be certain leaves nothing to give up: aim for what was measured instead, and say so.
            route = self._drop(target, estimated)
            held = self.accuracy_known and accuracy <= self.certified_accuracy(route.guarantee.max_drop or 0.0)
        guarantee = route.guarantee
        return replace(
            route,
            guarantee=replace(
                guarantee,
                status=AccuracyStatus.CERTIFIED if held else AccuracyStatus.BEST_EFFORT,
                delta=round((guarantee.delta or 0.0) + INTERVAL_DELTA, 6) if held else guarantee.delta,
                n=self.best_accuracy.n if self.accuracy_known else guarantee.n,
                basis=Basis.LABELLED if self.accuracy_known else guarantee.basis,
            ),
        )

    def _confidence(self, target: Target, confidence: float) -> Route:
        """Per answer, calibrated but not certified: probabilities are right on average, not one by one.

        Where the pair compares margins, which are no larger than confidences, the escalation is an upper estimate.
        """
        guarantee = AccuracyGuarantee(target, AccuracyStatus.BEST_EFFORT, Basis.PROFILE, n=self.best_accuracy.n)
        escalation = next(
            (p.escalation for p in reversed(self.pair.path) if threshold_value(p.threshold) >= confidence), 1.0
        )
        return Route(confidence, guarantee, escalation, by_confidence=True, to_best=escalation)

    def _certified(self, target: Target, certificate: Certificate) -> Route:
        if certificate not in self._decided:
            self._decided[certificate] = self._settle(certificate)
        intermediate, controls = self._decided[certificate]
        return Route(
            threshold_value(certificate.threshold),
            guaranteed(target, certificate),
            certificate.escalation,
            to_best=certificate.to_best,
            intermediate=intermediate,
            controls=controls,
        )

    @staticmethod
    def _edge_alone(guarantee: AccuracyGuarantee, claims: Claims | None) -> Route:
        """The edge's answer, whatever its score."""
        controls = Controls(claims) if guarantee.status is AccuracyStatus.CERTIFIED else None
        return Route(-math.inf, guarantee, 0.0, to_best=0.0, controls=controls)

    def _settle(self, certificate: Certificate) -> tuple[IntermediateRoute | None, Controls | None]:
        threshold, bar = threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold)
        pair, intermediate = self.pair, None
        edge, between, claims = None, None, None
        certified = certificate.basis != "profile"  # what is only expected is neither claimed nor watched
        if certified and threshold < math.inf:
            edge = controller_spec("edge", self._models, certificate, threshold, certificate.edge_watch, pair.curve)
        if pair.intermediate is not None and certificate.intermediate_watch is not None and bar < math.inf:
            intermediate, watch = (
                IntermediateRoute(pair.intermediate.name, pair.intermediate.score, bar),
                certificate.intermediate_watch,
            )
            if certified and math.isfinite(bar):
                between = controller_spec("middle", self._models, certificate, bar, watch, pair.intermediate.curve)
            if certified:
                # What reaches it depends on the edge's threshold, so each certificate's images are others.
                stage = f"{pair.intermediate.name} from {bar}, after {threshold}"
                delta = certificate.delta / self._intermediate_certificates
                claims = claims_of(self._name, stage, [Claim(bar, watch.disagreement)], delta)
        if edge is None and claims is None:
            return intermediate, None
        return intermediate, Controls(self._edge_claims if edge else None, edge, claims, between)


def _settles_something(certificate: Certificate) -> bool:
    """Whether any image is answered below the reference stage."""
    return certificate.threshold != "always" or certificate.intermediate_threshold != "always"


def _edge_claims(name: str, edge: str, condition: Condition) -> Claims | None:
    """What all certificates claim of the edge; None if none believes it."""
    certificates = [
        certificate
        for certificate in (condition.fast, condition.balanced, *condition.certificates)
        if certificate.basis != "profile" and threshold_value(certificate.threshold) < math.inf
    ]
    found = [Claim(threshold_value(each.threshold), each.edge_watch.disagreement) for each in certificates]
    return claims_of(name, edge, found, min(each.delta for each in certificates)) if found else None


def _site_conditions(profile: Profile, pair: Pair, site: SiteCertificates) -> tuple[Condition, ...]:
    found = site.pair(pair.edge, pair.best)
    if site.task != profile.task:
        raise ManifestError(f"the site's certificates are for task {site.task!r}, the profile for {profile.task!r}")
    intermediate = None if pair.intermediate is None else pair.intermediate.name
    scores = (pair.score, None if pair.intermediate is None else pair.intermediate.score)
    if (found.score, found.intermediate_score) != scores or found.intermediate != intermediate:
        raise ManifestError(
            f"the site's certificates compare scores {found.score} of {pair.edge} and {found.intermediate_score} of "
            "the "
            f"intermediate stage {found.intermediate}, but the profile {scores[0]} and {scores[1]} of {intermediate}; "
            "run `hawkvision "
            "certify` again"
        )
    for name in (pair.edge, pair.best, *(() if intermediate is None else (intermediate,))):
        stage, expected = site.stage(name), profile.stage(name)
        if stage is None:
            raise ManifestError(f"the site's certificates do not say for which {name} they were made")
        if (stage.fingerprint, stage.temperature) != (expected.fingerprint, expected.temperature):
            raise ManifestError(
                f"the site's certificates were made for {name} with fingerprint {stage.fingerprint} and temperature "
                f"{stage.temperature}, but the profile has {expected.fingerprint} and {expected.temperature}; run "
                f"`{advise('certify', '--task', profile.task, '--data', 'IMAGES')}` again"
            )
    return found.conditions


def _best(target: Target) -> Route:
    """Everything to the reference stage: nothing can be given up, so nothing needs a sample."""
    return Route(math.inf, AccuracyGuarantee(target, AccuracyStatus.CERTIFIED, Basis.PROFILE, max_drop=0.0), 1.0)


def decide(
    route: Route,
    score: float,
    *,
    slack_ms: float | None,
    reachable: bool,
    on_miss: OnMiss,
    threshold: float | None = None,
) -> Decision:
    """Accept the edge's answer or escalate.

    Args:
        route: of the request's target.
        score: the edge's score of this image (its confidence, if `route.by_confidence`).
        slack_ms: time left before the deadline; None without one.
        reachable: whether the datacenter is; whether it would answer in time is another question (`network`).
        on_miss: what the caller wants when the deadline would pass.
        threshold: in place of the route's, where a controller asks for more.
    """
    if score >= (route.threshold if threshold is None else threshold):
        return Accept()
    reason = Reason.TARGET if route.direct else Reason.LOW_CONFIDENCE
    if not reachable:
        return Accept(degraded=True)
    if slack_ms is None or on_miss is OnMiss.WAIT:
        return Escalate(reason)
    if slack_ms < ANSWER_MARGIN_MS:
        return Miss() if on_miss is OnMiss.FAIL else Accept(degraded=True)
    return Escalate(reason, cutoff_ms=slack_ms - ANSWER_MARGIN_MS)
