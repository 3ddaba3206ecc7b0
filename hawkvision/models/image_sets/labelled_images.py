"""Sets of images as values, and what their readers share."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp")
UNREAD_SUFFIXES: Final = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jfif", ".jp2", ".ppm", ".pgm")
"""Suffixes of images that are not read; to leave them out would change what is measured."""
_TRAINING: Final = re.compile(r"train(ing)?(set|data)?(?![a-z])", re.IGNORECASE)
MAX_FOLDER_BYTES: Final = 4 << 30
"""All bodies are in memory; 4 GiB are 40,000 photographs of 100 kB."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """The classes in one image, and where they are if that is known."""

    classes: NDArray[np.int64]
    """(m,), indices of the task's labels. Without boxes each occurs once."""
    boxes: NDArray[np.float32] | None = None
    """(m, 4): x1, y1, x2, y2 of each as fractions of the image's width and height; None where only classes are known.
    """


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Encoded images with their labels; `sources` groups images of the same origin.

    `is_test` marks those that a data set's makers set aside for testing; all False where nothing says so.
    """

    name: str
    sha256: str
    bodies: Sequence[bytes]
    labels: NDArray[np.int64]
    """The class of each image; -1 where there are `annotations`."""
    sources: NDArray[np.str_]
    is_test: NDArray[np.bool_]
    annotations: tuple[Annotation, ...] | None = None
    """What is in each image, if that is not one class."""
    trained: NDArray[np.bool_] | None = None
    """Which images a model was trained on, as far as the data set says; None where it says nothing."""
    files: tuple[str, ...] = ()
    """Where each image lies, if each is a file."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each image, if annotations state them."""

    def __len__(self) -> int:
        return len(self.bodies)

    def called(self, index: int) -> str:
        """An image's name in messages."""
        return self.files[index] if self.files else f"{self.name}: image {index}"

    def annotated(self) -> Iterable[Annotation]:
        """What is in each image, in order."""
        if self.annotations is not None:
            return self.annotations
        return (Annotation(self.labels[i : i + 1]) for i in range(len(self)))

    def part(self, chosen: NDArray[np.intp], sha256: str) -> LabelledImages:
        """The images of those indices, under the hash that names them."""
        return LabelledImages(
            self.name,
            sha256,
            [self.bodies[i] for i in chosen],
            self.labels[chosen],
            self.sources[chosen],
            self.is_test[chosen],
            None if self.annotations is None else tuple(self.annotations[i] for i in chosen),
            None if self.trained is None else self.trained[chosen],
            tuple(self.files[i] for i in chosen) if self.files else (),
            tuple(self.sizes[i] for i in chosen) if self.sizes else (),
        )


@dataclass(frozen=True, slots=True)
class UnlabelledImages:
    """Encoded images without labels; `sha256` is over their contents in the order of their names."""

    name: str
    sha256: str
    bodies: Sequence[bytes]
    files: tuple[str, ...] = ()
    """Where each image lies, if each is a file."""

    def __len__(self) -> int:
        return len(self.bodies)

    def called(self, index: int) -> str:
        """An image's name in messages."""
        return self.files[index] if self.files else f"{self.name}: image {index}"


def is_training_split(name: str) -> bool:
    """Whether a file or folder is named as the part of a data set that models are trained on: `train`, `train2017`,
    `training-set`, and not `trains`.
    """
    return _TRAINING.match(name) is not None


def images_in(folder: Path) -> list[Path]:
    """The images directly in a folder, sorted by name.

    Raises:
        ConfigError: if there are images of a format that is not read.
    """
    files = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    unread = [p for p in files if p.suffix.lower() in UNREAD_SUFFIXES]
    if unread:
        raise ConfigError(
            f"{folder}: {len(unread)} images are of formats that are not read here, such as {unread[0].name}; expected "
            f"{', '.join(SUFFIXES)}: convert them, or move them elsewhere"
        )
    return [p for p in files if p.suffix.lower() in SUFFIXES and p.is_file()]


def read_files(root: Path, paths: Sequence[Path]) -> list[bytes]:
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


# Finds images with the same bytes, within a set and between sets of which one is known by its digests only.

BYTES: Final = 6
"""A digest's length: two sets of 50,000 different images share one by chance with a probability of 1 in 100,000."""


def copies_of(bodies: Sequence[bytes]) -> NDArray[np.intp]:
    """For each image (n,) the index of the first one with the same bytes: its own, unless it is a copy."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(_sha256(body), index) for index, body in enumerate(bodies)], np.intp)


def digests_of(bodies: Sequence[bytes]) -> str:
    """Digests of the images, sorted, as text of eight characters each."""
    return base64.b64encode(b"".join(sorted({_sha256(body)[:BYTES] for body in bodies}))).decode()


def shared(bodies: Sequence[bytes], digests: str) -> int:
    """The number of these images that are among those of the digests."""
    raw = base64.b64decode(digests)
    known = {raw[at : at + BYTES] for at in range(0, len(raw), BYTES)}
    return sum(_sha256(body)[:BYTES] in known for body in bodies)


def _sha256(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
