"""Reads manifests of tasks from TOML.

A manifest states facts about models (where their weights come from, what they take in, how right they were measured
to be) and the default cascade. Which machine runs what is deployment, and lives in `hawkvision.core.settings.config`.
"""

from __future__ import annotations

import hashlib
import math
import os
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ManifestError, NotFound
from hawkvision.core.text_files import read_text
from hawkvision.models.input_spec import InputSpec as InputSpec
from hawkvision.models.input_spec import Interpolation as Interpolation
from hawkvision.models.input_spec import Weights as Weights
from hawkvision.models.manifest_schema import FLOAT_OR_INT8 as FLOAT_OR_INT8
from hawkvision.models.manifest_schema import Cascade as Cascade
from hawkvision.models.manifest_schema import Ensemble as Ensemble
from hawkvision.models.manifest_schema import FileSource as FileSource
from hawkvision.models.manifest_schema import Fraction as Fraction
from hawkvision.models.manifest_schema import Manifest as Manifest
from hawkvision.models.manifest_schema import MeasuredAccuracy as MeasuredAccuracy
from hawkvision.models.manifest_schema import Name as Name
from hawkvision.models.manifest_schema import NpmSource as NpmSource
from hawkvision.models.manifest_schema import PackageSource as PackageSource
from hawkvision.models.manifest_schema import Precision as Precision
from hawkvision.models.manifest_schema import Sha256 as Sha256
from hawkvision.models.manifest_schema import Training as Training
from hawkvision.models.manifest_schema import Variant as Variant
from hawkvision.models.manifest_schema import WeightSource as WeightSource
from hawkvision.models.manifest_schema import tag_source
from hawkvision.system.files import cache_dir as cache_dir

# Where manifests, profiles and built models lie.

MANIFEST: Final = "manifest.toml"
"""The file of a manifest, in its task's folder."""


def models_dir(override: Path | None = None, task: str | None = None) -> Path:
    """The folder of manifests with that of `task`: `override`, else the shipped one, else the user's own.

    A task that both have is the shipped one. `shipped_models_dir` is the answer for a task that neither has.
    """
    if override is not None:
        return override
    shipped, own = shipped_models_dir(), own_models_dir()
    if task is None or own is None or (shipped / task / MANIFEST).is_file() or not (own / task / MANIFEST).is_file():
        return shipped
    return own


def shipped_models_dir() -> Path:
    """The folder of the manifests that come with HawkVision: `models/` of the checkout, else the copy in the wheel."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "models"
    return checkout if checkout.is_dir() else package / "_models"


def own_models_dir() -> Path | None:
    """The folder of the user's own tasks: `hawkvision/models` below `$XDG_DATA_HOME`, else below `~/.local/share`.

    None for a user without a home.
    """
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "hawkvision" / "models"
    except RuntimeError:
        return None


def default_profile(override: Path | None, task: str) -> Path:
    """Where a new profile of a task goes: beside its manifest, or, if that is shipped, `TASK-profile.json` here."""
    folder = models_dir(override, task)
    shipped = folder.resolve() == shipped_models_dir().resolve()
    return Path(f"{task}-profile.json") if shipped else folder / task / "profile.json"


def artifact_path(cache: Path, task: str, variant: str) -> Path:
    """The path of the built ONNX file of a variant."""
    return cache / "models" / task / f"{variant}.onnx"


# Whether the parts of a manifest fit together: names, weights, and which tier runs what.


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


def load_manifest(task: str, models: Path) -> Manifest:
    """Read `models/<task>/manifest.toml`.

    Raises:
        NotFound: if the task has no manifest there; the message lists those that have.
        ManifestError: if the file breaks the schema, or is that of another task.
    """
    path = models / task / MANIFEST
    if not path.is_file():
        own = own_models_dir()
        places = [models] if own is None or models != shipped_models_dir() or not own.is_dir() else [models, own]
        known = sorted({found.parent.name for place in places for found in place.glob(f"*/{MANIFEST}")})
        where = " or ".join(map(str, places))
        raise NotFound(f"no task {task!r} under {where}; known tasks: {', '.join(known) or 'none'}")
    document = _document(_read(path), str(path))
    base = document.get("view_of")
    if isinstance(base, str):
        if "variants" in document:
            raise ManifestError(f"{path}: a view has the variants of {base!r}; expected no variants of its own")
        document["variants"] = _variants_of(base, models, str(path))
    manifest = manifest_of(document, str(path))
    if manifest.task != task:
        raise ManifestError(f"{path}: expected task = {task!r}, the name of its folder, got {manifest.task!r}")
    return manifest


def parse_manifest(text: str, where: str) -> Manifest:
    """Read a manifest from TOML text; `where` names it in errors.

    Raises:
        ManifestError: naming the key, what was expected and what was found.
    """
    return manifest_of(_document(text, where), where)


def manifest_of(document: dict[str, Any], where: str) -> Manifest:
    """The manifest in a TOML document, which is changed; `where` names it in errors.

    Raises:
        ManifestError: as `parse_manifest`, whatever values the document has.
    """
    try:
        manifest = msgspec.convert(_with_source_kinds(document, where), Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from None
    check_stages(manifest, where)
    return manifest


def load_labels(manifest: Manifest, models: Path) -> tuple[str, ...]:
    """The class names in index order, one per line of `models/<task>/<labels>`.

    Raises:
        ManifestError: if the file is missing, is not the one that is pinned, or its length is not `manifest.classes`.
    """
    path = models / manifest.task / manifest.labels
    if not path.is_file():
        raise ManifestError(f"{path}: label file of task {manifest.task!r} is missing")
    text = _read(path)
    if manifest.labels_sha256 is not None:
        found = hashlib.sha256(text.encode()).hexdigest()
        if found != manifest.labels_sha256:
            raise ManifestError(
                f"{path}: these are not the labels that the manifest pins: expected SHA-256 {manifest.labels_sha256}, "
                f"found {found}; restore them"
            )
    labels = tuple(text.splitlines())
    if len(labels) != manifest.classes:
        raise ManifestError(f"{path}: expected {manifest.classes} lines, one per class, found {len(labels)}")
    return labels


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from None


def _with_source_kinds(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The document with each `source` tagged by its kind, which follows from its keys.

    Raises:
        ManifestError: as `tag_source`.
    """
    variants = document.get("variants")
    for index, variant in enumerate(variants if isinstance(variants, list) else ()):
        source = variant.get("source") if isinstance(variant, dict) else None
        if not isinstance(source, dict):
            continue
        tag_source(source, f"{where}: variants[{index}].source")
    return document


def _variants_of(base: str, models: Path, where: str) -> Any:
    """The variants of another task, as in its TOML document, without accuracies: those are of its own question."""
    path = models / base / "manifest.toml"
    if not path.is_file():
        raise ManifestError(f"{where}: view_of: there is no task {base!r} beside it")
    document = _document(_read(path), str(path))
    if "view_of" in document:
        raise ManifestError(f"{where}: view_of: expected a task with models, and {base!r} is a view itself")
    variants = document.get("variants")
    for variant in variants if isinstance(variants, list) else ():
        if isinstance(variant, dict):
            variant.pop("accuracy", None)
    return variants


def _read(path: Path) -> str:
    """The text of a manifest or a label file.

    Raises:
        ManifestError: if it cannot be read.
    """
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot read: {error}") from None
