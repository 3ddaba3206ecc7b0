"""Predictions of detection: the objects of an image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Self, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.types import Prediction
from hawkvision.tasks.boxes.rows import MOST
from hawkvision.tasks.predictions.tensors import TensorSpec, WireTensor

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

    objects: Annotated[tuple[DetectedObject, ...], Meta(description="The objects, surest first.")]
    """At most `MOST`."""
    confidence: Annotated[
        float, Meta(description="The expected F1 of the objects, by the calibrated probabilities of all boxes.")
    ]
    """It is too high where a model misses objects without any box: nothing in its output speaks of them."""

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
"""Of a box in a reply; corners have six digits."""
_PADDING: Final = DetectedObject("", -1, 0.0, (0.0, 0.0, 0.0, 0.0))


class _Found(msgspec.Struct, frozen=True):
    """An object as the tiers send it to each other, who know the labels."""

    index: Annotated[int, Meta(ge=0)]
    confidence: Probability
    box: tuple[Probability, Probability, Probability, Probability]


class _Reply(msgspec.Struct, frozen=True):
    objects: Annotated[tuple[_Found, ...], Meta(max_length=MOST)]
    confidence: Probability


def to_reply(prediction: Detection) -> dict[str, Any]:
    """The objects without labels."""
    objects = [{"index": o.index, "confidence": o.confidence, "box": o.box} for o in prediction.objects]
    return {"objects": objects, "confidence": prediction.confidence}


def from_reply(reply: bytes, labels: Sequence[str]) -> Detection:
    """The inverse of `to_reply`.

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


def to_tensors(predictions: Sequence[Detection]) -> Mapping[str, WireTensor]:
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
