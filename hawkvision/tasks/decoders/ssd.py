"""SSD whose graph decodes its anchors: a score of each class for each anchor, and the anchors' boxes.

`scores` (n, k, classes) are probabilities, `boxes` (n, k, 4) or (n, k, 1, 4) are y1, x1, y2, x2 in fractions: the
tensors before the suppression of TensorFlow's Object Detection API (research/object_detection/meta_architectures/
ssd_meta_arch.py, `postprocess`), such as of `coco-ssd`, with classes by COCO's ids (`class_map = "coco90"`). With
`order = "xyxy"` and `scale = "pixels"` these are also the outputs of other detectors that give scores and boxes apart:
YOLO-NAS, PP-YOLOE (scores (n, classes, k)), DAMO-YOLO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.tasks.decoders.candidates import Candidates, surest
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions

Role = dict[str, NDArray[np.float32]]


class _Options(BoxOptions, frozen=True, kw_only=True):
    scale: Literal["pixels", "fractions"] = "fractions"
    order: Literal["yxyx", "xyxy"] = "yxyx"
    """The order of a box's coordinates."""
    background: bool = False
    """Whether the model's first class is the background, which is dropped."""


class Ssd(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _Options
    roles: Mapping[str, Sequence[str]] = {
        "scores": ("scores", "Postprocessor/Slice", "raw_detection_scores"),
        "boxes": ("boxes", "Postprocessor/ExpandDims_1", "raw_detection_boxes"),
    }

    def check(self, tensors: Role) -> None:
        """See `BoxDecoder.check`."""
        if tensors["boxes"].ndim == 4 and tensors["boxes"].shape[2] == 1:
            tensors["boxes"] = tensors["boxes"][:, :, 0]
        self.shape(tensors, "boxes", None, 4)
        anchors, classes = tensors["boxes"].shape[1], self.classes + self.settings.background
        if tensors["scores"].shape[1:] == (classes, anchors) and classes != anchors:
            tensors["scores"] = tensors["scores"].transpose(0, 2, 1)
        self.shape(tensors, "scores", anchors, classes)

    def candidates(self, tensors: Role, image: int) -> Candidates:
        """Every class of an anchor is a candidate."""
        scores = self.probabilities(tensors["scores"][image][:, int(self.settings.background) :])
        found = surest(scores, self.settings.score_floor, self.settings.max_candidates, one_class=False)
        boxes = tensors["boxes"][image][found.boxes]
        return Candidates(
            boxes[:, [1, 0, 3, 2]] if self.settings.order == "yxyx" else boxes, found.scores, found.classes
        )
