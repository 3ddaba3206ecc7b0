"""What kinds have in common whose outputs are boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.tasks.boxes.fusion import fuse, weight_matrix
from hawkvision.tasks.boxes.rows import (
    CLASS,
    MEMBERS,
    SCORE,
    TrueBoxes,
    by_temperature,
    placed,
    read_boxes,
    true_boxes,
    unmirrored,
)
from hawkvision.tasks.kind import PACKED_BYTES, STEPS, Output, PredictionT, TaskKind, Tensors, ToImage, Weights

_ROW: Final = np.dtype(("<u2", MEMBERS))
"""A box on the wire."""


class BoxKind(TaskKind[PredictionT]):
    """A kind whose outputs are boxes (`hawkvision.tasks.boxes.rows`)."""

    located: ClassVar[bool] = True

    def outputs(self, tensors: Tensors, temperature: float) -> list[Output]:
        """Boxes (k, 6) from the tensors `boxes`, `scores` and `classes`."""
        return read_boxes(tensors, temperature, len(self.labels))

    def combine(self, members: Sequence[Output], weights: Weights, temperature: float) -> Output:
        """Weighted boxes fusion; the boxes of a single member stay."""
        if len(members) == 1:
            return by_temperature(members[0], temperature)
        return by_temperature(fuse(members, weight_matrix(weights, len(members), len(self.labels))), temperature)

    def unmirror(self, output: Output) -> Output:
        """See `TaskKind.unmirror`."""
        return unmirrored(output)

    def truth(self, annotation: Annotation) -> TrueBoxes:
        """See `TaskKind.truth`; the objects."""
        return true_boxes(annotation, self.name)

    def place(self, output: Output, to_image: ToImage) -> Output:
        """See `TaskKind.place`; boxes are cut off at the image's borders."""
        return placed(output, to_image)

    def pack(self, output: Output) -> bytes:
        """See `TaskKind.pack`: the surest boxes, as corners, score and class in 16 bits each."""
        rows = output[: PACKED_BYTES // _ROW.itemsize, :MEMBERS].astype(np.float64)
        rows[:, :CLASS] *= STEPS
        rows[:, 2:CLASS] = np.ceil(rows[:, 2:CLASS])  # so that no box becomes empty
        return rows.astype(_ROW.base).tobytes()

    def unpack(self, packed: bytes) -> Output:
        """See `TaskKind.unpack`."""
        rows = np.frombuffer(packed, _ROW).astype(np.float32)
        if (rows[:, CLASS] >= len(self.labels)).any() or (rows[:, :2] >= rows[:, 2:SCORE]).any():
            raise ValueError(f"output: expected boxes of x1 < x2 and y1 < y2, classes from 0 to {len(self.labels) - 1}")
        rows[:, :CLASS] /= STEPS
        return rows
