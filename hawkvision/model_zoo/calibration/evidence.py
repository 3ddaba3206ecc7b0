"""Reading labelled images as evidence: with the kind's labels, and without images that a model was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError, RequestError
from hawkvision.imaging.preprocessing import probe
from hawkvision.models.datasets import LabelledImages, UnlabelledImages, read_annotated
from hawkvision.models.image_sets.folder_classes import directory_classes
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
class Evidence:
    """Labelled images with their labels as the kind's losses take them."""

    images: LabelledImages
    truths: list[Truth]

    @property
    def clean(self) -> NDArray[np.intp]:
        """The indices of the images that no model was trained on."""
        return clean_images(self.images)


def read_evidence(data: Path, kind: TaskKind[Any], manifest: Manifest, models: Path, reading: LabelReading) -> Evidence:
    """Read labelled images.

    Raises:
        ConfigError: if they cannot be read, their labels are not the kind's, or a model was trained on some of them and
            `reading` does not say what to do.
    """
    names = directory_classes(kind.labels, models / manifest.task, reading.class_map)
    images = read_annotated(data, kind.labels, names, clean_ids=reading.clean_ids)
    _check_sizes(images)
    clean = len(clean_images(images))
    if clean < len(images) and reading.trained is TrainedImages.REFUSE:
        raise ConfigError(
            f"{data}: a model was trained on {len(images) - clean} of these {len(images)} images, so that they are "
            f"no evidence; expected none, or `--trained-images leave-out` to use the other {clean} only, or "
            "`--trained-images fit` to fit temperatures and thresholds on them and certify on the others"
        )
    if clean < len(images) and clean < FEWEST_CLEAN:
        raise ConfigError(f"{data}: no model was trained on {clean} of these images; expected at least {FEWEST_CLEAN}")
    try:
        return Evidence(images, kind.truths(images.annotated()))
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


def clean_images(images: LabelledImages | UnlabelledImages) -> NDArray[np.intp]:
    """The indices of the images that no model was trained on, as far as the data set says."""
    if isinstance(images, UnlabelledImages) or images.trained is None:
        return np.arange(len(images))
    return np.flatnonzero(~images.trained)
