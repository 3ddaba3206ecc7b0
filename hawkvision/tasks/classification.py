"""Classification: one class per image.

An output is the probabilities of all classes (classes,). The loss is 0 or 1: accuracy is the share of right answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError, BadField, ConfigError, ManifestError
from hawkvision.core.types import LOGITS, LabelledClass, Logits, Prediction
from hawkvision.models.image_sets.labelled_images import Annotation
from hawkvision.tasks import class_scores
from hawkvision.tasks.class_scores import ROUNDING, Score, log_probabilities, softmax
from hawkvision.tasks.kind import Output, TaskKind, Tensors, TensorSpec, ToImage, Weights, WireTensor

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


def _from_classes(classes: Iterable[tuple[int, float]], labels: Sequence[str]) -> Classification:
    """The prediction of class indices and probabilities, most probable first."""
    return Classification(tuple([LabelledClass(labels[index], index, sure) for index, sure in classes]))


def _to_reply(prediction: Classification) -> dict[str, Any]:
    """The list without labels."""
    return {"top_k": [{"index": each.index, "confidence": each.confidence} for each in prediction.top_k]}


def _from_reply(reply: bytes, labels: Sequence[str]) -> Classification:
    """The inverse of `_to_reply`.

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
    return _from_classes(((each.index, each.confidence) for each in top_k), labels)


def _from_compared(reply: bytes, labels: Sequence[str]) -> Classification:
    """A prediction of the field `index` alone. The confidence is unknown, and stated as 0.

    Raises:
        msgspec.ValidationError, ValueError: naming what is malformed.
    """
    index = msgspec.json.decode(reply, type=dict[str, Any]).get("index")
    if type(index) is not int or not 0 <= index < len(labels):
        raise ValueError(f"index: expected 0 to {len(labels) - 1}, got {index!r}")
    return _from_classes([(index, 0.0)], labels)


def _to_tensors(predictions: Sequence[Classification], ranked: int | None) -> Mapping[str, WireTensor]:
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


