"""Temperature scaling, and the calibration error of probabilities.

Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017. One parameter per model, fitted by
    likelihood;
it does not change the top class. It needs some 200 images: with fewer the optimum is too flat.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from hawkvision.core.types import Logits
from hawkvision.tasks.class_scores import Floats

LOG_TEMPERATURE_BOUNDS = (-3.0, 3.0)
"""Temperatures from 0.05 to 20; published networks lie between 0.5 and 3."""


def fit_temperature(logits: Logits, labels: NDArray[np.integer]) -> float:
    """The temperature that minimises the negative log-likelihood of labels (n,) under logits (n, classes).

    Raises:
        ValueError: if the shapes do not fit or there is nothing to fit.
    """
    if logits.ndim != 2 or len(logits) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected logits (n, classes) and labels (n,), n >= 1; got {logits.shape}, {labels.shape}")
    wide = logits.astype(np.float64)
    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        return float(-log_softmax(wide / np.exp(log_temperature), axis=1)[rows, labels].mean())

    found = minimize_scalar(loss, bounds=LOG_TEMPERATURE_BOUNDS, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


def expected_calibration_error(confidence: Floats, correct: NDArray[np.bool_], bins: int = 15) -> float:
    """Mean gap between confidence (n,) and accuracy over equally wide bins, weighted by their share (0..1)."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    gap = np.zeros(bins)
    np.add.at(gap, place, confidence - correct)
    return float(np.abs(gap).sum() / max(1, len(confidence)))
