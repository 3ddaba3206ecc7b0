"""Predictions of classification: the most probable classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from hawkvision.core.types import LabelledClass, Prediction
from hawkvision.tasks.predictions.tensors import TensorSpec, WireTensor

TENSORS: Final[Mapping[str, TensorSpec]] = {
    "label": TensorSpec("BYTES", (-1,)),
    "index": TensorSpec("INT64", (-1,)),
    "confidence": TensorSpec("FP32", (-1,), ranked=True),
}


class _ClassScore(msgspec.Struct, frozen=True):
    """A class as the tiers send it to each other, who know the labels."""

    index: int
    confidence: float


class _Reply(msgspec.Struct, frozen=True):
    top_k: tuple[_ClassScore, ...]


class _Compared(msgspec.Struct, frozen=True):
    index: int


class ClassificationFields(msgspec.Struct, frozen=True):
    """The most probable classes."""

    label: Annotated[str, Meta(description="The name of the most probable class.")]
    index: Annotated[int, Meta(description="Its index in the list of labels.")]
    confidence: Annotated[float, Meta(description="The calibrated probability that it is right.")]
    top_k: Annotated[tuple[LabelledClass, ...], Meta(description="The most probable classes, in order.")]


class Classification(Prediction, frozen=True):
    """The most probable classes, in order."""

    top_k: Annotated[tuple[LabelledClass, ...], Meta(min_length=1)]

    def summary(self) -> str:
        """See `Prediction.summary`: the most probable class."""
        return self.label

    @classmethod
    def json_type(cls) -> type[msgspec.Struct]:
        """See `Prediction.json_type`."""
        return ClassificationFields

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        return cls((LabelledClass("Egyptian cat", 285, 0.612), LabelledClass("tiger cat", 282, 0.238)))

    @property
    def label(self) -> str:
        """The name of the most probable class."""
        return self.top_k[0].label

    @property
    def index(self) -> int:
        """The index of the most probable class."""
        return self.top_k[0].index

    @property
    def confidence(self) -> float:
        """The calibrated probability that `label` is right."""
        return self.top_k[0].confidence

    def to_json(self) -> dict[str, Any]:
        """The most probable class and the list; probabilities to six digits."""
        top_k = [
            {"label": each.label, "index": each.index, "confidence": round(each.confidence, 6)} for each in self.top_k
        ]
        return {**top_k[0], "top_k": top_k}


def from_classes(classes: Iterable[tuple[int, float]], labels: Sequence[str]) -> Classification:
    """The prediction of class indices and probabilities, most probable first."""
    return Classification(tuple([LabelledClass(labels[index], index, sure) for index, sure in classes]))


def to_reply(prediction: Classification) -> dict[str, Any]:
    """The list without labels."""
    return {"top_k": [{"index": each.index, "confidence": each.confidence} for each in prediction.top_k]}


def from_reply(reply: bytes, labels: Sequence[str]) -> Classification:
    """The inverse of `to_reply`.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    top_k = msgspec.json.decode(reply, type=_Reply).top_k
    sound = all(0 <= each.index < len(labels) and 0.0 <= each.confidence <= 1.0 for each in top_k)
    if not top_k or not sound:
        raise ValueError(
            f"top_k: expected at least one class, each with an index from 0 to {len(labels) - 1} and a confidence "
            "from 0 to 1"
        )
    return from_classes(((each.index, each.confidence) for each in top_k), labels)


def from_compared(reply: bytes, labels: Sequence[str]) -> Classification:
    """Of the field `index` alone. The confidence is unknown, and stated as 0.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    index = msgspec.json.decode(reply, type=_Compared).index
    if not 0 <= index < len(labels):
        raise ValueError(f"index: expected 0 to {len(labels) - 1}, got {index}")
    return from_classes([(index, 0.0)], labels)


def to_tensors(predictions: Sequence[Classification], ranked: int | None) -> Mapping[str, WireTensor]:
    """See `TaskKind.tensors`; fewer classes are ranked where a prediction lists fewer."""
    n = len(predictions)
    confidence = WireTensor((n,), [each.confidence for each in predictions])
    if ranked is not None:
        k = min(ranked, *(len(each.top_k) for each in predictions))
        rows = [found for each in predictions for found in each.top_k[:k]]
        confidence = WireTensor((n, k), [f"{found.confidence:.6f}:{found.index}:{found.label}" for found in rows])
    return {
        "label": WireTensor((n,), [each.label for each in predictions]),
        "index": WireTensor((n,), [each.index for each in predictions]),
        "confidence": confidence,
    }
