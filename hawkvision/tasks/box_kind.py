"""What kinds have in common whose outputs are boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.tasks.boxes.fusion import fuse, weight_matrix
from hawkvision.tasks.boxes.rows import TrueBoxes, by_temperature, placed, read_boxes, true_boxes, unmirrored
from hawkvision.tasks.kind import Output, PredictionT, TaskKind, Tensors, ToImage, Weights


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
