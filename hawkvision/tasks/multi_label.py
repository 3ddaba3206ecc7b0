"""Multi-label classification: which of the labels apply to an image, each on its own.

An output is one probability per label (labels,): of a model's own logits, or of the boxes of a detector. The prediction
is the labels from a threshold on. The loss is the Jaccard distance of label sets, 1 − |both| / |either|, which is a
metric (M. Levandowsky, D. Winter, "Distance between Sets", Nature 234, 1971), so that agreement with the reference
bounds an accuracy drop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from hawkvision.core.errors import BackendError, BadField
from hawkvision.core.types import LOGITS, LabelledClass, Prediction
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.tasks.boxes.fusion import weight_matrix
from hawkvision.tasks.boxes.rows import CLASS, SCORE, by_temperature, is_true_boxes, read_boxes, tempered
from hawkvision.tasks.kind import Output, TaskKind, Tensors, TensorSpec, Truth, Weights, WireTensor

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

    labels: Annotated[
        tuple[LabelledClass, ...], Meta(description="The labels from the task's `threshold` on, surest first.")
    ]
    confidence: Annotated[
        float,
        Meta(
            description="The expected Jaccard index by the probabilities of all labels. It ranks images, and is not "
            "calibrated."
        ),
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


def _from_labels(labels: Iterable[tuple[int, float]], confidence: float, names: Sequence[str]) -> LabelSet:
    """The prediction of indices and probabilities, surest first."""
    return LabelSet(tuple(LabelledClass(names[index], index, p) for index, p in labels), confidence)


def _to_reply(prediction: LabelSet) -> dict[str, Any]:
    """The labels by their indices."""
    labels = [{"index": each.index, "confidence": each.confidence} for each in prediction.labels]
    return {"labels": labels, "confidence": prediction.confidence}


def _from_reply(reply: bytes, names: Sequence[str]) -> LabelSet:
    """The inverse of `_to_reply`.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    read = msgspec.json.decode(reply, type=_Reply)
    found = [(each.index, each.confidence) for each in read.labels]
    if len({index for index, _ in found}) < len(found) or any(index >= len(names) for index, _ in found):
        raise ValueError(f"labels: expected each index once, from 0 to {len(names) - 1}")
    return _from_labels(found, read.confidence, names)


def _to_tensors(predictions: Sequence[LabelSet]) -> Mapping[str, WireTensor]:
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


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5
    """The probability from which on a label applies."""
    pool: Literal["max", "noisy_or"] = "max"
    """The probability of a label by its boxes: the highest, or that at least one is right."""


