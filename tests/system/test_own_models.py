"""docs/own-models.md, as pasted: from an ONNX file and labelled images to certified answers, in three styles of export.

The networks are trained here, on generated images of shapes; the owner's own predictions come from the exported files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from hawkvision.client.blocking import Client
from hawkvision.core.types import Pixels
from hawkvision.integer import reference
from hawkvision.integer.artifact import graph_of
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.system.child_server import ended, running
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import softmax
from hawkvision.tasks.registry import task_kind
from tests.hawkvision.model_zoo.own import small_detector
from tests.hawkvision.model_zoo.own.exports import as_keras_takes, as_torch_takes, save_keras_style, save_torch_style
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, Array, SmallCnn, shape_images, write_folder
from tests.system import pages

pytestmark = pytest.mark.slow

PAGE = pages.ROOT / "docs" / "own-models.md"
HEIGHT, WIDTH = 20, 28
YARD = 20
"""Sides of the detector's images."""
READY = "ready; Ctrl-C stops both"


def commands(heading: str) -> list[list[str]]:
    """The commands of each block below a heading of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"## {heading}") + 1
    last = next((at for at, line in enumerate(lines[first:], first + 1) if line.startswith("## ")), len(lines))
    return [block.commands() for block in pages.blocks(PAGE) if first < block.line < last]


def stretched(pixels: Pixels) -> Pixels:
    """As Keras fits images to the network."""
    return np.stack([cv2.resize(each, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR) for each in pixels])


def stretched_by_pillow(pixels: Pixels) -> Pixels:
    """As torchvision fits images to the network."""
    resized = (Image.fromarray(each).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for each in pixels)
    return np.stack([np.asarray(each) for each in resized])


@dataclass(frozen=True)
class Owner:
    """A folder with what an owner has, in which the page's commands run."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        home = self.folder / "home"
        return pages.shell_environment(self.folder) | {
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_STATE_HOME": str(home / "state"),
        }

    def run(self, words: Sequence[str]) -> str:
        """Run commands but those that serve; an error shows what was printed."""
        printed = ""
        for command in words:
            if not re.match(r"hawkvision (up|edge up)\b", command):
                ran = subprocess.run(
                    ["bash", "-e", "-c", command], cwd=self.folder, env=self.environment, capture_output=True,
                    text=True, timeout=pages.COMMAND_LIMIT_S,
                )  # fmt: skip
                assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
                printed += ran.stdout
        return printed

    def predict(self, model: str, images: Pixels, taken: Array) -> None:
        """The owner's own predictions of images, by the exported file."""
        session = ort.InferenceSession(str(self.folder / model))
        (found,) = session.run(None, {session.get_inputs()[0].name: taken})
        probabilities = softmax(found) if not np.allclose(found.sum(axis=1), 1, atol=1e-3) else found
        rows = ["file,label,probability"]
        for index, (image, row) in enumerate(zip(images, probabilities, strict=True)):
            assert cv2.imwrite(str(self.folder / f"{index}.png"), image[..., ::-1])
            rows.append(f"{index}.png,{LABELS[row.argmax()]},{row.max():.6f}")
        (self.folder / "predictions.csv").write_text("\n".join(rows) + "\n")

    def detect(self, images: Pixels) -> None:
        """The owner's own detections, by the exported file; each cell holds one object at most."""
        session = ort.InferenceSession(str(self.folder / "detector.onnx"))
        inputs = np.stack([cv2.resize(each, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR) for each in images])
        (rows,) = session.run(None, {"images": small_detector.as_taken(inputs)})
        lines = []
        for index, (image, found) in enumerate(zip(images, rows, strict=True)):
            assert cv2.imwrite(str(self.folder / f"yard{index}.png"), image[..., ::-1])
            objects = []
            for x, y, w, h, *classes in found.T.astype(float) / ([SIDE] * 4 + [1, 1]):
                box = [min(max(each, 0.0), 1.0) for each in (x - w / 2, y - h / 2, x + w / 2, y + h / 2)]
                label = small_detector.LABELS[int(np.argmax(classes))]
                objects += [{"label": label, "confidence": max(classes), "box": box}] if max(classes) >= 0.5 else []
            lines.append(json.dumps({"file": f"yard{index}.png", "objects": objects}))
        (self.folder / "predictions.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Owner:
    """Two classifiers of different strength in two styles, and images for calibration."""
    found = Owner(tmp_path_factory.mktemp("owner"))
    images, labels = shape_images(1000, 0, HEIGHT, WIDTH)
    inputs = stretched(images)
    small, large = SmallCnn((4, 8), len(LABELS)), SmallCnn((8, 16), len(LABELS))
    taken = as_torch_takes(stretched_by_pillow(images))
    small.train(taken, labels, 4)
    large.train(taken, labels, 5)
    save_torch_style(small, found.folder / "pets.onnx", SIDE)
    save_torch_style(large, found.folder / "pets_large.onnx", SIDE)
    keras = SmallCnn((4, 8), len(LABELS), seed=1)
    keras.train(np.ascontiguousarray(as_keras_takes(inputs).transpose(0, 3, 1, 2)), labels, 5)
    save_keras_style(keras, found.folder / "flowers.onnx", SIDE)
    write_folder(found.folder / "images", *shape_images(700, 1, HEIGHT, WIDTH))
    (found.folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    detector = small_detector.trained_detector(*small_detector.object_images(900, 0), epochs=8)
    small_detector.save_yolo_style(detector, found.folder / "detector.onnx")
    small_detector.write_annotated(found.folder / "annotated", *small_detector.object_images(700, 1, YARD, YARD))
    return found


@pytest.fixture(scope="module")
def prepared(owner: Owner) -> Owner:
    """All commands of the page have run but those that serve."""
    shown, _ = shape_images(25, 2, HEIGHT, WIDTH)
    first, second = commands("PyTorch")
    owner.predict("pets.onnx", shown, as_torch_takes(stretched_by_pillow(shown)))
    assert "worst difference 0.0" in owner.run(first)
    assert "edge pets; datacenter pets_large" in owner.run(second)
    owner.predict("flowers.onnx", shown, as_keras_takes(stretched(shown)))
    (block,) = commands("Keras")
    assert "worst difference 0.0" in owner.run(block)
    owner.detect(small_detector.object_images(25, 2, YARD, YARD)[0])
    (owner.folder / "labels.txt").write_text("\n".join(small_detector.LABELS) + "\n")
    (block,) = commands("A detector")
    assert "worst difference 0.0" in owner.run(block)
    return owner


@pytest.fixture(scope="module")
def node_url(prepared: Owner) -> Iterator[str]:
    """Where both tiers answer for all tasks: the `up` of each section, as one."""
    tasks = [
        word[-1]
        for heading in ("PyTorch", "Keras", "A detector")
        for word in map(shlex.split, commands(heading)[0])
        if word[1] == "up"
    ]
    several = {"HAWKVISION_EDGE_TASKS": ",".join(tasks), "HAWKVISION_DC_TASKS": ",".join(tasks)}
    command = [sys.executable, "-m", "hawkvision.cli", "up", "--port", "0", "--dc-port", "0"]
    environment = prepared.environment | several
    with subprocess.Popen(
        command, env=environment, cwd=prepared.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as up:
        try:
            assert up.stdout is not None
            printed = ""
            for line in up.stdout:
                printed += line.decode()
                if line.decode().strip() == READY:
                    break
            print(printed)
            found = re.search(r"^edge node +(http://127.0.0.1:\d+)", printed, re.MULTILINE)
            assert found is not None, printed
            yield found.group(1)
        finally:
            up.send_signal(signal.SIGINT)
            assert ended(up) == 0


@pytest.mark.parametrize("task", ["pets", "flowers"])
def test_an_own_classifier_gives_certified_answers(task: str, node_url: str) -> None:
    images, labels = shape_images(40, 3, HEIGHT, WIDTH)
    right = 0
    with Client(node_url) as client:
        for image, label in zip(images, labels, strict=True):
            answer = client.classify(image, task=task, max_accuracy_drop=0.05)
            assert answer.accuracy.status == "certified", answer
            right += answer.label == LABELS[label]
    assert right >= 32


def test_an_own_detector_gives_certified_answers(node_url: str) -> None:
    images, boxes = small_detector.object_images(25, 3, YARD, YARD)
    kind = task_kind("detection", small_detector.LABELS, {})
    losses = []
    with Client(node_url) as client:
        for image, found in zip(images, boxes, strict=True):
            answer = client.detect(image, task="yard", max_accuracy_drop=0.1)
            assert answer.accuracy.status == "certified", answer
            places = np.array([box for _, *box in found], np.float32)
            (truth,) = kind.truths([Annotation(np.array([label for label, *_ in found]), places)])
            losses.append(kind.loss(answer.prediction, truth))
    assert np.mean(losses) < 0.3


def test_an_own_network_takes_the_whole_fpga_way(prepared: Owner) -> None:
    (quantising,), (block,) = commands("In fewer bits"), commands("On an FPGA")
    printed = prepared.run([*quantising, *block])
    assert "accuracy" in printed
    words = shlex.split(block[-1])
    assert words[:3] == ["hawkvision", "edge", "up"]
    images, _ = shape_images(3, 4, HEIGHT, WIDTH)
    graph = graph_of(Path(prepared.environment["XDG_CACHE_HOME"]) / "hawkvision" / "models" / "pets" / "pets_w8.onnx")
    sums = reference.logits(graph, reference.planes(graph, stretched_by_pillow(images)))
    there = ("env", "--chdir", str(prepared.folder))
    with (
        running(
            "hawkvision.cli", *words[1:], "--port", "0", env=dict(os.environ) | prepared.environment, prefix=there
        ) as node,
        Client(node.url) as client,
    ):
        for image, row in zip(images, sums, strict=True):
            answer = client.classify(image, top_k=len(LABELS))
            assert answer.model == "pets_w8"
            assert [each.index for each in answer.top_k] == list(np.argsort(-row, kind="stable"))
