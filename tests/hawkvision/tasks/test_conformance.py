"""All built-in kinds keep the contract of kinds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st

from hawkvision.tasks.classification import ClassificationKind
from hawkvision.tasks.counting import CountingKind
from hawkvision.tasks.detection import DetectedObject, Detection, DetectionKind
from hawkvision.tasks.kind import TaskKind, Tensors, Truth
from hawkvision.tasks.multi_label import MultiLabelKind
from hawkvision.testing import TaskKindConformance
from tests.hawkvision.tasks.drawn import box_tensors, logits, true_boxes

LABELS = ("person", "car", "bus")


class TestClassification(TaskKindConformance):
    def make_kind(self) -> TaskKind[Any]:
        return ClassificationKind(LABELS, {})

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        return logits(n, len(LABELS))

    def truths(self) -> st.SearchStrategy[Truth]:
        return st.integers(0, len(LABELS) - 1)


class TestDetection(TaskKindConformance):
    fusion_tolerance: ClassVar[float] = 1.0
    """Boxes that overlap each other may be fused."""

    def make_kind(self) -> TaskKind[Any]:
        return DetectionKind(LABELS, {"threshold": 0.4})

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        return box_tensors(n, len(LABELS))

    def truths(self) -> st.SearchStrategy[Truth]:
        return true_boxes(len(LABELS))

    def counterexample(self) -> tuple[Detection, Detection, Truth]:
        """Of two objects, one found only the one that is none, the other both."""
        wrong, right = ((0.0, 0.0, 0.2, 0.2), (0.5, 0.5, 0.9, 0.9))
        objects = [DetectedObject("person", 0, 0.9, each) for each in (wrong, right)]
        return Detection((objects[0],), 0.9), Detection(tuple(objects), 0.9), (np.array([right]), np.array([0]))


class TestMultiLabel(TaskKindConformance):
    def make_kind(self) -> TaskKind[Any]:
        return MultiLabelKind(LABELS, {})

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        return logits(n, len(LABELS))

    def truths(self) -> st.SearchStrategy[Truth]:
        return st.sets(st.integers(0, len(LABELS) - 1)) | true_boxes(len(LABELS))


class TestMultiLabelOfBoxes(TestMultiLabel):
    def make_kind(self) -> TaskKind[Any]:
        return MultiLabelKind(LABELS, {"threshold": 0.3, "pool": "noisy_or"})

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        return box_tensors(n, len(LABELS))


class TestCounting(TaskKindConformance):
    fusion_tolerance: ClassVar[float] = 1.0

    def make_kind(self) -> TaskKind[Any]:
        groups = {"person": ["person"], "vehicle": ["car", "bus"]}
        return CountingKind(LABELS, {"groups": groups, "max_error": 3})

    def tensors(self, n: int) -> st.SearchStrategy[Tensors]:
        return box_tensors(n, len(LABELS))

    def truths(self) -> st.SearchStrategy[Truth]:
        number = st.integers(0, 9)
        return true_boxes(len(LABELS)) | st.fixed_dictionaries({"person": number, "vehicle": number})


class TestCountingInRegions(TestCounting):
    def make_kind(self) -> TaskKind[Any]:
        regions = {"left": [0, 0, 0.5, 1], "right": [0.5, 0, 1, 1]}
        threshold = {"person": 0.6, "vehicle": 0.3}
        groups = {"person": ["person"], "vehicle": ["car", "bus"]}
        return CountingKind(LABELS, {"groups": groups, "max_error": 2, "regions": regions, "threshold": threshold})

    def truths(self) -> st.SearchStrategy[Truth]:
        counts = st.fixed_dictionaries({"person": st.integers(0, 9), "vehicle": st.integers(0, 9)})
        return true_boxes(len(LABELS)) | st.fixed_dictionaries({"left": counts, "right": counts})
