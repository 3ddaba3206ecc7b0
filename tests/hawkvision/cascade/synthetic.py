"""A small cascade with known behaviour, for tests that need a profile."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import StagePredictions, split_indices
from hawkvision.cascade.certification.profile import Certificate, Profile, ProfileData, ReceivedCondition, StageProfile
from hawkvision.cascade.certification.profiling import profile_pair, profile_stage
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import Logits
from hawkvision.guarantee.evidence import StageEvidence
from hawkvision.model_zoo.calibration.loss_simulation import Band, measured_condition
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.class_scores import softmax
from hawkvision.tasks.registry import task_kind

SHA = "a" * 64
KIND = task_kind("classification", [str(label) for label in range(10)], {})


def outcomes(scores: NDArray[Any], right: NDArray[Any], differs: NDArray[Any]) -> StageEvidence:
    """A stage's outcomes, from whether it was right and whether it differed from the reference stage."""
    return StageEvidence(scores, 1.0 - right, differs.astype(np.float64))


def make_logits(rng: np.random.Generator, labels: np.ndarray, strength: float, classes: int = 10) -> Logits:
    """Logits whose arg max is right more often the larger `strength`, and surer when right."""
    logits = rng.normal(size=(len(labels), classes))
    logits[np.arange(len(labels)), labels] += strength * rng.gamma(2.0, 0.5, len(labels))
    return (2.0 * logits).astype(np.float32)


@functools.cache
def make_profile(seed: int = 7, n: int = 3_000, intermediate: bool = False) -> Profile:
    """A profile of two stages, `small` (about 75 % right) and `large` (about 95 %); with `medium` between, if asked."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    split = split_indices(np.where(np.arange(n) % 3 == 0, "a", "b"), seed)

    def stage(name: str, strength: float, cost_ms: float) -> tuple[StageProfile, StagePredictions]:
        logits = list(make_logits(rng, labels, strength))
        return profile_stage(KIND, name, {name: SHA}, SHA, logits, labels.tolist(), split, SHA, cost_ms)

    small, edge = stage("small", 3.0, 1.0)
    large, best = stage("large", 8.0, 20.0)
    medium, between = stage("medium", 6.0, 4.0)
    return Profile(
        format=6,
        task="digits",
        data=ProfileData(
            name="synthetic",
            sha256=SHA,
            seed=seed,
            profile=len(split.profile),
            certify=len(split.certify),
            held_out=len(split.held_out),
        ),
        stages=(small, medium, large) if intermediate else (small, large),
        pairs=(profile_pair(KIND, edge, best, labels.tolist(), split, between if intermediate else None),),
    )


HARM = {(80, 1.0): 0.05, (80, 0.75): 0.3, (80, 0.0): 2.0, (27, 1.0): 0.4, (27, 0.6): 1.0}
"""Conditions of `make_received_profile`, finest first, and how much noise each adds to logits."""


RECEIVED_DROPS = (0.01, 0.02, 0.04, 0.05, 0.06, 0.15, 0.3)


@functools.cache
def make_condition(quality: int, fraction: float, harm: float, n: int = 1_600) -> ReceivedCondition:
    """A measured condition: logits suffered on the way, and the edge gets surer of itself the more they did."""
    rng = np.random.default_rng(11)
    labels = rng.integers(0, 10, n)
    edge, best = make_logits(rng, labels, 3.0), make_logits(rng, labels, 8.0)
    noise = rng.normal(size=(2, *edge.shape)).astype(np.float32)
    heated = (edge + 3.0 * harm * noise[0]) * np.float32(1.0 + harm)
    temperature = round(fit_temperature(KIND, list(heated), labels.tolist(), 1.0), 6)
    outputs = KIND.calibrated(list(heated), temperature)
    lost, received, original = (
        KIND.losses(each, labels.tolist())
        for each in (outputs, list(softmax(best + np.float32(3.0 * harm) * noise[1])), list(softmax(best)))
    )
    scores, band = KIND.score_all(outputs, "top1"), Band(fraction, 1.0, fraction > 0.0)
    return measured_condition(quality, band, temperature, scores, lost, received, original, RECEIVED_DROPS)


@functools.cache
def make_received_profile() -> Profile:
    """`make_profile` with a pair that knows some conditions of lossy links."""
    profile = make_profile()
    conditions = tuple(make_condition(*place, harm) for place, harm in HARM.items())
    pair = msgspec.structs.replace(profile.pairs[0], received=conditions)
    return msgspec.structs.replace(profile, pairs=(pair,))


def measured(value: float, n: int = 900) -> MeasuredAccuracy:
    return MeasuredAccuracy(value=value, n=n, low=value - 0.02, high=value + 0.02, data_sha256=SHA)


def site_of(profile: Profile, *, labelled: bool = True, fingerprint: str = SHA) -> SiteCertificates:
    """Certificates of a site where the edge's bars lie a little higher than in the profile."""

    def moved(certificate: Certificate) -> Certificate:
        bar = certificate.threshold
        return msgspec.structs.replace(
            certificate,
            threshold=min(1.0, bar + 0.001) if isinstance(bar, float) else bar,
            n=900,
            basis="labelled" if labelled else "agreement",
        )

    pair = profile.pairs[0]
    condition = pair.conditions[0]
    condition = msgspec.structs.replace(
        condition,
        balanced=moved(condition.balanced),
        fast=moved(condition.fast),
        certificates=tuple(moved(c) for c in condition.certificates),
    )
    accuracies = {"small": measured(0.6), "medium": measured(0.7), "large": measured(0.8)}
    return SiteCertificates(
        format=4,
        task=profile.task,
        basis="site",
        since=datetime(2026, 11, 1, tzinfo=UTC),
        until=datetime(2026, 11, 21, tzinfo=UTC),
        data=SiteData(
            name="yard", sha256=SHA, n=900, labels=900 if labelled else 0, shrinks_images=profile.shrinks_images
        ),
        stages=tuple(
            SiteStage(
                name=r.name, fingerprint=fingerprint, temperature=r.temperature,
                accuracy=accuracies[r.name] if labelled else None,
            )
            for r in profile.stages
        ),
        pairs=(
            SitePair(
                edge=pair.edge, best=pair.best, intermediate=pair.intermediate.name if pair.intermediate else None,
                score=pair.score, intermediate_score=pair.intermediate.score if pair.intermediate else None,
                conditions=(condition,),
            ),
        ),
    )  # fmt: skip