class ClassificationKind(TaskKind[Classification]):
    """See the module."""

    name: ClassVar[str] = "classification"
    prediction = Classification
    scores: tuple[str, ...] = tuple(each.value for each in Score)
    agreement_bounds_drop: ClassVar[bool] = True
    one_class: ClassVar[bool] = True
    binary: ClassVar[bool] = True
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = TENSORS

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; there are no options."""
        super().__init__(labels, options)
        self.refuse_unknown_options(())
        if len(self.labels) < 2:
            raise ManifestError(f"kind 'classification': expected at least two labels, got {len(self.labels)}")

    def outputs(self, tensors: Tensors, temperature: float) -> list[Output]:
        """Probabilities (classes,) of logits (n, classes)."""
        return list(softmax(self._logits(tensors), temperature))

    def _logits(self, tensors: Tensors) -> Logits:
        logits = tensors.get(LOGITS)
        if logits is None or logits.ndim != 2 or logits.shape[1] != len(self.labels):
            found = "none" if logits is None else str(logits.shape)
            raise BackendError(f"tensor {LOGITS!r}: expected (n, {len(self.labels)}), got {found}")
        return logits

    def combine(
        self,
        members: Sequence[Output],
        weights: Weights,  # noqa: ARG002 - members weigh the same
        temperature: float,
    ) -> Output:
        """The mean of the members' probabilities; weights are not used."""
        combined: Output = class_scores.average([member[np.newaxis] for member in members], temperature)[0]
        return combined

    def raw(self, tensors: Tensors) -> list[Output]:
        """The logits (classes,)."""
        return list(self._logits(tensors))

    def calibrated(self, raw: Sequence[Output], temperature: float) -> list[Output]:
        """See `TaskKind.calibrated`."""
        return list(softmax(np.asarray(raw), temperature))

    def raw_of(self, outputs: Sequence[Output]) -> list[Output]:
        """See `TaskKind.raw_of`."""
        return list(log_probabilities(np.asarray(outputs)))

    def tempered(self, raw: Sequence[Output], temperature: float) -> list[Output]:
        """See `TaskKind.tempered`."""
        return list(class_scores.tempered(np.asarray(raw), temperature))

    def calibrated_after(self, raw: Sequence[Output], before: float, temperature: float) -> list[Output]:
        """See `TaskKind.calibrated_after`."""
        return self.calibrated(self.tempered(raw, before), temperature)

    def recalibrated(self, outputs: Sequence[Output], temperature: float) -> list[Output]:
        """See `TaskKind.recalibrated`."""
        return self.calibrated(self.raw_of(outputs), temperature)

    def negative_log_likelihood(self, raw: Sequence[Output], truths: Sequence[Any], temperature: float) -> float:
        """The mean negative logarithm of the labels' probabilities."""
        from scipy.special import log_softmax  # edge nodes do without SciPy

        wide = np.asarray(raw, np.float64)
        return float(-log_softmax(wide / temperature, axis=1)[np.arange(len(wide)), np.asarray(truths)].mean())

    def decided(self, known: Sequence[Output], missing: int, margin: float = 1.0) -> bool:
        """Whether the first class leads by more than the missing members can make up."""
        if not known:
            return False
        total: Output = np.asarray(known, np.float32).sum(axis=0, keepdims=True)
        return class_scores.decided(total, missing, margin * ROUNDING)

    def score(self, output: Output, kind: str) -> float:
        """The largest probability, or its lead over the second largest."""
        return float(class_scores.score(output[np.newaxis], Score(kind))[0])

    def predict(self, output: Output, limit: int) -> Classification:
        """The `limit` most probable classes."""
        return self.from_classes((int(i), float(output[i])) for i in class_scores.top_classes(output, limit))

    def from_classes(self, found: Iterable[tuple[int, float]]) -> Classification:
        """The prediction of class indices and probabilities, most probable first."""
        return _from_classes(found, self.labels)

    def loss(self, prediction: Classification, truth: Any) -> float:
        """1 for another class than the label."""
        return float(prediction.index != int(truth))

    def disagreement(self, prediction: Classification, reference: Classification) -> float:
        """1 for another class than the reference's."""
        return float(prediction.index != reference.index)

    def confidence(self, prediction: Classification) -> float:
        """The probability of the most probable class."""
        return prediction.confidence

    def judge(self, output: Output, limit: int, score: str, temperature: float = 1.0) -> tuple[Classification, float]:
        """See `TaskKind.judge`."""
        return self._judged(log_probabilities(output), limit, score, temperature)

    def judge_tensors(
        self,
        tensors: Tensors,
        row: int,
        limit: int,
        score: str,
        temperature: float,
        before: float = 1.0,
        to_image: ToImage | None = None,  # noqa: ARG002 - classes are in no place
    ) -> tuple[Classification, float]:
        """See `TaskKind.judge_tensors`."""
        return self._judged(tensors[LOGITS][row], limit, score, temperature, before)

    def _judged(
        self, logits: Logits, limit: int, score: str, temperature: float, before: float = 1.0
    ) -> tuple[Classification, float]:
        margin = score == Score.MARGIN
        indices, sure = class_scores.most_probable(logits, temperature, max(2, limit) if margin else limit, before)
        prediction = self.from_classes(zip(indices[:limit], sure, strict=False))
        return prediction, float(np.float32(sure[0]) - np.float32(sure[1])) if margin else sure[0]

    def stated(self, prediction: Classification) -> str:
        """The name of the class."""
        return prediction.label

    def read_label(self, label: Any) -> int:
        """A class by its name or index."""
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.labels):
            return label
        raise BadField(
            f"label: expected the name or index of one of {len(self.labels)} classes, got {str(label)[:60]!r}"
        )

    def encode_reply(self, prediction: Classification) -> dict[str, Any]:
        """See `TaskKind.encode_reply`."""
        return _to_reply(prediction)

    def decode_reply(self, reply: bytes) -> Classification:
        """See `TaskKind.decode_reply`."""
        return _from_reply(reply, self.labels)

    def encode_compared(self, prediction: Classification) -> dict[str, Any]:
        """The index of the most probable class."""
        return {"index": prediction.index}

    def decode_compared(self, reply: bytes) -> Classification:
        """See `TaskKind.decode_compared`."""
        return _from_compared(reply, self.labels)

    def tensors(self, predictions: Sequence[Classification], ranked: int | None = None) -> Mapping[str, WireTensor]:
        """See `TaskKind.tensors`."""
        return _to_tensors(predictions, ranked)

    def truth(self, annotation: Annotation) -> int:
        """The class of an image that has only one."""
        if annotation.boxes is not None or len(annotation.classes) != 1:
            what = "boxes" if annotation.boxes is not None else f"{len(annotation.classes)} classes"
            raise ConfigError(f"kind {self.name!r} needs one class per image, got {what}")
        return int(annotation.classes[0])

    def score_all(self, outputs: Sequence[Output], kind: str) -> NDArray[np.float64]:
        """See `TaskKind.score_all`."""
        return class_scores.score(np.asarray(outputs), Score(kind)).astype(np.float64)

    def losses(self, outputs: Sequence[Output], truths: Iterable[Any]) -> NDArray[np.float64]:
        """See `TaskKind.losses`; for many images at once."""
        return np.asarray(_classes(outputs) != np.asarray(list(truths)), np.float64)

    def disagreements(self, outputs: Sequence[Output], references: Sequence[Output]) -> NDArray[np.float64]:
        """See `TaskKind.disagreements`; for many images at once."""
        return np.asarray(_classes(outputs) != _classes(references), np.float64)


def _classes(outputs: Sequence[Output]) -> NDArray[np.intp]:
    found: NDArray[np.intp] = np.asarray(outputs).argmax(axis=1)
    return found
