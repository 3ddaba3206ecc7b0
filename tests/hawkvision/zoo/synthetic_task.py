"""A task that a small network learns in seconds: a bright square in one of three places on noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hawkvision.pictures import LabelledPictures, read_pictures
from hawkvision.pictures_idx import grey_png

RECIPE = """
format = 1
task = "shapes"
labels = "labels.txt"
license = "Apache-2.0"
pictures = { train = 192, seed = 3 }
input = { side = 12, mean = [60.0, 60.0, 60.0], std = [50.0, 50.0, 50.0] }
ladder = { edge = ["tiny"], dc = ["both"], default_edge = "tiny" }
committees = [{ name = "both", members = ["tiny", "other"], horizontal_flip = true }]

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
"""
LABELS = ("low", "middle", "high")
COUNT, TESTED = 320, 64


def write_task(root: Path) -> tuple[Path, Path]:
    """Recipe and labels below `root`/models, the pictures in an npz file; both paths."""
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


def pictures_of(data: Path) -> LabelledPictures:
    return read_pictures(data, LABELS)
