"""Decoders of models that give something for every place of a grid: the YOLO family, NanoDet and CenterNet.

Coordinates are pixels of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.types import LOGITS
from hawkvision.models.input_spec import InputSpec
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions, Candidates, Order, corners

Strides: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=1, le=256)], ...], Meta(min_length=1, max_length=8)]


@functools.lru_cache(maxsize=64)
def grid_points(spec: InputSpec, strides: tuple[int, ...], offset: float) -> NDArray[np.float64]:
    """The points (k, 3) of all grids, row by row: x and y in pixels of the input, and the stride.

    Args:
        spec: the input; a grid has ceil(side / stride) cells.
        strides: pixels per cell, of each grid in turn.
        offset: of a point in its cell: 0 its corner, 0.5 its middle.
    """
    grids = []
    for stride in strides:
        rows, columns = -(-spec.height // stride), -(-spec.width // stride)
        y, x = np.mgrid[0:rows, 0:columns].reshape(2, -1) + offset
        grids.append(np.stack([x * stride, y * stride, np.full(rows * columns, float(stride))], axis=1))
    points = np.concatenate(grids)
    points.setflags(write=False)
    return points


ROW: Mapping[str, Sequence[str]] = {"rows": (LOGITS, "output0", "output", "outputs", "predictions")}
Role = dict[str, NDArray[np.float32]]


class _DenseOptions(BoxOptions, frozen=True, kw_only=True):
    one_class: bool = True
    """Whether a box has only its surest class, as in the sources' own predictions; evaluations take all."""


class _YoloOptions(_DenseOptions, frozen=True, kw_only=True):
    order: Order = "cxcywh"


class YoloV5(BoxDecoder):
    """(n, k, 5 + classes): cx, cy, w, h, objectness, classes; also v7 (ultralytics/yolov5 utils/general.py)."""

    options: type[msgspec.Struct] = _YoloOptions
    roles: Mapping[str, Sequence[str]] = ROW

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", None, 5 + self.classes)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each box with the product of its objectness and class."""
        rows = tensors["rows"][image]
        scores = self.probabilities(rows[:, 5:]) * self.probabilities(rows[:, 4:5])
        at, labels, sure = self.surest(scores, one_class=self.settings.one_class)
        return Candidates(self.boxes(rows, at), sure, labels)

    def boxes(self, rows: NDArray[np.float32], chosen: NDArray[np.intp]) -> NDArray[Any]:
        """The corners of the chosen rows."""
        return corners(rows[chosen, :4], self.settings.order)


class _YoloxOptions(_DenseOptions, frozen=True, kw_only=True):
    strides: Strides = (8, 16, 32)
    """Pixels per grid cell, in the order of the rows; P6 models add 64."""


class Yolox(YoloV5):
    """(n, k, 5 + classes): offsets in grid cells, logarithms of sides, objectness, classes (Megvii-BaseDetection/YOLOX
    yolox/utils/demo_utils.py). Exports with `decode_in_inference` are those of `YoloV5`.
    """

    options: type[msgspec.Struct] = _YoloxOptions

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", len(grid_points(self.spec, self.settings.strides, 0.0)), 5 + self.classes)

    def boxes(self, rows: NDArray[np.float32], chosen: NDArray[np.intp]) -> NDArray[Any]:
        """Centres are offsets from the cell's corner in cells, sides are logarithms of cells."""
        points = grid_points(self.spec, self.settings.strides, 0.0)[chosen]
        raw, stride = rows[chosen, :4].astype(np.float64), points[:, 2:3]
        sides = np.exp(np.minimum(raw[:, 2:], 50.0)) * stride
        return corners(np.concatenate([points[:, :2] + raw[:, :2] * stride, sides], 1), "cxcywh")


