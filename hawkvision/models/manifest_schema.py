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
    MemberFacts,
    Weights,
    model_fingerprint,
    task_facts,
)
from hawkvision.models.weight_sources import Sha256, WeightSource

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
    """Of cascades that `models/train.py` made; else None."""
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
