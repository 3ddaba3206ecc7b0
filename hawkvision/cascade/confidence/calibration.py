"""Temperature scaling, and the calibration error of probabilities.

Source: Guo et al., "On Calibration of Modern Neural Networks", ICML 2017. One parameter per model, fitted by
likelihood; it does not change the top class. It needs some 200 images: with fewer the optimum is too flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Output, TaskKind, Truth

LOG_TEMPERATURE_BOUNDS = (-3.0, 3.0)
"""Temperatures from 0.05 to 20; published networks lie between 0.5 and 3."""


def fit_temperature(
    kind: TaskKind[Any], raw: Sequence[Output], truths: Sequence[Truth], unfitted: float = 1.0
) -> float:
    """The temperature that minimises the negative log-likelihood of the truths of n ≥ 1 images.

    Args:
        kind: of the task.
        raw: of each image (`TaskKind.raw`).
        truths: of each image.
        unfitted: the temperature if the kind has none to fit.

    Raises:
        ValueError: if there are not as many images as truths, or none.
    """
    from scipy.optimize import minimize_scalar  # edge nodes, which calibrate nothing, do without SciPy

    if len(raw) != len(truths) or len(raw) == 0:
        raise ValueError(f"expected as many images as truths, at least 1; got {len(raw)} and {len(truths)}")
    if kind.negative_log_likelihood(raw, truths, 1.0) is None:
        return unfitted

    def loss(log_temperature: float) -> float:
        found = kind.negative_log_likelihood(raw, truths, float(np.exp(log_temperature)))
        assert found is not None, "it was known at temperature 1"
        return found

    found = minimize_scalar(loss, bounds=LOG_TEMPERATURE_BOUNDS, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


def expected_calibration_error(confidence: Floats, correct: NDArray[np.bool_] | Floats, bins: int = 15) -> float:
    """Mean gap between confidence (n,) and 1 − loss (n,) over equally wide bins, weighted by their share (0..1)."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, bins - 1)
    gap = np.zeros(bins)
    np.add.at(gap, place, confidence - correct)
    return float(np.abs(gap).sum() / max(1, len(confidence)))
