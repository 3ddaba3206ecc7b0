"""Measuring a ladder that was trained here: weight files in, its manifest with temperatures and accuracies out.

Temperatures are fitted on the profile part of `split_pictures`, the part that `hawkvision calibrate` fits on as well;
accuracies are measured on what nothing is fitted on, the certification and the held-out part. Training pictures are in
neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import sched_getaffinity
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from hawkvision.artifacts import sha256_of
from hawkvision.cascade.calibration import fit_temperature
from hawkvision.cascade.profiling import Split, measure_accuracy
from hawkvision.manifest import FileSource, InputSpec, Manifest, Training, Variant
from hawkvision.pictures import LabelledPictures
from hawkvision.types import Logits, Pixels
from hawkvision.vision.backends import open_backend
from hawkvision.zoo.build import emit_variant
from hawkvision.zoo.looking import Looks, Views
from hawkvision.zoo.recipe import Network, Recipe
from hawkvision.zoo.splits import SPLIT_SEED, split_pictures

BATCH: Final = 64
"""Pictures a run: more does not run faster on two cores."""


def measured_manifest(
    recipe: Recipe, classes: int, weights: Mapping[str, bytes], pictures: LabelledPictures, inputs: Pixels
) -> Manifest:
    """The ladder's manifest, from its weight files by name and the pictures with their pixels (n, side, side, 3).

    Raises:
        ArtifactError: if a weight file does not fit its architecture.
    """
    graphs: dict[str, bytes] = {}
    variants = []
    for network in recipe.networks:
        variant = _variant(recipe, network, weights[network.name])
        graph = emit_variant(recipe.task, variant, Path(), weights[network.name])
        graphs[network.name] = graph
        variants.append(msgspec.structs.replace(variant, sha256=sha256_of(graph), bytes=len(graph)))
    manifest = Manifest(
        format=1,
        task=recipe.task,
        labels=recipe.labels,
        classes=classes,
        ladder=recipe.ladder,
        variants=tuple(variants),
        committees=recipe.committees,
        training=Training(data_sha256=pictures.sha256, pictures=recipe.pictures.train, seed=recipe.pictures.seed),
    )
    return _measured(manifest, graphs, pictures, inputs)


def input_spec(recipe: Recipe) -> InputSpec:
    """What all networks of a recipe take in."""
    facts = recipe.input
    return InputSpec(height=facts.side, width=facts.side, mean=facts.mean, std=facts.std)


def weight_path(name: str) -> str:
    """A network's weight file, below the task's folder."""
    return f"weights/{name}.safetensors"


def _variant(recipe: Recipe, network: Network, content: bytes) -> Variant:
    return Variant(
        name=network.name,
        architecture=network.architecture,
        precision="fp32",
        license=recipe.license,
        source=FileSource(file=weight_path(network.name), sha256=sha256_of(content)),
        input=input_spec(recipe),
    )


def _measured(manifest: Manifest, graphs: Mapping[str, bytes], pictures: LabelledPictures, inputs: Pixels) -> Manifest:
    """The manifest with the temperatures and accuracies of its variants, then of the committees they vote in."""
    split = split_pictures(manifest, pictures, SPLIT_SEED)
    used = np.sort(np.concatenate([split.profile, split.certify, split.held_out]))
    place = Split(*(np.searchsorted(used, part) for part in (split.profile, split.certify, split.held_out)))
    unseen = np.concatenate([place.certify, place.held_out])
    labels, batch = pictures.labels[used], inputs[used]
    mirrored = {m for committee in manifest.committees if committee.horizontal_flip for m in committee.members}

    def temperature(logits: Logits) -> float:
        return round(fit_temperature(logits[place.profile], labels[place.profile]), 4)

    def right(logits: Logits) -> NDArray[np.bool_]:
        correct: NDArray[np.bool_] = (logits.argmax(axis=1) == labels)[unseen]
        return correct

    views: dict[str, Views] = {}
    variants = []
    for variant in manifest.variants:
        graph = graphs[variant.name]
        upright = _infer(graph, variant, manifest.classes, batch)
        flipped = _infer(graph, variant, manifest.classes, batch[:, :, ::-1]) if variant.name in mirrored else None
        views[variant.name] = Views(upright, flipped, 0.0)
        accuracy = measure_accuracy(right(upright), pictures.sha256)
        variants.append(msgspec.structs.replace(variant, temperature=temperature(upright), accuracy=accuracy))
    manifest = msgspec.structs.replace(manifest, variants=tuple(variants))
    looks = Looks(manifest, views)
    committees = []
    for committee in manifest.committees:
        logits = looks.logits(committee.name)
        accuracy = measure_accuracy(right(logits), pictures.sha256)
        committees.append(msgspec.structs.replace(committee, temperature=temperature(logits), accuracy=accuracy))
    return msgspec.structs.replace(manifest, committees=tuple(committees))


def _infer(graph: bytes, variant: Variant, classes: int, batch: Pixels) -> Logits:
    backend = open_backend("onnxruntime", graph, variant.input, classes, threads=len(sched_getaffinity(0)))
    starts = track(range(0, len(batch), BATCH), description=f"measuring {variant.name}", transient=True)
    try:
        return np.concatenate([backend.infer(np.ascontiguousarray(batch[i : i + BATCH])) for i in starts])
    finally:
        backend.close()
