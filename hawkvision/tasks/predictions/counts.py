"""Predictions of counting: numbers of objects."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from msgspec import Meta

from hawkvision.core.types import Prediction
from hawkvision.tasks.boxes.rows import MOST

Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]


class Counts(Prediction, frozen=True):
    """The number of objects of each group in each region."""

    counts: Annotated[
        dict[str, dict[str, Count]], Meta(description="The number of objects, by region and by group of classes.")
    ]
    confidence: Annotated[
        Probability, Meta(description="1 − the expected loss, by the calibrated probabilities of all boxes.")
    ]

    def summary(self) -> str:
        """See `Prediction.summary`: the counts of each region."""
        regions = {name: ", ".join(f"{n} {group}" for group, n in found.items()) for name, found in self.counts.items()}
        return "; ".join(regions.values() if len(regions) == 1 else (f"{name}: {n}" for name, n in regions.items()))

    @classmethod
    def example(cls) -> Self:
        """See `Prediction.example`."""
        return cls({"image": {"person": 3, "vehicle": 1}}, 0.88)