class YoloV8(BoxDecoder):
    """(n, 4 + classes, k): cx, cy, w, h, classes; also v9, v11, v12 (ultralytics/ultralytics utils/ops.py)."""

    options: type[msgspec.Struct] = _YoloOptions
    roles: Mapping[str, Sequence[str]] = ROW

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`; exports from Keras have the axes the other way round."""
        rows = tensors["rows"]
        if rows.ndim == 3 and rows.shape[1] != 4 + self.classes and rows.shape[2] == 4 + self.classes:
            tensors["rows"] = rows.transpose(0, 2, 1)
        self.shape(tensors, "rows", 4 + self.classes, None)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each box with its classes."""
        rows = tensors["rows"][image].T
        scores = self.probabilities(rows[:, 4:])
        at, labels, sure = self.surest(scores, one_class=self.settings.one_class)
        return Candidates(corners(rows[at, :4], self.settings.order), sure, labels)


class _RowsOptions(BoxOptions, frozen=True, kw_only=True):
    order: Order = "xyxy"


class _EndToEndOptions(_RowsOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class YoloV10(BoxDecoder):
    """(n, k, 6): x1, y1, x2, y2, score, class; also exports with `nms=True` (THU-MIG/yolov10)."""

    options: type[msgspec.Struct] = _EndToEndOptions
    roles: Mapping[str, Sequence[str]] = {"rows": (*ROW["rows"], "detections")}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", None, 6)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each row is a box."""
        rows = tensors["rows"][image]
        return self.detected(corners(rows[:, :4], self.settings.order), rows[:, 4], rows[:, 5])


class CenterNetRows(YoloV10):
    """Detections of CenterNet's own decoding, of which some repeat each other."""

    options: type[msgspec.Struct] = _RowsOptions


class _NanoDetOptions(BoxOptions, frozen=True, kw_only=True):
    strides: Strides = (8, 16, 32, 64)
    """Pixels per grid cell, of each grid in turn."""
    centre: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Where a grid point lies in its cell, in cells."""
    split: bool = False
    """Whether scores and distances of each grid are outputs of their own."""


class NanoDet(BoxDecoder):
    """NanoDet: at each grid point the scores of classes, and the distances to a box's four sides as distributions.

    A distance is the mean of its distribution over 0, 1, … bins − 1, times the stride (X. Li et al., "Generalized Focal
    Loss", NeurIPS 2020; RangiLyu/nanodet nanodet/model/head/gfl_head.py). One output of `rows` (n, points, classes + 4
    · bins), all grids in turn, is that of NanoDet-Plus, whose points are cells' corners. Exports of NanoDet and
    NanoDet-g have points in the middle (`centre = 0.5`) and `scores_0`, `distances_0`, `scores_1`, … of each grid in
    turn (`split = true`), whose names in the model `outputs` states.
    """

    options: type[msgspec.Struct] = _NanoDetOptions
    roles: Mapping[str, Sequence[str]] = {"rows": (LOGITS, "output")}
    asked: Mapping[str, str] = {"centre": "where points lie in their cells: 0 (NanoDet-Plus), 0.5 (NanoDet, NanoDet-g)"}

    def __init__(self, options: Mapping[str, Any], spec: InputSpec, labels: int) -> None:
        """See `Decoder`."""
        settings = self.read(options)
        if settings.split:
            self.roles = {f"{role}_{i}": () for i in range(len(settings.strides)) for role in ("scores", "distances")}
        super().__init__(options, spec, labels)

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`; the grids are put together."""
        grids = range(len(self.settings.strides))
        if self.settings.split:
            for i in grids:
                cells = len(grid_points(self.spec, self.settings.strides[i : i + 1], 0.0))
                self.shape(tensors, f"scores_{i}", cells, self.classes)
                self.shape(tensors, f"distances_{i}", cells, None)
            if len({tensors[f"distances_{i}"].shape[2] for i in grids}) > 1:
                self.refuse("grids whose distances have different numbers of bins")
            parts = [np.concatenate([tensors.pop(f"{r}_{i}") for r in ("scores", "distances")], axis=2) for i in grids]
            tensors["rows"] = np.concatenate(parts, axis=1)
        self.shape(tensors, "rows", len(self._points()), None)
        bins = tensors["rows"].shape[2] - self.classes
        if bins < 8 or bins % 4:
            self.refuse(f"{tensors['rows'].shape[2]} values per point, expected {self.classes} and four times the bins")

    def _points(self) -> NDArray[np.float64]:
        return grid_points(self.spec, self.settings.strides, self.settings.centre)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """The scores of every point; boxes around it."""
        rows = tensors["rows"][image]
        scores = self.probabilities(rows[:, : self.classes])
        at, labels, sure = self.surest(scores)
        points = self._points()[at]
        logits = rows[at, self.classes :].astype(np.float64)
        logits = logits.reshape(len(points), 4, logits.shape[1] // 4)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        mean = (weights * np.arange(logits.shape[2])).sum(axis=2) / weights.sum(axis=2)
        distances = mean * points[:, 2:3]
        boxes = np.concatenate([points[:, :2] - distances[:, :2], points[:, :2] + distances[:, 2:]], axis=1)
        return Candidates(boxes, sure, labels)


class _CenterNetOptions(BoxOptions, frozen=True, kw_only=True):
    layout: Literal["nchw", "nhwc"] = "nchw"
    """The order of the tensors' axes."""
    sides: Literal["size", "distances"] = "size"
    """What the second tensor holds: width and height in cells, or the four distances in pixels."""


