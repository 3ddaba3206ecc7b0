"""Warm-up: sample images take the path of callers' images, so that the first caller waits no longer than others.

They are decoded from each format, scaled, inferred by every model of the stage on one and on several threads, and
ranked.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import cv2
import numpy as np

from edge.inference.edge_stage import DurationEstimate, EdgeStage, InferenceJob, StagePrediction
from hawkvision.core.clock import Clock
from hawkvision.core.types import Pixels, Prediction
from hawkvision.imaging.preprocessing import probe
from hawkvision.inference.backends.interface import Backend

FORMATS: Final = (".jpg", ".png", ".webp")
NO_PREDICTION: Final = StagePrediction(Prediction(), 1.0, 0.0, 0.0)
"""What a job that only warms a worker gives."""
OVERSIZE: Final = 1.5
"""A sample's side over the model's input, so that it is scaled as most images are."""


@functools.lru_cache(maxsize=4)
def samples(side: int) -> tuple[bytes, ...]:
    """An image of noise in each format, encoded; `side` is the input's, in pixels."""
    size = max(16, round(OVERSIZE * side))
    pixels: Pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    encoded = []
    for suffix in FORMATS:
        made, data = cv2.imencode(suffix, pixels)
        if made:  # an OpenCV that cannot write WebP cannot read it either
            encoded.append(data.tobytes())
    return tuple(encoded)


def run_samples(stage: EdgeStage, max_pixels: int, clock: Clock) -> StagePrediction:
    """Run every model of a stage on each sample, once alone and once not; its estimates do not change.

    Raises:
        BackendError: if a backend is broken.
    """
    others = stage.others
    if others is not None:  # whose members run however confident the first is
        others = replace(others, accept_confidence=np.inf, duration=DurationEstimate())
    trial = replace(stage, others=others)
    for body in samples(max(stage.first.spec.height, stage.first.spec.width)):
        for alone in (True, False):
            InferenceJob(
                trial, body, probe(body), 1, max(max_pixels, 2**24), clock, alone=functools.partial(bool, alone)
            )()
    return NO_PREDICTION


def warm_stage(stage: EdgeStage) -> None:
    """Run a blank image on each backend of a stage."""
    for model in stage.models:
        for each in (model.backend, model.wide):
            if each is not None:
                warm_up(each)


def warm_up(backend: Backend, together: int = 1) -> StagePrediction:
    """Run blank images, up to so many at once, so that the first callers do not pay for lazy allocation."""
    for size in (1, *range(1, together + 1)):
        backend.infer(np.zeros((size, *backend.input_shape), np.uint8))
    return NO_PREDICTION
