"""Detections that the model's graph has already made, in several outputs.

Detections    boxes (n, k, 4) as x1, y1, x2, y2, scores (n, k), labels (n, k): RT-DETR's and D-FINE's exports with
their post-processor (lyuwenyu/RT-DETR, Peterande/D-FINE, `labels`, `boxes`, `scores`)
TfDetections  boxes as y1, x1, y2, x2 in fractions, classes, scores, and the number of boxes (n,) or (n, 1):
TensorFlow's Object Detection API, whose saved models count classes from 1 and TFLite models from 0
(research/object_detection/exporter.py, TFLite_Detection_PostProcess)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.tasks.decoders.candidates import Candidates
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions

Role = dict[str, NDArray[np.float32]]


class _Options(BoxOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class Detections(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _Options
    roles: Mapping[str, Sequence[str]] = {"classes": ("labels", "classes"), "boxes": ("boxes",), "scores": ("scores",)}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "boxes", None, 4)
        k = tensors["boxes"].shape[1]
        self.shape(tensors, "scores", k)
        self.shape(tensors, "classes", k)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each row is a box."""
        return self.detected(tensors["boxes"][image], tensors["scores"][image], tensors["classes"][image])


class _TfOptions(_Options, frozen=True, kw_only=True):
    scale: Literal["pixels", "fractions"] = "fractions"
    first_class: Literal[0, 1] = 0
    """The model's number of the first class: 1 in saved models, 0 in TFLite's."""


class TfDetections(Detections):
    """See the module."""

    options: type[msgspec.Struct] = _TfOptions
    roles: Mapping[str, Sequence[str]] = {
        "boxes": ("detection_boxes",),
        "classes": ("detection_classes",),
        "scores": ("detection_scores",),
        "count": ("num_detections",),
    }
    asked: Mapping[str, str] = {"first_class": "the model's number of the first label: 1 (saved models) or 0 (TFLite)"}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        super().check(tensors)
        if tensors["count"][:1].size != min(1, len(tensors["count"])):
            self.refuse(f"count of shape {tensors['count'].shape}, expected (n,) or (n, 1)")

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """As many rows as are said to be boxes."""
        rows = slice(0, int(np.clip(tensors["count"][image].reshape(-1)[0], 0, tensors["scores"].shape[1])))
        boxes = tensors["boxes"][image][rows][:, [1, 0, 3, 2]]
        classes = tensors["classes"][image][rows] - self.settings.first_class
        return self.detected(boxes, tensors["scores"][image][rows], classes)
