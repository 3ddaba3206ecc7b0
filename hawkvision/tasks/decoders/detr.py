"""RT-DETR, D-FINE and their relatives: logits of each class for each query, and its box.

`logits` (n, queries, classes) through a sigmoid, `boxes` (n, queries, 4) as centre x, centre y, width, height in
fractions. The best pairs of query and class are the result; there is no suppression (lyuwenyu/RT-DETR
rtdetr_postprocessor.py and Peterande/D-FINE postprocessor.py, with focal loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.tasks.boxes.rows import MOST
from hawkvision.tasks.decoders.candidates import Candidates, corners, surest
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions

Role = dict[str, NDArray[np.float32]]


class _Options(BoxOptions, frozen=True, kw_only=True):
    iou: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    scale: Literal["pixels", "fractions"] = "fractions"
    sigmoid: bool = True


class Detr(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _Options
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
        found = surest(scores, self.settings.score_floor, min(MOST, self.settings.max_candidates), one_class=False)
        return Candidates(corners(tensors["boxes"][image][found.boxes]), found.scores, found.classes)
