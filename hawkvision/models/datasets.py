"""Images for training, calibrating and evaluating. The readers are in `image_sets`.

One class per image: an npz file, a directory per class, or an MNIST-like directory. Directory per class:
`ROOT/<class>/<image>`, where <class> is a label, an index of the task, or one of the `names` that the caller knows
(`image_sets.folder_classes`); a model counts as trained on the images of a ROOT whose name begins with "train".
MNIST-like: `{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]`. Boxes, or several classes per image: an npz file, a
COCO annotation file, or YOLO folders. Without labels there is only the flat directory, which `read_unlabelled` reads.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.models.image_sets.box_images import holds_boxes, other_form, read_coco, read_yolo
from hawkvision.models.image_sets.folder_classes import class_numbers, expected_classes
from hawkvision.models.image_sets.idx_reader import holds_idx_files, read_idx_parts
from hawkvision.models.image_sets.labelled_images import (
    SUFFIXES as SUFFIXES,
)
from hawkvision.models.image_sets.labelled_images import (
    Annotation as Annotation,
)
from hawkvision.models.image_sets.labelled_images import (
    LabelledImages as LabelledImages,
)
from hawkvision.models.image_sets.labelled_images import (
    UnlabelledImages as UnlabelledImages,
)
from hawkvision.models.image_sets.labelled_images import (
    images_in,
    is_training_split,
    read_files,
)
from hawkvision.models.image_sets.npz_images import read_npz

FORMS: Final = (
    "an npz file or a directory of class directories, or of idx files; for boxes also a COCO annotation file (.json), "
    "or a directory with YOLO's `images` and `labels`"
)
OTHER_FORMS: Final = (".xml", ".csv", ".jsonl", ".txt", ".yaml", ".yml", ".zip", ".tar", ".gz", ".parquet")
"""Suffixes of annotations and archives that are not read."""


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
    """Read a set with one class per image; `labels` are the task's class names in index order.

    `names` are further names that a class directory may have, with their class indices.

    Raises:
        ConfigError: naming the file or folder and what was expected there.
    """
    images = read_annotated(path, labels, names)
    if images.annotations is not None:
        raise ConfigError(f"{path}: expected one class per image, got boxes or several classes")
    return images


def read_annotated(
    path: Path,
    labels: Sequence[str],
    names: Mapping[str, int] | None = None,
    *,
    clean_ids: Path | None = None,
) -> LabelledImages:
    """Read a labelled set of any form.

    Args:
        path: npz file, directory, or COCO annotation file.
        labels: the task's, in index order.
        names: further names of classes, with their indices.
        clean_ids: a file with the ids (COCO) or names without suffix (YOLO) of the images that no model was trained on;
            all others count as `trained`. None means `clean_ids.txt` beside the annotations, if it is there.

    Raises:
        ConfigError: naming the file or folder and what was expected there.
    """
    known = {label: index for index, label in enumerate(labels)} | dict(names or {})
    if path.is_dir():
        if holds_idx_files(path):
            return _read_idx(path, len(labels))
        if holds_boxes(path):
            return read_yolo(path, len(labels), known, clean_ids)
        return _read_folder(path, labels, names or {})
    if path.suffix == ".json" and path.is_file():
        return read_coco(path, known, clean_ids)
    if path.is_file() and path.suffix not in OTHER_FORMS:
        return read_npz(path, known, len(labels))
    found = "this is another form" if path.exists() else "there is no such file or directory"
    raise ConfigError(f"{path}: {found}; expected {FORMS}")


def read_unlabelled(root: Path) -> UnlabelledImages:
    """Read a flat folder of images, sorted by name. Other files are ignored.

    Raises:
        ConfigError: if it is no folder, holds no images, or more than `MAX_FOLDER_BYTES` of them.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: expected a folder of images")
    digest = hashlib.sha256()
    files = images_in(root)
    bodies = read_files(root, files)
    for body in bodies:
        digest.update(f"{len(body)}:".encode() + body)
    if not bodies:
        raise ConfigError(f"{root}: no images (expected files ending in {', '.join(SUFFIXES)})")
    return UnlabelledImages(root.name, digest.hexdigest(), bodies, tuple(map(str, files)))


def image_times(data: Path, now: datetime) -> tuple[datetime | None, datetime]:
    """When the oldest and the newest image of a set were taken, as far as their files say.

    Times are those of the files' last change, in whole seconds, none of them after `now`. The oldest is None where
    images are no files of their own; then the newest is that of the set.
    """
    root = data.parent if data.suffix == ".json" else data
    files = (p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()) if root.is_dir() else ()
    times = [int(path.stat().st_mtime) for path in files]
    newest = min(max(times, default=int(data.stat().st_mtime)), int(now.timestamp()))
    oldest = datetime.fromtimestamp(min(*times, newest), UTC) if times else None
    return oldest, datetime.fromtimestamp(newest, UTC)


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
    known = class_numbers(labels)
    numbers = known | dict(names)
    paths: list[Path] = []
    found: list[int] = []
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        index = numbers.get(folder.name, numbers.get(unicodedata.normalize("NFC", folder.name)))
        if index is None:
            _refuse_other_form(root)
            raise ConfigError(
                f"{folder}: the directory is named after no class; expected {expected_classes(known)}"
                f"{_or_one_of(names)}; --class-map names other directories"
            )
        images = images_in(folder)
        paths += images
        found += [index] * len(images)
    bodies = read_files(root, paths)
    if not bodies:
        _refuse_other_form(root)
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
        trained=np.ones(len(bodies), np.bool_) if is_training_split(root.resolve().name) else None,
        files=tuple(map(str, paths)),
    )


def _refuse_other_form(root: Path) -> None:
    """Raises: ConfigError if a directory without class directories holds something else that is known."""
    other = other_form(root)
    if other is not None:
        raise ConfigError(f"{root}: {other}")


def _or_one_of(names: Mapping[str, int]) -> str:
    return f", or a name such as {min(names)!r}" if names else ""
