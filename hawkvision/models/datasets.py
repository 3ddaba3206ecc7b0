"""Images for training, calibrating and evaluating. The readers are in `image_sets`.

One class per image: an npz file, a directory per class, or an MNIST-like directory. Directory per class:
`ROOT/<class>/<image>`, where <class> is a label, an index of the task, or one of the `names` that the caller knows
(`image_sets.folder_classes`); a model counts as trained on the images of a ROOT whose name begins with "train".
MNIST-like: `{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]`. Boxes, or several classes per image: an npz file, a
COCO annotation file, or YOLO folders. Without labels there is only the flat directory, which `read_unlabelled` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.models.image_sets.box_images import holds_boxes, read_coco, read_yolo
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
    if path.is_file():
        return read_npz(path, known, len(labels))
    raise ConfigError(
        f"{path}: expected an npz file or a directory of class directories, or of idx files; for boxes also a COCO "
        "annotation file (.json), or a directory with YOLO's `images` and `labels`"
    )


def read_unlabelled(root: Path) -> UnlabelledImages:
    """Read a flat folder of images, sorted by name. Other files are ignored.

    Raises:
        ConfigError: if it is no folder, holds no images, or more than `MAX_FOLDER_BYTES` of them.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: expected a folder of images")
    digest = hashlib.sha256()
    bodies = read_files(root, images_in(root))
    for body in bodies:
        digest.update(f"{len(body)}:".encode() + body)
    if not bodies:
        raise ConfigError(f"{root}: no images (expected files ending in {', '.join(SUFFIXES)})")
    return UnlabelledImages(root.name, digest.hexdigest(), bodies)


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
        images = images_in(folder)
        paths += images
        found += [numbers[folder.name]] * len(images)
    bodies = read_files(root, paths)
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
        trained=np.ones(len(bodies), np.bool_) if is_training_split(root.resolve().name) else None,
    )


def _or_one_of(names: Mapping[str, int]) -> str:
    return f", or a name such as {min(names)!r}" if names else ""
