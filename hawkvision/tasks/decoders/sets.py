"""Decoders of models that give boxes in outputs of their own: DETR, SSD, and graphs that have chosen the boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.tasks.boxes.rows import MOST
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions, Candidates, Order, corners

Role = dict[str, NDArray[np.float32]]


class _DetrOptions(BoxOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    scale: Literal["pixels", "fractions"] = "fractions"
    sigmoid: bool = True
    order: Order = "cxcywh"


class Detr(BoxDecoder):
    """RT-DETR, D-FINE and their relatives: logits of each class for each query, and its box.

    `logits` (n, queries, classes) through a sigmoid, `boxes` (n, queries, 4) as centre x, centre y, width, height in
    fractions. The best pairs of query and class are the result; there is no suppression (lyuwenyu/RT-DETR
    rtdetr_postprocessor.py and Peterande/D-FINE postprocessor.py, with focal loss).
    """

    options: type[msgspec.Struct] = _DetrOptions
    roles: Mapping[str, Sequence[str]] = {
        "logits": ("logits", "pred_logits", "labels"),
        "boxes": ("pred_boxes", "boxes", "dets"),
    }

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "boxes", None, 4)
        self.shape(tensors, "logits", tensors["boxes"].shape[1], self.classes)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """The best pairs of query and class."""
        scores = self.probabilities(tensors["logits"][image])
        at, labels, sure = self.surest(scores, most=min(MOST, self.settings.max_candidates))
        return Candidates(corners(tensors["boxes"][image][at], self.settings.order), sure, labels)


TENSORFLOW_BOXES: Final = ("Postprocessor/ExpandDims_1", "raw_detection_boxes")
"""Tensors whose name says that boxes are y1, x1, y2, x2."""


class _SsdOptions(BoxOptions, frozen=True, kw_only=True):
    scale: Literal["pixels", "fractions"] = "fractions"
    order: Order = "yxyx"
    background: bool = False
    """Whether the model's first class is the background, which is dropped."""


class Ssd(BoxDecoder):
    """SSD whose graph decodes its anchors: a score of each class for each anchor, and the anchors' boxes.

    `scores` (n, k, classes) are probabilities, `boxes` (n, k, 4) or (n, k, 1, 4) are y1, x1, y2, x2 in fractions: the
    tensors before the suppression of TensorFlow's Object Detection API (research/object_detection/meta_architectures/
    ssd_meta_arch.py, `postprocess`), such as of `coco-ssd`, with classes by COCO's ids (`class_map = "coco90"`). With
    `order = "xyxy"` and `scale = "pixels"` these are also the outputs of other detectors that give scores and boxes
    apart: YOLO-NAS, PP-YOLOE (scores (n, classes, k)), DAMO-YOLO.
    """

    options: type[msgspec.Struct] = _SsdOptions
    roles: Mapping[str, Sequence[str]] = {
        "scores": ("scores", "Postprocessor/Slice", "raw_detection_scores"),
        "boxes": ("boxes", *TENSORFLOW_BOXES),
    }
    asked: Mapping[str, str] = {
        "order": "a box's numbers: yxyx (TensorFlow), xyxy (torchvision, YOLO-NAS, PP-YOLOE), cxcywh or xywh"
    }

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        if tensors["boxes"].ndim == 4 and tensors["boxes"].shape[2] == 1:
            tensors["boxes"] = tensors["boxes"][:, :, 0]
        self.shape(tensors, "boxes", None, 4)
        anchors, classes = tensors["boxes"].shape[1], self.classes + self.settings.background
        if tensors["scores"].shape[1:] == (classes, anchors) and classes != anchors:
            tensors["scores"] = tensors["scores"].transpose(0, 2, 1)
        if not self.settings.background and tensors["scores"].shape[1:] == (anchors, classes + 1):
            self.refuse(f"scores of {classes + 1} classes for {classes}; background = true drops a first one")
        self.shape(tensors, "scores", anchors, classes)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Every class of an anchor is a candidate."""
        scores = self.probabilities(tensors["scores"][image][:, int(self.settings.background) :])
        at, labels, sure = self.surest(scores)
        return Candidates(corners(tensors["boxes"][image][at], self.settings.order), sure, labels)


class _DetectionsOptions(BoxOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    order: Order = "xyxy"
    first_class: Literal[0, 1] = 0
    """The model's number of the first class: 1 in torchvision's models and TensorFlow's saved ones."""


class Detections(BoxDecoder):
    """Boxes (n, k, 4) as x1, y1, x2, y2, scores (n, k) and labels (n, k) that the model's graph has already chosen.

    RT-DETR's and D-FINE's exports with their post-processor (lyuwenyu/RT-DETR, Peterande/D-FINE), which count classes
    from 0, and torchvision's detectors, which count them from 1.
    """

    options: type[msgspec.Struct] = _DetectionsOptions
    asked: Mapping[str, str] = {
        "first_class": "the model's number of the first label: 0 (RT-DETR, D-FINE) or 1 (torchvision)",
        "scale": "what coordinates are: pixels of the input, or fractions of its sides",
    }
    roles: Mapping[str, Sequence[str]] = {"classes": ("labels", "classes"), "boxes": ("boxes",), "scores": ("scores",)}

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        self.shape(tensors, "boxes", None, 4)
        k = tensors["boxes"].shape[1]
        self.shape(tensors, "scores", k)
        self.shape(tensors, "classes", k)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Each row is a box."""
        return self._rows(tensors, image, slice(None))

    def _rows(self, tensors: Role, image: int, rows: slice) -> Candidates:
        boxes = corners(tensors["boxes"][image][rows], self.settings.order)
        classes = tensors["classes"][image][rows] - self.settings.first_class
        return self.detected(boxes, tensors["scores"][image][rows], classes)


class _TfDetectionsOptions(_DetectionsOptions, frozen=True, kw_only=True):
    scale: Literal["pixels", "fractions"] = "fractions"
    order: Order = "yxyx"


class TfDetections(Detections):
    """Boxes as y1, x1, y2, x2 in fractions, classes, scores, and the number of boxes (n,) or (n, 1).

    TensorFlow's Object Detection API, whose saved models count classes from 1 and TFLite models from 0
    (research/object_detection/exporter.py, TFLite_Detection_PostProcess).
    """

    options: type[msgspec.Struct] = _TfDetectionsOptions
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
        rows = int(np.clip(tensors["count"][image].reshape(-1)[0], 0, tensors["scores"].shape[1]))
        return self._rows(tensors, image, slice(0, rows))
