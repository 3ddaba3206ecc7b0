"""A cascade of linear networks that see which of four bands is bright: seconds from images to a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.models.image_sets.idx_reader import grey_png
from hawkvision.models.manifest import artifact_path
from hawkvision.system.files import sha256_of
from tests.hawkvision.inference.graphs import model

SIDE, BANDS, COUNT = 8, 4, 900
STAGES = {"dim": 2.5, "sharp": 0.0}
"""Edge and reference stage, with how far their weights stray from the right ones."""


@dataclass(frozen=True, slots=True)
class BandTask:
    """Where everything lies."""

    models: Path
    cache: Path
    data: Path
    profile: Path


def band_classifier(astray: float) -> bytes:
    """A linear network whose weights are the bands, and noise `astray` times as strong."""
    bands = np.repeat(np.eye(BANDS), SIDE // BANDS, axis=1)[:, :, None, None] * np.ones((1, 1, SIDE, 3))
    weights = bands + astray * np.random.default_rng(8).normal(size=bands.shape)
    constants = {
        "weights": weights.reshape(BANDS, -1).T.astype(np.float32) / 400.0,
        "grey": np.array([100.0], np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["wide", "grey"], ["centred"]),
        helper.make_node("Flatten", ["centred"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    given, gives = ("image", TensorProto.UINT8, ["n", SIDE, SIDE, 3]), ("logits", TensorProto.FLOAT, ["n", BANDS])
    return model(nodes, constants, given, gives)  # type: ignore[arg-type]


def write_band_task(root: Path, data_name: str = "bands.npz") -> BandTask:
    """Manifest, models, images and profile below `root`."""
    models, cache = root / "models", root / "cache"
    (models / "bands").mkdir(parents=True)
    (models / "bands" / "labels.txt").write_text("<script>alert(1)</script>\nb\nc\nd\n")
    text = f"""
format = 1
task = "bands"
labels = "labels.txt"
classes = {BANDS}
cascade = {{ edge = ["dim"], dc = ["sharp"], default_edge = "dim" }}
"""
    for name, astray in STAGES.items():
        graph = band_classifier(astray)
        path = artifact_path(cache, "bands", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(graph)
        text += f"""
[[variants]]
name = "{name}"
architecture = "linear"
precision = "fp32"
license = "Apache-2.0"
source = {{ file = "weights/{name}.safetensors", sha256 = "{"0" * 64}" }}
input = {{ height = {SIDE}, width = {SIDE}, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }}
sha256 = "{sha256_of(graph)}"
"""
    (models / "bands" / "manifest.toml").write_text(text)
    data = root / data_name
    write_band_images(data)
    profile = models / "bands" / "profile.json"
    calibrate("bands", data, profile, seed=3, models=models, cache=cache)
    return BandTask(models, cache, data, profile)


def write_band_images(path: Path, seed: int = 0) -> None:
    """Labelled images; other seeds give others."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, BANDS, COUNT)
    bodies = []
    for label in labels:
        pixels = rng.normal(100.0, 25.0, (SIDE, SIDE))
        pixels[label * SIDE // BANDS : (label + 1) * SIDE // BANDS] += rng.gamma(2.0, 14.0)
        bodies.append(grey_png(pixels.round().clip(0, 255).astype(np.uint8)))
    offsets = np.cumsum([0, *map(len, bodies)])
    with path.open("wb") as file:  # by handle, so that the name is taken as it is
        np.savez(file, data=np.frombuffer(b"".join(bodies), np.uint8), offsets=offsets, labels=labels)
