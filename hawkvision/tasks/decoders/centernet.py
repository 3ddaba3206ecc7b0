"""CenterNet: a heat map of the objects' centres for each class, and the objects' sides at each place.

`heatmap` and `sides` have one value per cell, of several pixels of the input. A centre is a cell that no neighbour
surpasses (X. Zhou, D. Wang, P. Krähenbühl, "Objects as Points", 2019, §4; xingyizhou/CenterNet src/lib/models/
decode.py). Two channels of sides are width and height in cells, with an optional `offset` of the centre in cells; four
are the distances to left, top, right and bottom in pixels, as in TTFNet (Z. Liu et al., "Training-Time-Friendly Network
for Real-Time Object Detection", AAAI 2020; 610265158/mobilenetv3_centernet).
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
    layout: Literal["nchw", "nhwc"] = "nchw"
    """The order of the tensors' axes."""
    sides: Literal["size", "distances"] = "size"
    """What the second tensor holds: width and height in cells, or the four distances in pixels."""


class CenterNet(BoxDecoder):
    """See the module."""

    options: type[msgspec.Struct] = _Options
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
        found = surest(
            peaks.reshape(-1, classes), self.settings.score_floor, self.settings.max_candidates, one_class=False
        )
        sides = (
            tensors["sides"][image].reshape(height * width, tensors["sides"].shape[3])[found.boxes].astype(np.float64)
        )
        cell = np.array([self.spec.width / width, self.spec.height / height])
        centre = np.stack([found.boxes % width, found.boxes // width], axis=1).astype(np.float64)
        if "offset" in tensors:
            centre += tensors["offset"][image].reshape(height * width, 2)[found.boxes]
        centre *= cell
        if self.settings.sides == "size":
            half = sides * cell / 2
            boxes = np.concatenate([centre - half, centre + half], axis=1)
        else:
            boxes = np.concatenate([centre - sides[:, :2], centre + sides[:, 2:]], axis=1)
        return Candidates(boxes, found.scores, found.classes)


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
