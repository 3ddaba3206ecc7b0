"""Manifests of tasks: their variants, ensembles and cascade, read from TOML into frozen values.

A manifest states facts about models (where their weights come from, what they take in, how right they were measured
to be) and the default cascade. Which machine runs what is deployment, and lives in `hawkvision.core.settings.config`.
"""

from __future__ import annotations

import hashlib
import math
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.errors import ConfigError, ManifestError, NotFound
from hawkvision.core.text_files import read_text
from hawkvision.models.input_spec import DEFAULT_KIND, ManifestStruct, MemberFacts, model_fingerprint, task_facts
from hawkvision.models.input_spec import InputSpec as InputSpec
from hawkvision.models.input_spec import Interpolation as Interpolation
from hawkvision.models.input_spec import Weights as Weights
from hawkvision.models.weight_sources import FileSource as FileSource
from hawkvision.models.weight_sources import NpmSource as NpmSource
from hawkvision.models.weight_sources import PackageSource as PackageSource
from hawkvision.models.weight_sources import Sha256 as Sha256
from hawkvision.models.weight_sources import WeightSource as WeightSource
from hawkvision.models.weight_sources import tag_source

Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Name: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_.-]*$", max_length=64)]
Precision: TypeAlias = Literal["fp32", "int8", "w2a8", "w3a8", "w4a8", "w5a8", "w6a8", "w7a8", "w8a8"]
"""`w4a8` is an integer network with 4 bits per weight and 8 per activation, which an FPGA can run."""
FLOAT_OR_INT8: Final = ("fp32", "int8")
"""Precisions of networks that are no integer networks."""

MANIFEST: Final = "manifest.toml"
"""The file of a manifest, in its task's folder."""
_RENAMED_KEYS: Final = {"ladder": "cascade", "committees": "ensembles", "pictures": "images"}
"""Keys of manifests before 0.2."""


class MeasuredAccuracy(ManifestStruct, frozen=True):
    """Accuracy (1 − mean loss of the task kind) on labelled images, with its 95 % interval."""

    value: Fraction
    n: Annotated[int, Meta(ge=1)]
    low: Fraction
    high: Fraction
    data_sha256: Sha256


class Variant(ManifestStruct, frozen=True):
    """One runnable model: weights, precision and input size."""

    name: Name
    architecture: Name
    precision: Precision
    license: str
    source: WeightSource
    input: InputSpec
    decoder: Name = "logits"
    """How the model's tensors become those of the task kind (`hawkvision.tasks.decoders`)."""
    decoder_options: dict[str, Any] = msgspec.field(default_factory=dict)
    sha256: Sha256 | None = None
    bytes: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
    accuracy: MeasuredAccuracy | None = None


class Ensemble(ManifestStruct, frozen=True):
    """Several variants whose outputs the task kind combines, over the image and its mirror image."""

    name: Name
    members: Annotated[tuple[Name, ...], Meta(min_length=2)]
    horizontal_flip: bool = False
    temperature: Annotated[float, Meta(gt=0.0)] = 1.0
    """Temperature of the combination."""
    weights: Weights = ()
    """Of the members, in their order: one number each, or one per label each. Empty weighs all the same."""
    accept_confidence: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Confidence from which on the first member answers alone: a conditional ensemble, for edge nodes. None runs all
    members on every image."""
    accuracy: MeasuredAccuracy | None = None


class Cascade(ManifestStruct, frozen=True):
    """The stages of each tier, cheapest first. The last of `dc` is the reference stage."""

    edge: Annotated[tuple[Name, ...], Meta(min_length=1)]
    dc: Annotated[tuple[Name, ...], Meta(min_length=1)]
    default_edge: Name
    fpga: Name | None = None
    """The quantised stage of `edge` that FPGAs run by default."""


class Training(ManifestStruct, frozen=True):
    """Which images trained a cascade: `images` of a set, drawn by `seed`
    (`hawkvision.model_zoo.calibration.splits.training_mask`).
    """

    data_sha256: Sha256
    images: Annotated[int, Meta(ge=1)]
    seed: int


class Manifest(ManifestStruct, frozen=True):
    """The models of a task."""

    format: Literal[1]
    task: Name
    labels: str
    classes: Annotated[int, Meta(ge=1)]
    """The number of labels."""
    cascade: Cascade
    variants: tuple[Variant, ...]
    ensembles: tuple[Ensemble, ...] = ()
    training: Training | None = None
    """For cascades made by `hawkvision models train`; else None."""
    labels_sha256: Sha256 | None = None
    """SHA-256 of the label file with newline line ends; None does not check it."""
    profile_sha256: Sha256 | None = None
    """SHA-256 of `profile.json`; None relies on the digest in the file."""
    kind: Name = DEFAULT_KIND
    """The kind of task, as installed (`hawkvision.tasks`)."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """The options of the kind, which checks them."""
    view_of: Name | None = None
    """The task whose variants these are: a view answers another question by the same models."""

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            ManifestError: if there is none.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(v.name for v in self.variants)
        raise ManifestError(f"task {self.task!r} has no variant {name!r}; it has {known}")

    def ensemble(self, name: str) -> Ensemble | None:
        """The ensemble of that name, or None."""
        return next((c for c in self.ensembles if c.name == name), None)

    def fingerprint(self, stage: str) -> str:
        """SHA-256 of everything that decides a stage's answers: files, inputs, decoders, combination, kind.

        A certificate holds for the stage with this fingerprint and no other.
        """
        ensemble = self.ensemble(stage)
        return model_fingerprint(
            [
                MemberFacts(v.name, v.sha256, v.input, v.temperature, v.decoder, v.decoder_options)
                for v in self.members(stage)
            ],
            horizontal_flip=ensemble is not None and ensemble.horizontal_flip,
            temperature=ensemble.temperature if ensemble else None,
            accept_confidence=None if ensemble is None else ensemble.accept_confidence,
            weights=() if ensemble is None else ensemble.weights,
            task=self.task_facts,
        )

    @property
    def task_facts(self) -> str:
        """The kind and its options as a part of fingerprints."""
        return task_facts(self.kind, self.options)

    @property
    def best(self) -> str:
        """The cascade's reference stage."""
        return self.cascade.dc[-1]

    def members(self, stage: str) -> tuple[Variant, ...]:
        """The variants of a stage: the members of an ensemble, or the variant itself."""
        ensemble = self.ensemble(stage)
        return tuple(self.variant(m) for m in (ensemble.members if ensemble else (stage,)))

    @property
    def datacenter_inputs(self) -> tuple[InputSpec, ...]:
        """The distinct inputs of the stages of `cascade.dc` and their members."""
        return tuple(dict.fromkeys(member.input for stage in self.cascade.dc for member in self.members(stage)))


