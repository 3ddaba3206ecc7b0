"""`hawkvision models train`: a recipe and its images in, a cascade ready to build and calibrate out.

It trains the networks that are not trained yet. When all are, it measures the cascade and writes one weight file per
network and the manifest. Needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_after_training, training_mask
from hawkvision.model_zoo.training.measure import MeasuredCascade, input_spec, measured_cascade, training_of
from hawkvision.model_zoo.training.qat import is_quantised, quantised_net, train_quantised
from hawkvision.model_zoo.training.qonnx_export import write_qonnx
from hawkvision.model_zoo.training.recipe import TrainingRecipe, load_recipe, recipe_labels
from hawkvision.model_zoo.training.train import TrainingSet, is_finished, progress_reports, train_network, weight_file
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.manifest import FileSource, InputSpec
from hawkvision.system.files import write_atomic

MAX_PIXELS: Final = 50_000_000
FEWEST_MEASURED: Final = 10
"""Minimum number of images in each part."""
HEADER: Final = """Written by `hawkvision models train {task}` from recipe.toml: change that one and train again.
Temperatures were fitted on the profile part, accuracies measured on the certification and held-out parts."""


@dataclass(frozen=True, slots=True)
class TrainedCascade:
    """The result of a training."""

    folder: Path
    """The folder for weights and manifest."""
    left: tuple[str, ...]
    """Networks still to be trained. While there are any nothing is written, so that weights and manifest always fit."""
    measured: MeasuredCascade | None


def train_cascade(
    task: str,
    data: Path,
    *,
    models: Path,
    cache: Path,
    only: Sequence[str] = (),
    epochs: int | None = None,
    out: Path | None = None,
) -> TrainedCascade:
    """Train the networks of `models/<task>/recipe.toml`, or resume an interrupted run.

    Args:
        task: the task, by the name of its recipe.
        data: labelled images (`hawkvision.models.datasets`).
        models: the folder of recipes; weights and manifest are written there too, unless `out` is given.
        cache: the state of trainings is saved in `training/<task>` below it.
        only: networks to train now; none means all of the recipe.
        epochs: replaces each network's own number, for a trial.
        out: another folder to write to, for `models build --models-dir`.

    Raises:
        NotFound: if the task has no recipe.
        ManifestError: if the recipe is malformed, or asks for more images than there are.
        ConfigError: for bad data, too few of them to measure with, or a trial that would overwrite the cascade.
        ArtifactError: if a saved state is damaged, or a file cannot be written.
    """
    recipe = load_recipe(task, models)
    if epochs is not None:
        if out is None or out.resolve() == models.resolve():
            raise ConfigError(
                f"a trial of {epochs} epochs must not overwrite the cascade; give another folder as --out"
            )
        recipe = _with_epochs(recipe, epochs)
    wanted = recipe.wanted(only)
    labels = recipe_labels(recipe, models)
    images = read_images(data, labels)
    split = split_after_training(training_of(recipe, images), images, SPLIT_SEED)
    if min(len(split.profile), len(split.certify), len(split.held_out)) < FEWEST_MEASURED:
        raise ConfigError(
            f"{data}: {recipe.images.train} images train, which leaves {len(split.profile)} to fit on, "
            f"{len(split.certify)} to certify with and {len(split.held_out)} held out; expected at least "
            f"{FEWEST_MEASURED} each"
        )
    inputs = decode_all(images, input_spec(recipe))
    folder = (out or models) / task
    weights = _train_all(recipe, len(labels), images, inputs, wanted, cache)
    left = tuple(name for name in recipe.trained if name not in weights)
    if left:
        return TrainedCascade(folder, left, None)
    measured = measured_cascade(recipe, len(labels), weights, images, inputs, split)
    if out is not None:
        write_atomic(folder / recipe.labels, (models / task / recipe.labels).read_bytes())
    _write_cascade(folder, measured, weights)
    return TrainedCascade(folder, (), measured)


def _with_epochs(recipe: TrainingRecipe, epochs: int) -> TrainingRecipe:
    """The recipe with that many epochs for each network."""
    return msgspec.structs.replace(
        recipe,
        networks=tuple(msgspec.structs.replace(network, epochs=epochs) for network in recipe.networks),
        quantised=tuple(msgspec.structs.replace(quantised, epochs=epochs) for quantised in recipe.quantised),
    )


def _write_cascade(folder: Path, measured: MeasuredCascade, weights: Mapping[str, bytes]) -> None:
    for variant in measured.manifest.variants:
        assert isinstance(variant.source, FileSource)
        write_atomic(folder / variant.source.file, weights[variant.name])
    header = HEADER.format(task=measured.manifest.task)
    write_atomic(folder / "manifest.toml", format_manifest(measured.manifest, header).encode())


def decode_all(images: LabelledImages, spec: InputSpec) -> Pixels:
    """All images as (n, height, width, 3), decoded by the serving code.

    Raises:
        ConfigError: naming the first that cannot be read.
    """
    inputs = np.empty((len(images), spec.height, spec.width, 3), np.uint8)
    for index, body in enumerate(images.bodies):
        try:
            inputs[index] = load_input(body, spec, max_pixels=MAX_PIXELS)[0]
        except RequestError as error:
            raise ConfigError(f"{images.called(index)}: {error}") from None
    return inputs


def _train_all(
    recipe: TrainingRecipe, classes: int, images: LabelledImages, inputs: Pixels, wanted: set[str], cache: Path
) -> dict[str, bytes]:
    """The weight files of all networks that are wanted or were finished before, by name."""
    chosen = training_mask(images.is_test, recipe.images.train, recipe.images.seed)
    data = TrainingSet(inputs[chosen], images.labels[chosen], images.sha256)
    kept = cache / "training" / recipe.task
    weights: dict[str, bytes] = {}
    for network in recipe.networks:
        finished = is_finished(network, recipe.input, data, classes, kept)
        if not finished and network.name not in wanted:
            continue
        with nullcontext(_silent) if finished else progress_reports(network, len(data.labels)) as report:
            model = train_network(network, recipe.input, data, classes, kept, report)
        weights[network.name] = weight_file(model)
    for quantised in recipe.quantised:
        of = recipe.network(quantised.of)
        if of.name not in weights:
            continue
        training = (quantised, of, weights[of.name], recipe.input, data, classes, kept)
        finished = is_quantised(*training)
        if not finished and quantised.name not in wanted:
            continue
        with nullcontext(_silent) if finished else progress_reports(quantised.network(of), len(data.labels)) as report:
            twin = train_quantised(*training, report)
        weights[quantised.name] = write_qonnx(quantised_net(twin, recipe.input), f"{recipe.task}_{quantised.name}")
    return weights


def _silent(epoch: int, index: int, loss: float) -> None:
    """Reports nothing: a finished training has no batches to report."""
