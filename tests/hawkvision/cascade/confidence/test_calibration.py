"""Temperature scaling, calibration error, exact intervals, scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hawkvision.cascade.confidence.calibration import expected_calibration_error, fit_temperature
from hawkvision.tasks.class_scores import softmax, top_classes
from tests.hawkvision.cascade.synthetic import KIND, make_logits


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_fit_finds_the_temperature_the_labels_were_drawn_with(temperature: float) -> None:
    rng = np.random.default_rng(11)
    logits = make_logits(rng, rng.integers(0, 10, 20_000), 2.0)
    probabilities = softmax(logits, temperature).astype(np.float64)
    labels = (probabilities.cumsum(axis=1) > rng.random((len(logits), 1))).argmax(axis=1)
    assert fit_temperature(KIND, list(logits), labels.tolist()) == pytest.approx(temperature, rel=0.05)


def test_fit_lowers_the_calibration_error_of_an_overconfident_model() -> None:
    rng = np.random.default_rng(12)
    labels = rng.integers(0, 10, 4_000)
    logits = make_logits(rng, labels, 3.0) * 3
    right = logits.argmax(axis=1) == labels
    raw = expected_calibration_error(softmax(logits).max(axis=1).astype(float), right)
    fitted = softmax(logits, fit_temperature(KIND, list(logits), labels.tolist())).max(axis=1).astype(float)
    assert expected_calibration_error(fitted, right) < raw / 2


def test_calibration_error_of_a_perfectly_calibrated_and_a_lying_model() -> None:
    right = np.array([True, False] * 50)
    assert expected_calibration_error(np.full(100, 0.5), right) == pytest.approx(0.0)
    assert expected_calibration_error(np.full(100, 1.0), right) == pytest.approx(0.5)


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(0, 1, width=32)), st.integers(1, 50))
def test_top_classes_agree_with_a_full_stable_sort(row: np.ndarray, k: int) -> None:
    np.testing.assert_array_equal(top_classes(row, k), np.argsort(-row, kind="stable")[:k])
