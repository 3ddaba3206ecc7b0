"""Classification: one class per image.

An output is the probabilities of all classes (classes,). The loss is 0 or 1, so that accuracy is the share of right
answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, ManifestError
from hawkvision.core.types import LOGITS, LabelledClass
from hawkvision.tasks.class_scores import Score, average, decided, score, softmax, top_classes
from hawkvision.tasks.kind import Output, Prediction, TaskKind, Tensors, Weights


class _ClassScore(msgspec.Struct, frozen=True):
    """A class as the tiers send it to each other, who know the labels."""

    index: int
    confidence: float


class _Reply(msgspec.Struct, frozen=True):
    top_k: tuple[_ClassScore, ...]


class Classification(Prediction, frozen=True):
    """The most probable class, and the most probable ones in order."""

    label: str
    index: int
    confidence: float
    top_k: tuple[LabelledClass, ...]


class ClassificationKind(TaskKind[Classification]):
    """See the module."""

    name: ClassVar[str] = "classification"
    prediction = Classification
    scores: tuple[str, ...] = tuple(each.value for each in Score)
    agreement_bounds_drop: ClassVar[bool] = True

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; there are no options."""
        super().__init__(labels, options)
        self.refuse_unknown_options(())
        if len(self.labels) < 2:
            raise ManifestError(f"kind 'classification': expected at least two labels, got {len(self.labels)}")

    def outputs(self, tensors: Tensors, temperature: float) -> list[Output]:
        """Probabilities (classes,) of logits (n, classes)."""
        logits = tensors.get(LOGITS)
        if logits is None or logits.ndim != 2 or logits.shape[1] != len(self.labels):
            found = "none" if logits is None else str(logits.shape)
            raise BackendError(f"tensor {LOGITS!r}: expected (n, {len(self.labels)}), got {found}")
        return list(softmax(logits, temperature))

    def combine(
        self,
        members: Sequence[Output],
        weights: Weights,  # noqa: ARG002 - members weigh the same
        temperature: float,
    ) -> Output:
        """The mean of the members' probabilities; weights are not used."""
        combined: Output = average([member[np.newaxis] for member in members], temperature)[0]
        return combined

    def decided(self, known: Sequence[Output], missing: int) -> bool:
        """Whether the first class leads by more than the missing members can make up."""
        if not known:
            return False
        total: Output = np.asarray(known, np.float32).sum(axis=0, keepdims=True)
        return decided(total, missing)

    def score(self, output: Output, kind: str) -> float:
        """The largest probability, or its lead over the second largest."""
        return float(score(output[np.newaxis], Score(kind))[0])

    def predict(self, output: Output, limit: int) -> Classification:
        """The `limit` most probable classes."""
        return self.from_classes((int(i), float(output[i])) for i in top_classes(output, limit))

    def from_classes(self, classes: Iterable[tuple[int, float]]) -> Classification:
        """The prediction of class indices and probabilities, most probable first."""
        top_k = tuple(LabelledClass(self.labels[index], index, confidence) for index, confidence in classes)
        return Classification(top_k[0].label, top_k[0].index, top_k[0].confidence, top_k)

    def loss(self, prediction: Classification, truth: Any) -> float:
        """1 for another class than the label."""
        return float(prediction.index != int(truth))

    def disagreement(self, prediction: Classification, reference: Classification) -> float:
        """1 for another class than the reference's."""
        return float(prediction.index != reference.index)

    def confidence(self, prediction: Classification) -> float:
        """The probability of the most probable class."""
        return prediction.confidence

    def encode(self, prediction: Classification) -> dict[str, Any]:
        """The most probable class and the list; probabilities to six digits."""
        top_k = [
            {"label": each.label, "index": each.index, "confidence": round(each.confidence, 6)}
            for each in prediction.top_k
        ]
        return {**top_k[0], "top_k": top_k}

    def encode_reply(self, prediction: Classification) -> dict[str, Any]:
        """The list without labels."""
        return {"top_k": [{"index": each.index, "confidence": each.confidence} for each in prediction.top_k]}

    def decode_reply(self, reply: bytes) -> Classification:
        """See `TaskKind.decode_reply`."""
        top_k = msgspec.json.decode(reply, type=_Reply).top_k
        if not top_k or not all(0 <= each.index < len(self.labels) for each in top_k):
            raise ValueError(f"top_k: expected at least one class, with an index from 0 to {len(self.labels) - 1}")
        return self.from_classes((each.index, each.confidence) for each in top_k)

    def losses(self, outputs: Sequence[Output], truths: Iterable[Any]) -> NDArray[np.float64]:
        """See `TaskKind.losses`; for many images at once."""
        return np.asarray(_classes(outputs) != np.asarray(list(truths)), np.float64)

    def disagreements(self, outputs: Sequence[Output], references: Sequence[Output]) -> NDArray[np.float64]:
        """See `TaskKind.disagreements`; for many images at once."""
        return np.asarray(_classes(outputs) != _classes(references), np.float64)


def _classes(outputs: Sequence[Output]) -> NDArray[np.intp]:
    found: NDArray[np.intp] = np.asarray(outputs).argmax(axis=1)
    return found
