"""Labelled images in one npz file.

`data` holds all encoded bytes in a row (uint8), and `offsets` (n + 1) where each image begins. What they show is one of

    labels (n)                                      a class index per image
    labels (n, classes) of 0 and 1                  several classes per image
    boxes (m, 4), classes (m), box_offsets (n + 1)  x1, y1, x2, y2 in 0..1 and a class index of each box; image i has
                                                    those from box_offsets[i] up to box_offsets[i + 1]

Optional are `class_names` (the names behind the indices, if they are not in the task's order), `source` (n names of
where each image came from), `is_test` (n booleans), and what says whether a model was trained on an image: `clean` (n
booleans) or `split` (n names, of which those that begin with "train" were).
"""

from __future__ import annotations

import hashlib
import itertools
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.models.image_sets.labelled_images import Annotation, LabelledImages

_BOXES: Final = ("boxes", "classes", "box_offsets")
_ROUNDING: Final = 1e-5
"""Boxes may reach this far beyond the image, as pixels rounded to fractions do."""
_KNOWN: Final = ("data", "offsets", "labels", *_BOXES, "class_names", "source", "is_test", "clean", "split")
UNREADABLE: Final = (
    ValueError,
    OSError,
    EOFError,
    RuntimeError,  # encrypted, or an unknown compression
    MemoryError,  # a header that claims more than there is
    KeyError,  # a directory that names what is not there
    SyntaxError,  # of a header, which NumPy reads as Python
    tokenize.TokenError,
    zlib.error,
    zipfile.BadZipFile,
)
"""What reading a damaged archive raises."""
Arrays = dict[str, NDArray[Any]]


def read_npz(path: Path, names: Mapping[str, int], classes: int) -> LabelledImages:
    """Read a file.

    Args:
        path: of the file.
        names: of classes, with their indices.
        classes: the number of the task's labels.

    Raises:
        ConfigError: naming the file and what was expected in it.
    """
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    arrays = _load(path)
    data, offsets = arrays["data"], arrays["offsets"]
    n = _check_bytes(path, data, offsets, arrays)
    labels, annotations = np.full(n, -1, np.int64), None
    if "labels" not in arrays:
        annotations = _boxes(path, arrays, n, _indices(path, arrays, names, classes))
    elif arrays["labels"].ndim == 2:
        annotations = _sets(path, arrays["labels"], n, classes)
    else:
        _check_labels(path, arrays["labels"], classes)
        labels = arrays["labels"].astype(np.int64)
    return LabelledImages(
        path.name,
        digest,
        [data[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)],
        labels,
        _names(path, arrays, "source", "sources", n),
        _flags(path, arrays, "is_test", n),
        annotations,
        _trained(path, arrays, n),
    )


def _load(path: Path) -> Arrays:
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path}: not a readable npz file: it is no zip archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = set(archive.files)
            content = {"labels"} if "labels" in found or not found & set(_BOXES) else set(_BOXES)
            missing = ({"data", "offsets"} | content) - found
            if missing:
                raise ConfigError(
                    f"{path}: expected arrays data, offsets and labels, or {', '.join(_BOXES)}; {min(missing)} is "
                    "missing"
                )
            return {name: np.asarray(archive[name]) for name in _KNOWN if name in found}
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not a readable npz file: {error}") from None


def _check_bytes(path: Path, data: NDArray[Any], offsets: NDArray[Any], arrays: Arrays) -> int:
    """The number of images."""
    flat = data.ndim == offsets.ndim == 1 and arrays.get("labels", offsets).ndim in (1, 2)
    if data.dtype != np.uint8 or not flat or not np.issubdtype(offsets.dtype, np.integer):
        raise ConfigError(f"{path}: expected flat arrays: data of uint8, offsets, labels")
    n = len(offsets) - 1
    labels = len(arrays["labels"]) if "labels" in arrays else n
    if labels != n or n < 1:
        raise ConfigError(f"{path}: expected n >= 1 labels and n + 1 offsets, got {labels} and {len(offsets)}")
    if offsets[0] != 0 or offsets[-1] > len(data) or np.any(np.diff(offsets.astype(np.int64)) <= 0):
        raise ConfigError(f"{path}: offsets must rise from 0 to at most {len(data)}, the length of data")
    return n


def _check_labels(path: Path, labels: NDArray[Any], classes: int) -> None:
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
        raise ConfigError(f"{path}: labels must be whole numbers from 0 to {classes - 1}")


