"""Detection: the objects of an image, each with its class and its box.

An output is boxes (`hawkvision.tasks.boxes.rows`). The prediction is the boxes from a threshold of their score on. The
loss is 1 − F1 at intersection over union 0.5, so that accuracy is the mean F1 of images. Agreement with the reference
does not bound an accuracy drop, because F1 does not obey the triangle inequality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.types import Prediction
from hawkvision.tasks.box_kind import BoxKind
from hawkvision.tasks.boxes.rows import CLASS, MOST, SCORE, expected_f1, matches, rounded_corners
from hawkvision.tasks.kind import Output, TensorSpec, Truth, WireTensor

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]

TENSORS: Final[Mapping[str, TensorSpec]] = {
    "boxes": TensorSpec("FP32", (-1, -1, 4)),
    "scores": TensorSpec("FP32", (-1, -1)),
    "classes": TensorSpec("INT64", (-1, -1)),
    "labels": TensorSpec("BYTES", (-1, -1)),
    "counts": TensorSpec("INT64", (-1,)),
    "confidence": TensorSpec("FP32", (-1,)),
}


class DetectedObject(msgspec.Struct, frozen=True):
    """One object, with the calibrated probability that its class and its box are right."""

    label: Annotated[str, Meta(description="The name of its class.")]
    index: Annotated[int, Meta(description="The index of its class in the list of labels.")]
    confidence: Annotated[float, Meta(description="The calibrated probability that class and box are right.")]
    box: Annotated[
        tuple[float, float, float, float],
        Meta(description="x1, y1, x2, y2: fractions of the width and height of the upright image."),
    ]


class Detection(Prediction, frozen=True):
    """The objects of an image, surest first."""

    objects: Annotated[
        tuple[DetectedObject, ...],
        Meta(description="The objects from the task's `threshold` on (0.1 of `coco`), surest first."),
    ]
    """At most `MOST`."""
    confidence: Annotated[
        float,
        Meta(
            description="The expected F1 by the scores of all boxes. It ranks images, and is not calibrated: no score "
            "speaks of objects without any box, so it is too high on average."
        ),
    ]

    def summary(self) -> str:
        """See `Prediction.summary`: how many objects of each class."""
        counts = Counter(found.label for found in self.objects)
        return ", ".join(f"{number} {label}" for label, number in counts.items()) or "nothing"

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        person = DetectedObject("person", 0, 0.93, (0.104, 0.211, 0.402, 0.968))
        return cls((person, DetectedObject("dog", 16, 0.71, (0.55, 0.61, 0.83, 0.95))), 0.84)


LEAST_SIDE: Final = 1e-6
"""The shortest side of a box in a reply; corners have six digits."""
_PADDING: Final = DetectedObject("", -1, 0.0, (0.0, 0.0, 0.0, 0.0))


class _Found(msgspec.Struct, frozen=True):
    """An object as the tiers send it to each other, who know the labels."""

    index: Annotated[int, Meta(ge=0)]
    confidence: Probability
    box: tuple[Probability, Probability, Probability, Probability]


class _Reply(msgspec.Struct, frozen=True):
    objects: Annotated[tuple[_Found, ...], Meta(max_length=MOST)]
    confidence: Probability


def _to_reply(prediction: Detection) -> dict[str, Any]:
    """The objects without labels."""
    objects = [{"index": o.index, "confidence": o.confidence, "box": o.box} for o in prediction.objects]
    return {"objects": objects, "confidence": prediction.confidence}


def _from_reply(reply: bytes, labels: Sequence[str]) -> Detection:
    """The inverse of `_to_reply`.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    read = msgspec.json.decode(reply, type=_Reply)
    if any(each.index >= len(labels) for each in read.objects):
        raise ValueError(f"objects: expected an index from 0 to {len(labels) - 1}")
    if not all(_has_area(each.box) for each in read.objects):
        raise ValueError("objects: expected boxes of x1 < x2 and y1 < y2, in fractions of the image")
    objects = (DetectedObject(labels[o.index], o.index, o.confidence, o.box) for o in read.objects)
    return Detection(tuple(objects), read.confidence)


def _has_area(box: tuple[float, float, float, float]) -> bool:
    return box[2] - box[0] > LEAST_SIDE / 2 and box[3] - box[1] > LEAST_SIDE / 2


def _to_tensors(predictions: Sequence[Detection]) -> Mapping[str, WireTensor]:
    """See `TaskKind.tensors`: k objects of each image, and padding behind its `counts` (score 0, class -1)."""
    n, k = len(predictions), max(len(each.objects) for each in predictions)
    rows = [(each.objects[at] if at < len(each.objects) else _PADDING) for each in predictions for at in range(k)]
    return {
        "boxes": WireTensor((n, k, 4), [corner for found in rows for corner in found.box]),
        "scores": WireTensor((n, k), [found.confidence for found in rows]),
        "classes": WireTensor((n, k), [found.index for found in rows]),
        "labels": WireTensor((n, k), [found.label for found in rows]),
        "counts": WireTensor((n,), [len(each.objects) for each in predictions]),
        "confidence": WireTensor((n,), [each.confidence for each in predictions]),
    }


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """The score from which on a box is part of the prediction."""


class DetectionKind(BoxKind[Detection]):
    """See the module."""

    name: ClassVar[str] = "detection"
    prediction = Detection
    scores: tuple[str, ...] = ("expected_f1",)
    agreement_bounds_drop: ClassVar[bool] = False
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = TENSORS

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
        return 1.0 - _f1(matches(*arrays(prediction), boxes, classes), len(prediction.objects), len(boxes))

    def disagreement(self, prediction: Detection, reference: Detection) -> float:
        """1 − F1 of one with the other, by the better of both orders of matching."""
        a, b = arrays(prediction), arrays(reference)
        return 1.0 - _f1(max(matches(*a, *b), matches(*b, *a)), len(prediction.objects), len(reference.objects))

    def confidence(self, prediction: Detection) -> float:
        """The expected F1."""
        return prediction.confidence

    def encode_reply(self, prediction: Detection) -> dict[str, Any]:
        """See `TaskKind.encode_reply`."""
        return _to_reply(prediction)

    def decode_reply(self, reply: bytes) -> Detection:
        """See `TaskKind.decode_reply`."""
        return _from_reply(reply, self.labels)

    def tensors(self, predictions: Sequence[Detection], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
        """See `TaskKind.tensors`."""
        return _to_tensors(predictions)


def arrays(prediction: Detection) -> tuple[NDArray[Any], NDArray[Any]]:
    """The boxes (k, 4) and the classes (k,) of the objects."""
    boxes = np.array([each.box for each in prediction.objects], np.float64).reshape(-1, 4)
    return boxes, np.array([each.index for each in prediction.objects], np.intp)


def _f1(common: int, one: int, other: int) -> float:
    return 2.0 * common / (one + other) if one + other else 1.0
