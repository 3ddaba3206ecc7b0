"""NanoDet: at each grid point the scores of classes, and the distances to a box's four sides as distributions.

A distance is the mean of its distribution over 0, 1, … bins − 1, times the stride (X. Li et al., "Generalized Focal
Loss", NeurIPS 2020; RangiLyu/nanodet nanodet/model/head/gfl_head.py). One output of `rows` (n, points, classes +
4 · bins), all grids in turn, is that of NanoDet-Plus, whose points are cells' corners. Exports of NanoDet and NanoDet-g
have points in the middle (`centre = 0.5`) and `scores_0`, `distances_0`, `scores_1`, … of each grid in turn
(`split = true`), whose names in the model `outputs` states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.types import LOGITS
from hawkvision.models.input_spec import InputSpec
from hawkvision.tasks.decoders.candidates import Candidates, surest
from hawkvision.tasks.decoders.decoder import BoxDecoder, BoxOptions
from hawkvision.tasks.decoders.grid import Strides, grid_points

Role = dict[str, NDArray[np.float32]]


class _Options(BoxOptions, frozen=True, kw_only=True):
    strides: Strides = (8, 16, 32, 64)
    """Pixels per grid cell, of each grid in turn."""
    centre: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Where a grid point lies in its cell, in cells."""
    split: bool = False
    """Whether scores and distances of each grid are outputs of their own."""


class NanoDet(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _Options
    roles: Mapping[str, Sequence[str]] = {"rows": (LOGITS, "output")}

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
        found = surest(scores, self.settings.score_floor, self.settings.max_candidates, one_class=False)
        points = self._points()[found.boxes]
        logits = rows[found.boxes, self.classes :].astype(np.float64)
        logits = logits.reshape(len(points), 4, logits.shape[1] // 4)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        mean = (weights * np.arange(logits.shape[2])).sum(axis=2) / weights.sum(axis=2)
        distances = mean * points[:, 2:3]
        boxes = np.concatenate([points[:, :2] - distances[:, :2], points[:, :2] + distances[:, 2:]], axis=1)
        return Candidates(boxes, found.scores, found.classes)