def _sets(path: Path, labels: NDArray[Any], n: int, classes: int) -> tuple[Annotation, ...]:
    if labels.shape != (n, classes) or not _is_number(labels) or not np.isin(labels, (0, 1)).all():
        raise ConfigError(f"{path}: labels of several classes must be ({n}, {classes}) of 0 and 1, got {labels.shape}")
    return tuple(Annotation(np.flatnonzero(row).astype(np.int64)) for row in labels)


def _indices(path: Path, arrays: Arrays, names: Mapping[str, int], classes: int) -> NDArray[np.int64]:
    """The task's index of each class index in the file."""
    if "class_names" not in arrays:
        return np.arange(classes)
    stated = _texts(path, "class_names", arrays["class_names"])
    unknown = [name for name in stated.tolist() if name not in names]
    if unknown:
        raise ConfigError(f"{path}: class_names: the task has no label {unknown[0]!r}")
    return np.array([names[name] for name in stated.tolist()], np.int64)


def _boxes(path: Path, arrays: Arrays, n: int, indices: NDArray[np.int64]) -> tuple[Annotation, ...]:
    boxes, classes, offsets = (arrays[name] for name in _BOXES)
    if classes.ndim != 1 or boxes.shape != (len(classes), 4) or offsets.shape != (n + 1,):
        raise ConfigError(
            f"{path}: expected boxes (m, 4), classes (m) and box_offsets ({n + 1}), got {boxes.shape}, "
            f"{classes.shape} and {offsets.shape}"
        )
    if not np.issubdtype(classes.dtype, np.integer) or not np.issubdtype(offsets.dtype, np.integer):
        raise ConfigError(f"{path}: classes and box_offsets must be whole numbers")
    if not _is_number(boxes):
        raise ConfigError(f"{path}: boxes must be numbers, got {boxes.dtype}")
    if offsets[0] != 0 or offsets[-1] != len(boxes) or np.any(np.diff(offsets.astype(np.int64)) < 0):
        raise ConfigError(f"{path}: box_offsets must rise from 0 to {len(boxes)}, the number of boxes")
    if len(classes) and (classes.min() < 0 or classes.max() >= len(indices)):
        raise ConfigError(f"{path}: classes must be from 0 to {len(indices) - 1}")
    within = (boxes >= -_ROUNDING) & (boxes <= 1.0 + _ROUNDING)
    boxes = np.clip(boxes, 0.0, 1.0)
    if not within.all() or (boxes[:, 2:] < boxes[:, :2]).any():
        raise ConfigError(f"{path}: boxes must be x1 <= x2 and y1 <= y2 in 0..1, as fractions of the image")
    rows = itertools.pairwise(offsets.tolist())
    return tuple(Annotation(indices[classes[a:b]], boxes[a:b].astype(np.float32)) for a, b in rows)


def _names(path: Path, arrays: Arrays, key: str, plural: str, n: int) -> NDArray[np.str_]:
    found = arrays.get(key, np.full(n, ""))
    if found.shape != (n,):
        raise ConfigError(f"{path}: expected as many {plural} as labels, got {found.shape} and ({n},)")
    return _texts(path, key, found)


def _texts(path: Path, key: str, found: NDArray[Any]) -> NDArray[np.str_]:
    """The array as text; bytes are UTF-8."""
    try:
        if found.ndim != 1 or found.dtype.kind not in "USiub":
            raise ConfigError(f"{path}: {key} must be a row of texts, got {found.dtype} of {found.shape}")
        return np.char.decode(found, "utf-8") if found.dtype.kind == "S" else found.astype(np.str_)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {key}: {error}") from None


def _is_number(found: NDArray[Any]) -> bool:
    return found.dtype.kind in "biuf"


def _flags(path: Path, arrays: Arrays, key: str, n: int) -> NDArray[np.bool_]:
    found = arrays.get(key, np.zeros(n, np.bool_))
    if found.shape != (n,) or not _is_number(found) or not np.isin(found, (0, 1)).all():
        raise ConfigError(f"{path}: {key} must be ({n},) booleans, one per label, got {found.dtype} of {found.shape}")
    return found.astype(np.bool_)


def _trained(path: Path, arrays: Arrays, n: int) -> NDArray[np.bool_] | None:
    trained = None
    if "split" in arrays:
        trained = np.char.startswith(_names(path, arrays, "split", "splits", n), "train")
    if "clean" in arrays:
        unclean = ~_flags(path, arrays, "clean", n)
        trained = unclean if trained is None else unclean | trained
    return trained
