"""What models of different families give for known boxes: the inverse of decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Tensors
from hawkvision.models.manifest import InputSpec

SPEC = InputSpec(height=128, width=192, mean=(0.0,) * 3, std=(1.0,) * 3)
SIDES = np.array([SPEC.width, SPEC.height] * 2, np.float64)
CLASSES = 3
BINS = 16


class Objects(NamedTuple):
    """Objects of one image, surest first."""

    boxes: NDArray[np.float64]
    """(k, 4) of x1, y1, x2, y2, fractions of the input."""
    scores: NDArray[np.float64]
    classes: NDArray[np.intp]


Encode: TypeAlias = Callable[[Objects], Tensors]


def of_classes(found: Objects, rows: int, at: NDArray[np.intp]) -> NDArray[np.float64]:
    """Scores (rows, classes): of the objects at their rows, elsewhere next to nothing."""
    scores = np.full((rows, CLASSES), 0.001)
    scores[at, found.classes] = found.scores
    return scores


def centred(boxes: NDArray[Any]) -> NDArray[np.float64]:
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)


def batch(**tensors: NDArray[Any]) -> Tensors:
    return {name: np.asarray(tensor, np.float32)[np.newaxis] for name, tensor in tensors.items()}


def spread(found: Objects, rows: int) -> NDArray[np.intp]:
    """A row for each object, in no order."""
    return np.random.default_rng(len(found.scores)).permutation(rows)[: len(found.scores)]


def yolov5(found: Objects) -> Tensors:
    rows = np.zeros((60, 5 + CLASSES))
    at = spread(found, 60)
    rows[at, :4] = centred(found.boxes * SIDES)
    rows[:, 4] = 0.98
    rows[:, 5:] = of_classes(found, 60, at) / 0.98
    return batch(logits=rows)


def yolov8(found: Objects) -> Tensors:
    rows = np.zeros((60, 4 + CLASSES))
    at = spread(found, 60)
    rows[at, :4] = centred(found.boxes * SIDES)
    rows[:, 4:] = of_classes(found, 60, at)
    return batch(output0=rows.T)


def yolov8_of_keras(found: Objects) -> Tensors:
    return {name: tensor.transpose(0, 2, 1) for name, tensor in yolov8(found).items()}


def ends(found: Objects) -> Tensors:
    rows = np.zeros((300, 6))
    rows[: len(found.scores)] = np.column_stack([found.boxes * SIDES, found.scores, found.classes])
    return batch(output0=rows)


def points(strides: tuple[int, ...], offset: float) -> NDArray[np.float64]:
    """By loops, unlike the decoder's."""
    return np.array(
        [
            ((column + offset) * stride, (row + offset) * stride, stride)
            for stride in strides
            for row in range(-(-SPEC.height // stride))
            for column in range(-(-SPEC.width // stride))
        ]
    )


def nearest(found: Objects, grid: NDArray[np.float64], stride: int) -> NDArray[np.intp]:
    """A point of one grid inside each box, a different one for each."""
    middle = centred(found.boxes * SIDES)[:, :2]
    distances = np.abs(grid[:, :2] - middle[:, np.newaxis]).sum(axis=2) + 1e9 * (grid[:, 2] != stride)
    closest: NDArray[np.intp] = distances.argmin(axis=1)
    return closest


def yolox(found: Objects) -> Tensors:
    grid = points((8, 16, 32), 0.0)
    at = nearest(found, grid, 16)
    rows = np.zeros((len(grid), 5 + CLASSES))
    wanted = centred(found.boxes * SIDES)
    rows[at, :2] = (wanted[:, :2] - grid[at, :2]) / grid[at, 2:]
    rows[at, 2:4] = np.log(wanted[:, 2:] / grid[at, 2:])
    rows[:, 4] = 1.0
    rows[:, 5:] = of_classes(found, len(grid), at)
    return batch(output=rows)


def _distributions(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logits (k, 4 * bins) of distributions with these means, on two neighbouring bins."""
    low = np.floor(distances).astype(int)
    chances = np.full((*distances.shape, BINS), 1e-9)
    np.put_along_axis(chances, low[..., None], (low + 1 - distances)[..., None].clip(1e-9), 2)
    np.put_along_axis(chances, low[..., None] + 1, (distances - low)[..., None].clip(1e-9), 2)
    return np.log(chances).reshape(len(distances), 4 * BINS)


def _nanodet(found: Objects, offset: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    grid = points((8, 16, 32, 64), offset)
    at = nearest(found, grid, 16)
    boxes = found.boxes * SIDES
    distances = np.zeros((len(grid), 4 * BINS))
    there, stride = grid[at, :2], grid[at, 2:]
    distances[at] = _distributions(np.concatenate([there - boxes[:, :2], boxes[:, 2:] - there], axis=1) / stride)
    return grid, of_classes(found, len(grid), at), distances


def nanodet_plus(found: Objects) -> Tensors:
    _, scores, distances = _nanodet(found, 0.0)
    return batch(output=np.concatenate([scores, distances], axis=1))


def nanodet_g(found: Objects) -> Tensors:
    grid, scores, distances = _nanodet(found, 0.5)
    named: dict[str, NDArray[Any]] = {}
    for stride in (8, 16, 32, 64):
        rows = grid[:, 2] == stride
        named |= {f"cls_{stride}": scores[rows], f"dis_{stride}": distances[rows]}
    return batch(**dict(reversed(named.items())))


NANODET_G = {
    "split": True,
    "centre": 0.5,
    "outputs": {
        name: f"{prefix}_{stride}"
        for i, stride in enumerate((8, 16, 32, 64))
        for name, prefix in ((f"scores_{i}", "cls"), (f"distances_{i}", "dis"))
    },
}


def ssd(found: Objects) -> Tensors:
    at = spread(found, 90)
    boxes = np.zeros((90, 1, 4))
    boxes[at, 0] = found.boxes[:, [1, 0, 3, 2]]
    scores = np.column_stack([np.full(90, 0.9), of_classes(found, 90, at)])
    return batch(**{"Postprocessor/ExpandDims_1": boxes, "Postprocessor/Slice": scores})


def pp_yoloe(found: Objects) -> Tensors:
    at = spread(found, 90)
    boxes = np.zeros((90, 4))
    boxes[at] = found.boxes * SIDES
    return batch(a=boxes, b=of_classes(found, 90, at).T)


def tf_detections(found: Objects) -> Tensors:
    count = len(found.scores)
    boxes, scores, classes = np.full((20, 4), 0.3), np.full(20, 0.7), np.zeros(20)
    boxes[:count], scores[:count], classes[:count] = found.boxes[:, [1, 0, 3, 2]], found.scores, found.classes + 1
    return batch(
        detection_boxes=boxes, detection_classes=classes, detection_scores=scores, num_detections=np.array(count)
    )


def rt_detr(found: Objects) -> Tensors:
    at = spread(found, 80)
    boxes = np.tile([0.5, 0.5, 0.1, 0.1], (80, 1))
    boxes[at] = centred(found.boxes)
    scores = of_classes(found, 80, at)
    return batch(pred_boxes=boxes, logits=np.log(scores / (1 - scores)))


def d_fine(found: Objects) -> Tensors:
    boxes, scores, labels = np.zeros((30, 4)), np.zeros(30), np.full(30, -1.0)
    count = len(found.scores)
    boxes[:count], scores[:count], labels[:count] = found.boxes * SIDES, found.scores, found.classes
    return batch(labels=labels, boxes=boxes, scores=scores)


def _cells(found: Objects) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """Rows and columns of the centres in a map of one value per four pixels, and a heat map."""
    middle = centred(found.boxes * SIDES)[:, :2] / 4
    columns, rows = np.rint(middle).astype(np.intp).T
    heat = np.full((SPEC.height // 4, SPEC.width // 4, CLASSES), 0.001)
    for row, column, score, each in zip(rows, columns, found.scores, found.classes, strict=True):
        heat[row, max(0, column - 1) : column + 2, each] = score - 0.01  # neighbours that are no peaks
    heat[rows, columns, found.classes] = found.scores
    return rows, columns, heat


def centernet(found: Objects) -> Tensors:
    rows, columns, heat = _cells(found)
    sizes = np.zeros((*heat.shape[:2], 2))
    sizes[rows, columns] = centred(found.boxes * SIDES)[:, 2:] / 4
    return batch(wh=sizes.transpose(2, 0, 1), hm=heat.transpose(2, 0, 1))


def ttfnet(found: Objects) -> Tensors:
    rows, columns, heat = _cells(found)
    there = np.stack([columns, rows], axis=1) * 4
    boxes, distances = found.boxes * SIDES, np.zeros((*heat.shape[:2], 4))
    distances[rows, columns] = np.concatenate([there - boxes[:, :2], boxes[:, 2:] - there], axis=1)
    return batch(**{"tower_0/keypoints": heat, "tower_0/wh": distances})


EXPORTS: dict[str, tuple[str, dict[str, Any], Encode]] = {
    "yolov5": ("yolov5", {}, yolov5),
    "yolov8": ("yolov8", {}, yolov8),
    "yolov8 of Keras": ("yolov8", {}, yolov8_of_keras),
    "yolov10": ("yolov10", {}, ends),
    "CenterNet's detections": ("centernet_rows", {}, ends),
    "YOLOX": ("yolox", {}, yolox),
    "RT-DETR": ("rt_detr", {}, rt_detr),
    "D-FINE after its processing": ("detections", {}, d_fine),
    "SSD": ("ssd", {"background": True}, ssd),
    "PP-YOLOE": ("ssd", {"order": "xyxy", "scale": "pixels", "outputs": {"boxes": "a", "scores": "b"}}, pp_yoloe),
    "TensorFlow's detections": ("tf_detections", {"class_map": [-1, 0, 1, 2]}, tf_detections),
    "CenterNet": ("centernet", {}, centernet),
    "TTFNet": ("centernet", {"layout": "nhwc", "sides": "distances"}, ttfnet),
    "NanoDet-Plus": ("nanodet", {}, nanodet_plus),
    "NanoDet-g": ("nanodet", NANODET_G, nanodet_g),
}
"""Of common exports, the decoder, its options and what such a model gives."""
