"""The numbers of `hawkvision report calibration`, measured on images that nothing was fitted on.

They come from a profile and its stages' predictions on a labelled set. Reliability is measured on certification and
held-out images, accuracy drops on held-out images alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import clopper_pearson, mean_interval
from hawkvision.cascade.certification.certificate import (
    Sample,
    Thresholds,
    ThresholdStep,
    certify,
    losses,
    sweep,
)
from hawkvision.cascade.certification.predictions import Scored, Split, StagePredictions, accuracies, make_sample
from hawkvision.cascade.certification.profile import Certificate, Pair, Profile, threshold_value
from hawkvision.cascade.certification.profiling import costs_of, paths_of
from hawkvision.cascade.certification.threshold_order import expected_cost
from hawkvision.cascade.confidence.calibration import expected_calibration_error
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind, Truth

BINS: Final = 10
INTERVAL_SIGMAS: Final = 1.96
"""Factor for 95 % intervals of a mean drop, which is a mean of thousands of values."""


@dataclass(frozen=True, slots=True)
class LabelledPredictions:
    """The predictions of every stage for some images as each tier serves them, and the labels."""

    kind: TaskKind[Any]
    edge: Mapping[str, StagePredictions]
    datacenter: Mapping[str, StagePredictions]
    truths: Sequence[Truth]

    def sample(self, pair: Pair, chosen: NDArray[np.intp]) -> Sample:
        """The images `chosen`, scored as the pair is."""
        between = pair.intermediate
        return make_sample(
            self.kind, Scored(self.edge[pair.edge], pair.score), self.datacenter[pair.best], self.truths, chosen,
            None if between is None else Scored(self.datacenter[between.name], between.score),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReliabilityBins:
    """Confidence against accuracy, in equally wide bins; empty bins are left out. All arrays are (bins,)."""

    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    """Ends of the exact 95 % interval of the accuracy."""
    counts: NDArray[np.intp]
    error: float
    """Expected calibration error, 0..1."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """The calibration of one stage's probabilities, without and with its temperature."""

    stage: str
    temperature: float
    n: int
    before: ReliabilityBins
    after: ReliabilityBins


@dataclass(frozen=True, slots=True)
class ThresholdsResult:
    """The results of one choice of thresholds on the held-out images."""

    escalation: float
    to_best: float
    drop: float
    margin: float
    """Half the 95 % interval of the drop."""

    @property
    def low(self) -> float:
        """The lower end of the drop's interval."""
        return self.drop - self.margin

    def misses(self, max_drop: float) -> bool:
        """Whether the drop is larger than that, beyond doubt."""
        return self.low > max_drop


@dataclass(frozen=True, slots=True)
class TargetResult:
    """One target: its certificate, and the results of certified and plug-in thresholds on held-out images.

    The plug-in threshold is the lowest whose observed drop on the certification images is within the target.
    """

    certificate: Certificate
    measured: ThresholdsResult
    plug_in: ThresholdsResult

    @property
    def certified(self) -> bool:
        """Whether it is certified by a test, and a stage below the reference answers any image."""
        return self.certificate.basis != "profile" and self.certificate.to_best < 1.0

    @property
    def exceeded(self) -> bool:
        """Whether the drop on held-out images is larger than certified, possibly by chance."""
        return self.measured.drop > self.certificate.max_drop

    @property
    def broken(self) -> bool:
        """Whether it is larger beyond its 95 % interval."""
        return self.measured.misses(self.certificate.max_drop)

    @property
    def plug_in_exceeded(self) -> bool:
        """`exceeded`, of the plug-in threshold."""
        return self.plug_in.drop > self.certificate.max_drop


@dataclass(frozen=True, slots=True)
class LevelCost:
    """One target's cost in milliseconds of one core per image; each number of levels is certified with the whole δ."""

    max_drop: float
    two: float
    three: float


@dataclass(frozen=True, slots=True)
class PairFindings:
    """One edge stage backed by the best: its frontier on held-out images, and its targets."""

    pair: Pair
    n: int
    edge_accuracy: float
    best_accuracy: float
    oracle_escalation: float
    """Share of images that the reference stage gets more right, which an oracle would escalate."""
    frontier: tuple[ThresholdsResult, ...]
    """Along the path of two levels."""
    kept: tuple[TargetResult, ...]
    """Rising in the drop; `balanced` and `fast` among them."""
    costs: tuple[LevelCost, ...]
    """Empty where there is no intermediate stage."""

    @property
    def gap(self) -> float:
        """The drop of never escalating."""
        return self.best_accuracy - self.edge_accuracy

    @property
    def certified(self) -> tuple[TargetResult, ...]:
        """The certified targets."""
        return tuple(kept for kept in self.kept if kept.certified)

    @property
    def half(self) -> TargetResult | None:
        """The certified target nearest to half the gap; None if nothing is certified."""
        return min(self.certified, key=lambda kept: abs(kept.certificate.max_drop - self.gap / 2), default=None)


