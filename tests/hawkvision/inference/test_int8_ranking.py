"""The most probable classes as the kernels' library finds them: those that NumPy finds, and as probable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.inference.int8 import ranking
from hawkvision.native import library
from hawkvision.tasks import class_scores

pytestmark = pytest.mark.skipif(
    library.unsupported_reason() is not None, reason=f"this machine cannot: {library.unsupported_reason()}"
)

EIGHTHS = st.integers(-300, 300).map(lambda eighths: eighths / 8)
TEMPERATURES = st.floats(0.25, 4.0)


@given(st.lists(EIGHTHS, min_size=1, max_size=60), TEMPERATURES, TEMPERATURES, st.integers(1, 70))
def test_classes_are_ranked_as_numpy_ranks_them_equal_ones_by_number(
    logits: list[float], temperature: float, before: float, k: int
) -> None:
    row = np.array(logits, np.float32)
    numbers, probabilities = ranking.most_probable(row, temperature, k, before)
    expected_numbers, expected = class_scores.most_probable(row, temperature, k, before)
    assert numbers == expected_numbers
    np.testing.assert_array_max_ulp(np.array(probabilities, np.float32), np.array(expected, np.float32), 1)


def test_probabilities_of_a_thousand_classes_are_those_of_numpy_bit_for_bit() -> None:
    draw = np.random.default_rng(5)
    for _ in range(500):
        row = draw.normal(0.0, draw.uniform(0.5, 6.0), 1000).astype(np.float32)
        temperature, before = draw.uniform(0.5, 2.0, 2)
        assert ranking.most_probable(row, temperature, 5, before) == class_scores.most_probable(
            row, temperature, 5, before
        )


def test_a_column_of_a_larger_array_is_read_as_a_copy_of_it() -> None:
    columns = np.random.default_rng(6).normal(0.0, 2.0, (40, 3)).astype(np.float32)
    assert ranking.most_probable(columns[:, 1], 1.0, 3) == ranking.most_probable(columns[:, 1].copy(), 1.0, 3)
