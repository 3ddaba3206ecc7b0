"""Certificates of images that crossed a lossy link, relative to the reference stage on the original images.

`certificate` handles this as three levels:

    edge           the edge stage on the image as received, accepted from τ on
    intermediate   the reference stage on the image as received, always accepted: the result of an escalation
    best           the reference stage on the whole original, which no node has

The path is (τ, −∞) for falling τ, from (+∞, −∞), escalating everything, on. If that first test fails, nothing keeps ε
in this condition. Scores are compared as for whole images. The temperature is fitted again, because networks are
over-confident on images with missing parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import drop_upper_bound
from hawkvision.cascade.certification.certificate import (
    BEST_ONLY,
    Sample,
    StageOutcomes,
    Thresholds,
    ThresholdStep,
    certify,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.cascade.certification.certificate_rounding import write_certificate, written_curve
from hawkvision.cascade.certification.predictions import measure_accuracy
from hawkvision.cascade.certification.profile import Certificate, ReceivedCondition
from hawkvision.cascade.certification.profiling import rounded_path
from hawkvision.cascade.certification.threshold_order import Path, measure_curve
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import Logits, Score
from hawkvision.tasks.class_scores import score, softmax

DELTA: Final = 0.05
CURVE_KNOTS: Final = 17
"""Fewer than for whole images: there are twenty conditions, and controllers interpolate."""


@dataclass(frozen=True, slots=True)
class ReceivedPredictions:
    """Predictions for n images in one condition, and for their originals."""

    edge: Logits
    """(n, classes), on the images as received."""
    best: NDArray[np.intp]
    """(n,) the reference stage's classes for the images as received."""
    reference: NDArray[np.intp]
    """(n,) the reference stage's classes for the whole originals."""
    truth: NDArray[np.integer]

    def part(self, chosen: NDArray[np.intp]) -> ReceivedPredictions:
        """The images `chosen`."""
        return ReceivedPredictions(self.edge[chosen], self.best[chosen], self.reference[chosen], self.truth[chosen])

    def edge_stage(self, kind: Score, temperature: float) -> StageOutcomes:
        """The edge compared with the reference stage on the same received image."""
        probabilities = softmax(self.edge, temperature)
        answers = probabilities.argmax(axis=1)
        return StageOutcomes(score(probabilities, kind).astype(np.float64), answers == self.truth, answers != self.best)


def profile_received(
    planned: ReceivedPredictions,
    certifying: ReceivedPredictions,
    *,
    kind: Score,
    min_quality: int,
    min_received_fraction: float,
    drops: Iterable[float],
    believed: bool,
    data_sha256: str,
    delta: float = DELTA,
) -> ReceivedCondition:
    """Measure one condition: temperature, curve and path on `planned`, accuracies and certificates on `certifying`.

    Args:
        planned: of the profile split.
        certifying: of the certification split.
        kind: the pair's score.
        min_quality: at which the images were encoded.
        min_received_fraction: the smallest received fraction.
        drops: ε to certify; those that cannot be certified are left out.
        believed: whether the edge's answers may be accepted in this condition.
        data_sha256: over the images as received.
        delta: probability that a certificate is wrong.
    """
    temperature = round(fit_temperature(planned.edge, planned.truth), 6)
    edge = planned.edge_stage(kind, temperature)
    best_right = planned.best == planned.truth
    two = rounded_path(two_levels(threshold_grid(edge.scores)))
    three = (BEST_ONLY, *(Thresholds(step.edge, -math.inf) for step in two))
    kept, accepting = _against_original(certifying, kind, temperature), _against_received(certifying, kind, temperature)
    rising = sorted(set(drops))
    return ReceivedCondition(
        min_quality=min_quality,
        min_received_fraction=min_received_fraction,
        edge_temperature=temperature,
        edge_accuracy=measure_accuracy(kept.edge.right, data_sha256),
        best_accuracy=measure_accuracy(certifying.best == certifying.truth, data_sha256),
        curve=written_curve(measure_curve(edge, best_right, CURVE_KNOTS)),
        best=_bounded(kept, Thresholds(math.inf, -math.inf), delta),
        fast=_bounded(kept, Thresholds(-math.inf, -math.inf), delta) if believed else None,
        certificates=_certificates(kept, three, rising, delta) if believed else (),
        accept_certificates=_certificates(accepting, two, rising, delta) if believed else (),
    )