def parse_manifest(text: str, where: str) -> Manifest:
    """Read a manifest from TOML text; `where` names it in errors.

    Raises:
        ManifestError: naming the key, what was expected and what was found.
    """
    return manifest_of(_document(text, where), where)


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from None


def manifest_of(document: dict[str, Any], where: str) -> Manifest:
    """The manifest in a TOML document, which is changed; `where` names it in errors.

    Raises:
        ManifestError: as `parse_manifest`, whatever values the document has.
    """
    _refuse_old_words(document, where)
    try:
        manifest = msgspec.convert(_with_source_kinds(document, where), Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from None
    _check_stages(manifest, where)
    return manifest


def _check_stages(manifest: Manifest, where: str) -> None:
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


def _refuse_old_words(document: dict[str, Any], where: str) -> None:
    """Raises: ManifestError for a key of releases before 0.2, naming the present one."""
    tables = {where: document}
    for key in ("training", "cascade"):
        if isinstance(document.get(key), dict):
            tables[f"{where}: [{key}]"] = document[key]
    for place, table in tables.items():
        for old in table.keys() & _RENAMED_KEYS.keys():
            raise ManifestError(f"{place}: {old} is called {_RENAMED_KEYS[old]} since 0.2")
    ensembles = document.get("ensembles")
    for each in ensembles if isinstance(ensembles, list) else ():
        if isinstance(each, dict) and "sure_from" in each:
            raise ManifestError(f"{where}: [[ensembles]]: sure_from is called accept_confidence since 0.2")


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
    """Where a new profile of a task goes: beside the manifest in the user's own folder, else `profile.json` here."""
    folder = models_dir(override, task)
    return folder / task / "profile.json" if folder == own_models_dir() else Path("profile.json")


def cache_dir(override: Path | None = None) -> Path:
    """The folder of built artefacts: `override`, else `$XDG_CACHE_HOME/hawkvision`, else `~/.cache/hawkvision`.

    Raises:
        ConfigError: if nothing says where that is.
    """
    if override is not None:
        return override
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "hawkvision"
    try:
        return Path.home() / ".cache" / "hawkvision"
    except RuntimeError:
        raise ConfigError(
            f"there is no cache folder: user {os.geteuid()} has no HOME and no entry in /etc/passwd; "
            "set XDG_CACHE_HOME, or for models give --cache-dir"
        ) from None


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


def _read(path: Path) -> str:
    """The text of a manifest or a label file.

    Raises:
        ManifestError: if it cannot be read.
    """
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: cannot read: {error}") from None


def artifact_path(cache: Path, task: str, variant: str) -> Path:
    """The path of the built ONNX file of a variant."""
    return cache / "models" / task / f"{variant}.onnx"
