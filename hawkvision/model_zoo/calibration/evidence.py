"""Reading labelled images as evidence: with the kind's labels, each image once, none that a model was trained on.

Tests count independent images. A copy of an image is no further evidence, and a copy of an image that a model was
trained on is none at all. Copies are files with the same bytes; images that only look alike are not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.imaging.preprocessing import probe
from hawkvision.models.datasets import Annotation, LabelledImages, UnlabelledImages, read_annotated
from hawkvision.models.image_sets.folder_classes import directory_classes
from hawkvision.models.image_sets.labelled_images import copies_of
from hawkvision.models.manifest import Manifest
from hawkvision.tasks.kind import TaskKind, Truth

FEWEST_CLEAN: Final = 20
"""Images that no model was trained on: with fewer, no drop below 14 % can be certified, whatever their labels."""


class TrainedImages(StrEnum):
    """What to do with images that a model of the task was trained on. They are never evidence."""

    REFUSE = "refuse"
    LEAVE_OUT = "leave-out"
    FIT = "fit"
    """Fit temperatures, scores and the order of thresholds on them, and certify on all others."""


@dataclass(frozen=True, slots=True)
class LabelReading:
    """How to read the labels of a data set."""

    class_map: Path | None = None
    """Names of class directories (`folder_classes`)."""
    clean_ids: Path | None = None
    """Images that no model was trained on (`datasets.read_annotated`)."""
    trained: TrainedImages = TrainedImages.REFUSE


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Labelled images with their labels as the kind's losses take them."""

    images: LabelledImages
    truths: list[Truth]

    @property
    def clean(self) -> NDArray[np.intp]:
        """See `clean_images`."""
        return clean_images(self.images)


def read_evidence(
    data: Path, kind: TaskKind[Any], manifest: Manifest, models: Path, reading: LabelReading
) -> LabelledData:
    """Read labelled images; `check_enough` counts those that are evidence.

    Raises:
        ConfigError: if they cannot be read, their labels are not the kind's or contradict one another, or a model was
            trained on some of them and `reading` does not say what to do.
    """
    names = directory_classes(kind.labels, models / manifest.task, reading.class_map)
    images = read_annotated(data, kind.labels, names, clean_ids=reading.clean_ids)
    _check_sizes(images)
    trained, clean = int(_trained(images).sum()), len(clean_images(images))
    if trained and reading.trained is TrainedImages.REFUSE:
        raise ConfigError(
            f"{data}: a model was trained on {trained} of these {len(images)} images, so that they are no evidence; "
            f"expected none, or `--trained-images leave-out` to use the other {clean} only, or `--trained-images fit` "
            "to fit temperatures and thresholds on them and certify on the others"
        )
    _refuse_contradictions(data, images)
    try:
        return LabelledData(images, kind.truths(images.annotated()))
    except ConfigError as error:
        raise ConfigError(f"{data}: {error}") from None


def _check_sizes(images: LabelledImages) -> None:
    """Check that images have the sizes that their annotations state, on which the boxes rest.

    Raises:
        ConfigError: naming an image of another size, or one that cannot be read.
    """
    for index, stated in enumerate(images.sizes):
        try:
            header = probe(images.bodies[index])
        except RequestError as error:
            raise ConfigError(f"{images.called(index)}: {error}") from None
        if sorted(stated) != sorted((header.width, header.height)):
            raise ConfigError(
                f"{images.called(index)}: the image has {header.width}x{header.height} pixels; its annotations are for "
                f"{stated[0]}x{stated[1]}"
            )


def check_enough(data: Path, images: LabelledImages | UnlabelledImages, fewest: int) -> None:
    """Check that so many different images can be evidence, or `FEWEST_CLEAN` where a model was trained on others.

    Raises:
        ConfigError: if there are fewer.
    """
    found = len(clean_images(images))
    if isinstance(images, LabelledImages) and _trained(images).any():
        fewest = FEWEST_CLEAN
    if found < fewest:
        copies = "" if found == len(images) else f" of {len(images)} that are different and trained no model"
        raise ConfigError(f"{data}: {found} images{copies} certify nothing; expected at least {fewest}")


def check_classes(data: Path, images: LabelledImages, kind: TaskKind[Any]) -> None:
    """Check that images are of more than one class, where each has one.

    Raises:
        ConfigError: naming the only one.
    """
    if images.annotations is None and len(kind.labels) > 1 and (images.labels == images.labels[0]).all():
        only = kind.labels[int(images.labels[0])]
        raise ConfigError(f"{data}: all {len(images)} images are of {only!r}; expected images of several classes")


def clean_images(images: LabelledImages | UnlabelledImages) -> NDArray[np.intp]:
    """The indices of the images that no model was trained on, as far as the data set says; of copies, the first."""
    first = copies_of(images.bodies)
    usable = first == np.arange(len(first))
    if isinstance(images, LabelledImages):
        usable &= ~_trained(images, first)
    return np.flatnonzero(usable)


def _trained(images: LabelledImages, first: NDArray[np.intp] | None = None) -> NDArray[np.bool_]:
    """Whether a model was trained on each image (n,), or on a copy of it; `first` as by `copies_of`."""
    if images.trained is None or not images.trained.any():
        return np.zeros(len(images), np.bool_)
    first = copies_of(images.bodies) if first is None else first
    return np.isin(first, first[images.trained])


def _refuse_contradictions(data: Path, images: LabelledImages) -> None:
    """Raises: ConfigError naming two copies of an image with different labels."""
    first, annotations = copies_of(images.bodies), None
    for copy in np.flatnonzero(first != np.arange(len(first))):
        annotations = annotations or list(images.annotated())
        one, other = annotations[first[copy]], annotations[copy]
        if not (np.array_equal(one.classes, other.classes) and _same_boxes(one, other)):
            raise ConfigError(
                f"{data}: images {first[copy]} and {copy}, in the order of their names, have the same bytes and "
                "different labels; expected one label of each image"
            )


def _same_boxes(one: Annotation, other: Annotation) -> bool:
    if one.boxes is None or other.boxes is None:
        return one.boxes is other.boxes
    return np.array_equal(one.boxes, other.boxes)
