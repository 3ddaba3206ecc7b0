from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax

from hawkvision.datacenter.committee import average, probabilities, top_k
from hawkvision.types import Logits

LOGITS = arrays(np.float32, (3, 7), elements=st.floats(-80, 80, width=32))


@given(LOGITS, st.floats(0.1, 10.0))
def test_probabilities_are_the_temperature_scaled_softmax(logits: Logits, temperature: float) -> None:
    expected = softmax(logits.astype(np.float64) / temperature, axis=-1)
    np.testing.assert_allclose(probabilities(logits, temperature), expected, rtol=1e-6, atol=1e-30)


@given(LOGITS)
def test_a_committee_is_the_mean_of_its_members(logits: Logits) -> None:
    members = probabilities(logits, 1.3)
    assert np.array_equal(average(list(members)), members.astype(np.float64).mean(0).astype(np.float32))


@given(LOGITS)
def test_averaging_views_then_members_is_averaging_all(logits: Logits) -> None:
    rows = probabilities(np.concatenate((logits, logits[::-1]))[:6], 1.0)
    nested = average([average(rows[i : i + 2]) for i in (0, 2, 4)])
    np.testing.assert_allclose(nested, rows.mean(0), rtol=1e-5)


def test_a_committee_temperature_softens_the_average_and_keeps_its_order() -> None:
    sharp = np.array([0.9, 0.08, 0.02], np.float32)
    soft = average([sharp], temperature=2.0)
    np.testing.assert_allclose(soft, np.sqrt(sharp) / np.sqrt(sharp).sum(), rtol=1e-5)


def test_a_certain_zero_survives_the_committee_temperature() -> None:
    row = average([np.array([1.0, 0.0], np.float32)], temperature=1.5)
    assert np.isfinite(row).all()


def test_top_k_lists_the_best_first_and_equals_by_index() -> None:
    row = np.array([0.1, 0.4, 0.1, 0.4], np.float32)
    assert [c.index for c in top_k(row, 3)] == [1, 3, 0]


def test_top_k_of_more_than_there_are_lists_them_all() -> None:
    assert len(top_k(np.array([0.5, 0.5], np.float32), 10)) == 2
