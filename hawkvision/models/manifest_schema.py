"""What a manifest states: variants, ensembles and cascade of a task, as frozen values."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.errors import ManifestError
from hawkvision.models.input_spec import (
    DEFAULT_KIND,
    InputSpec,
    ManifestStruct,
    Weights,
    model_fingerprint,
    task_facts,
)

# Where the weights of a variant come from, as manifests state it.

Sha256: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class PackageSource(ManifestStruct, frozen=True, tag_field="kind", tag="package"):
    """A weight file inside a pinned package of the Python registry."""

    package: str
    version: str
    member: str
    sha256: Sha256
    """SHA-256 of the member."""
    archive_sha256: Sha256 | None = None
    """SHA-256 of the archive. An sdist needs it, because pip runs its set-up code unless a hash refuses it."""
    reader: Literal["torch", "numpy_pickle"] = "torch"

    def __str__(self) -> str:
        return f"{self.package}=={self.version}:{self.member}"


class NpmSource(ManifestStruct, frozen=True, tag_field="kind", tag="npm"):
    """A TensorFlow.js graph model inside a pinned package of the npm registry."""

    npm: Annotated[str, Meta(pattern=r"^(@[a-z0-9][\w.-]*/)?[a-z0-9][\w.-]*$", max_length=214)]
    """The package's name. It cannot be taken for an option of npm, a path or an address."""
    version: Annotated[str, Meta(pattern=r"^\d[\w.+-]*$", max_length=64)]
    member: str
    """The model's `model.json` in the archive; its shards lie beside it."""
    archive_sha256: Sha256

    @property
    def sha256(self) -> str:
        """SHA-256 of the archive, since a model has several files."""
        return self.archive_sha256

    @property
    def reader(self) -> Literal["tfjs"]:
        """The format."""
        return "tfjs"

    @property
    def package(self) -> str:
        """The package's name as a part of file names, as `npm pack` writes it."""
        return self.npm.removeprefix("@").replace("/", "-")

    def __str__(self) -> str:
        return f"{self.npm}@{self.version}:{self.member}"


class FileSource(ManifestStruct, frozen=True, tag_field="kind", tag="file"):
    """A weight file beside the manifest, committed with it."""

    file: Annotated[str, Meta(pattern=r"^(\w[\w.-]*/)*\w[\w.-]*\.(safetensors|onnx)$", max_length=128)]
    """A path below `models/<task>/`. No part begins with a dot, so it cannot leave that folder."""
    sha256: Sha256

    @property
    def reader(self) -> Literal["safetensors", "onnx"]:
        """The format by the file name: float weights, or a network in ONNX.

        The latter is QONNX for the precisions of integer networks, else the model as it is run.
        """
        return "onnx" if self.file.endswith(".onnx") else "safetensors"

    def __str__(self) -> str:
        return self.file


WeightSource: TypeAlias = PackageSource | NpmSource | FileSource
"""The source of a variant's weights. In TOML, its key `package`, `npm` or `file` says which it is."""

_KINDS: Final = ("file", "npm", "package")


def tag_source(source: dict[str, Any], place: str) -> None:
    """Tag a source with its kind, which follows from its keys; `place` names it in errors.

    Raises:
        ManifestError: if it is of two kinds, or names its kind itself.
    """
    if "kind" in source:
        raise ManifestError(f"{place}: unknown field `kind`; `file`, `npm` or `package` says which kind it is")
    named = [kind for kind in _KINDS if kind in source]
    others = {"version", "member", "archive_sha256", "reader"} if named[:1] == ["file"] else set()
    foreign = sorted(source.keys() & {*named[1:], *others})
    if foreign:
        raise ManifestError(
            f"{place}: expected either `file` or `package` or `npm`, got `{named[0]}` together with {foreign}"
        )
    source["kind"] = named[0] if named else "package"


Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_.-]*\Z", max_length=64)]
Precision: TypeAlias = Literal["fp32", "int8", "w2a8", "w3a8", "w4a8", "w5a8", "w6a8", "w7a8", "w8a8"]
"""`w4a8` is an integer network with 4 bits per weight and 8 per activation, which an FPGA can run."""
FLOAT_OR_INT8: Final = ("fp32", "int8")
"""Precisions of networks that are no integer networks."""


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
    """The members' weights, in their order: one number each, or one per label each. Empty weighs all the same."""
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
    """The training images of cascades that `models/train.py` made; else None."""
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
            self.members(stage),
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
