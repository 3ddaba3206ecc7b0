"""Reads manifests of tasks from TOML.

A manifest states facts about models (where their weights come from, what they take in, how right they were measured
to be) and the default cascade. Which machine runs what is deployment, and lives in `hawkvision.core.settings.config`.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from hawkvision.core.errors import ManifestError, NotFound
from hawkvision.core.text_files import read_text
from hawkvision.models.input_spec import InputSpec as InputSpec
from hawkvision.models.input_spec import Interpolation as Interpolation
from hawkvision.models.input_spec import Weights as Weights
from hawkvision.models.manifest_checks import check_stages
from hawkvision.models.manifest_schema import FLOAT_OR_INT8 as FLOAT_OR_INT8
from hawkvision.models.manifest_schema import Cascade as Cascade
from hawkvision.models.manifest_schema import Ensemble as Ensemble
from hawkvision.models.manifest_schema import Fraction as Fraction
from hawkvision.models.manifest_schema import Manifest as Manifest
from hawkvision.models.manifest_schema import MeasuredAccuracy as MeasuredAccuracy
from hawkvision.models.manifest_schema import Name as Name
from hawkvision.models.manifest_schema import Precision as Precision
from hawkvision.models.manifest_schema import Training as Training
from hawkvision.models.manifest_schema import Variant as Variant
from hawkvision.models.places import MANIFEST as MANIFEST
from hawkvision.models.places import artifact_path as artifact_path
from hawkvision.models.places import cache_dir as cache_dir
from hawkvision.models.places import default_profile as default_profile
from hawkvision.models.places import models_dir as models_dir
from hawkvision.models.places import own_models_dir as own_models_dir
from hawkvision.models.places import shipped_models_dir as shipped_models_dir
from hawkvision.models.weight_sources import FileSource as FileSource
from hawkvision.models.weight_sources import NpmSource as NpmSource
from hawkvision.models.weight_sources import PackageSource as PackageSource
from hawkvision.models.weight_sources import Sha256 as Sha256
from hawkvision.models.weight_sources import WeightSource as WeightSource
from hawkvision.models.weight_sources import tag_source


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
