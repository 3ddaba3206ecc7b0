"""Whether the parts of a manifest fit together: names, weights, and which tier runs what."""

from __future__ import annotations

import math

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest_schema import Ensemble, Manifest


def check_stages(manifest: Manifest, where: str) -> None:
    """Check that names are distinct, and that each stage and member that is named exists.

    Raises:
        ManifestError: naming the one that is wrong.
    """
    names = [v.name for v in manifest.variants] + [c.name for c in manifest.ensembles]
    if len(set(names)) != len(names):
        raise ManifestError(f"{where}: variants and ensembles must have distinct names, got {sorted(names)}")
    for stage in (*manifest.cascade.edge, *manifest.cascade.dc):
        if stage not in names:
            raise ManifestError(f"{where}: cascade names {stage!r}, which is neither a variant nor an ensemble")
    for variant in manifest.variants:
        if (contradiction := variant.input.contradiction()) is not None:
            raise ManifestError(f"{where}: input of variant {variant.name!r}: {contradiction}")
    for ensemble in manifest.ensembles:
        _check_weights(ensemble, manifest.classes, where)
        for member in ensemble.members:
            try:
                manifest.variant(member)
            except ManifestError as error:
                raise ManifestError(f"{where}: ensemble {ensemble.name!r}: {error}") from None
        if ensemble.accept_confidence is not None and ensemble.horizontal_flip:
            raise ManifestError(f"{where}: ensemble {ensemble.name!r} has accept_confidence, and so no horizontal_flip")
    _check_conditional(manifest, where)
    if manifest.cascade.default_edge not in manifest.cascade.edge:
        raise ManifestError(f"{where}: cascade.default_edge {manifest.cascade.default_edge!r} is not in cascade.edge")
    if manifest.cascade.fpga is not None and manifest.cascade.fpga not in manifest.cascade.edge:
        raise ManifestError(f"{where}: cascade.fpga {manifest.cascade.fpga!r} is not in cascade.edge")


def _check_weights(ensemble: Ensemble, labels: int, where: str) -> None:
    """Check that there is a weight for each member, or for each label of each, and that not all are zero.

    Raises:
        ManifestError: naming what is expected.
    """
    if not ensemble.weights:
        return
    rows = [each if isinstance(each, tuple) else (each,) * labels for each in ensemble.weights]
    place = f"{where}: weights of ensemble {ensemble.name!r}"
    if len(rows) != len(ensemble.members):
        raise ManifestError(f"{place}: expected {len(ensemble.members)}, one per member, got {len(rows)}")
    for member, row in zip(ensemble.members, rows, strict=True):
        if len(row) != labels:
            raise ManifestError(f"{place}: expected {labels} for {member!r}, one per label, got {len(row)}")
        if not all(math.isfinite(weight) and weight >= 0.0 for weight in row):
            raise ManifestError(f"{place}: expected finite numbers of at least 0 for {member!r}")
    if not all(any(column) for column in zip(*rows, strict=True)):
        raise ManifestError(f"{place}: expected at least one member with a weight above 0 for every label")


def _check_conditional(manifest: Manifest, where: str) -> None:
    """Check that the ensembles of each tier are of the kind that it runs.

    Raises:
        ManifestError: naming the one that is not.
    """
    for tier, stages, conditional in (("edge", manifest.cascade.edge, True), ("dc", manifest.cascade.dc, False)):
        for stage in stages:
            ensemble = manifest.ensemble(stage)
            if ensemble is not None and (ensemble.accept_confidence is not None) is not conditional:
                wanted = "ensembles with accept_confidence" if conditional else "ensembles without accept_confidence"
                raise ManifestError(
                    f"{where}: cascade.{tier} names {stage!r}; {tier} runs single variants and {wanted}"
                )
