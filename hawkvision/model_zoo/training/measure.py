"""Measuring a cascade that was trained here: weight files in, its manifest with temperatures and accuracies out.

Temperatures are fitted on the profile part of `split_after_training`, as by `hawkvision calibrate`. Accuracies are
measured on the certification and held-out parts. Training images are in none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import sched_getaffinity
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from hawkvision.cascade.certification.predictions import Split, measure_accuracy
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import LOGITS, Logits, Pixels, Tier
from hawkvision.inference.backend_registry import open_backend
from hawkvision.model_zoo.building.build import emit_variant, precision_of
from hawkvision.model_zoo.predictions.cascade_predictions import CascadePredictions, VariantInput, VariantViews
from hawkvision.model_zoo.training.recipe import TrainingRecipe
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.manifest import FileSource, InputSpec, Manifest, MeasuredAccuracy, Training, Variant
from hawkvision.system.files import sha256_of
from hawkvision.tasks.kind import TaskKind
from hawkvision.tasks.registry import task_kind

BATCH: Final = 64
"""Images per inference."""


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """Accuracy of a variant or ensemble on each part of the images."""

    name: str
    temperature: float
    profile: MeasuredAccuracy
    """On the part that the temperature was fitted on; for comparison only."""
    certify: MeasuredAccuracy
    held_out: MeasuredAccuracy
    unseen: MeasuredAccuracy
    """On the certification and the held-out part together, as the manifest states it."""


@dataclass(frozen=True, slots=True)
class MeasuredCascade:
    """A manifest with temperatures and accuracies, and the measurements behind them."""

    manifest: Manifest
    stages: tuple[MeasuredStage, ...]
    """Variants, then ensembles."""


def measured_cascade(
    recipe: TrainingRecipe,
    classes: int,
    weights: Mapping[str, bytes],
    images: LabelledImages,
    inputs: Pixels,
    split: Split,
) -> MeasuredCascade:
    """A trained cascade, from its weight files by name and the images with their pixels (n, side, side, 3).

    Raises:
        ArtifactError: if a weight file does not fit its architecture.
    """
    graphs: dict[str, bytes] = {}
    variants = []
    for name in recipe.trained:
        variant = _variant(recipe, name, weights[name])
        graph = emit_variant(recipe.task, variant, Path(), weights[name])
        graphs[name] = graph
        variants.append(msgspec.structs.replace(variant, sha256=sha256_of(graph), bytes=len(graph)))
    manifest = Manifest(
        format=1,
        task=recipe.task,
        labels=recipe.labels,
        classes=classes,
        cascade=recipe.cascade,
        variants=tuple(variants),
        ensembles=recipe.ensembles,
        training=training_of(recipe, images),
    )
    used = np.sort(np.concatenate([split.profile, split.certify, split.held_out]))
    place = Split(*(np.searchsorted(used, part) for part in (split.profile, split.certify, split.held_out)))
    kind = task_kind(manifest.kind, [str(index) for index in range(classes)], manifest.options)
    return _measured(manifest, graphs, inputs[used], _AccuracyMeter(kind, images.labels[used], place, images.sha256))


def training_of(recipe: TrainingRecipe, images: LabelledImages) -> Training:
    """Which of the images train the recipe's networks, as the manifest records it."""
    return Training(data_sha256=images.sha256, images=recipe.images.train, seed=recipe.images.seed)


def input_spec(recipe: TrainingRecipe) -> InputSpec:
    """The input of all networks of a recipe."""
    facts = recipe.input
    return InputSpec(height=facts.side, width=facts.side, mean=facts.mean, std=facts.std)


def weight_path(name: str, kind: Literal["safetensors", "onnx"] = "safetensors") -> str:
    """A network's weight file, below the task's folder. Quantised networks have `onnx` files."""
    return f"weights/{name}.{kind}"


def _variant(recipe: TrainingRecipe, name: str, content: bytes) -> Variant:
    quantised = next((q for q in recipe.quantised if q.name == name), None)
    file = weight_path(name) if quantised is None else weight_path(name, "onnx")
    return Variant(
        name=name,
        architecture=recipe.network(name if quantised is None else quantised.of).architecture,
        precision="fp32" if quantised is None else precision_of(quantised.weight_bits),
        license=recipe.license,
        source=FileSource(file=file, sha256=sha256_of(content)),
        input=input_spec(recipe),
    )


@dataclass(frozen=True, slots=True)
class _AccuracyMeter:
    """Labels (n,) of the images that did not train, and which of them fit and which measure."""

    kind: TaskKind[Any]
    labels: NDArray[np.int64]
    split: Split
    data_sha256: str

    def measured(self, name: str, logits: Logits) -> MeasuredStage:
        """The accuracy of these logits (n, classes), and their temperature."""
        right = logits.argmax(axis=1) == self.labels
        split, fit = self.split, self.split.profile
        unseen = np.concatenate([split.certify, split.held_out])
        profile, certify, held_out, both = (
            measure_accuracy(right[part], self.data_sha256) for part in (fit, split.certify, split.held_out, unseen)
        )
        temperature = round(fit_temperature(self.kind, list(logits[fit]), self.labels[fit].tolist()), 4)
        return MeasuredStage(name, temperature, profile, certify, held_out, both)


def _measured(manifest: Manifest, graphs: Mapping[str, bytes], batch: Pixels, judge: _AccuracyMeter) -> MeasuredCascade:
    """Variants first, because ensembles use their temperatures."""
    mirrored = {m for ensemble in manifest.ensembles if ensemble.horizontal_flip for m in ensemble.members}
    views: dict[VariantInput, VariantViews] = {}
    stages: list[MeasuredStage] = []
    variants = []
    for variant in manifest.variants:
        graph = graphs[variant.name]
        upright = _infer(graph, variant, manifest.classes, batch)
        flipped = _infer(graph, variant, manifest.classes, batch[:, :, ::-1]) if variant.name in mirrored else None
        # What a view costs is not asked here.
        views[VariantInput(variant.name, False)] = VariantViews(
            list(upright), None if flipped is None else list(flipped), 0.0
        )
        stages.append(found := judge.measured(variant.name, upright))
        variants.append(msgspec.structs.replace(variant, temperature=found.temperature, accuracy=found.unseen))
    manifest = msgspec.structs.replace(manifest, variants=tuple(variants))
    predictions = CascadePredictions(judge.kind, manifest, np.arange(len(batch)), views, reduced=False)
    ensembles = []
    for ensemble in manifest.ensembles:
        combined = np.stack(list(predictions.raw(ensemble.name, Tier.DATACENTER).values()))
        stages.append(found := judge.measured(ensemble.name, combined))
        ensembles.append(msgspec.structs.replace(ensemble, temperature=found.temperature, accuracy=found.unseen))
    return MeasuredCascade(msgspec.structs.replace(manifest, ensembles=tuple(ensembles)), tuple(stages))


def _infer(graph: bytes, variant: Variant, classes: int, batch: Pixels) -> Logits:
    backend = open_backend("onnxruntime", graph, variant.input, classes, threads=len(sched_getaffinity(0)))
    places, description = range(0, len(batch), BATCH), f"measuring {variant.name}"
    starts = track(places, description=description, transient=True, disable=not sys.stdout.isatty())
    try:
        return np.concatenate([backend.infer(np.ascontiguousarray(batch[i : i + BATCH]))[LOGITS] for i in starts])
    finally:
        backend.close()
