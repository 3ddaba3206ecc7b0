"""Images for training, calibrating and evaluating: an npz file, a directory per class, or an MNIST-like directory.

npz: `data` (all encoded bytes in a row, uint8), `offsets` (n + 1), `labels` (n), and optionally `source` (n names of
where each image came from) and `is_test` (n booleans). Directory per class: `ROOT/<class>/<image>`, where <class>
is a label or an index of the task. MNIST-like: `{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]` (`images_idx`).
Without labels there is only the flat directory, which `read_unlabelled` reads.
"""

from __future__ import annotations

import hashlib
import itertools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.models.idx_reader import holds_idx_files, read_idx_parts

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp")
MAX_FOLDER_BYTES: Final = 4 << 30
"""All bodies are in memory; 4 GiB are 40,000 photographs of 100 kB."""


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Encoded images with their labels; `sources` groups images of the same origin.

    `is_test` marks those that a data set's makers set aside for testing; all False where nothing says so.
    """

    name: str
    sha256: str
    bodies: Sequence[bytes]
    labels: NDArray[np.int64]
    sources: NDArray[np.str_]
    is_test: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.bodies)


@dataclass(frozen=True, slots=True)
class UnlabelledImages:
    """Encoded images without labels; `sha256` is over their contents in the order of their names."""

    name: str
    sha256: str
    bodies: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.bodies)


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The paths, with each folder replaced by the images below it, sorted by name.

    Raises:
        ConfigError: naming a folder that holds no images.
    """
    files: list[Path] = []
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not found:
                raise ConfigError(f"{path}: expected images ({', '.join(SUFFIXES)}) in this folder, found none")
        files += found
    return files


def read_images(path: Path, labels: Sequence[str], names: Mapping[str, int] | None = None) -> LabelledImages:
    """Read a labelled set; `labels` are the task's class names in index order.

    `names` are further names that a class directory may have, with their class indices.

    Raises:
        ConfigError: naming the file or folder and what was expected there.
    """
    if path.is_dir():
        return _read_idx(path, len(labels)) if holds_idx_files(path) else _read_folder(path, labels, names or {})
    if path.is_file():
        return _read_npz(path, len(labels))
    raise ConfigError(f"{path}: expected an npz file or a directory of class directories, or of idx files")


def read_unlabelled(root: Path) -> UnlabelledImages:
    """Read a flat folder of images, sorted by name. Other files are ignored.

    Raises:
        ConfigError: if it is no folder, holds no images, or more than `MAX_FOLDER_BYTES` of them.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: expected a folder of images")
    digest = hashlib.sha256()
    bodies = _read_files(root, _images_in(root))
    for body in bodies:
        digest.update(f"{len(body)}:".encode() + body)
    if not bodies:
        raise ConfigError(f"{root}: no images (expected files ending in {', '.join(SUFFIXES)})")
    return UnlabelledImages(root.name, digest.hexdigest(), bodies)


def _read_npz(path: Path, classes: int) -> LabelledImages:
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
            is_test = np.asarray(archive["is_test"]) if "is_test" in archive.files else np.zeros(labels.shape, np.bool_)
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a readable npz file: {error}") from None
    _check(path, data, offsets, labels, classes)
    if sources.shape != labels.shape:
        raise ConfigError(f"{path}: expected as many sources as labels, got {sources.shape} and {labels.shape}")
    if is_test.shape != labels.shape or not np.isin(is_test, (0, 1)).all():
        raise ConfigError(
            f"{path}: is_test must be {labels.shape} booleans, one per label, got {is_test.dtype} of {is_test.shape}"
        )
    bodies = [data[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)]
    return LabelledImages(
        path.name, digest, bodies, labels.astype(np.int64), sources.astype(np.str_), is_test.astype(np.bool_)
    )


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


def _read_idx(root: Path, classes: int) -> LabelledImages:
    parts = read_idx_parts(root)
    digest = hashlib.sha256()
    for part in parts:
        if part.labels.max() >= classes:
            raise ConfigError(f"{root}: {part.name}: a label is {part.labels.max()}; expected 0 to {classes - 1}")
        digest.update(part.digest())
    sizes = [len(part.labels) for part in parts]
    return LabelledImages(
        root.name,
        digest.hexdigest(),
        [body for part in parts for body in part.bodies()],
        np.concatenate([part.labels for part in parts]).astype(np.int64),
        np.repeat([part.name for part in parts], sizes).astype(np.str_),
        np.repeat([part.is_test for part in parts], sizes),
    )


def _read_folder(root: Path, labels: Sequence[str], names: Mapping[str, int]) -> LabelledImages:
    numbers = {label: index for index, label in enumerate(labels)} | {str(i): i for i in range(len(labels))}
    numbers |= names
    paths: list[Path] = []
    found: list[int] = []
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        if folder.name not in numbers:
            raise ConfigError(
                f"{folder}: the directory is named after no class; expected a label such as {labels[0]!r} "
                f"or an index from 0 to {len(labels) - 1}{_or_one_of(names)}"
            )
        images = _images_in(folder)
        paths += images
        found += [numbers[folder.name]] * len(images)
    bodies = _read_files(root, paths)
    if not bodies:
        raise ConfigError(f"{root}: no images in class directories (expected files ending in {', '.join(SUFFIXES)})")
    digest = hashlib.sha256()
    for label, body in zip(found, bodies, strict=True):
        digest.update(f"{label}:{len(body)}:".encode() + body)
    return LabelledImages(
        root.name,
        digest.hexdigest(),
        bodies,
        np.array(found, np.int64),
        np.full(len(bodies), root.name),
        np.zeros(len(bodies), np.bool_),
    )


def _or_one_of(names: Mapping[str, int]) -> str:
    return f", or a name such as {min(names)!r}" if names else ""


def _images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)


def _read_files(root: Path, paths: Sequence[Path]) -> list[bytes]:
    """The files' contents.

    Raises:
        ConfigError: if one cannot be read, or all together exceed `MAX_FOLDER_BYTES`.
    """
    bodies: list[bytes] = []
    left = MAX_FOLDER_BYTES
    for path in paths:
        try:
            left -= path.stat().st_size
            if left < 0:
                raise ConfigError(f"{root}: the images exceed {MAX_FOLDER_BYTES} bytes together; take a sample")
            bodies.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot read the image: {error.strerror}") from None
    return bodies
