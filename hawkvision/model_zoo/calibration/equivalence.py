"""`hawkvision models equivalence`: check whether existing certificates cover another execution of a stage.

The mathematics is in `hawkvision.cascade.certification.equivalence`. Here both executions run over the images of the
certificates, the other one in several ways. Passed checks are written to the file that edge nodes read. Labels are not
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np

from hawkvision.cascade.certification.equivalence import (
    CertificateInputs,
    ComparisonResult,
    EquivalenceCheck,
    EquivalenceChecks,
    certificate_inputs,
    compare,
    dump_equivalences,
    equivalences_path,
    load_equivalences,
)
from hawkvision.cascade.certification.profile_files import load_profile_of, load_site
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.types import Tier
from hawkvision.inference.backend_registry import execution_of
from hawkvision.inference.batch_sizes import SIZES, prepares_sizes
from hawkvision.model_zoo.calibration.evidence import clean_images
from hawkvision.model_zoo.calibration.model_runner import (
    CERTIFIED_EXECUTION,
    AnyImages,
    ModelExecution,
    run_stages,
)
from hawkvision.models.datasets import read_annotated, read_unlabelled
from hawkvision.models.fingerprints import BETWEEN, VariantRun, is_exact, stage_fingerprint, statement
from hawkvision.models.image_sets.folder_classes import directory_classes
from hawkvision.models.manifest import Manifest, load_labels, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import load_kind

WAYS: Final = ((8, 1), (1, 1), (1, 2))
"""Batch sizes and numbers of threads, as in replicas and edge nodes."""
DEVICE_WAYS: Final = tuple((size, 1) for size in SIZES)
"""The same on devices that prepare for each batch size."""


@dataclass(frozen=True, slots=True)
class StageCheck:
    """The result for one stage."""

    stage: str
    fingerprint: str
    n: int
    outcome: ComparisonResult | None
    """None if the execution gives the certified answers by construction, so that nothing was run."""


def check_equivalence(
    task: str,
    data: Path,
    *,
    execution: ModelExecution,
    stages: Sequence[str] = (),
    edge: str | None = None,
    profile: Path | None = None,
    certificates: Path | None = None,
    out: Path | None = None,
    models: Path,
    cache: Path,
    today: date | None = None,
) -> tuple[StageCheck, ...]:
    """Run both executions over the certificates' images, and record the passed checks.

    Args:
        task: the task, by the name of its manifest.
        data: the images that the certificates were made from.
        execution: the other one; its batch size and threads do not count.
        stages: to check; none means all that certificates depend on.
        edge: the edge stage; None means the manifest's default.
        profile: None means the task's own.
        certificates: a site's, if they replace the profile's.
        out: the file of passed checks; None means the one in the cache.
        models: the folder of manifests.
        cache: the folder of built models.
        today: the date to write; None means the clock's.

    Raises:
        ConfigError: for other images than the certificates', or an unknown stage.
        HawkVisionError: for bad data, missing models, a profile for other models, or a backend that cannot run them.
    """
    manifest = load_manifest(task, models)
    known = load_profile_of(manifest, models, profile)
    site = None if certificates is None else load_site(certificates)
    pair = known.pair(edge or manifest.cascade.default_edge, manifest.best)
    first = manifest.members(pair.edge)[0].name
    judged = certificate_inputs(known, pair, site, first)
    names = tuple(dict.fromkeys(each.stage for each in judged))
    unknown = sorted(set(stages) - set(names))
    if unknown:
        raise ConfigError(f"--stage: certificates depend on {', '.join(names)}, got {unknown[0]!r}")
    wanted = [each for name in (stages or names) for each in judged if each.stage == name]
    images = _images(manifest, data, models, site)
    cascade = _Cascade(load_kind(manifest, models), manifest, images, known.shrinks_images, cache)
    path = equivalences_path(out, cache, task)
    before = load_equivalences(path)
    results, passed = [], []
    for each in wanted:
        result = cascade.checked(each, execution)
        results.append(result)
        if result.outcome is not None and result.outcome.passed:
            passed.append(_written(result, result.outcome, each, images, today or date.today()))
    if passed:
        new = {(check.stage, check.fingerprint) for check in passed}
        kept = () if before is None else before.checks
        others = tuple(check for check in kept if (check.stage, check.fingerprint) not in new)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, dump_equivalences(EquivalenceChecks(format=1, task=task, checks=(*others, *passed))))
    return tuple(results)


def _images(manifest: Manifest, data: Path, models: Path, site: SiteCertificates | None) -> AnyImages:
    if site is not None and not site.data.labelled:
        return read_unlabelled(data)
    labels = load_labels(manifest, models)
    return read_annotated(data, labels, directory_classes(labels, models / manifest.task))


@dataclass(frozen=True, slots=True)
class _Cascade:
    """A task's models and the images of its certificates."""

    kind: TaskKind[Any]
    manifest: Manifest
    images: AnyImages
    shrink: bool
    cache: Path

    def checked(self, judged: CertificateInputs, execution: ModelExecution) -> StageCheck:
        name, manifest, images = judged.stage, self.manifest, self.images
        if manifest.fingerprint(name) != judged.models:
            raise ManifestError(
                f"the certificates are about {name} with fingerprint {judged.models}, but the manifest has "
                f"{manifest.fingerprint(name)}; build or certify the same models"
            )
        if images.sha256 != judged.images_sha256:
            raise ConfigError(
                f"{images.name}: expected the images of the certificates, SHA-256 {judged.images_sha256}, found "
                f"{images.sha256}; other images do not show that the certificates would be the same"
            )
        fingerprint, n = _fingerprint(manifest, name, execution, self.cache), len(clean_images(images))
        if is_exact(fingerprint):
            return StageCheck(name, fingerprint, n, None)
        outcome = self._compared(judged, execution)
        ensemble = manifest.ensemble(name)
        if ensemble is not None and ensemble.accept_confidence is not None:
            first = manifest.members(name)[0]
            bar = float(np.float32(ensemble.accept_confidence))
            asks = CertificateInputs(
                first.name, "", first.temperature, self.kind.scores[0], (bar,), images.sha256, judged.tier
            )
            others = self._compared(asks, execution).decisions
            outcome = replace(outcome, decisions=outcome.decisions + others)
        return StageCheck(name, fingerprint, n, outcome)

    def _compared(self, judged: CertificateInputs, execution: ModelExecution) -> ComparisonResult:
        certified = self._outputs(judged, CERTIFIED_EXECUTION)
        used = DEVICE_WAYS if prepares_sizes(execution.backend, execution.providers) else WAYS
        other = [replace(execution, batch=batch, threads=threads) for batch, threads in used]
        return compare(self.kind, judged, certified, [self._outputs(judged, each) for each in other])

    def _outputs(self, judged: CertificateInputs, execution: ModelExecution) -> list[Output]:
        """For all images, at the temperature at which the stage serves."""
        edge, datacenter = ((judged.stage,), ()) if judged.tier is Tier.EDGE else ((), (judged.stage,))
        predictions = run_stages(
            self.kind, self.manifest, self.images, edge=edge, datacenter=datacenter, shrink=self.shrink,
            execution=execution, cache=self.cache, chosen=clean_images(self.images),
        )  # fmt: skip
        if judged.tier is Tier.DATACENTER:
            return predictions.served(judged.stage).of(predictions.chosen)
        return list(predictions.outputs(judged.stage, Tier.EDGE, judged.temperature).values())


