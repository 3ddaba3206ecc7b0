"""Labelled pictures for calibrating and evaluating: an npz file of encoded pictures, or a directory per class.

npz: `data` (all encoded bytes in a row, uint8), `offsets` (n + 1), `labels` (n), and optionally `source` (n names of
where each picture came from). Directory: `ROOT/<class>/<picture>`, where <class> is a label or an index of the task.
"""

from __future__ import annotations

import hashlib
import itertools
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.errors import ConfigError

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class LabelledPictures:
    """Encoded pictures with their labels; `sources` groups pictures that were taken alike."""

    name: str
    sha256: str
    bodies: Sequence[bytes]
    labels: NDArray[np.int64]
    sources: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.bodies)


def read_pictures(path: Path, labels: Sequence[str]) -> LabelledPictures:
    """Read a labelled set; `labels` are the task's class names in index order.

    Raises:
        ConfigError: naming the file or folder and what was expected there.
    """
    if path.is_dir():
        return _read_folder(path, labels)
    if path.is_file():
        return _read_npz(path, len(labels))
    raise ConfigError(f"{path}: expected an npz file or a directory of class directories")


def _read_npz(path: Path, classes: int) -> LabelledPictures:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path}: not a readable npz file: it is no zip archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = {"data", "offsets", "labels"} - set(archive.files)
            if missing:
                raise ConfigError(f"{path}: expected arrays data, offsets and labels; {min(missing)} is missing")
            data, offsets, labels = (np.asarray(archive[name]) for name in ("data", "offsets", "labels"))
            sources = np.asarray(archive["source"]) if "source" in archive.files else np.full(labels.shape, "")
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a readable npz file: {error}") from None
    _check(path, data, offsets, labels, classes)
    if sources.shape != labels.shape:
        raise ConfigError(f"{path}: expected as many sources as labels, got {sources.shape} and {labels.shape}")
    bodies = [data[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)]
    return LabelledPictures(path.name, digest, bodies, labels.astype(np.int64), sources.astype(np.str_))


def _check(path: Path, data: NDArray[Any], offsets: NDArray[Any], labels: NDArray[Any], classes: int) -> None:
    flat = data.ndim == offsets.ndim == labels.ndim == 1
    if data.dtype != np.uint8 or not flat or not np.issubdtype(offsets.dtype, np.integer):
        raise ConfigError(f"{path}: expected flat arrays: data of uint8, offsets, labels")
    if len(offsets) != len(labels) + 1 or len(labels) == 0:
        raise ConfigError(f"{path}: expected n >= 1 labels and n + 1 offsets, got {len(labels)} and {len(offsets)}")
    if offsets[0] != 0 or offsets[-1] > len(data) or np.any(np.diff(offsets.astype(np.int64)) <= 0):
        raise ConfigError(f"{path}: offsets must rise from 0 to at most {len(data)}, the length of data")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
        raise ConfigError(f"{path}: labels must be whole numbers from 0 to {classes - 1}")


def _read_folder(root: Path, labels: Sequence[str]) -> LabelledPictures:
    numbers = {label: index for index, label in enumerate(labels)} | {str(i): i for i in range(len(labels))}
    digest = hashlib.sha256()
    bodies: list[bytes] = []
    found: list[int] = []
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        if folder.name not in numbers:
            raise ConfigError(
                f"{folder}: the directory is named after no class; expected a label such as {labels[0]!r} "
                f"or an index from 0 to {len(labels) - 1}"
            )
        for picture in sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES):
            body = picture.read_bytes()
            digest.update(f"{numbers[folder.name]}:{len(body)}:".encode() + body)
            bodies.append(body)
            found.append(numbers[folder.name])
    if not bodies:
        raise ConfigError(f"{root}: no pictures in class directories (expected files ending in {', '.join(SUFFIXES)})")
    return LabelledPictures(
        root.name, digest.hexdigest(), bodies, np.array(found, np.int64), np.full(len(bodies), root.name)
    )
