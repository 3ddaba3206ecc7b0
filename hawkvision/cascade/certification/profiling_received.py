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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.certificate_rounding import write_certificate, written_curve
from hawkvision.cascade.certification.predictions import accuracies, in_random_order, measure_accuracy, select
from hawkvision.cascade.certification.profile import Certificate, ReceivedCondition
from hawkvision.cascade.certification.profiling import rounded_path
from hawkvision.cascade.certification.threshold_order import Path, measure_curve
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.guarantee.certificate import certify, drop_bound
from hawkvision.guarantee.evidence import (
    BEST_ONLY,
    Evidence,
    StageEvidence,
    Thresholds,
    ThresholdStep,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.tasks.kind import Output, TaskKind, Truth

DELTA: Final = 0.05
CURVE_KNOTS: Final = 17
"""Fewer than for whole images: there are twenty conditions, and controllers interpolate."""


@dataclass(frozen=True, slots=True)
class ReceivedPredictions:
    """Predictions for n images in one condition, and for their originals."""

    kind: TaskKind[Any]
    edge: Sequence[Output]
    """The edge's `TaskKind.raw` for the images as received."""
    best: Sequence[Output]
    """The reference stage's outputs for the images as received."""
    reference: Sequence[Output]
    """The reference stage's outputs for the whole originals."""
    truths: Sequence[Truth]
    temperature: float = 1.0
    """The edge stage's, for kinds that have none to fit."""

    def part(self, chosen: NDArray[np.intp]) -> ReceivedPredictions:
        """The images `chosen`, in that order."""
        return ReceivedPredictions(
            self.kind,
            select(self.edge, chosen),
            select(self.best, chosen),
            select(self.reference, chosen),
            select(self.truths, chosen),
            self.temperature,
        )

    def shuffled(self) -> ReceivedPredictions:
        """The same images in a random order."""
        return self.part(in_random_order(np.arange(len(self.truths))))

    def edge_stage(self, score: str, temperature: float) -> StageEvidence:
        """The edge compared with the reference stage on the same received image."""
        kind, outputs = self.kind, self.kind.calibrated(self.edge, temperature)
        return StageEvidence(
            kind.score_all(outputs, score),
            kind.losses(outputs, self.truths),
            kind.disagreements(outputs, self.best),
        )


def profile_received(
    planned: ReceivedPredictions,
    certifying: ReceivedPredictions,
    *,
    score: str,
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
        score: the pair's.
        min_quality: at which the images were encoded.
        min_received_fraction: the smallest received fraction.
        drops: ε to certify; those that cannot be certified are left out.
        believed: whether the edge's answers may be accepted in this condition.
        data_sha256: over the images as received.
        delta: probability that a certificate is wrong.
    """
    kind, certifying = planned.kind, certifying.shuffled()
    temperature = round(fit_temperature(kind, planned.edge, planned.truths, planned.temperature), 6)
    edge = planned.edge_stage(score, temperature)
    best_losses = kind.losses(planned.best, planned.truths)
    two = rounded_path(two_levels(threshold_grid(edge.scores)))
    three = (BEST_ONLY, *(Thresholds(step.edge, -math.inf) for step in two))
    kept, accepting = (
        _against_original(certifying, score, temperature),
        _against_received(certifying, score, temperature),
    )
    rising = sorted(set(drops))
    return ReceivedCondition(
        min_quality=min_quality,
        min_received_fraction=min_received_fraction,
        edge_temperature=temperature,
        edge_accuracy=measure_accuracy(_right(kept.edge.losses, certifying), data_sha256),
        best_accuracy=measure_accuracy(accuracies(kind, certifying.best, certifying.truths), data_sha256),
        curve=written_curve(measure_curve(edge, best_losses, CURVE_KNOTS)),
        best=_bounded(kept, Thresholds(math.inf, -math.inf), delta),
        fast=_bounded(kept, Thresholds(-math.inf, -math.inf), delta) if believed else None,
        certificates=_certificates(kept, three, rising, delta) if believed else (),
        accept_certificates=_certificates(accepting, two, rising, delta) if believed else (),
    )


def certify_received(
    design: ReceivedCondition,
    certifying: ReceivedPredictions,
    *,
    score: str,
    drops: Iterable[float],
    data_sha256: str,
    delta: float,
) -> ReceivedCondition:
    """The condition with accuracies and certificates from `certifying`; its fitted values and plan stay.

    Args:
        design: the condition whose temperature, curve and thresholds were fixed without these images.
        certifying: the certification images that reached this condition.
        score: the pair's.
        drops: ε to certify; those that cannot be certified are left out.
        data_sha256: over the images as received.
        delta: probability that a certificate is wrong.
    """
    certifying = certifying.shuffled()
    order, believed, temperature = design.thresholds(), design.fast is not None, design.edge_temperature
    two = tuple(Thresholds(value) for value in (math.inf, *order, -math.inf))
    three = (BEST_ONLY, *(Thresholds(step.edge, -math.inf) for step in two))
    kept, accepting = (
        _against_original(certifying, score, temperature),
        _against_received(certifying, score, temperature),
    )
    rising = sorted(set(drops))
    return msgspec.structs.replace(
        design,
        order=order,
        edge_accuracy=measure_accuracy(_right(kept.edge.losses, certifying), data_sha256, delta),
        best_accuracy=measure_accuracy(
            accuracies(certifying.kind, certifying.best, certifying.truths), data_sha256, delta
        ),
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


def _right(losses: NDArray[np.float64], predictions: ReceivedPredictions) -> NDArray[np.bool_] | NDArray[np.float64]:
    return losses == 0.0 if predictions.kind.binary else 1.0 - losses


def _against_original(predictions: ReceivedPredictions, score: str, temperature: float) -> Evidence:
    kind = predictions.kind
    escalated = StageEvidence(
        np.zeros(len(predictions.truths)),
        kind.losses(predictions.best, predictions.truths),
        kind.disagreements(predictions.best, predictions.reference),
    )
    reference = kind.losses(predictions.reference, predictions.truths)
    return Evidence(predictions.edge_stage(score, temperature), reference, escalated, binary=kind.binary)


def _against_received(predictions: ReceivedPredictions, score: str, temperature: float) -> Evidence:
    kind = predictions.kind
    best = kind.losses(predictions.best, predictions.truths)
    return Evidence(predictions.edge_stage(score, temperature), best, binary=kind.binary)


def _certificates(sample: Evidence, path: Path, drops: list[float], delta: float) -> tuple[Certificate, ...]:
    """For each certified threshold the certificate with the smallest ε; none for escalating everything."""
    found: list[Certificate] = []
    last = math.inf
    for max_drop in drops:
        step = certify(sample, path, max_drop, delta)
        if step.thresholds.edge < last:
            last = step.thresholds.edge
            found.append(_certificate(sample, step, max_drop, delta))
    return tuple(found)


def _bounded(sample: Evidence, thresholds: Thresholds, delta: float) -> Certificate:
    """The certificate of one pair of thresholds, with the bound on its drop as ε."""
    step = next(sweep(sample, (thresholds,)))
    bound = drop_bound(sample, step, delta)
    return _certificate(sample, step, math.ceil(bound * 1e4) / 1e4, delta)


def _certificate(sample: Evidence, step: ThresholdStep, max_drop: float, delta: float) -> Certificate:
    """The certificate as profiles write it: the reference stage answers all that the edge does not."""
    made = write_certificate(sample, step, max_drop, delta)
    return msgspec.structs.replace(
        made, intermediate_threshold="always", to_best=made.escalation, intermediate_watch=None
    )
