"""Temperature scaling, calibration error, exact intervals, scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hawkvision.cascade.certification.bounds import clopper_pearson
from hawkvision.cascade.confidence.calibration import expected_calibration_error, fit_temperature
from hawkvision.core.types import Score
from hawkvision.tasks.class_scores import average, score, softmax, top_classes
from tests.hawkvision.cascade.synthetic import KIND, make_logits

LOGITS = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(2, 12)), elements=st.floats(-50, 50, width=32))


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


@pytest.mark.parametrize("shape", [(0, 3), (4, 3)])
def test_fit_refuses_shapes_that_do_not_fit(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="as many images as truths, at least 1"):
        fit_temperature(KIND, list(np.zeros(shape, np.float32)), [])


def test_calibration_error_of_a_perfectly_calibrated_and_a_lying_model() -> None:
    right = np.array([True, False] * 50)
    assert expected_calibration_error(np.full(100, 0.5), right) == pytest.approx(0.0)
    assert expected_calibration_error(np.full(100, 1.0), right) == pytest.approx(0.5)


@given(st.integers(1, 200), st.data())
def test_exact_interval_contains_the_proportion(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = clopper_pearson(k, n)
    assert 0.0 <= low <= k / n <= high <= 1.0


@given(LOGITS, st.floats(0.05, 20))
def test_softmax_sums_to_one_and_keeps_the_winner(logits: np.ndarray, temperature: float) -> None:
    before = logits.copy()
    probabilities = softmax(logits, temperature)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
    rows = np.arange(len(logits))
    np.testing.assert_allclose(probabilities[rows, logits.argmax(axis=1)], probabilities.max(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(logits, before)


@given(LOGITS)
def test_scores_lie_between_zero_and_one_and_margin_is_the_smaller(logits: np.ndarray) -> None:
    probabilities = softmax(logits)
    top1, margin = score(probabilities, Score.TOP1), score(probabilities, Score.MARGIN)
    assert np.all((margin >= 0) & (margin <= top1 + 1e-6) & (top1 <= 1 + 1e-6))


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(0, 1, width=32)), st.integers(1, 50))
def test_top_classes_agree_with_a_full_stable_sort(row: np.ndarray, k: int) -> None:
    np.testing.assert_array_equal(top_classes(row, k), np.argsort(-row, kind="stable")[:k])


def test_ensemble_is_the_mean_of_its_members() -> None:
    first, second = np.array([[0.2, 0.8]], np.float32), np.array([[0.6, 0.4]], np.float32)
    np.testing.assert_allclose(average([first, second]), [[0.4, 0.6]], rtol=1e-6)
