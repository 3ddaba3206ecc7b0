"""Counting: how many objects of each group are in an image, or in each of its regions.

An output is boxes (`hawkvision.tasks.boxes.rows`). An object is in a region if the middle of its box is. The
prediction is the number of boxes from a threshold of their score on. The loss is min(1, |error| / C), the mean over
regions and groups, which is a metric, so that agreement with the reference bounds an accuracy drop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.errors import BadField, ManifestError
from hawkvision.core.types import Prediction
from hawkvision.tasks.box_kind import BoxKind
from hawkvision.tasks.boxes.rows import CLASS, MEMBERS, MOST, SCORE, is_true_boxes
from hawkvision.tasks.kind import Output, TensorSpec, Truth, WireTensor

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]


class Counts(Prediction, frozen=True):
    """The number of objects of each group in each region."""

    counts: Annotated[
        dict[str, dict[str, Count]], Meta(description="The number of objects, by region and by group of classes.")
    ]
    confidence: Annotated[
        Probability,
        Meta(description="1 − the expected loss by the scores of all boxes. It ranks images, and is not calibrated."),
    ]

    def summary(self) -> str:
        """See `Prediction.summary`: the counts of each region."""
        regions = {name: ", ".join(f"{n} {group}" for group, n in found.items()) for name, found in self.counts.items()}
        return "; ".join(regions.values() if len(regions) == 1 else (f"{name}: {n}" for name, n in regions.items()))

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        return cls({"image": {"person": 3, "vehicle": 1}}, 0.88)


WHOLE: Final[Mapping[str, tuple[float, float, float, float]]] = {"image": (0.0, 0.0, 1.0, 1.0)}
"""The region of tasks that name none."""


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: Annotated[dict[str, tuple[str, ...]], Meta(min_length=1, max_length=64)]
    """The labels whose objects are counted together, by the name of the group."""
    max_error: Annotated[float, Meta(gt=0.0)]
    """C: the error of a count from which on the loss is 1."""
    regions: Annotated[dict[str, tuple[Probability, Probability, Probability, Probability]], Meta(max_length=64)] = {}
    """Rectangles x1, y1, x2, y2, in fractions of the image, by the name of the region."""
    threshold: Annotated[float, Meta(gt=0.0, le=1.0)] | dict[str, Annotated[float, Meta(gt=0.0, le=1.0)]] = 0.5
    """The score from which on a box counts; one, or one per group."""


class CountingKind(BoxKind[Counts]):
    """See the module."""

    name: ClassVar[str] = "counting"
    prediction = Counts
    scores: tuple[str, ...] = ("agreement", "spread")
    agreement_bounds_drop: ClassVar[bool] = True
    wire_tensors: ClassVar[Mapping[str, TensorSpec]] = {
        "counts": TensorSpec("INT64", (-1, -1, -1)),
        "confidence": TensorSpec("FP32", (-1,)),
    }

    def __init__(self, labels: Sequence[str], options: Mapping[str, Any]) -> None:
        """See `TaskKind`; the options are those of `_Options`."""
        super().__init__(labels, options)
        self._options = read = self.options_as(_Options)
        self._members = {
            group: np.isin(np.arange(len(self.labels)), [self._index(label, group) for label in names])
            for group, names in read.groups.items()
        }
        self._regions = read.regions or WHOLE
        thresholds = read.threshold
        if isinstance(thresholds, dict) and thresholds.keys() != read.groups.keys():
            raise ManifestError(f"options of kind 'counting': threshold: expected one for each of {list(read.groups)}")
        self._thresholds = thresholds if isinstance(thresholds, dict) else dict.fromkeys(read.groups, thresholds)

    def _index(self, label: str, group: str) -> int:
        if label not in self.labels:
            raise ManifestError(f"options of kind 'counting': groups.{group}: no label {label!r}")
        return self.labels.index(label)

    def score(self, output: Output, kind: str) -> float:
        """How sure the counts are.

        `spread`: 1 − the expected loss. `agreement`: the mean of that and of the members' agreement, which is 1 − the
        loss of one's counts against another's, mean over pairs; with a single model the same as `spread`. Members that
        count the same are common, and the expected loss ranks the images for which they do.
        """
        found, members = self._expected(output), output.shape[1] - MEMBERS
        if kind == "agreement" and members > 1:
            counts = [self._counts(output, MEMBERS + member) for member in range(members)]
            pairs = [(a, b) for at, a in enumerate(counts) for b in counts[:at]]
            found = (found + 1.0 - math.fsum(self._distance(a, b) for a, b in pairs) / len(pairs)) / 2.0
        return float(np.float32(found))

    def _places(self, output: Output) -> Iterator[tuple[str, str, Output]]:
        """The boxes of each region and group."""
        x, y = (output[:, 0] + output[:, 2]) / 2, (output[:, 1] + output[:, 3]) / 2
        labels = output[:, CLASS].astype(np.intp)
        of_groups = {group: member[labels] for group, member in self._members.items()}
        for region, (x1, y1, x2, y2) in self._regions.items():
            inside = (x >= x1) & (x <= x2) & (y >= y1) & (y <= y2)
            for group, of_group in of_groups.items():
                yield region, group, output[inside & of_group]

    def _counts(self, output: Output, column: int = SCORE) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {region: {} for region in self._regions}
        for region, group, rows in self._places(output):
            found[region][group] = int((rows[:, column] >= self._thresholds[group]).sum())
        return found

    def _expected(self, output: Output) -> float:
        """1 − the expected loss, where each box is right with its probability and independent of the others."""
        losses = []
        for _, group, rows in self._places(output):
            count = int((rows[:, SCORE] >= self._thresholds[group]).sum())
            chance = number_distribution(rows[:, SCORE])
            errors = np.minimum(1.0, np.abs(np.arange(len(chance)) - count) / self._options.max_error)
            losses.append(math.fsum((chance * errors).tolist()))
        return min(1.0, max(0.0, 1.0 - math.fsum(losses) / len(losses)))

    def predict(self, output: Output, limit: int) -> Counts:  # noqa: ARG002 - there are no alternatives
        """The number of boxes of each region and group."""
        return Counts(self._counts(output), round(self._expected(output), 6))

    def loss(self, prediction: Counts, truth: Truth) -> float:
        """min(1, |error| / C), mean over regions and groups.

        The truth is boxes (`TrueBoxes`), or counts: {region: {group: number}}, or {group: number} of one region.
        """
        return self._distance(prediction.counts, self._true_counts(truth))

    def _true_counts(self, truth: Truth) -> Mapping[str, Mapping[str, int]]:
        if is_true_boxes(truth):
            boxes, classes = truth
            rows = np.column_stack([boxes, np.ones(len(boxes)), classes]).astype(np.float32)
            return self._counts(rows.reshape(-1, MEMBERS))
        if truth.keys() == self._members.keys() and len(self._regions) == 1:
            return {next(iter(self._regions)): truth}
        counts: Mapping[str, Mapping[str, int]] = truth
        return counts

    def _distance(self, one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> float:
        regions, groups = self._regions, self._members
        errors = [min(1.0, abs(one[r][g] - other[r][g]) / self._options.max_error) for r in regions for g in groups]
        return math.fsum(errors) / len(errors)

    def stated(self, prediction: Counts) -> Any:
        """The counts; of one group in one region the number alone."""
        counts = prediction.counts
        (first, *others) = counts.values()
        if others:
            return counts
        return first if len(first) > 1 else next(iter(first.values()))

    def read_label(self, label: Any) -> Mapping[str, Mapping[str, int]]:
        """Counts {region: {group: number}}; {group: number} of one region; a number of one group in one region."""
        groups, regions = list(self._members), list(self._regions)
        if not isinstance(label, dict) and len(groups) == 1:
            label = {groups[0]: label}
        if isinstance(label, dict) and label.keys() == self._members.keys() and len(regions) == 1:
            label = {regions[0]: label}
        try:
            read = msgspec.convert(label, dict[str, dict[str, Count]])
        except msgspec.ValidationError as error:
            raise BadField(f"label: {error}") from None
        if {region: counts.keys() for region, counts in read.items()} != dict.fromkeys(regions, self._members.keys()):
            raise BadField(f"label: expected the number of {', '.join(groups)} in each of {', '.join(regions)}")
        return read

    def disagreement(self, prediction: Counts, reference: Counts) -> float:
        """min(1, |difference| / C), mean over regions and groups."""
        return self._distance(prediction.counts, reference.counts)

    def confidence(self, prediction: Counts) -> float:
        """1 − the expected loss."""
        return prediction.confidence

    def decode_reply(self, reply: bytes) -> Counts:
        """See `TaskKind.decode_reply`."""
        read = super().decode_reply(reply)
        expected = dict.fromkeys(self._regions, self._members.keys())
        if {region: groups.keys() for region, groups in read.counts.items()} != expected:
            raise ValueError(f"counts: expected {list(self._members)} in each of {list(self._regions)}")
        return read

    def tensors(self, predictions: Sequence[Counts], ranked: int | None = None) -> Mapping[str, WireTensor]:  # noqa: ARG002
        """See `TaskKind.tensors`: of each image, the counts of each region and group, in the manifest's order."""
        n, places = len(predictions), [(region, group) for region in self._regions for group in self._members]
        counts = [each.counts[region][group] for each in predictions for region, group in places]
        return {
            "counts": WireTensor((n, len(self._regions), len(self._members)), counts),
            "confidence": WireTensor((n,), [each.confidence for each in predictions]),
        }


def number_distribution(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """The distribution (n + 1,) of how many of n independent events happen (the Poisson binomial)."""
    chance = np.zeros(len(probabilities) + 1)
    chance[0] = 1.0
    for p in probabilities.tolist():
        chance[1:] = chance[1:] * (1.0 - p) + chance[:-1] * p
        chance[0] *= 1.0 - p
    return chance
