"""A small detector of the YOLO family, trained with NumPy, and generated images of one or two squares or discs.

The head gives, for each of `CELLS` x `CELLS` cells, the box of an object whose centre lies in the cell (centre and
sides as fractions of the image, less `ANCHORS`) and a logit per class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Pixels
from tests.hawkvision.model_zoo.own.exports import Graph
from tests.hawkvision.model_zoo.own.small_cnn import Array, SmallCnn

LABELS = ("disc", "square")
SIDE, CELLS = 16, 2
ROWS = 4 + len(LABELS)
ANCHORS: Array = np.array(
    [[(cell % CELLS + 0.5) / CELLS, (cell // CELLS + 0.5) / CELLS, 0.35, 0.35] for cell in range(CELLS * CELLS)],
    np.float32,
).T
"""(4, cells)"""
Boxes = list[tuple[int, float, float, float, float]]
"""Label, then x1, y1, x2, y2 as fractions."""


def object_images(n: int, seed: int, height: int = SIDE, width: int = SIDE) -> tuple[Pixels, list[Boxes]]:
    """Images (n, height, width, 3), each with an object in one or two of its quarters."""
    rng = np.random.default_rng(seed)
    images: Pixels = rng.normal(60, 15, (n, height, width, 3)).clip(0, 255).astype(np.uint8)
    boxes: list[Boxes] = []
    for image in images:
        found: Boxes = []
        for cell in rng.permutation(CELLS * CELLS)[: rng.integers(1, 3)]:
            label, r = int(rng.integers(0, 2)), min(height, width) // 6
            x = int((cell % CELLS + 0.5) * width / CELLS + rng.integers(-1, 2))
            y = int((cell // CELLS + 0.5) * height / CELLS + rng.integers(-1, 2))
            colour = (230, 60, 60) if label else (60, 60, 230)
            if label:
                cv2.rectangle(image, (x - r, y - r), (x + r, y + r), colour, -1)
            else:
                cv2.circle(image, (x, y), r, colour, -1)
            found.append((label, (x - r) / width, (y - r) / height, (x + r + 1) / width, (y + r + 1) / height))
        boxes.append(found)
    return images, boxes


def targets_of(boxes: list[Boxes]) -> Array:
    """(n, ROWS + 1, cells): centre, sides, classes, and whether there is an object."""
    targets = np.zeros((len(boxes), ROWS + 1, CELLS * CELLS), np.float32)
    for target, found in zip(targets, boxes, strict=True):
        for label, x1, y1, x2, y2 in found:
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            cell = int(min(y, 0.999) * CELLS) * CELLS + int(min(x, 0.999) * CELLS)
            target[:4, cell] = x, y, x2 - x1, y2 - y1
            target[4 + label, cell] = target[ROWS, cell] = 1
    return targets


def error_of(given: Array, targets: NDArray[Any]) -> Array:
    """Gradient of the squared error of boxes, where there are some, and of the cross entropy of classes."""
    rows = given.reshape(len(given), ROWS, -1)
    error = np.empty_like(rows)
    error[:, :4] = 8 * (rows[:, :4] + ANCHORS - targets[:, :4]) * targets[:, ROWS:]
    error[:, 4:] = 1 / (1 + np.exp(-rows[:, 4:])) - targets[:, 4:ROWS]
    return error.reshape(given.shape)


def trained_detector(images: Pixels, boxes: list[Boxes], epochs: int) -> SmallCnn:
    """A detector of images of `SIDE`, whose pixels are divided by 255."""
    net = SmallCnn((6, 12), ROWS * CELLS * CELLS, SIDE)
    net.weight *= 0.1  # so that boxes begin at their anchors
    net.train(as_taken(images), targets_of(boxes), epochs, error=error_of, rate=2e-3)
    return net


def as_taken(images: Pixels) -> Array:
    """Planes of 0..1."""
    return np.ascontiguousarray(images.astype(np.float32).transpose(0, 3, 1, 2) / np.float32(255))


def save_yolo_style(net: SmallCnn, path: Any) -> None:
    """Ultralytics' export: `images` to `output0` (n, 4 + classes, boxes), boxes in pixels, classes by sigmoid."""
    graph = Graph()
    x = graph.node("Flatten", [graph.layers("images", net)], "/head/flatten", axis=1)
    x = graph.node("Gemm", [x, graph.constant("w", net.weight), graph.constant("b", net.bias)], "/head/rows", transB=1)
    shape = graph.constant("shape", np.array([-1, ROWS, CELLS * CELLS], np.int64))
    x = graph.node("Reshape", [x, shape], "/head/reshaped")
    ends = [graph.constant(name, np.array([at], np.int64)) for name, at in (("0", 0), ("4", 4), ("r", ROWS), ("ax", 1))]
    boxes = graph.node("Slice", [x, ends[0], ends[1], ends[3]], "/head/box")
    boxes = graph.node("Add", [boxes, graph.constant("anchors", ANCHORS[np.newaxis])], "/head/placed")
    boxes = graph.node("Mul", [boxes, graph.constant("side", np.array(SIDE, np.float32))], "/head/box_pixels")
    classes = graph.node("Sigmoid", [graph.node("Slice", [x, ends[1], ends[2], ends[3]], "/head/cls")], "/head/cls_p")
    graph.node("Concat", [boxes, classes], "output0", axis=1)
    graph.save(path, ("images", ["batch", 3, SIDE, SIDE]), ("output0", ["batch", ROWS, CELLS * CELLS]))


def write_annotated(root: Path, images: Pixels, boxes: list[Boxes]) -> None:
    """YOLO's folders `images` and `labels`."""
    for name in ("images", "labels"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for index, (image, found) in enumerate(zip(images, boxes, strict=True)):
        assert cv2.imwrite(str(root / "images" / f"{index}.png"), image[..., ::-1])
        lines = [f"{c} {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}" for c, x1, y1, x2, y2 in found]
        (root / "labels" / f"{index}.txt").write_text("\n".join(lines))
