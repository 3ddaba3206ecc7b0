"""Equivalence checks: whether another execution of a stage would have received the same certificates.

A certificate is the outcome of a test on n images. With fixed thresholds τ it depends, for each image x, only on the
stage's answer y(x) and its decisions 1{s(x) ≥ τ}; for the reference stage, only on its answer. (The thresholds include
that of a conditional ensemble's first member.) Let y', s' be the values of another execution. If on *the images of the
certificate*

    y'(x) = y(x)   and   1{s'(x) ≥ τ} = 1{s(x) ≥ τ}   for all x and all τ,

the same test with that execution has the same data and issues the same certificate, with the same ε, δ and n. No label
is read. Traffic that mixes k such executions of a stage keeps ε with probability at least 1 − kδ (union bound). So a
node runs its edge stage in one way only.

An execution may also vary by itself, with batch size, number of threads, or from run to run. So it runs in several ways
w. Let v be the largest difference of a value of an output between two ways, over all images. A decision counts as
different if the score lies within its possible variation of a threshold (`TaskKind.score_slope`: v for a top-1
probability, 2 v for a margin). An answer counts as different if other values within v could change it
(`TaskKind.steady`: for classes, if the two most probable lie within 2 v). One such image fails the check. y'(x) = y(x)
means no disagreement where that implies equal losses (`TaskKind.agreement_bounds_drop`), else equal predictions.

Other images than the certificate's do not suffice: no difference among m of them bounds the share of differing traffic
by ln(1/δ') / m, which would add to ε and δ. They are refused. The images are whole, so nothing follows for images that
a link damaged or re-encoded; for those only `fingerprints.EXACT` is certified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.cascade.certification.profile import Condition, Pair, Profile, threshold_value
from hawkvision.cascade.certification.profile_files import load_sealed, sealed
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.core.types import Tier
from hawkvision.system.files import sha256_of
from hawkvision.tasks.kind import Output, TaskKind

WHAT: Final = "equivalence checks"
COMMAND: Final = "models equivalence"


@dataclass(frozen=True, slots=True)
class CertificateInputs:
    """The properties of a stage that its certificates depend on."""

    stage: str
    models: str
    """Fingerprint of the stage's models, as the profile has it."""
    temperature: float
    score: str | None
    """None if only the label counts: the reference stage, and stages that answer whatever their score."""
    thresholds: tuple[float, ...]
    """Finite ones, falling."""
    images_sha256: str
    """Of the images behind the certificates."""
    tier: Tier
    """That runs it so."""

    @property
    def digest(self) -> str:
        """Equal if and only if all fields are; a stage that both tiers run has a score on one of them."""
        facts = [self.stage, self.models, self.temperature, self.score, self.thresholds, self.images_sha256]
        return sha256_of(msgspec.json.encode(facts))


class EquivalenceCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One passed check."""

    stage: str
    fingerprint: Annotated[str, Meta(max_length=1024)]
    """As stated by a process that runs the stage so."""
    judged: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """`CertificateInputs.digest` of the checked stage."""
    images: str
    images_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    n: Annotated[int, Meta(ge=1)]
    thresholds: tuple[float, ...]
    largest_difference: Annotated[float, Meta(ge=0.0)]
    """Largest difference of a score from the certified execution's."""
    variation: Annotated[float, Meta(ge=0.0)]
    """v of the module's documentation."""
    as_of: str
    """Date, YYYY-MM-DD."""