class CenterNet(BoxDecoder):
    """CenterNet: a heat map of the objects' centres for each class, and the objects' sides at each place.

    `heatmap` and `sides` have one value per cell, of several pixels of the input. A centre is a cell that no neighbour
    surpasses (X. Zhou, D. Wang, P. Krähenbühl, "Objects as Points", 2019, §4; xingyizhou/CenterNet src/lib/models/
    decode.py). Two channels of sides are width and height in cells, with an optional `offset` of the centre in cells;
    four are the distances to left, top, right and bottom in pixels, as in TTFNet (Z. Liu et al.,
    "Training-Time-Friendly Network for Real-Time Object Detection", AAAI 2020; 610265158/mobilenetv3_centernet).
    """

    options: type[msgspec.Struct] = _CenterNetOptions
    roles: Mapping[str, Sequence[str]] = {
        "heatmap": ("heatmap", "hm", "keypoints", "tower_0/keypoints"),
        "sides": ("wh", "tower_0/wh"),
    }
    optional: Mapping[str, Sequence[str]] = {"offset": ("reg", "offset", "hm_offset")}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        channels = 2 if self.settings.sides == "size" else 4
        for role, size in (("heatmap", self.classes), ("sides", channels), ("offset", 2)):
            if role not in tensors:
                continue
            if self.settings.layout == "nchw" and tensors[role].ndim == 4:
                tensors[role] = tensors[role].transpose(0, 2, 3, 1)
            self.shape(tensors, role, None, None, size)
        cells = {role: tensor.shape[1:3] for role, tensor in tensors.items()}
        if len(set(cells.values())) != 1 or not tensors["heatmap"].size:
            self.refuse(f"grids of {', '.join(f'{grid} ({role})' for role, grid in cells.items())}")

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Peaks of the heat map."""
        heat = self.probabilities(tensors["heatmap"][image])
        peaks = _peaks(heat, self.settings.score_floor)
        height, width, classes = heat.shape
        at, labels, sure = self.surest(peaks.reshape(-1, classes))
        sides = tensors["sides"][image].reshape(height * width, tensors["sides"].shape[3])[at].astype(np.float64)
        cell = np.array([self.spec.width / width, self.spec.height / height])
        centre = np.stack([at % width, at // width], axis=1).astype(np.float64)
        if "offset" in tensors:
            centre += tensors["offset"][image].reshape(height * width, 2)[at]
        centre *= cell
        if self.settings.sides == "size":
            half = sides * cell / 2
            boxes = np.concatenate([centre - half, centre + half], axis=1)
        else:
            boxes = np.concatenate([centre - sides[:, :2], centre + sides[:, 2:]], axis=1)
        return Candidates(boxes, sure, labels)


def _peaks(heat: NDArray[np.float32], floor: float) -> NDArray[np.float32]:
    """The values (h, w, classes) above `floor` that none of the eight cells around surpasses; 0 elsewhere."""
    rows, columns, classes = np.nonzero(heat > floor)
    values = heat[rows, columns, classes]
    highest = np.ones(len(values), np.bool_)
    for down, across in np.ndindex(3, 3):
        row = np.clip(rows + down - 1, 0, heat.shape[0] - 1)
        column = np.clip(columns + across - 1, 0, heat.shape[1] - 1)
        highest &= values >= heat[row, column, classes]
    peaks = np.zeros_like(heat)
    peaks[rows[highest], columns[highest], classes[highest]] = values[highest]
    return peaks
