"""Whatever is measured is measured as it is served: a model for which smaller images are worse, on both tiers."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest
from onnx import TensorProto, helper

from edge.factory import load_components
from hawkvision.cascade.certification.profile import Profile, Shrinking
from hawkvision.cascade.certification.profile_files import dump
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.imaging.preprocessing import load_input, probe
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.models.manifest import artifact_path, load_manifest
from hawkvision.system.files import sha256_of
from tests.hawkvision.inference.graphs import model

SIDE, FINER, COUNT = 32, 8, 240
RED, BLUE = (180, 60, 60), (60, 98, 180)
"""Of about the same lightness: JPEG keeps nothing of their stripes at the size of the input."""
MANIFEST = """
format = 1
task = "stripes"
labels = "labels.txt"
classes = 2
cascade = {{ edge = ["only"], dc = ["only"], default_edge = "only" }}

[[variants]]
name = "only"
architecture = "linear"
precision = "fp32"
license = "Apache-2.0"
source = {{ file = "weights/only.safetensors", sha256 = "{zeros}" }}
input = {{ height = {side}, width = {side}, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }}
sha256 = "{sha256}"
"""


@dataclass(frozen=True, slots=True)
class StripesTask:
    """Where everything lies, and the images."""

    models: Path
    cache: Path
    bodies: list[bytes]
    labels: list[int]
    profile: Profile


def stripes_classifier() -> bytes:
    """Upright or lying stripes of red and blue, one pixel of the input each."""
    sign = (-1.0) ** np.arange(SIDE)
    colours = np.array([1.0, 0.0, -1.0])
    patterns = [np.ones((SIDE, 1)) * sign, sign[:, None] * np.ones(SIDE)]
    weights = np.stack([(pattern[..., None] * colours).ravel() for pattern in patterns], axis=1)
    nodes = [
        helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["wide"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    constants = {"weights": (weights / 4000.0).astype(np.float32)}
    given = ("image", TensorProto.UINT8, ["n", SIDE, SIDE, 3])
    return model(nodes, constants, given, ("logits", TensorProto.FLOAT, ["n", 2]))  # type: ignore[arg-type]


def striped(label: int, rng: np.random.Generator) -> bytes:
    """A PNG eight times as large as the input, so that edge nodes would make it smaller; some are hard to tell."""
    lines = np.arange(SIDE * FINER) // FINER % 2
    red = np.broadcast_to(lines[None, :] if label == 0 else lines[:, None], (SIDE * FINER, SIDE * FINER)) == 0
    colours = np.where(red[..., None], np.array(RED), np.array(BLUE)).astype(np.float64)
    grey = colours.mean(axis=(0, 1))
    noise = rng.normal(0.0, 60.0, (SIDE, SIDE, 3)).repeat(FINER, axis=0).repeat(FINER, axis=1)
    pixels = grey + (colours - grey) * rng.gamma(1.0, 0.1) + noise
    done, encoded = cv2.imencode(".png", pixels.round().clip(0, 255).astype(np.uint8)[..., ::-1])
    assert done
    return encoded.tobytes()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> StripesTask:
    root = tmp_path_factory.mktemp("stripes")
    models, cache, data = root / "models", root / "cache", root / "stripes.npz"
    (models / "stripes").mkdir(parents=True)
    (models / "stripes" / "labels.txt").write_text("upright\nlying\n")
    graph = stripes_classifier()
    path = artifact_path(cache, "stripes", "only")
    path.parent.mkdir(parents=True)
    path.write_bytes(graph)
    text = MANIFEST.format(zeros="0" * 64, side=SIDE, sha256=sha256_of(graph))
    assert tomllib.loads(text)
    (models / "stripes" / "manifest.toml").write_text(text)
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 2, COUNT)
    bodies = [striped(int(label), rng) for label in labels]
    offsets = np.cumsum([0, *map(len, bodies)])
    np.savez(data, data=np.frombuffer(b"".join(bodies), np.uint8), offsets=offsets, labels=labels)
    out = models / "stripes" / "profile.json"
    profile = calibrate("stripes", data, out, seed=3, models=models, cache=cache)
    return StripesTask(models, cache, bodies, labels.tolist(), profile)


def accuracy_at_the_edge(task: StripesTask) -> float:
    """Measured without the product's calibration."""
    spec = load_manifest("stripes", task.models).variant("only").input
    inputs = np.stack([load_input(body, spec, max_pixels=10**7)[0] for body in task.bodies]).astype(np.float64)
    stripes = inputs[..., 0] - inputs[..., 2]
    sign = (-1.0) ** np.arange(SIDE)
    upright, lying = (stripes * sign).sum(axis=(1, 2)), (stripes * sign[:, None]).sum(axis=(1, 2))
    return float((np.where(upright >= lying, 0, 1) == task.labels).mean())


def test_a_model_that_both_tiers_run_is_measured_on_the_images_that_the_edge_has(task: StripesTask) -> None:
    stage = task.profile.stage("only")
    assert 0.8 < accuracy_at_the_edge(task) < 1.0
    assert stage.accuracy.low <= accuracy_at_the_edge(task) <= stage.accuracy.high
    assert stage.datacenter_accuracy == stage.accuracy
    assert task.profile.pairs[0].conditions[0].fast.observed_drop == 0.0


def test_where_smaller_images_cost_accuracy_they_are_not_made_and_the_profile_says_what_they_would_cost(
    task: StripesTask,
) -> None:
    shrinking = task.profile.shrinking
    assert isinstance(shrinking, Shrinking)
    assert not shrinking.allowed
    assert shrinking.accuracy < shrinking.accuracy_whole - 0.1
    assert shrinking.n == task.profile.data.profile


@pytest.mark.parametrize("allowed", [False, True])
def test_edge_nodes_send_images_as_the_profile_says(task: StripesTask, allowed: bool, tmp_path: Path) -> None:
    assert isinstance(task.profile.shrinking, Shrinking)
    shrinking = msgspec.structs.replace(task.profile.shrinking, allowed=allowed)
    own = tmp_path / "profile.json"
    own.write_bytes(dump(msgspec.structs.replace(task.profile, shrinking=shrinking)))
    config = EdgeConfig(task="stripes", models_dir=task.models, cache_dir=task.cache, profile=own)
    components = load_components(config)
    components.models.stage.close()
    body = task.bodies[0]
    sent = components.reducer.reduced(body, probe(body))
    assert (sent is body, probe(sent).width) == ((False, SIDE) if allowed else (True, SIDE * FINER))
