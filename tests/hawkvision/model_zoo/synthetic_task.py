"""A task that a small network learns in seconds: a bright square in one of three places on noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.model_zoo.building.convnet import CONVNETS
from hawkvision.model_zoo.building.manifest_writer import format_manifest
from hawkvision.model_zoo.calibration.splits import SPLIT_SEED, split_after_training
from hawkvision.model_zoo.training.measure import measured_cascade, training_of, weight_path
from hawkvision.model_zoo.training.qonnx_export import write_qonnx
from hawkvision.model_zoo.training.recipe import load_recipe
from hawkvision.models.datasets import LabelledImages, read_images
from hawkvision.models.image_sets.idx_reader import grey_png
from hawkvision.models.manifest import InputSpec, Manifest
from hawkvision.system.files import write_atomic
from tests.hawkvision.integer.quantised_nets import random_net
from tests.hawkvision.model_zoo.tiny_states import convnet_state

RECIPE = """
format = 1
task = "shapes"
labels = "labels.txt"
license = "Apache-2.0"
images = { train = 192, seed = 3 }
input = { side = 12, mean = [60.0, 60.0, 60.0], std = [50.0, 50.0, 50.0] }
cascade = { edge = ["tiny_w4", "tiny"], dc = ["both"], default_edge = "tiny", fpga = "tiny_w4" }
ensembles = [{ name = "both", members = ["tiny", "other"], horizontal_flip = true }]

[[networks]]
name = "tiny"
architecture = "convnet_tiny"
seed = 1
epochs = 2
batch = 32
flip = false
shift = 1

[[networks]]
name = "other"
architecture = "convnet_tiny_grey"
seed = 2
epochs = 2
batch = 32
label_smoothing = 0.1
cutout = 4

[[quantised]]
name = "tiny_w4"
of = "tiny"
weight_bits = 4
seed = 3
epochs = 2
"""
LABELS = ("low", "intermediate", "high")
COUNT, TESTED = 320, 64


def write_task(root: Path) -> tuple[Path, Path]:
    """Recipe and labels below `root`/models, the images in an npz file; both paths."""
    models = root / "models"
    (models / "shapes").mkdir(parents=True)
    (models / "shapes" / "recipe.toml").write_text(RECIPE)
    (models / "shapes" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, len(LABELS), COUNT)
    bodies = []
    for label in labels:
        pixels = rng.integers(0, 90, (12, 12), dtype=np.uint8)
        pixels[1 + 4 * label : 4 + 4 * label, 4:8] += 120
        bodies.append(grey_png(pixels))
    data = root / "shapes.npz"
    np.savez(
        data,
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]),
        labels=labels,
        is_test=np.arange(COUNT) >= COUNT - TESTED,
    )
    return models, data


def images_of(data: Path) -> LabelledImages:
    return read_images(data, LABELS)


def inputs_of(bodies: Sequence[bytes], side: int) -> Pixels:
    spec = InputSpec(height=side, width=side, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    return np.stack([load_input(body, spec, max_pixels=10**6)[0] for body in bodies])


def write_cascade(root: Path, channels: tuple[int, ...] = (16, 32, 32)) -> tuple[Path, Path, Manifest]:
    """The task with a cascade of random weights, measured as `models train` does: models folder, images, manifest.

    `channels` are the quantised network's.
    """
    models, data = write_task(root)
    recipe, images = load_recipe("shapes", models), images_of(data)
    rng = np.random.default_rng(5)
    weights = {
        network.name: safetensors.numpy.save(convnet_state(CONVNETS[network.architecture], rng, 12, len(LABELS)))
        for network in recipe.networks
    }
    twin = random_net(side=12, planes=3, channels=channels, classes=len(LABELS))
    weights["tiny_w4"] = write_qonnx(twin, "shapes_tiny_w4")
    split = split_after_training(training_of(recipe, images), images, SPLIT_SEED)
    manifest = measured_cascade(recipe, len(LABELS), weights, images, inputs_of(images.bodies, 12), split).manifest
    for name, content in weights.items():
        path = weight_path(name, "onnx") if name == "tiny_w4" else weight_path(name)
        write_atomic(models / "shapes" / path, content)
    write_atomic(models / "shapes" / "manifest.toml", format_manifest(manifest, "made by a test").encode())
    return models, data, manifest
