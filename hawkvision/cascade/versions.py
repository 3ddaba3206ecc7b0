"""Which computations a profile's certificates are about: the set that each answer's fingerprint is looked up in.

A certificate names a stage by its models' fingerprint, and was made with ONNX Runtime on a CPU. So the set of a stage
holds that fingerprint with every execution that gives the same answers (`hawkvision.models.fingerprints.EXACT`), and
those that have passed an equivalence check (`hawkvision.cascade.certification.equivalence`), which is about whole
images only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from hawkvision.models.fingerprints import EXACT, parts_of

_REMEMBERED: Final = 256
"""Fingerprints whose verdict is kept; a datacenter states a handful."""


class CertifiedVersions:
    """The set of certified fingerprints of each stage. Never changes: other certificates are another object."""

    def __init__(self, stages: Mapping[str, str], equivalent: Mapping[str, Collection[str]] | None = None) -> None:
        """Make the set.

        Args:
            stages: the models' fingerprint of each stage, as the profile has it.
            equivalent: whole fingerprints that passed an equivalence check, by stage.
        """
        self.stages = dict(stages)
        self.equivalent = {stage: frozenset(those) for stage, those in (equivalent or {}).items()}
        self._known: dict[tuple[str, str], tuple[bool, bool]] = {}

    def holds(self, stage: str, fingerprint: str | None, *, whole: bool = True) -> bool:
        """Whether what states this fingerprint is the stage as it was certified.

        Args:
            stage: its name.
            fingerprint: as stated by the process that ran it; None is never certified.
            whole: whether it was the whole image as its sender had it.
        """
        if fingerprint is None:
            return False
        key = stage, fingerprint
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._find(stage, fingerprint)
        return found[0] or (whole and found[1])

    def models_of(self, stage: str, models: str | None) -> bool:
        """Whether these are the stage's models, whatever runs them."""
        return models is not None and self.stages.get(stage) == models

    def _find(self, stage: str, fingerprint: str) -> tuple[bool, bool]:
        """Whether it is certified as such, and whether it passed a check."""
        models, executions = parts_of(fingerprint)
        if not self.models_of(stage, models):
            return False, False
        return executions <= EXACT, fingerprint in self.equivalent.get(stage, ())
