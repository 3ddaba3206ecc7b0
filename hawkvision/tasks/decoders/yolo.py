"""The YOLO family: with objectness, without, with the suppression in the graph, and YOLOX's grids.

    YoloV5    (n, k, 5 + classes)   cx, cy, w, h, objectness, classes; also v7
                                    ultralytics/yolov5 utils/general.py
    YoloV8    (n, 4 + classes, k)   cx, cy, w, h, classes; also v9, v11, v12
                                    ultralytics/ultralytics utils/ops.py
    YoloV10   (n, k, 6)             x1, y1, x2, y2, score, class; also exports with `nms=True`
                                    THU-MIG/yolov10; ultralytics/ultralytics engine/exporter.py
    Yolox     (n, k, 5 + classes)   offsets in grid cells, logarithms of sides, objectness, classes
                                    Megvii-BaseDetection/YOLOX yolox/utils/demo_utils.py

Coordinates are pixels of the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.types import LOGITS
from hawkvision.tasks.decoders.candidates import Candidates, corners, surest
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions
from hawkvision.tasks.decoders.grid import Strides, grid_points

ROW: Mapping[str, Sequence[str]] = {"rows": (LOGITS, "output0", "output", "outputs", "predictions")}
Role = dict[str, NDArray[np.float32]]


class _DenseOptions(BoxOptions, frozen=True, kw_only=True):
    one_class: bool = True
    """Whether a box has only its surest class, as in the sources' own predictions; evaluations take all."""


class YoloV5(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _DenseOptions
    roles: Mapping[str, Sequence[str]] = ROW

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", None, 5 + self.classes)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Of each box, the product of objectness and class."""
        rows = tensors["rows"][image]
        scores = self.probabilities(rows[:, 5:]) * self.probabilities(rows[:, 4:5])
        found = surest(
            scores, self.settings.score_floor, self.settings.max_candidates, one_class=self.settings.one_class
        )
        return Candidates(corners(self.boxes(rows, found.boxes)), found.scores, found.classes)

    def boxes(self, rows: NDArray[np.float32], chosen: NDArray[np.intp]) -> NDArray[Any]:
        """Centres and sides of the chosen rows."""
        return rows[chosen, :4]


class _YoloxOptions(_DenseOptions, frozen=True, kw_only=True):
    strides: Strides = (8, 16, 32)
    """Pixels per grid cell, in the order of the rows; P6 models add 64."""


class Yolox(YoloV5):
    """See the module. Exports with `decode_in_inference` are those of `YoloV5`."""

    options: type[msgspec.Struct] = _YoloxOptions

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", len(grid_points(self.spec, self.settings.strides, 0.0)), 5 + self.classes)

    def boxes(self, rows: NDArray[np.float32], chosen: NDArray[np.intp]) -> NDArray[Any]:
        """Centres are offsets from the cell's corner in cells, sides are logarithms of cells."""
        points = grid_points(self.spec, self.settings.strides, 0.0)[chosen]
        raw, stride = rows[chosen, :4].astype(np.float64), points[:, 2:3]
        return np.concatenate([points[:, :2] + raw[:, :2] * stride, np.exp(np.minimum(raw[:, 2:], 50.0)) * stride], 1)


class YoloV8(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _DenseOptions
    roles: Mapping[str, Sequence[str]] = ROW

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`; exports from Keras have the axes the other way round."""
        rows = tensors["rows"]
        if rows.ndim == 3 and rows.shape[1] != 4 + self.classes and rows.shape[2] == 4 + self.classes:
            tensors["rows"] = rows.transpose(0, 2, 1)
        self.shape(tensors, "rows", 4 + self.classes, None)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Of each box, its classes."""
        rows = tensors["rows"][image].T
        scores = self.probabilities(rows[:, 4:])
        found = surest(
            scores, self.settings.score_floor, self.settings.max_candidates, one_class=self.settings.one_class
        )
        return Candidates(corners(rows[found.boxes, :4]), found.scores, found.classes)


class _EndToEndOptions(BoxOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class YoloV10(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _EndToEndOptions
    roles: Mapping[str, Sequence[str]] = {"rows": (*ROW["rows"], "detections")}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "rows", None, 6)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each row is a box."""
        rows = tensors["rows"][image]
        return self.detected(rows[:, :4], rows[:, 4], rows[:, 5])


class CenterNetRows(YoloV10):
    """Detections of CenterNet's own decoding, of which some repeat each other."""

    options: type[msgspec.Struct] = BoxOptions