def certify_received(
    design: ReceivedCondition,
    certifying: ReceivedPredictions,
    *,
    kind: Score,
    drops: Iterable[float],
    data_sha256: str,
    delta: float,
) -> ReceivedCondition:
    """The condition with accuracies and certificates from `certifying`; its fitted values and plan stay.

    Args:
        design: the condition whose temperature, curve and thresholds were fixed without these images.
        certifying: the certification images that reached this condition.
        kind: the pair's score.
        drops: ε to certify; those that cannot be certified are left out.
        data_sha256: over the images as received.
        delta: probability that a certificate is wrong.
    """
    order, believed, temperature = design.thresholds(), design.fast is not None, design.edge_temperature
    two = tuple(Thresholds(value) for value in (math.inf, *order, -math.inf))
    three = (BEST_ONLY, *(Thresholds(step.edge, -math.inf) for step in two))
    kept, accepting = _against_original(certifying, kind, temperature), _against_received(certifying, kind, temperature)
    rising = sorted(set(drops))
    return msgspec.structs.replace(
        design,
        order=order,
        edge_accuracy=measure_accuracy(kept.edge.right, data_sha256, delta),
        best_accuracy=measure_accuracy(certifying.best == certifying.truth, data_sha256, delta),
        best=_bounded(kept, Thresholds(math.inf, -math.inf), delta),
        fast=_bounded(kept, Thresholds(-math.inf, -math.inf), delta) if believed else None,
        certificates=_certificates(kept, three, rising, delta) if believed else (),
        accept_certificates=_certificates(accepting, two, rising, delta) if believed else (),
    )


def without_certificates(design: ReceivedCondition) -> ReceivedCondition:
    """The condition as planned by the design, without a guarantee."""

    def plain(certificate: Certificate) -> Certificate:
        return msgspec.structs.replace(certificate, basis="profile")

    return msgspec.structs.replace(
        design,
        order=design.thresholds(),
        best=plain(design.best),
        fast=None if design.fast is None else plain(design.fast),
        certificates=tuple(map(plain, design.certificates)),
        accept_certificates=tuple(map(plain, design.accept_certificates)),
    )


def _against_original(predictions: ReceivedPredictions, kind: Score, temperature: float) -> Sample:
    escalated = StageOutcomes(
        np.zeros(len(predictions.truth)),
        predictions.best == predictions.truth,
        predictions.best != predictions.reference,
    )
    return Sample(predictions.edge_stage(kind, temperature), predictions.reference == predictions.truth, escalated)


def _against_received(predictions: ReceivedPredictions, kind: Score, temperature: float) -> Sample:
    return Sample(predictions.edge_stage(kind, temperature), predictions.best == predictions.truth)


def _certificates(sample: Sample, path: Path, drops: list[float], delta: float) -> tuple[Certificate, ...]:
    """For each certified threshold the certificate with the smallest ε; none for escalating everything."""
    found: list[Certificate] = []
    last = math.inf
    for max_drop in drops:
        step = certify(sample, path, max_drop, delta)
        if step.thresholds.edge < last:
            last = step.thresholds.edge
            found.append(_certificate(step, max_drop, len(sample), delta))
    return tuple(found)


def _bounded(sample: Sample, thresholds: Thresholds, delta: float) -> Certificate:
    """The certificate of one pair of thresholds, with the bound on its drop as ε."""
    step = next(sweep(sample, (thresholds,)))
    bound = drop_upper_bound(step.lost, step.gained, len(sample), delta)
    return _certificate(step, math.ceil(bound * 1e4) / 1e4, len(sample), delta)


def _certificate(step: ThresholdStep, max_drop: float, n: int, delta: float) -> Certificate:
    """The certificate as profiles write it: the reference stage answers all that the edge does not."""
    made = write_certificate(step, max_drop, n, delta)
    return msgspec.structs.replace(
        made, intermediate_threshold="always", to_best=made.escalation, intermediate_watch=None
    )
