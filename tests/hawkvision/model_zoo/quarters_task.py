"""A cascade of detectors that see which quarters of an image are bright: seconds from boxes to a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from onnx import TensorProto, helper

from hawkvision.models.manifest import artifact_path
from hawkvision.system.files import sha256_of
from tests.hawkvision.inference.graphs import model

SIDE, HALF = 16, 8
STAGES = {"dim": 4.0, "sharp": 0.0}
"""Edge and reference stage, with how far their weights stray from the right ones."""
QUARTERS = np.array([[y, x] for y in (0, 1) for x in (0, 1)])
BOXES = np.concatenate([QUARTERS[:, ::-1], QUARTERS[:, ::-1] + 1], axis=1).astype(np.float32) / 2.0
TASK = """
format = 1
task = "quarters"
kind = "detection"
labels = "labels.txt"
classes = 2
cascade = { edge = ["dim"], dc = ["sharp"], default_edge = "dim" }
"""
VARIANT = """
[[variants]]
name = "{name}"
architecture = "linear"
precision = "fp32"
license = "Apache-2.0"
source = {{ file = "weights/{name}.safetensors", sha256 = "{zeros}" }}
decoder = "detections"
decoder_options = {{ scale = "fractions" }}
sha256 = "{sha256}"

[variants.input]
height = {side}
width = {side}
mean = [0.0, 0.0, 0.0]
std = [1.0, 1.0, 1.0]
fit = "stretch"
"""


@dataclass(frozen=True, slots=True)
class QuartersTask:
    """Where everything lies; `data` has boxes, and says on which images a model was trained."""

    models: Path
    cache: Path
    data: Path
    clean: Path
    """The same without images that a model was trained on."""
    folder: Path
    """Other images, without labels."""


def quarters_detector(astray: float) -> bytes:
    """Four boxes, each with the chance that its quarter is bright; the upper two show lamps, the lower ones mirrors."""
    sees = np.zeros((4, SIDE, SIDE, 3))
    for number, (y, x) in enumerate(QUARTERS):
        sees[number, y * HALF : (y + 1) * HALF, x * HALF : (x + 1) * HALF] = 1.0
    sees += astray * np.random.default_rng(2).normal(size=sees.shape)
    constants = {
        "weights": (sees.reshape(4, -1).T / (192.0 * 12.0)).astype(np.float32),
        "grey": np.array([110.0], np.float32),
        "boxes4": BOXES[np.newaxis],
        "kinds": np.array([[0.0, 0.0, 1.0, 1.0]], np.float32),
        "zero": np.array([0.0], np.float32),
        "axis": np.array([2], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["wide", "grey"], ["centred"]),
        helper.make_node("Flatten", ["centred"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["scores"]),
        helper.make_node("Mul", ["scores", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "kinds"], ["labels"]),
        helper.make_node("Unsqueeze", ["nothing", "axis"], ["column"]),
        helper.make_node("Add", ["column", "boxes4"], ["boxes"]),
    ]
    given = ("image", TensorProto.UINT8, ["n", SIDE, SIDE, 3])
    gives = (("boxes", ["n", 4, 4]), ("scores", ["n", 4]), ("labels", ["n", 4]))
    return model(nodes, constants, given, *((name, TensorProto.FLOAT, shape) for name, shape in gives))  # type: ignore[arg-type]


def write_quarters_task(root: Path, count: int = 400) -> QuartersTask:
    """Manifest, models and images below `root`."""
    models, cache = root / "models", root / "cache"
    (models / "quarters").mkdir(parents=True)
    (models / "quarters" / "labels.txt").write_text("lamp\nmirror\n")
    text = TASK
    for name, astray in STAGES.items():
        graph = quarters_detector(astray)
        path = artifact_path(cache, "quarters", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(graph)
        text += VARIANT.format(name=name, zeros="0" * 64, sha256=sha256_of(graph), side=SIDE)
    (models / "quarters" / "manifest.toml").write_text(text)
    rng = np.random.default_rng(6)
    _write_images(root / "some.npz", rng, count, clean=np.arange(count) % 4 != 0)
    _write_images(root / "clean.npz", rng, count, clean=np.ones(count, np.bool_))
    folder = root / "folder"
    folder.mkdir()
    for number in range(80):
        (folder / f"{number}.png").write_bytes(_image(rng, rng.random(4) < 0.4))
    return QuartersTask(models, cache, root / "some.npz", root / "clean.npz", folder)


def _image(rng: np.random.Generator, bright: np.ndarray) -> bytes:
    pixels = rng.normal(90.0, 30.0, (SIDE, SIDE, 3))
    for (y, x), shines in zip(QUARTERS, bright, strict=True):
        if shines:
            pixels[y * HALF : (y + 1) * HALF, x * HALF : (x + 1) * HALF] += rng.gamma(2.0, 22.0)
    done, encoded = cv2.imencode(".png", pixels.round().clip(0, 255).astype(np.uint8))
    assert done
    return encoded.tobytes()


def _write_images(path: Path, rng: np.random.Generator, count: int, clean: np.ndarray) -> None:
    bright = rng.random((count, 4)) < 0.4
    bodies = [_image(rng, row) for row in bright]
    np.savez(
        path,
        data=np.frombuffer(b"".join(bodies), np.uint8),
        offsets=np.cumsum([0, *map(len, bodies)]),
        boxes=np.concatenate([BOXES[row] for row in bright]),
        classes=np.concatenate([np.flatnonzero(row) // 2 for row in bright]),
        box_offsets=np.cumsum([0, *bright.sum(axis=1)]),
        clean=clean,
    )