class EquivalenceChecks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of passed checks of a task."""

    format: Literal[1]
    task: str
    checks: tuple[EquivalenceCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The result of a comparison."""

    labels: int
    """Images whose label differs, or could within the execution's variation."""
    decisions: int
    """Images with another decision at a threshold, or one that could be."""
    largest_difference: float
    """Largest difference of a score from the certified execution's."""
    variation: float
    """v of the module's documentation."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.labels and not self.decisions


def compare(
    kind: TaskKind[Any], judged: CertificateInputs, certified: Sequence[Output], ways: Sequence[Sequence[Output]]
) -> ComparisonResult:
    """Compare an execution, run in at least one way, with the certified one.

    Args:
        kind: of the task.
        judged: the stage, with the thresholds that its scores are compared with.
        certified: outputs of the certified execution for n images.
        ways: the other execution's, of the same images.
    """
    name = judged.score or kind.scores[0]
    variation = _variation(ways)
    reach = kind.score_slope(name) * variation if variation > 0.0 else 0.0
    labels = np.zeros(len(certified), np.bool_)
    for way in ways:
        labels |= _differing(kind, way, certified)
        if variation > 0.0:
            labels |= ~np.array([kind.steady(output, variation) for output in way], np.bool_)
    before = kind.score_all(certified, name)
    scores = np.stack([kind.score_all(way, name) for way in ways])
    decisions = np.zeros(len(certified), np.bool_)
    for threshold in judged.thresholds:
        decisions |= ((scores >= threshold) != (before >= threshold)).any(axis=0)
        if variation > 0.0:
            decisions |= (np.abs(scores - threshold) <= reach).any(axis=0)
    return ComparisonResult(int(labels.sum()), int(decisions.sum()), float(np.abs(scores - before).max()), variation)


def _variation(ways: Sequence[Sequence[Output]]) -> float:
    """v of the module's documentation; infinite if outputs for one image differ in shape, such as in their boxes."""
    found = 0.0
    for outputs in zip(*ways, strict=True):
        if len({output.shape for output in outputs}) > 1:
            return math.inf
        values = np.stack(outputs)
        found = max(found, float((values.max(axis=0) - values.min(axis=0)).max(initial=0.0)))
    return found


def _differing(kind: TaskKind[Any], way: Sequence[Output], certified: Sequence[Output]) -> NDArray[np.bool_]:
    """Whether the answer to each image (n,) could have another loss.

    Where agreement bounds differences of losses, answers that agree have the same. Elsewhere they must be equal: boxes
    that match one another can match different true ones.
    """
    if kind.agreement_bounds_drop:
        return kind.disagreements(way, certified) > 0.0
    return np.array([kind.predict(a, 1) != kind.predict(b, 1) for a, b in zip(way, certified, strict=True)], np.bool_)


def equivalences_path(own: Path | None, cache: Path, task: str) -> Path:
    """The file of passed checks: `own`, or one in the cache."""
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
    """The properties that certificates of whole images depend on, stage by stage.

    Args:
        profile: of the cascade.
        pair: of its stages.
        site: certificates that replace the profile's.
        first: the first member of a conditional ensemble at the edge, which answers `fast` alone if the profile's own
            certificates know it (`Policy`).
    """
    conditions: Iterable[Condition] = pair.conditions
    images = profile.certified_on[1]
    if site is not None:
        conditions, images = site.pair(pair.edge, pair.best).conditions, site.data.sha256
    certificates = [c for each in conditions for c in (each.balanced, each.fast, *each.certificates)]

    def one(name: str, score: str | None, values: Iterable[float], tier: Tier) -> CertificateInputs:
        stage = profile.stage(name)
        thresholds = tuple(sorted({value for value in values if math.isfinite(value)}, reverse=True))
        return CertificateInputs(name, stage.fingerprint, stage.temperature, score, thresholds, images, tier)

    found = [
        one(pair.edge, pair.score, (threshold_value(c.threshold) for c in certificates), Tier.EDGE),
        one(pair.best, None, (), Tier.DATACENTER),
    ]
    if pair.intermediate is not None:
        values = (threshold_value(c.intermediate_threshold) for c in certificates)
        found.append(one(pair.intermediate.name, pair.intermediate.score, values, Tier.DATACENTER))
    known = any((each.edge, each.best) == (first, pair.best) for each in profile.pairs)
    if first is not None and first != pair.edge and known and site is None:
        found.append(one(first, None, (), Tier.EDGE))
    return tuple(found)


def passed(
    checks: EquivalenceChecks | None,
    profile: Profile,
    pair: Pair,
    site: SiteCertificates | None = None,
    first: str | None = None,
) -> dict[str, set[str]]:
    """The fingerprints, by stage, that passed a check of the certificates in force."""
    if checks is None or checks.task != profile.task:
        return {}
    judged: dict[str, set[str]] = {}
    for each in certificate_inputs(profile, pair, site, first):
        judged.setdefault(each.stage, set()).add(each.digest)
    done: dict[tuple[str, str], set[str]] = {}
    for check in checks.checks:
        done.setdefault((check.stage, check.fingerprint), set()).add(check.judged)
    found: dict[str, set[str]] = {}
    for (stage, fingerprint), digests in done.items():
        if stage in judged and judged[stage] <= digests:
            found.setdefault(stage, set()).add(fingerprint)
    return found
