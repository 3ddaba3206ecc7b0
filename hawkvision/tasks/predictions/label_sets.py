"""Predictions of multi-label classification: the labels that apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Self, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.types import LabelledClass, Prediction
from hawkvision.tasks.predictions.tensors import TensorSpec, WireTensor

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]

TENSORS: Final[Mapping[str, TensorSpec]] = {
    "labels": TensorSpec("BYTES", (-1, -1)),
    "classes": TensorSpec("INT64", (-1, -1)),
    "scores": TensorSpec("FP32", (-1, -1)),
    "counts": TensorSpec("INT64", (-1,)),
    "confidence": TensorSpec("FP32", (-1,)),
}


class LabelSet(Prediction, frozen=True):
    """The labels that apply, surest first."""

    labels: Annotated[tuple[LabelledClass, ...], Meta(description="The labels that apply, surest first.")]
    confidence: Annotated[
        float, Meta(description="The expected Jaccard index of the labels, by the calibrated probabilities of all.")
    ]

    def summary(self) -> str:
        """See `Prediction.summary`: the labels."""
        return ", ".join(found.label for found in self.labels) or "none"

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        return cls((LabelledClass("person", 0, 0.97), LabelledClass("dog", 16, 0.74)), 0.81)


_PADDING: Final = LabelledClass("", -1, 0.0)


class _Label(msgspec.Struct, frozen=True):
    """A label as the tiers send it to each other."""

    index: Annotated[int, Meta(ge=0)]
    confidence: Probability


class _Reply(msgspec.Struct, frozen=True):
    labels: tuple[_Label, ...]
    confidence: Probability


def from_labels(labels: Iterable[tuple[int, float]], confidence: float, names: Sequence[str]) -> LabelSet:
    """The prediction of indices and probabilities, surest first."""
    return LabelSet(tuple(LabelledClass(names[index], index, p) for index, p in labels), confidence)


def to_reply(prediction: LabelSet) -> dict[str, Any]:
    """The labels by their indices."""
    labels = [{"index": each.index, "confidence": each.confidence} for each in prediction.labels]
    return {"labels": labels, "confidence": prediction.confidence}


def from_reply(reply: bytes, names: Sequence[str]) -> LabelSet:
    """The inverse of `to_reply`.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    read = msgspec.json.decode(reply, type=_Reply)
    found = [(each.index, each.confidence) for each in read.labels]
    if len({index for index, _ in found}) < len(found) or any(index >= len(names) for index, _ in found):
        raise ValueError(f"labels: expected each index once, from 0 to {len(names) - 1}")
    return from_labels(found, read.confidence, names)


def to_tensors(predictions: Sequence[LabelSet]) -> Mapping[str, WireTensor]:
    """See `TaskKind.tensors`: k labels of each image, and padding behind its `counts` (score 0, class -1)."""
    n, k = len(predictions), max(len(each.labels) for each in predictions)
    rows = [(each.labels[at] if at < len(each.labels) else _PADDING) for each in predictions for at in range(k)]
    return {
        "labels": WireTensor((n, k), [found.label for found in rows]),
        "classes": WireTensor((n, k), [found.index for found in rows]),
        "scores": WireTensor((n, k), [found.confidence for found in rows]),
        "counts": WireTensor((n,), [len(each.labels) for each in predictions]),
        "confidence": WireTensor((n,), [each.confidence for each in predictions]),
    }
