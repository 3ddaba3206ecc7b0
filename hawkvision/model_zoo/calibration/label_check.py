"""Labels are compared with answers before anything is certified by them, and the list of images to label is written."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import ByImage, StagePredictions, select
from hawkvision.core.errors import ConfigError
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.labels import (
    FEWEST_CHECKED,
    RANDOM_IMAGES,
    LabelNeed,
    doubt,
)
from hawkvision.model_zoo.calibration.model_runner import AnyImages
from hawkvision.system.files import write_atomic
from hawkvision.tasks.kind import Output, TaskKind, Truth

COLUMNS: Final = ("file", "label", "answer_1", "answer_2", "helps")


def random_images(images: AnyImages, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """The images that labels are checked on, drawn at random from those `chosen`; the same at every call."""
    rng = np.random.default_rng(int(images.sha256[:16], 16))
    drawn: NDArray[np.intp] = rng.permutation(chosen)[:RANDOM_IMAGES]
    return drawn


def checkable(
    images: AnyImages, truths: Sequence[Truth | None], chosen: NDArray[np.intp], where: str
) -> NDArray[np.intp]:
    """The images to check labels on: all if all have one, else those drawn at random that have one.

    Raises:
        ConfigError: if too few of those drawn have a label.
    """
    if all(truths[i] is not None for i in chosen.tolist()):
        return chosen
    drawn = random_images(images, chosen)
    labelled = np.array([i for i in drawn.tolist() if truths[i] is not None], np.intp)
    if len(labelled) < min(FEWEST_CHECKED, len(drawn)):
        raise ConfigError(
            f"{where}: {len(labelled)} of the {len(drawn)} images drawn at random, which labels are checked on, have a "
            f"label; expected at least {FEWEST_CHECKED}: they come first in the list that --to-label writes"
        )
    return labelled


def check_labels(
    kind: TaskKind[Any],
    stages: Iterable[StagePredictions],
    reference: StagePredictions,
    truths: ByImage[Truth],
    chosen: NDArray[np.intp],
    where: str,
    *,
    allow_worse: bool = False,
) -> None:
    """Compare the labels of images drawn at random with what the stages answer.

    Args:
        kind: of the task.
        stages: those below the reference stage.
        reference: the reference stage.
        truths: the labels.
        chosen: the images.
        where: the labels come from, for errors.
        allow_worse: whether the reference stage may be worse than a stage below it.

    Raises:
        ConfigError: saying what is wrong with the labels, or with the reference stage.
    """
    own, answers = select(truths, chosen), reference.of(chosen)
    classes = None
    if kind.one_class:
        classes = np.array(own, np.int64), class_indices(kind, answers), len(kind.labels)
    below = {stage.name: kind.losses(stage.of(chosen), own) for stage in stages}
    found = doubt(
        reference.name, kind.losses(answers, own), below, classes, binary=kind.binary, allow_worse=allow_worse
    )
    if found is not None:
        raise ConfigError(f"{where}: {found}")


def class_indices(kind: TaskKind[Any], outputs: Sequence[Output]) -> NDArray[np.int64]:
    """The class that each output says (n,)."""
    return np.array([kind.predict(output, 1).index for output in outputs], np.int64)


@dataclass(frozen=True, slots=True)
class Wish:
    """Images whose labels would help one pair of stages."""

    below: list[StagePredictions]
    """The edge stage, and the intermediate stage if there is one."""
    reference: StagePredictions
    needs: dict[float, LabelNeed]
    """By `max_drop`."""
    scores: NDArray[np.float64]
    """The edge's (n,)."""
    images: NDArray[np.intp]


def write_list(
    path: Path,
    kind: TaskKind[Any],
    images: AnyImages,
    truths: Sequence[Truth | None],
    drawn: NDArray[np.intp],
    wishes: Sequence[Wish],
) -> int:
    """Write the images to label: those drawn at random, then those that help the most targets.

    Returns:
        the number of images in the list.
    """
    helped: dict[int, list[str]] = {i: [] for i in drawn.tolist() if truths[i] is None}
    asked = dict.fromkeys(helped, wishes[0])
    for wish in wishes:
        count = np.sum([need.helps for need in wish.needs.values()], axis=0)
        for row in np.lexsort((-wish.scores, -count)).tolist():
            if count[row]:
                index = int(wish.images[row])
                asked.setdefault(index, wish)
                drops = [f"{stated_drop(drop):g}" for drop, need in wish.needs.items() if need.helps[row]]
                helped.setdefault(index, []).append(f"{wish.below[0].name}: {' '.join(drops)}")
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(COLUMNS)
    for index, wish in asked.items():
        *below, best = (int(kind.predict(stage.outputs[index], 1).index) for stage in (*wish.below, wish.reference))
        pair = [next((each for each in below if each != best), best), best]
        if hashlib.sha256(images.bodies[index]).digest()[0] % 2:
            pair.reverse()
        rows.writerow(
            [Path(images.called(index)).name, "", *(kind.labels[each] for each in pair), "; ".join(helped[index])]
        )
    write_atomic(path, text.getvalue().encode())
    return len(asked)
