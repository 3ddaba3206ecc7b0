"""Passed equivalence checks: that another execution of a stage could not have changed one of its certificates.

A certificate is the outcome of a test on n images. With the thresholds τ of the stage fixed beforehand, that outcome
is a function of nothing but, for each image x, the stage's label y(x) and its decisions 1{s(x) ≥ τ}; of the reference
stage, of its label alone. (Of a conditional ensemble the first member's threshold is one of the τ, too.) Let y', s' be
the same by another execution. If on *the very images of the certificate*

    y'(x) = y(x)   and   1{s'(x) ≥ τ} = 1{s(x) ≥ τ}   for all x and all τ,

then the same test, made with that execution, would have read the same table and issued the same certificate. So the
certificate is one of that execution too, with the same ε, δ and n, and no label was looked at for it. Traffic that is a
mixture of k such executions of a stage keeps ε with probability at least 1 − kδ (union bound; each of them keeps it
with 1 − δ), which is why a node runs its edge stage in one way only.

An execution may also differ from itself, with the batch size, the number of threads, or from run to run. So it is run
in several ways w. With v = max |p'_w(x) − p'_w'(x)| over images, classes and ways, an image within what a score can
move by that, v for a top-1 probability and 2 v for a lead, of a threshold counts as one whose decision differs, and one
whose two most probable classes lie within 2 v as one whose label does. One such image, and the check is not passed.

Other images than the certificate's prove nothing of the kind: zero differences among m others bound the share of
traffic that differs by ln(1/δ') / m, which would add to ε and δ. So they are refused. And the images are whole, so
nothing follows for images that a link has damaged or coarsened: there, only `fingerprints.EXACT` is certified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hawkvision.cascade.certification.profile import Condition, Pair, Profile, threshold_value
from hawkvision.cascade.certification.profile_files import load_sealed, sealed
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.confidence.scores import Probabilities, score
from hawkvision.core.types import Score
from hawkvision.system.files import sha256_of

WHAT: Final = "equivalence checks"
COMMAND: Final = "models equivalence"


@dataclass(frozen=True, slots=True)
class CertificateInputs:
    """What of a stage's outputs certificates depend on."""

    stage: str
    models: str
    """Fingerprint of the stage's models, as the profile has it."""
    temperature: float
    score: Score | None
    """None of a stage of which the label alone counts: the reference, and what answers whatever its score."""
    thresholds: tuple[float, ...]
    """Finite ones, falling."""
    images_sha256: str
    """Of the images behind the certificates."""

    @property
    def digest(self) -> str:
        """The same as long as all of it is."""
        facts = [self.stage, self.models, self.temperature, self.score, self.thresholds, self.images_sha256]
        return sha256_of(msgspec.json.encode(facts))


class EquivalenceCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One passed check."""

    stage: str
    fingerprint: Annotated[str, Meta(max_length=1024)]
    """As a process states it that runs the stage so."""
    judged: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """`CertificateInputs.digest` of what was looked at."""
    images: str
    images_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    n: Annotated[int, Meta(ge=1)]
    thresholds: tuple[float, ...]
    largest_difference: Annotated[float, Meta(ge=0.0)]
    """Of a score from the certified execution's."""
    variation: Annotated[float, Meta(ge=0.0)]
    """Of a probability from one way of running it to another: v above."""
    as_of: str
    """Date, YYYY-MM-DD."""


