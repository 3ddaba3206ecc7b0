"""A kind from a package of someone else is served by an edge node as the built-in ones are."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from hawkvision.core.errors import NotReady
from hawkvision.core.types import LOGITS
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.models.manifest import artifact_path
from hawkvision.system.child_server import ServerProcess, running
from tests.edge.conftest import Caller
from tests.hawkvision.inference.graphs import tiny_classifier
from tests.hawkvision.tasks import added_kind
from tests.images import encoded

ROOT = Path(__file__).resolve().parents[3]
IMAGES = 400
GRADES = ("green", "breaker", "pink", "red")
MANIFEST = """
format = 1
task = "ripeness"
kind = "grading"
labels = "labels.txt"
classes = 4
cascade = { edge = ["small"], dc = ["large"], default_edge = "small" }
"""
VARIANT = """
[[variants]]
name = "NAME"
architecture = "tiny"
precision = "fp32"
license = "MIT"
source = { file = "NAME.onnx", sha256 = "SHA" }
sha256 = "SHA"
input = { height = 16, width = 12, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }
"""


def write_task(models: Path, cache: Path) -> None:
    """A task of the added kind with two built models."""
    text = MANIFEST
    for seed, name in enumerate(("small", "large")):
        content = tiny_classifier(classes=len(GRADES), seed=seed)
        built = artifact_path(cache, "ripeness", name)
        built.parent.mkdir(parents=True, exist_ok=True)
        built.write_bytes(content)
        text += VARIANT.replace("NAME", name).replace("SHA", hashlib.sha256(content).hexdigest())
    folder = models / "ripeness"
    folder.mkdir(parents=True)
    (folder / "manifest.toml").write_text(text)
    (folder / "labels.txt").write_text("\n".join(GRADES) + "\n")


def write_images(folder: Path, large: OnnxRuntimeBackend) -> None:
    """Images in a folder per grade, nearly all as the large model grades them."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = cv2.resize(rng.integers(0, 256, (3, 3, 3), np.uint8), (12, 16), interpolation=cv2.INTER_CUBIC)
        grade = int(large.infer(pixels[np.newaxis])[LOGITS].argmax()) if number % 10 else int(rng.integers(4))
        place = folder / GRADES[grade]
        place.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(place / f"{number}.png"), pixels[..., ::-1])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Calibrated on labelled images and then served, both with the commands that users have."""
    folder = tmp_path_factory.mktemp("ripeness")
    (folder / "site").mkdir()
    added_kind.install(folder / "site")
    write_task(folder / "models", folder / "cache")
    write_images(folder / "images", OnnxRuntimeBackend(tiny_classifier(classes=len(GRADES), seed=1)))
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    task = ("--task", "ripeness", "--models-dir", str(folder / "models"), "--cache-dir", str(folder / "cache"))
    profile = folder / "models" / "ripeness" / "profile.json"
    command = [sys.executable, "-m", "hawkvision", "calibrate", *task, "--data", str(folder / "images")]
    ran = subprocess.run(
        [*command, "--out", str(profile)], env={**os.environ, **env}, cwd=folder, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with running("edge", "--port", "0", "--backend", "onnxruntime", *task, env=env) as server:
        yield server


@pytest.mark.slow
def test_a_kind_of_another_package_is_served(node: ServerProcess) -> None:
    with closing(Caller(node)) as caller:
        answers = [
            caller.send("POST", "/v1/infer?task=ripeness&quality=fast", encoded(seed=seed)).json for seed in range(3)
        ]
        for answer in answers:
            assert answer["grade"] == GRADES[answer["position"]]
            assert 0.0 < answer["confidence"] <= 1.0
            assert (answer["task"], answer["tier"], answer["model"]) == ("ripeness", "edge", "small")
            assert answer["accuracy"]["status"] == "best_effort", "there is no datacenter"
        assert caller.get("/v1/targets").json["certificates"]["name"] == "images"
        assert answers[0] == caller.send("POST", "/v1/infer?quality=fast", encoded(seed=0)).json | {
            "id": answers[0]["id"], "timing_ms": answers[0]["timing_ms"]
        }  # fmt: skip


@pytest.mark.slow
def test_a_kind_that_is_not_installed_is_named(tmp_path: Path) -> None:
    write_task(tmp_path / "models", tmp_path / "cache")
    places = ("--models-dir", str(tmp_path / "models"), "--cache-dir", str(tmp_path / "cache"))
    with (
        pytest.raises(NotReady, match="kind 'grading' is not installed; there are classification, counting"),
        running("edge", "--port", "0", "--task", "ripeness", "--backend", "onnxruntime", *places),
    ):
        pass
