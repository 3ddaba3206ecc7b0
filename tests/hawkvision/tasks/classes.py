"""Classification for tests: kinds with any number of classes, predictions, and replies as an edge node reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from hawkvision.core.escalation_api import EscalationReply
from hawkvision.core.types import LabelledClass, Prediction
from hawkvision.models.manifest import Manifest
from hawkvision.tasks.classification import Classification, ClassificationKind
from hawkvision.tasks.serving import decode_reply, encode_reply


@cache
def classes(number: int) -> ClassificationKind:
    """A kind of so many classes, which are labelled by their indices."""
    return ClassificationKind([str(index) for index in range(number)], {})


TEN: Final = classes(10)


def classes_of(manifest: Manifest) -> ClassificationKind:
    """A kind with as many classes as the manifest has."""
    return classes(manifest.classes)


def write_labels(folder: Path, number: int = 10) -> None:
    """The label file of such a kind."""
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in classes(number).labels))


def predicted(*found: tuple[int, float]) -> Classification:
    """The prediction of these class indices and confidences."""
    return classes(1000).from_classes(found)


def read_reply(body: bytes | memoryview) -> EscalationReply:
    """A reply of up to a thousand classes."""
    return decode_reply(classes(1000), bytes(body))


def write_reply(reply: EscalationReply) -> bytes:
    """A reply as the datacenter writes it."""
    return encode_reply(classes(1000), reply)


def top_k(reply: EscalationReply) -> tuple[LabelledClass, ...]:
    """The classes of a reply."""
    return classes_in(reply.prediction)


def classes_in(prediction: Prediction) -> tuple[LabelledClass, ...]:
    """The classes of a prediction."""
    assert isinstance(prediction, Classification)
    return prediction.top_k
