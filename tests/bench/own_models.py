"""Times the commands of docs/own-models.md in three styles of export, and counts right answers.

The classifiers are trained here on five classes of Fashion-MNIST (Debian: dataset-fashion-mnist), the detector on
generated images. Run: `python -m tests.bench.own_models [PyTorch] [Keras] [A detector]`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.client.blocking import Client
from hawkvision.core.types import Answer, Pixels
from hawkvision.models.image_sets.idx_reader import read_idx_parts
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import softmax
from hawkvision.tasks.registry import task_kind
from tests.hawkvision.model_zoo.own import small_detector
from tests.hawkvision.model_zoo.own.exports import as_keras_takes, as_torch_takes, save_keras_style, save_torch_style
from tests.hawkvision.model_zoo.own.small_cnn import Array, SmallCnn
from tests.system.test_own_models import READY, YARD, Owner, commands

DATA = Path("/usr/share/datasets/fashion-mnist")
NAMES = ("coat", "dress", "pullover", "top", "trouser")
PLACES = np.array([3, 4, 2, 1, 0])
"""Of the classes 0..4 of Fashion-MNIST in `NAMES`."""
SIDE, TRAINED, CALIBRATED, ASKED = 28, 1500, 2500, 500
Judge = Callable[[Answer, int], float]


def fashion(test: bool, n: int, skip: int = 0) -> tuple[Pixels, NDArray[np.int64]]:
    """Images (n, 28, 28, 3) of the five classes, and their labels."""
    part = next(part for part in read_idx_parts(DATA) if part.is_test is test)
    chosen = np.flatnonzero(part.labels < len(NAMES))[skip : skip + n]
    return np.repeat(part.images[chosen][..., None], 3, axis=3), PLACES[part.labels[chosen]]


def classifier(owner: Owner, model: str, keras: bool) -> tuple[Pixels, Judge]:
    """Train, export and predict as the owner; write the folders. Returns images to ask about."""
    images, labels = fashion(test=False, n=TRAINED)
    takes: Callable[[Pixels], Array] = as_keras_takes if keras else as_torch_takes
    planes = takes(images).transpose(0, 3, 1, 2) if keras else takes(images)
    for name, channels, epochs in ((model, (4, 8), 2), (f"{Path(model).stem}_large.onnx", (8, 16), 4)):
        net = SmallCnn(channels, len(NAMES), SIDE)
        net.train(np.ascontiguousarray(planes), labels, epochs, rate=2e-3)
        (save_keras_style if keras else save_torch_style)(net, owner.folder / name, SIDE)
    (owner.folder / "labels.txt").write_text("\n".join(NAMES))
    for index, (image, label) in enumerate(zip(*fashion(test=True, n=CALIBRATED), strict=True)):
        folder = owner.folder / "images" / f"{NAMES[label]}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{index}.png"), image)
    shown, _ = fashion(test=True, n=50)
    session = ort.InferenceSession(str(owner.folder / model))
    (found,) = session.run(None, {session.get_inputs()[0].name: takes(shown)})
    probabilities = found if keras else softmax(found)
    rows = ["file,label,probability"]
    for index, (image, row) in enumerate(zip(shown, probabilities, strict=True)):
        cv2.imwrite(str(owner.folder / f"{index}.png"), image)
        rows.append(f"{index}.png,{NAMES[row.argmax()]},{row.max():.6f}")
    (owner.folder / "predictions.csv").write_text("\n".join(rows))
    asked, truths = fashion(test=True, n=ASKED, skip=CALIBRATED)
    return asked, lambda answer, at: float(answer.label == NAMES[truths[at]])


def detector(owner: Owner) -> tuple[Pixels, Judge]:
    """As `classifier`, on generated images."""
    made = small_detector.trained_detector(*small_detector.object_images(1500, 0), epochs=8)
    small_detector.save_yolo_style(made, owner.folder / "detector.onnx")
    small_detector.write_annotated(owner.folder / "annotated", *small_detector.object_images(CALIBRATED, 1, YARD, YARD))
    (owner.folder / "labels.txt").write_text("\n".join(small_detector.LABELS))
    owner.detect(small_detector.object_images(50, 2, YARD, YARD)[0])
    images, boxes = small_detector.object_images(ASKED, 3, YARD, YARD)
    kind = task_kind("detection", small_detector.LABELS, {})

    def judge(answer: Answer, at: int) -> float:
        found = boxes[at]
        places = np.array([box for _, *box in found], np.float32)
        (truth,) = kind.truths([Annotation(np.array([label for label, *_ in found]), places)])
        return 1.0 - kind.loss(answer.prediction, truth)

    return images, judge


def served(owner: Owner, command: str, images: Pixels, judge: Judge) -> None:
    """Start both tiers with the page's command, and ask."""
    began = time.monotonic()
    words = [sys.executable, "-m", "hawkvision.cli", *command.split()[1:], "--port", "0", "--dc-port", "0"]
    with subprocess.Popen(
        words, env=owner.environment, cwd=owner.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as up:
        assert up.stdout is not None
        printed = ""
        for line in up.stdout:
            printed += line
            if line.strip() == READY:
                break
        print(f"  {time.monotonic() - began:6.1f} s  {command}", flush=True)
        found = re.search(r"^edge node +(http://127.0.0.1:\d+)", printed, re.MULTILINE)
        assert found is not None, printed
        with Client(found.group(1)) as client:
            answers = [client.infer(image, max_accuracy_drop=0.05) for image in images]
        up.send_signal(signal.SIGINT)
    certified = sum(answer.accuracy.status == "certified" for answer in answers)
    escalated = sum(answer.escalated for answer in answers)
    right = np.mean([judge(answer, at) for at, answer in enumerate(answers)])
    print(f"  {len(answers)} new images: {certified} certified, {escalated} escalated, accuracy {right:.4f}")


def main(headings: list[str]) -> None:
    for heading in headings:
        with tempfile.TemporaryDirectory(prefix="own-models-") as folder:
            owner = Owner(Path(folder))
            blocks = commands(heading)
            model = blocks[0][0].split()[3]
            images, judge = detector(owner) if heading == "A detector" else classifier(owner, model, heading == "Keras")
            print(heading, flush=True)
            words = [command for block in blocks for command in block]
            for command in (each for each in words if not each.startswith("hawkvision up")):
                began = time.monotonic()
                printed = owner.run([command])
                print(f"  {time.monotonic() - began:6.1f} s  {command}\n{printed}", flush=True)
            served(owner, blocks[0][-1], images, judge)


if __name__ == "__main__":
    main(sys.argv[1:] or ["PyTorch", "Keras", "A detector"])
