"""Tensors of variants for data sets, kept between runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Tensors
from hawkvision.models.manifest import Variant
from hawkvision.system.files import sha256_of

_VIEWS: Final = ("upright", "mirrored")


@dataclass(frozen=True, slots=True)
class VariantTensors:
    """One variant's decoded tensors on the images that were run, and on their mirror images if an ensemble needs it."""

    upright: Tensors
    mirrored: Tensors | None
    cost_ms: float
    """Processor time of one view of one image."""


def tensors_path(cache: Path, task: str, variant: Variant, facts: Sequence[str | int]) -> Path:
    """The file of a variant's tensors; `facts` say on which images and how it was run."""
    decoded = [variant.sha256, variant.input, variant.decoder, variant.decoder_options]
    key = sha256_of(msgspec.json.encode([decoded, *facts], order="sorted"))
    return cache / "looks" / task / f"{variant.name}-{key[:20]}.npz"


def read_tensors(path: Path, n: int) -> VariantTensors | None:
    """Kept tensors of n images; None if there are none, or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        cost, digest = float(arrays.pop("cost_ms")), str(arrays.pop("sha256"))
    except (OSError, ValueError, KeyError, EOFError):
        return None
    views: dict[str, dict[str, NDArray[np.float32]]] = {view: {} for view in _VIEWS}
    for name, array in arrays.items():
        view, _, tensor = name.partition("/")
        if view not in views or len(array) != n:
            return None
        views[view][tensor] = array
    if not views["upright"] or digest != _digest(arrays):
        return None
    return VariantTensors(views["upright"], views["mirrored"] or None, cost)


def write_tensors(path: Path, found: VariantTensors) -> None:
    """Keep tensors."""
    arrays: dict[str, NDArray[Any]] = {
        f"{view}/{name}": tensor
        for view, tensors in zip(_VIEWS, (found.upright, found.mirrored or {}), strict=True)
        for name, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, allow_pickle=False, **arrays, cost_ms=np.float64(found.cost_ms), sha256=np.array(_digest(arrays)))
    part.replace(path)


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
