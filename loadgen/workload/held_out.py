"""Which images of a data set a calibration set aside, and how a part of a set is chosen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import LabelledImages


class HeldOutIndices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The images that a calibration set aside, by number, and the data set they number."""

    data_sha256: str
    indices: tuple[int, ...]


def read_indices(path: Path, images: LabelledImages) -> NDArray[np.intp]:
    """The held-out images' numbers.

    Raises:
        ConfigError: if the file is missing, unreadable or malformed, or numbers another data set.
    """
    try:
        held_out = msgspec.json.decode(path.read_bytes(), type=HeldOutIndices)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `hawkvision calibrate` writes it beside the profile") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if held_out.data_sha256 != images.sha256:
        raise ConfigError(
            f"{path} numbers images of the data with sha256 {held_out.data_sha256[:12]}…, but {images.name} has "
            f"{images.sha256[:12]}…; pass the data of the calibration, or --split all for data it never saw"
        )
    if not held_out.indices:
        raise ConfigError(
            f"{path}: the calibration held no images out; pass --split auto for those that no model was trained on, or "
            "--split all"
        )
    indices = np.array(held_out.indices, np.intp)
    if len(np.unique(indices)) < len(indices) or not _within(indices, len(images)):
        raise ConfigError(f"{path}: indices: expected distinct numbers from 0 to {len(images) - 1}")
    return indices


def _within(indices: NDArray[np.intp], n: int) -> bool:
    return bool(indices.min() >= 0 and indices.max() < n)


def thin(chosen: NDArray[np.intp], limit: int | None) -> NDArray[np.intp]:
    """At most `limit` of the numbers, evenly spread over them, since data sets are often sorted by class.

    Raises:
        ConfigError: if the limit leaves nothing.
    """
    if limit is None or limit >= len(chosen):
        return chosen
    if limit < 1:
        raise ConfigError(f"--limit: expected at least 1, got {limit}")
    return chosen[np.linspace(0, len(chosen) - 1, limit).round().astype(np.intp)]