class EquivalenceChecks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of passed checks of a task."""

    format: Literal[1]
    task: str
    checks: tuple[EquivalenceCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """What a comparison found."""

    labels: int
    """Images whose label differs, or could by as much as the execution varies."""
    decisions: int
    """Images with another decision at a threshold, or one that could be."""
    largest_difference: float
    """Of a score from the certified execution's."""
    variation: float
    """v: of a probability, from one way of running the execution to another."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.labels and not self.decisions


def compare(judged: CertificateInputs, certified: Probabilities, ways: Sequence[Probabilities]) -> ComparisonResult:
    """Compare an execution, run in at least one way, with the certified one.

    Args:
        judged: the stage, with the thresholds that its scores are compared with.
        certified: probabilities (n, classes) as the certificates saw them.
        ways: the other execution's, of the same images.
    """
    kind = judged.score or Score.TOP1
    every = np.stack(ways)
    variation = float((every.max(axis=0) - every.min(axis=0)).max())
    reach = variation if kind is Score.TOP1 else 2.0 * variation
    leads = np.stack([score(way, Score.MARGIN) for way in ways]).astype(np.float64)
    labels = (every.argmax(axis=2) != certified.argmax(axis=1)).any(axis=0)
    if variation > 0.0:
        labels |= (leads <= 2.0 * variation).any(axis=0)
    before = score(certified, kind).astype(np.float64)
    scores = np.stack([score(way, kind) for way in ways]).astype(np.float64)
    decisions = np.zeros(len(certified), np.bool_)
    for threshold in judged.thresholds:
        decisions |= ((scores >= threshold) != (before >= threshold)).any(axis=0)
        if variation > 0.0:
            decisions |= (np.abs(scores - threshold) <= reach).any(axis=0)
    return ComparisonResult(int(labels.sum()), int(decisions.sum()), float(np.abs(scores - before).max()), variation)


def equivalences_path(own: Path | None, cache: Path, task: str) -> Path:
    """Where passed checks are kept: `own`, or a file in the cache."""
    return cache / "equivalence" / f"{task}.json" if own is None else own


def load_equivalences(path: Path) -> EquivalenceChecks | None:
    """The checks that were passed; None if there is no such file.

    Raises:
        ManifestError: if it breaks the schema or was altered.
    """
    return load_sealed(path, EquivalenceChecks, WHAT, COMMAND) if path.exists() else None


def dump_equivalences(checks: EquivalenceChecks) -> bytes:
    """As indented JSON with a digest."""
    return sealed(msgspec.to_builtins(checks))


def certificate_inputs(
    profile: Profile, pair: Pair, site: SiteCertificates | None = None, first: str | None = None
) -> tuple[CertificateInputs, ...]:
    """What certificates of whole images depend on, stage by stage.

    Args:
        profile: of the cascade.
        pair: of its stages.
        site: certificates that take the place of the profile's.
        first: the first member of a conditional ensemble at the edge, which answers `fast` alone if the profile's own
            certificates know it (`Policy`).
    """
    conditions: Iterable[Condition] = pair.conditions
    images = profile.certified_on[1]
    if site is not None:
        conditions, images = site.pair(pair.edge, pair.best).conditions, site.data.sha256
    certificates = [c for each in conditions for c in (each.balanced, each.fast, *each.certificates)]

    def one(name: str, score: Score | None, values: Iterable[float]) -> CertificateInputs:
        stage = profile.stage(name)
        thresholds = tuple(sorted({value for value in values if math.isfinite(value)}, reverse=True))
        return CertificateInputs(name, stage.fingerprint, stage.temperature, score, thresholds, images)

    found = [
        one(pair.edge, pair.score, (threshold_value(c.threshold) for c in certificates)),
        one(pair.best, None, ()),
    ]
    if pair.intermediate is not None:
        values = (threshold_value(c.intermediate_threshold) for c in certificates)
        found.append(one(pair.intermediate.name, pair.intermediate.score, values))
    known = any((each.edge, each.best) == (first, pair.best) for each in profile.pairs)
    if first is not None and first != pair.edge and known and site is None:
        found.append(one(first, None, ()))
    return tuple(found)


def passed(
    checks: EquivalenceChecks | None,
    profile: Profile,
    pair: Pair,
    site: SiteCertificates | None = None,
    first: str | None = None,
) -> dict[str, set[str]]:
    """The fingerprints, by stage, that passed a check of the very certificates that are in force."""
    found: dict[str, set[str]] = {}
    if checks is None or checks.task != profile.task:
        return found
    judged = {each.stage: each.digest for each in certificate_inputs(profile, pair, site, first)}
    for check in checks.checks:
        if judged.get(check.stage) == check.judged:
            found.setdefault(check.stage, set()).add(check.fingerprint)
    return found
