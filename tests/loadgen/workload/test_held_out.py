"""Which images a calibration held out, and how a set is thinned."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import LabelledImages
from loadgen.workload.dataset import HeldOutIndices, read_indices, thin


def images(n: int) -> LabelledImages:
    """Image i is its own number as text; its label is i modulo 7."""
    bodies = [b"%d" % i for i in range(n)]
    return LabelledImages("set.npz", "a" * 64, bodies, np.arange(n) % 7, np.full(n, "x"), np.zeros(n, np.bool_))


def test_thinning_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--limit"):
        thin(np.arange(5), 0)


def write_indices(path: Path, indices: tuple[int, ...], sha256: str = "a" * 64) -> Path:
    path.write_bytes(msgspec.json.encode(HeldOutIndices(sha256, indices)))
    return path


def test_held_out_numbers_of_other_data_are_refused(tmp_path: Path) -> None:
    path = write_indices(tmp_path / "held_out.json", (1,), sha256="b" * 64)
    with pytest.raises(ConfigError, match=r"bbbbbbbbbbbb.*aaaaaaaaaaaa"):
        read_indices(path, images(10))


@pytest.mark.parametrize("indices", [(1, 1), (-1,), (10,)])
def test_impossible_numbers_are_refused(tmp_path: Path, indices: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="distinct numbers from 0 to 9"):
        read_indices(write_indices(tmp_path / "held_out.json", indices), images(10))


def test_a_calibration_that_held_none_out_names_the_other_splits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held no images out; pass --split auto"):
        read_indices(write_indices(tmp_path / "held_out.json", ()), images(10))


def test_missing_indices_name_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hawkvision calibrate"):
        read_indices(tmp_path / "none.json", images(10))
