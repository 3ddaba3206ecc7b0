"""Corrupted images: noise, blur and lower contrast at severities from 1 to 5.

After Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions and perturbations" (ICLR
2019). The constants are our own. They grow with the side of the input, so that a severity is about as hard at 32 pixels
as at 224.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import cv2
import numpy as np

from hawkvision.core.types import Pixels
from hawkvision.model_zoo.calibration.model_runner import Corruption
from hawkvision.system.files import sha256_of

SEVERITIES: Final = range(1, 6)

NOISE_STEP: Final = 0.02
"""Standard deviation of the noise per severity at 32 pixels, as a share of the full range. It grows with the square
root of the side."""

BLUR_LEAST: Final = 0.010
BLUR_STEP: Final = 0.004
"""Standard deviation of the blur at severity 0, and its step per severity, as shares of the side."""

CONTRAST_STEP: Final = 0.17
"""Share of the contrast that each severity removes."""

CORRUPTION_SEED: Final = 1903
SHIFT_SEVERITY: Final = 3


class CorruptionKind(StrEnum):
    """Kinds of corruption."""

    NOISE = "noise"
    BLUR = "blur"
    CONTRAST = "contrast"


def corrupt(kind: CorruptionKind, severity: int) -> Corruption:
    """A corruption of one kind.

    Noise is seeded by the image's index, so that all stages with one input size get the same.

    Raises:
        ValueError: if the severity is not from 1 to 5.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be from {SEVERITIES[0]} to {SEVERITIES[-1]}, got {severity}")

    def apply(pixels: Pixels, number: int) -> Pixels:
        side = math.sqrt(pixels.shape[0] * pixels.shape[1])
        wide = pixels.astype(np.float32)
        match kind:
            case CorruptionKind.NOISE:
                scale = np.float32(255.0 * NOISE_STEP * severity * math.sqrt(side / 32.0))
                rng = np.random.default_rng((CORRUPTION_SEED, number))
                wide += scale * rng.standard_normal(pixels.shape, np.float32)
            case CorruptionKind.BLUR:
                wide = np.asarray(
                    cv2.GaussianBlur(wide, (0, 0), (BLUR_LEAST + BLUR_STEP * severity) * side), np.float32
                )
            case CorruptionKind.CONTRAST:
                mean = wide.mean(axis=(0, 1))
                wide = mean + (wide - mean) * np.float32(1.0 - CONTRAST_STEP * severity)
        return np.clip(wide.round(), 0.0, 255.0).astype(np.uint8)

    return apply


def mixed(severity: int = SHIFT_SEVERITY) -> Corruption:
    """A third of the images each with noise, blur and lower contrast, in turn by number.

    Raises:
        ValueError: if the severity is not from 1 to 5.
    """
    corruptions = tuple(corrupt(kind, severity) for kind in CorruptionKind)
    return lambda pixels, number: corruptions[number % len(corruptions)](pixels, number)


def mixture_name(severity: int = SHIFT_SEVERITY) -> str:
    """The name of `mixed` in the cache of logits; it changes with every constant."""
    constants = (NOISE_STEP, BLUR_LEAST, BLUR_STEP, CONTRAST_STEP, CORRUPTION_SEED, [*CorruptionKind])
    return f"mixed-{severity}-{sha256_of(repr(constants).encode())[:8]}"
