"""The certificates in force, and the guarantee that each answer may carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from edge.inference.edge_stage import EdgeStage
from edge.monitoring.certificate_reload import Certification
from edge.monitoring.served_versions import ServedVersions
from edge.monitoring.streams import Streams
from hawkvision.cascade.certification.profile import Pair, Profile
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route, StageClaims, without_guarantee
from hawkvision.core.errors import ManifestError
from hawkvision.core.escalation_api import EscalationReply
from hawkvision.core.types import AccuracyGuarantee, StatusReason, Tier
from hawkvision.guarantee.monitor import CLOCK_SET, CLOCK_SKEW_S, Watched
from hawkvision.models.fingerprints import parts_of
from hawkvision.system.files import sha256_of


class Guarantees:
    """The edge stage, the policy and the certified versions that belong together. Used on one event loop."""

    def __init__(
        self,
        stage: EdgeStage,
        profile: Profile,
        policy: Policy,
        best: str,
        served: ServedVersions,
        streams: Streams,
        max_age_s: float = math.inf,
    ) -> None:
        """Put certificates in force.

        Args:
            stage: the edge stage.
            profile: with what was measured of the stages.
            policy: routes of this cascade.
            best: the reference stage.
            served: what the datacenter runs, compared with the certified versions.
            streams: whose evidence supports or suspends the certificates.
            max_age_s: the age of a site's certificates from which on they certify nothing.
        """
        self.stage = stage
        self.profile = profile
        self.policy = policy
        self.served = served
        self.best = best
        self._streams = streams
        self._max_age_s = max_age_s

    @property
    def certificates_valid(self) -> bool:
        """Whether they have not expired, the edge stage is the certified one, and so are the datacenter's stages, as
        far as is known.
        """
        return self.whole_edge_certified and self.served.all_certified and not self.expired

    @property
    def expired(self) -> bool:
        """Whether the certificates are too old, or the clock is wrong: earlier than their newest image by a day, or
        never set.
        """
        until, now = self.policy.source.dates.until, self._streams.wall()
        return until > -math.inf and not (now >= CLOCK_SET and -CLOCK_SKEW_S <= now - until <= self._max_age_s)

    def adopt(self, found: Certification) -> None:
        """Put other certificates in force. Requests under way will claim nothing.

        Raises:
            ManifestError: if they are about other models of the edge stage or other labels than those that are loaded,
                or about images that are sent in another way.
        """
        stage = self.stage
        found.profile.check_labels(stage.kind.labels)
        if found.policy.shrinks_images != self.policy.shrinks_images:
            raise ManifestError(
                "the profile is about images that are made smaller before they are sent, or was so before, and now is "
                "not: restart the node to send them in the other way"
            )
        for name, fingerprint in ((stage.name, stage.fingerprint), (stage.first.name, stage.first_fingerprint)):
            certified = found.versions.stages.get(name)
            if fingerprint is not None and certified is not None and certified != parts_of(fingerprint)[0]:
                raise ManifestError(
                    f"the profile is about {name} with fingerprint {certified}, but loaded is "
                    f"{parts_of(fingerprint)[0]}: restart the node to load other models"
                )
        self.stage = replace(stage, temperature=found.temperature, score=found.score)
        self.profile, self.policy = found.profile, found.policy
        self._streams.monitor.adopt(found.policy.claims_in_force, found.policy.source.dates)
        intermediate = found.policy.pair.intermediate
        self.served.adopt(found.versions, None if intermediate is None else intermediate.name)

    def pair(self) -> tuple[Profile, Pair]:
        """The profile in force, and its pair of stages that run here."""
        return self.profile, self.policy.pair

    def versions(self) -> str:
        """Of the stages that are compared, and of what the scores of the edge stage depend on."""
        pair, versions = self.policy.pair, self.served.versions
        parts = [
            (versions.stages.get(name), sorted(versions.executions.get(name, ()))) for name in (pair.edge, pair.best)
        ] + [self.stage.temperature, pair.score]
        return sha256_of(f"{parts} {self.policy.shrinks_images}".encode())[:32]

    def alarm_raised(self) -> float:
        """When the last alarm that stands was raised, in seconds since 1970; −∞ if none stands."""
        return max((each.state.raised for each in self._streams.monitor.all() if each.alarm), default=-math.inf)

    def executions(self) -> Mapping[str, frozenset[str]]:
        """What may execute a stage, where that is not `EXACT`."""
        return self.served.versions.executions

    def watched(self, route: Route, stream: str | None, caller: str = "", *, whole: bool = True) -> Watched:
        """A request's streams; none where no certificate stands behind it, or one for other versions.

        No certificate is about a part of an image, but alarms of whole images concern it, too.
        """
        claims = route.claims if self.edge_certified(route) else None
        if not whole and not route.by_confidence:
            claims = StageClaims(None)
        return self._streams.watched(stream, claims, caller, route.counted_as)

    def edge_certified(self, route: Route) -> bool:
        """Whether the edge stage runs as certified; true for a route that does not ask it."""
        if route.direct:
            return True
        if route.first_only:
            return self.served.versions.holds(self.stage.first.name, self.stage.first_fingerprint)
        return self.whole_edge_certified

    @property
    def whole_edge_certified(self) -> bool:
        """Whether the edge stage runs as certified, whatever a route asks of it."""
        return self.served.versions.holds(self.stage.name, self.stage.fingerprint)

    def as_certified(self, route: Route, reply: EscalationReply | None = None) -> bool:
        """Whether the stage that answered, and the stages that it is compared with, are the certified ones.

        Args:
            route: of the target.
            reply: the datacenter's, if it answered.
        """
        if not self.edge_certified(route):
            return False
        if reply is not None and not self.served.certified(reply):
            return False
        if reply is not None and route.direct:
            return reply.model == self.best
        return self.served.references_certified(None if route.intermediate is None else route.intermediate.stage)

    def for_answer(
        self, route: Route, tier: Tier, streams: Watched, reason: StatusReason | None = None
    ) -> AccuracyGuarantee:
        """The guarantee of an answer, given what computed it and the traffic of its stream.

        Args:
            route: of the target.
            tier: the tier that answered.
            streams: what watches the request.
            reason: why the answer itself cannot be certified; None if it can.
        """
        guarantee, target = route.guarantee, route.guarantee.target
        if streams.suspended:
            return without_guarantee(target, StatusReason.ALARM)
        if reason is None and tier is Tier.DATACENTER and not self.served.listed:
            reason = StatusReason.UNCERTIFIED_VERSION
        if reason is not None:
            return without_guarantee(target, reason)
        if guarantee.max_drop is None and guarantee.max_disagreement is None:  # nothing certified is claimed
            return guarantee
        if route.claims is not None and self.expired:
            return without_guarantee(target, StatusReason.EXPIRED)
        if route.claims is not None and (not self.served.listed or not streams.monitored(route.disagreement)):
            return without_guarantee(target, StatusReason.UNMONITORED)
        return without_guarantee(target, StatusReason.LATE) if streams.late else guarantee