@dataclass(frozen=True, slots=True)
class StageMeasures:
    """What a kind measures of a stage beside its accuracy (`TaskKind.measures`), by name."""

    stage: str
    figures: Mapping[str, float]


def reliability(
    name: str,
    temperature: float,
    kind: TaskKind[Any],
    before: Sequence[Output],
    after: Sequence[Output],
    truths: Sequence[Truth],
) -> Reliability:
    """Calibration of one stage's first score, on images that its temperature was not fitted on.

    The outputs `before` are those at temperature 1.
    """
    return Reliability(name, temperature, len(truths), _bins(kind, before, truths), _bins(kind, after, truths))


def pair_findings(profile: Profile, pair: Pair, predictions: LabelledPredictions, split: Split) -> PairFindings:
    """A pair's certificates, and their results on held-out images."""
    held_out, certifying = (predictions.sample(pair, part) for part in (split.held_out, split.certify))
    condition = pair.conditions[0]
    path = paths_of(pair)[0]
    observed = list(sweep(certifying, path))
    certificates = {c.max_drop: c for c in (*condition.certificates, condition.balanced)}
    certificates = {drop: c for drop, c in certificates.items() if drop < condition.fast.max_drop}
    certificates[condition.fast.max_drop] = condition.fast
    kept = tuple(
        TargetResult(
            certificate, measure(held_out, _thresholds(certificate)), measure(held_out, _plug_in(observed, drop))
        )
        for drop, certificate in sorted(certificates.items())
    )
    lost = held_out.edge.losses - held_out.reference_losses
    return PairFindings(
        pair,
        len(held_out),
        float(1.0 - held_out.edge.losses.mean()),
        float(1.0 - held_out.reference_losses.mean()),
        float((lost > 0.0).mean()),
        tuple(measure(held_out, thresholds) for thresholds in path),
        kept,
        () if pair.intermediate is None else _level_costs(profile, pair, certifying),
    )


def measure(sample: Sample, thresholds: Thresholds) -> ThresholdsResult:
    """The results of these thresholds on a sample."""
    step = next(sweep(sample, (thresholds,)))
    spread = float(losses(sample, thresholds).std()) / math.sqrt(len(sample))
    return ThresholdsResult(step.escalation, step.to_best, step.drop, INTERVAL_SIGMAS * spread)


def _bins(kind: TaskKind[Any], outputs: Sequence[Output], truths: Sequence[Truth]) -> ReliabilityBins:
    confidence = kind.score_all(outputs, kind.scores[0])
    right = accuracies(kind, outputs, truths)
    place = np.minimum((confidence * BINS).astype(np.intp), BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    filled = np.flatnonzero(counts)
    hits = np.bincount(place, right, BINS)[filled]
    intervals = [_interval(right[place == bin_]) for bin_ in filled]
    return ReliabilityBins(
        np.bincount(place, confidence, BINS)[filled] / counts[filled],
        hits / counts[filled],
        np.array([low for low, _ in intervals]),
        np.array([high for _, high in intervals]),
        counts[filled],
        expected_calibration_error(confidence, right),
    )


def _interval(right: NDArray[np.bool_] | Floats) -> tuple[float, float]:
    """Of the mean, 95 %."""
    if right.dtype == np.bool_:
        return clopper_pearson(int(right.sum()), len(right))
    return mean_interval(right.astype(np.float64))


def _thresholds(certificate: Certificate) -> Thresholds:
    return Thresholds(threshold_value(certificate.threshold), threshold_value(certificate.intermediate_threshold))


def _plug_in(observed: Sequence[ThresholdStep], max_drop: float) -> Thresholds:
    """The last step of the path whose observed drop is within the target, chosen without a test."""
    return next(step.thresholds for step in reversed(observed) if step.drop <= max_drop)


def _level_costs(profile: Profile, pair: Pair, sample: Sample) -> tuple[LevelCost, ...]:
    costs = costs_of(profile, pair)
    condition = pair.conditions[0]

    def cost(step: ThresholdStep) -> float:
        return expected_cost(costs, step)

    found = []
    for certificate in condition.certificates:
        drop, delta = certificate.max_drop, certificate.delta
        two, three = (cost(certify(sample, path, drop, delta, sample.labelled_method, cost)) for path in paths_of(pair))
        found.append(LevelCost(drop, two, three))
    return tuple(found)
