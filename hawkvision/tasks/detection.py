"""Detection: the objects of an image, each with its class and its box.

An output is boxes (`hawkvision.tasks.boxes.rows`). The prediction is the boxes from a threshold of their score on. The
loss is 1 − F1 at intersection over union 0.5, so that accuracy is the mean F1 of images. Agreement with the reference
does not bound an accuracy drop, because F1 does not obey the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.tasks.box_kind import BoxKind
from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.confidence import expected_f1
from hawkvision.tasks.boxes.rows import CLASS, SCORE, matches, rounded_corners
from hawkvision.tasks.kind import Output, TensorSpec, Truth, WireTensor
from hawkvision.tasks.predictions import objects
from hawkvision.tasks.predictions.objects import DetectedObject as DetectedObject
from hawkvision.tasks.predictions.objects import Detection as Detection


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """The score from which on a box is part of the prediction."""


class DetectionKind(BoxKind[Detection]):
    """See the module."""

    name: ClassVar[str] = "detection"
    prediction = Detection
    scores: tuple[str, ...] = ("expected_f1",)
    agreement_bounds_drop: ClassVar[bool] = False
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = objects.TENSORS

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; the options are those of `_Options`."""
        super().__init__(labels, options)
        self._options = self.options_as(_Options)

    def score(self, output: Output, kind: str) -> float:  # noqa: ARG002 - there is one
        """The expected F1."""
        return float(np.float32(expected_f1(output, self._options.threshold)))

    def predict(self, output: Output, limit: int) -> Detection:  # noqa: ARG002 - there are no alternatives
        """The boxes from the threshold on; numbers to six digits."""
        return Detection(
            tuple(
                DetectedObject(self.labels[int(row[CLASS])], int(row[CLASS]), round(float(row[SCORE]), 6), corners)
                for row in output[output[:, SCORE] >= self._options.threshold]
                if (corners := rounded_corners(row))
            ),
            round(expected_f1(output, self._options.threshold), 6),
        )

    def loss(self, prediction: Detection, truth: Truth) -> float:
        """1 − F1 with the true boxes and classes (`TrueBoxes`); 0 if both are empty."""
        boxes, classes = truth
        return 1.0 - _f1(matches(*_arrays(prediction), boxes, classes), len(prediction.objects), len(boxes))

    def disagreement(self, prediction: Detection, reference: Detection) -> float:
        """1 − F1 of one with the other, by the better of both orders of matching."""
        a, b = _arrays(prediction), _arrays(reference)
        return 1.0 - _f1(max(matches(*a, *b), matches(*b, *a)), len(prediction.objects), len(reference.objects))

    def confidence(self, prediction: Detection) -> float:
        """The expected F1."""
        return prediction.confidence

    def measures(self, outputs: Sequence[Output], truths: Sequence[Truth]) -> dict[str, float]:
        """COCO's average precision over the images, and precision, recall and F1 of all boxes from the threshold on."""
        found = detection_quality(outputs, truths, self._options.threshold)
        return {
            "mAP": found.ap,
            "AP50": found.ap50,
            "precision": found.precision,
            "recall": found.recall,
            "F1": found.f1,
        }

    def encode_reply(self, prediction: Detection) -> dict[str, Any]:
        """See `TaskKind.encode_reply`."""
        return objects.to_reply(prediction)

    def decode_reply(self, reply: bytes) -> Detection:
        """See `TaskKind.decode_reply`."""
        return objects.from_reply(reply, self.labels)

    def tensors(self, predictions: Sequence[Detection], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
        """See `TaskKind.tensors`."""
        return objects.to_tensors(predictions)


def _arrays(prediction: Detection) -> tuple[NDArray[Any], NDArray[Any]]:
    boxes = np.array([each.box for each in prediction.objects], np.float64).reshape(-1, 4)
    return boxes, np.array([each.index for each in prediction.objects], np.intp)


def _f1(common: int, one: int, other: int) -> float:
    return 2.0 * common / (one + other) if one + other else 1.0
