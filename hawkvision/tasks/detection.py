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

from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Prediction
from hawkvision.tasks.box_kind import BoxKind
from hawkvision.tasks.boxes import confidence
from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.rows import CLASS, MOST, SCORE, matches, rounded_corners
from hawkvision.tasks.kind import Output, TensorSpec, Truth, WireTensor

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]


class DetectedObject(msgspec.Struct, frozen=True):
    """One object, with the calibrated probability that its class and its box are right."""

    label: str
    index: int
    confidence: float
    box: tuple[float, float, float, float]
    """x1, y1, x2, y2: fractions of the width and height of the upright image."""


class Detection(Prediction, frozen=True):
    """The objects of an image, surest first."""

    objects: tuple[DetectedObject, ...]
    """At most `MOST`."""
    confidence: float
    """The expected F1 of the objects, by the calibrated probabilities of all boxes."""

    def summary(self) -> str:
        """See `Prediction.summary`: how many objects of each class."""
        counts = Counter(found.label for found in self.objects)
        return ", ".join(f"{number} {label}" for label, number in counts.items()) or "nothing"

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        person = DetectedObject("person", 0, 0.93, (0.104, 0.211, 0.402, 0.968))
        return cls((person, DetectedObject("dog", 16, 0.71, (0.55, 0.61, 0.83, 0.95))), 0.84)


class _Found(msgspec.Struct, frozen=True):
    """An object as the tiers send it to each other, who know the labels."""

    index: Annotated[int, Meta(ge=0)]
    confidence: Probability
    box: tuple[Probability, Probability, Probability, Probability]


class _Reply(msgspec.Struct, frozen=True):
    objects: Annotated[tuple[_Found, ...], Meta(max_length=MOST)]
    confidence: Probability


class _Regression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    coefficients: dict[str, float]
    intercept: float = 0.0


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """The score from which on a box is part of the prediction."""
    regression: _Regression | None = None
    """Fitted coefficients of `boxes.confidence.STATISTICS`; they add the score `regression`."""


class DetectionKind(BoxKind[Detection]):
    """See the module."""

    name: ClassVar[str] = "detection"
    prediction = Detection
    scores: tuple[str, ...] = tuple(confidence.SCORES)
    agreement_bounds_drop: ClassVar[bool] = False
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = {
        "boxes": TensorSpec("FP32", (-1, -1, 4)),
        "scores": TensorSpec("FP32", (-1, -1)),
        "classes": TensorSpec("INT64", (-1, -1)),
        "labels": TensorSpec("BYTES", (-1, -1)),
        "counts": TensorSpec("INT64", (-1,)),
        "confidence": TensorSpec("FP32", (-1,)),
    }

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; the options are those of `_Options`."""
        super().__init__(labels, options)
        self._options = self.options_as(_Options)
        regression = self._options.regression
        if regression is not None:
            unknown = sorted(regression.coefficients.keys() - confidence.STATISTICS.keys())
            if unknown:
                known = ", ".join(confidence.STATISTICS)
                raise ManifestError(f"options of kind 'detection': regression of {unknown[0]!r}; expected {known}")
            self.scores = (*self.scores, confidence.REGRESSION)

    def score(self, output: Output, kind: str) -> float:
        """One of `boxes.confidence.SCORES`, or the regression's."""
        options = self._options
        if kind == confidence.REGRESSION and options.regression is not None:
            fitted = options.regression
            found = confidence.regression(output, options.threshold, fitted.coefficients, fitted.intercept)
        else:
            found = confidence.SCORES[kind](output, options.threshold)
        return float(np.float32(found))

    def predict(self, output: Output, limit: int) -> Detection:  # noqa: ARG002 - there are no alternatives
        """The boxes from the threshold on; numbers to six digits."""
        return Detection(
            tuple(
                DetectedObject(self.labels[int(row[CLASS])], int(row[CLASS]), round(float(row[SCORE]), 6), corners)
                for row in output[output[:, SCORE] >= self._options.threshold]
                if (corners := rounded_corners(row))
            ),
            round(confidence.expected_f1(output, self._options.threshold), 6),
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

    def encode_reply(self, prediction: Detection) -> dict[str, Any]:
        """The objects without labels."""
        objects = [{"index": o.index, "confidence": o.confidence, "box": o.box} for o in prediction.objects]
        return {"objects": objects, "confidence": prediction.confidence}

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

    def decode_reply(self, reply: bytes) -> Detection:
        """See `TaskKind.decode_reply`."""
        read = msgspec.json.decode(reply, type=_Reply)
        if any(each.index >= len(self.labels) for each in read.objects):
            raise ValueError(f"objects: expected an index from 0 to {len(self.labels) - 1}")
        objects = (DetectedObject(self.labels[o.index], o.index, o.confidence, o.box) for o in read.objects)
        return Detection(tuple(objects), read.confidence)

    def tensors(self, predictions: Sequence[Detection], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
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


_PADDING: Final = DetectedObject("", -1, 0.0, (0.0, 0.0, 0.0, 0.0))


def _arrays(prediction: Detection) -> tuple[NDArray[Any], NDArray[Any]]:
    boxes = np.array([each.box for each in prediction.objects], np.float64).reshape(-1, 4)
    return boxes, np.array([each.index for each in prediction.objects], np.intp)


def _f1(common: int, one: int, other: int) -> float:
    return 2.0 * common / (one + other) if one + other else 1.0
