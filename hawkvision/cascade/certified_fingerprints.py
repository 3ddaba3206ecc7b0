"""Which computations the certificates cover: the fingerprints of answers are looked up here.

A certificate names a stage by its models' fingerprint and was made with ONNX Runtime on a CPU. A stage's set holds that
fingerprint with every execution that gives the same answers (`hawkvision.models.fingerprints.EXACT`). It also holds,
for whole images only, executions that passed an equivalence check (`hawkvision.cascade.certification.equivalence`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from hawkvision.models.fingerprints import EXACT, parts_of

_REMEMBERED: Final = 256
"""Fingerprints whose result is cached; a datacenter states a handful."""


class CertifiedVersions:
    """The certified fingerprints of each stage. Immutable."""

    def __init__(self, stages: Mapping[str, str], equivalent: Mapping[str, Collection[str]] | None = None) -> None:
        """Make the set.

        Args:
            stages: the models' fingerprint of each stage, as the profile has it.
            equivalent: full fingerprints that passed an equivalence check, by stage.
        """
        self.stages = dict(stages)
        self.equivalent = {stage: frozenset(those) for stage, those in (equivalent or {}).items()}
        self._known: dict[tuple[str, str], tuple[bool, bool]] = {}

    def holds(self, stage: str, fingerprint: str | None, *, whole: bool = True) -> bool:
        """Whether this fingerprint is of the stage as certified.

        Args:
            stage: its name.
            fingerprint: as stated by the process that ran it; None is never certified.
            whole: whether the image was whole, as its sender had it.
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
        """Whether these are the stage's models, whatever executes them."""
        return models is not None and self.stages.get(stage) == models

    def _find(self, stage: str, fingerprint: str) -> tuple[bool, bool]:
        """Whether it is certified as such, and whether it passed a check."""
        models, executions = parts_of(fingerprint)
        if not self.models_of(stage, models):
            return False, False
        return executions <= EXACT, fingerprint in self.equivalent.get(stage, ())
