"""Which model versions the datacenter runs, compared with those that the certificates are about.

The datacenter lists its stages, and each of its answers states by which version it was computed. The answer counts:
during a rolling update, replicas of two versions answer side by side.
"""

from __future__ import annotations

import logging
from typing import Final

from hawkvision.core.escalation_api import EscalationReply, ListedStage, StageList
from hawkvision.core.logs import Transitions
from hawkvision.models.fingerprints import CertifiedVersions

log = logging.getLogger("hawkvision.edge")

CERTIFIED: Final = "certified"
"""The logged state of a stage that the datacenter serves as it was certified."""


class ServedVersions:
    """The certified versions, and what the datacenter states about its own. Used on one event loop."""

    def __init__(self, url: str | None, versions: CertifiedVersions, best: str, intermediate: str | None) -> None:
        """Begin with nothing known of the datacenter.

        Args:
            url: of the datacenter, for log lines; None without one.
            versions: which computations the certificates are about.
            best: the reference stage.
            intermediate: the intermediate stage, if the cascade has one.
        """
        self.versions = versions
        self._url = url
        self._best = best
        self._intermediate = intermediate
        self._listed: dict[str, ListedStage] | None = None
        """The datacenter's own list, by name; None before the first."""
        self._stated: dict[str, str | None] = {}
        """By stage, the version that its newest whole answer stated."""
        self._verdicts: tuple[CertifiedVersions, dict[str | None, bool]] = (versions, {})
        """Results of `references_certified`, by intermediate stage, until more is known."""
        self._transitions = Transitions(log, dict.fromkeys(self._stages, CERTIFIED))

    @property
    def listed(self) -> bool:
        """Whether the datacenter has said which stages it serves."""
        return self._listed is not None

    @property
    def all_certified(self) -> bool:
        """Whether every stage that certificates are about is the certified one; true before the first list."""
        return self._listed is None or all(map(self._as_certified, self._stages))

    @property
    def _stages(self) -> tuple[str, ...]:
        """The datacenter stages that certificates are about."""
        return (self._best,) if self._intermediate is None else (self._best, self._intermediate)

    def adopt(self, versions: CertifiedVersions, intermediate: str | None) -> None:
        """Compare with other certificates from now on."""
        self.versions, self._intermediate = versions, intermediate
        for name in self._stages:
            self._note(name)

    def record_list(self, served: StageList) -> None:
        """Take over the datacenter's list of stages."""
        self._listed = {stage.name: stage for stage in served.stages}
        for name in self._stages:
            self._note(name)

    def serves(self, stage: str) -> bool:
        """Whether the datacenter lists this stage in its certified version.

        The version that its replicas stated counts. Before they stated one, the version of its settings counts.
        """
        found = None if self._listed is None else self._listed.get(stage)
        if found is None:
            return False
        if found.ran is None:
            return self.versions.models_of(stage, found.fingerprint)
        return self.versions.holds(stage, found.ran)

    def certified(self, reply: EscalationReply) -> bool:
        """Whether a complete reply was computed by its stage as certified.

        The version that the reply states is remembered, and logged if it has changed.
        """
        if not reply.complete:
            return False
        name, version = reply.model, reply.fingerprint
        if self._stated.get(name, CERTIFIED) != version:
            self._stated[name] = version
            self._note(name)
        return self.versions.holds(name, version)

    def passed_over_certified(self, reply: EscalationReply) -> bool:
        """Whether the intermediate stage that the reply passed over was the certified one."""
        intermediate, passed = self._intermediate, reply.passed_over
        if intermediate is None or passed is None:
            return False
        return self.versions.holds(intermediate, passed.fingerprint)

    def references_certified(self, intermediate: str | None) -> bool:
        """Whether the reference stage, and the intermediate stage of a route, are the certified ones.

        True before anything is known of them.
        """
        versions, verdicts = self._verdicts
        if versions is not self.versions:
            self._verdicts = _, verdicts = self.versions, {}
        found = verdicts.get(intermediate)
        if found is None:
            unknown = self._listed is None and not self._stated
            found = unknown or (
                self._as_certified(self._best) and (intermediate is None or self._as_certified(intermediate))
            )
            verdicts[intermediate] = found
        return found

    def _as_certified(self, stage: str) -> bool:
        """Whether the stage's newest answer and the list both state its certified version."""
        found = None if self._listed is None else self._listed.get(stage)
        listed = None if found is None else found.ran
        if stage in self._stated:
            return self.versions.holds(stage, self._stated[stage]) and (listed is None or self.serves(stage))
        return self.versions.holds(stage, listed)

    def _note(self, name: str) -> None:
        """Log whether a stage is the certified one, if that has changed and certificates are about it."""
        self._verdicts = (self.versions, {})
        if self._url is None or name not in self._stages:
            return
        if self._as_certified(name) or (name not in self._stated and self.serves(name)):
            message = "guarantees restored: %s serves %s as it was certified"
            self._transitions.note(name, CERTIFIED, logging.INFO, message, self._url, name)
            return
        stage, models = (self._listed or {}).get(name), self.versions.stages.get(name)
        listed = None if stage is None else stage.ran or stage.fingerprint
        states = self._stated.get(name, listed)
        if self.serves(name):  # the list is right, and the answers are not
            found = "answers that state no version" if states is None else f"answers of {states}"
        else:
            found = "no such stage" if stage is None else f"it with fingerprint {listed}"
        self._transitions.note(
            name, (states, listed), logging.WARNING,
            "guarantees suspended: certificates are about %s with fingerprint %s, %s serves %s",
            name, models, self._url, found,
        )  # fmt: skip