class MultiLabelKind(TaskKind[LabelSet]):
    """See the module."""

    name: ClassVar[str] = "multi_label"
    prediction = LabelSet
    scores: tuple[str, ...] = ("expected_jaccard", "exact", "margin")
    agreement_bounds_drop: ClassVar[bool] = True
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = TENSORS

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; the options are those of `_Options`."""
        super().__init__(labels, options)
        self._options = self.options_as(_Options)

    def outputs(self, tensors: Tensors, temperature: float) -> list[Output]:
        """Probabilities of the tensor `logits` (n, labels), or of `boxes`, `scores` and `classes`."""
        return self.calibrated(self.raw(tensors), temperature)

    def raw(self, tensors: Tensors) -> list[Output]:
        """Logits (labels,), or boxes (k, 6)."""
        logits = tensors.get(LOGITS)
        if logits is None:
            return read_boxes(tensors, 1.0, len(self.labels))
        if logits.ndim != 2 or logits.shape[1] != len(self.labels):
            raise BackendError(f"tensor {LOGITS!r}: expected (n, {len(self.labels)}), got {logits.shape}")
        return list(logits)

    def calibrated(self, raw: Sequence[Output], temperature: float) -> list[Output]:
        """See `TaskKind.calibrated`."""
        return [
            self._pooled(by_temperature(each, temperature)) if each.ndim == 2 else _sigmoid(each, temperature)
            for each in raw
        ]

    def raw_of(self, outputs: Sequence[Output]) -> list[Output]:
        """The logits of the probabilities, which are clipped to what float32 tells from 0 and 1."""
        return [_logit(output) for output in outputs]

    def _pooled(self, boxes: Output) -> Output:
        missed = np.ones(len(self.labels), np.float64)
        for label, score in zip(boxes[:, CLASS].astype(np.intp), boxes[:, SCORE].astype(np.float64), strict=True):
            of_box = 1.0 - score
            missed[label] = missed[label] * of_box if self._options.pool == "noisy_or" else min(missed[label], of_box)
        return (1.0 - missed).astype(np.float32)

    def combine(self, members: Sequence[Output], weights: Weights, temperature: float) -> Output:
        """The weighted mean of the members' probabilities; those of a single member stay."""
        if len(members) == 1:
            return tempered(members[0], temperature)
        by_member = weight_matrix(weights, len(members), len(self.labels))
        mean = (np.asarray(members, np.float64) * by_member).sum(axis=0) / by_member.sum(axis=0)
        return tempered(mean, temperature)

    def score(self, output: Output, kind: str) -> float:
        """How sure the set of labels is.

        `expected_jaccard`: the expected Jaccard index. `exact`: the probability that every label is right. `margin`:
        how far the least sure label is from the threshold.
        """
        if kind == "expected_jaccard":
            found = self._expected_jaccard(output)
        elif kind == "exact":
            p = output.astype(np.float64)
            found = math.prod(np.where(output >= self._options.threshold, p, 1.0 - p).tolist())
        else:
            found = min(1.0, float(np.abs(output.astype(np.float64) - self._options.threshold).min()))
        return float(np.float32(found))

    def _expected_jaccard(self, output: Output) -> float:
        """With expected numbers: labels right / (labels predicted + labels missed); without any, the chance of none."""
        applies = output >= self._options.threshold
        predicted: list[float] = output[applies].tolist()
        rest: list[float] = output[~applies].tolist()
        if not predicted:
            return math.prod(1.0 - p for p in rest)
        return math.fsum(predicted) / (len(predicted) + math.fsum(rest))

    def predict(self, output: Output, limit: int) -> LabelSet:  # noqa: ARG002 - there are no alternatives
        """The labels from the threshold on, however many; probabilities to six digits."""
        order = np.argsort(-output, kind="stable")
        return _from_labels(
            ((int(i), round(float(output[i]), 6)) for i in order if output[i] >= self._options.threshold),
            round(self._expected_jaccard(output), 6),
            self.labels,
        )

    def loss(self, prediction: LabelSet, truth: Truth) -> float:
        """The Jaccard distance from the true labels, given as their indices or as boxes (`TrueBoxes`)."""
        indices = truth[1] if is_true_boxes(truth) else truth
        return _distance(_indices(prediction), {int(index) for index in indices})

    def disagreement(self, prediction: LabelSet, reference: LabelSet) -> float:
        """The Jaccard distance of both sets."""
        return _distance(_indices(prediction), _indices(reference))

    def truth(self, annotation: Annotation) -> frozenset[int]:
        """See `TaskKind.truth`; the indices of the labels."""
        return frozenset(annotation.classes.tolist())

    def confidence(self, prediction: LabelSet) -> float:
        """The expected Jaccard index."""
        return prediction.confidence

    def stated(self, prediction: LabelSet) -> list[str]:
        """The names of the labels."""
        return [found.label for found in prediction.labels]

    def read_label(self, label: Any) -> frozenset[int]:
        """The names of all labels that apply."""
        if not isinstance(label, list) or not all(isinstance(each, str) and each in self.labels for each in label):
            raise BadField(f"label: expected a list of names out of {len(self.labels)} labels, got {str(label)[:60]!r}")
        return frozenset(map(self.labels.index, label))

    def encode_reply(self, prediction: LabelSet) -> dict[str, Any]:
        """See `TaskKind.encode_reply`."""
        return _to_reply(prediction)

    def decode_reply(self, reply: bytes) -> LabelSet:
        """See `TaskKind.decode_reply`."""
        return _from_reply(reply, self.labels)

    def tensors(self, predictions: Sequence[LabelSet], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
        """See `TaskKind.tensors`."""
        return _to_tensors(predictions)


def _sigmoid(logits: Output, temperature: float) -> Output:
    scaled = np.clip(logits.astype(np.float64) / temperature, -700.0, 700.0)
    probabilities: Output = (1.0 / (1.0 + np.exp(-scaled))).astype(np.float32)
    return probabilities


def _logit(probabilities: Output) -> Output:
    clipped = np.clip(probabilities.astype(np.float64), 1e-37, 1.0 - 2.0**-26)
    logits: Output = (np.log(clipped) - np.log1p(-clipped)).astype(np.float32)
    return logits


def _indices(prediction: LabelSet) -> set[int]:
    return {each.index for each in prediction.labels}


def _distance(one: set[int], other: set[int]) -> float:
    either = one | other
    return 1.0 - len(one & other) / len(either) if either else 0.0