def _fingerprint(manifest: Manifest, stage: str, execution: ModelExecution, cache: Path) -> str:
    """As stated by a process that runs the stage so."""
    runs = []
    for variant in manifest.members(stage):
        executions = []
        for threads in dict.fromkeys(threads for _, threads in WAYS):
            opened = replace(execution, threads=threads).open(manifest, variant, cache)
            executions.append(execution_of(execution.backend, opened))
            opened.close()
        ran = BETWEEN.join(dict.fromkeys(executions))
        runs.append(VariantRun.of(variant, variant.sha256, ran))
    ensemble = manifest.ensemble(stage)
    found = stage_fingerprint(
        statement(runs),
        tuple(run.name for run in runs),
        horizontal_flip=ensemble is not None and ensemble.horizontal_flip,
        temperature=1.0 if ensemble is None else ensemble.temperature,
        accept_confidence=None if ensemble is None else ensemble.accept_confidence,
        weights=() if ensemble is None else ensemble.weights,
        task=manifest.task_facts,
    )
    assert found is not None, "all members have files"
    return found


def _written(
    result: StageCheck, outcome: ComparisonResult, judged: CertificateInputs, images: AnyImages, day: date
) -> EquivalenceCheck:
    return EquivalenceCheck(
        stage=result.stage,
        fingerprint=result.fingerprint,
        judged=judged.digest,
        images=images.name,
        images_sha256=images.sha256,
        n=result.n,
        thresholds=judged.thresholds,
        largest_difference=outcome.largest_difference,
        variation=outcome.variation,
        as_of=day.isoformat(),
    )
