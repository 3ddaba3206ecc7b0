"""`hawkvision models check`: what is served beside what the owner's own program predicts.

Where they differ, other preparations of the images are tried, because a wrong one is the usual cause.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec
import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.model_zoo.own.reference_predictions import (
    LabelReference,
    Reference,
    WholeReference,
    read_reference,
    summary,
)
from hawkvision.model_zoo.own.served import Bodies, StageRun, other_readings, with_readings
from hawkvision.models.artifacts import load_variant
from hawkvision.models.input_spec import InputSpec, Interpolation
from hawkvision.models.manifest import Manifest, Variant, load_manifest
from hawkvision.tasks.boxes.rows import matches
from hawkvision.tasks.decoders.decoder import UNSTATED
from hawkvision.tasks.detection import Detection, arrays
from hawkvision.tasks.kind import Output, TaskKind
from hawkvision.tasks.registry import load_kind

TRIED_ON: Final = 32
"""Images on which other preparations are tried: those that differ most."""
CROPS: Final = (1.0, 224 / 256, 0.9)
"""Crop fractions that are tried."""
CLEARLY: Final = 0.5
"""Another preparation is named if it leaves at most this share of the difference."""


@dataclass(frozen=True, slots=True)
class ImageDifference:
    """One image."""

    file: str
    reference: str
    served: str
    difference: float


class ObjectCounts(NamedTuple):
    """Objects of all images: the owner's, those served, and how many of these have the same label, and the same box."""

    yours: int
    served: int
    same_label: int
    same_box: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found; differences are 0..1."""

    stage: str
    images: tuple[ImageDifference, ...]
    """Most different first."""
    mean: float
    better: str | None
    """Options of `models add` with which the predictions agree better; None if there are none, or none were tried."""
    better_mean: float
    same_labels: int
    """Images of which both have the same label."""
    objects: ObjectCounts | None
    """For kinds that give objects."""
    unstated: tuple[str, ...]
    """Options of the decoder that the owner must still state."""
    tolerance: float

    @property
    def worst(self) -> float:
        """The largest difference."""
        return self.images[0].difference

    @property
    def agrees(self) -> bool:
        """Whether all is stated and no image differs by more than the tolerance."""
        return not self.unstated and self.worst <= self.tolerance


def check(
    task: str, reference: Path, *, data: Path | None, stage: str | None, tolerance: float, models: Path, cache: Path
) -> Checked:
    """Compare a stage with the owner's predictions.

    Args:
        task: the task.
        reference: the owner's predictions (`reference_predictions`).
        data: the folder that their file names start from; None means that of `reference`.
        stage: a single variant; None means the one that was added last.
        tolerance: largest difference that is accepted.
        models: the folder of manifests.
        cache: the folder of built models.

    Raises:
        HawkVisionError: if the task, the stage, the file or an image is missing or cannot be read.
    """
    manifest = load_manifest(task, models)
    kind, variant = load_kind(manifest, models), _variant(manifest, stage)
    known = read_reference(reference, kind)
    images = read_named([each.file for each in known], data or reference.parent)
    served = StageRun(kind, with_readings(variant), load_variant(cache, task, variant))
    unstated = tuple(name for name, value in variant.decoder_options.items() if value == UNSTATED)
    outputs = served.over(images)[0]
    found = _differences(kind, known, outputs)
    order = np.argsort(-found, kind="stable")
    compared = tuple(
        ImageDifference(
            known[at].file, known[at].described(kind), summary(_predicted(kind, outputs[at])), float(found[at])
        )
        for at in order
    )
    better, better_mean = None, float("nan")
    if unstated or compared[0].difference > tolerance:
        chosen = [int(at) for at in order[:TRIED_ON]]
        some, bodies = [known[at] for at in chosen], [images[at] for at in chosen]
        mean = float(found[chosen].mean())
        better, better_mean = _better_reading(kind, served, variant, some, bodies, mean)
        if better is None:
            better, better_mean = _better(kind, served, variant.input, some, bodies, mean)
    pairs = [(each, _predicted(kind, output)) for each, output in zip(known, outputs, strict=True)]
    same = sum(isinstance(each, LabelReference) and each.same_label(predicted) for each, predicted in pairs)
    return Checked(
        variant.name, compared, float(found.mean()), better, better_mean, same, _objects(pairs), unstated, tolerance
    )


def read_named(names: Sequence[str], folder: Path) -> list[tuple[str, bytes]]:
    """The files of these names, relative to the folder or absolute.

    Raises:
        ConfigError: naming one that cannot be read.
    """
    found: list[tuple[str, bytes]] = []
    for name in names:
        path = folder / name
        try:
            found.append((str(path), path.read_bytes()))
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{path}: cannot read the image: {reason}; --data names the folder that the files are in"
            ) from None
    return found


def _variant(manifest: Manifest, stage: str | None) -> Variant:
    return manifest.variants[-1] if stage is None else manifest.variant(stage)


def _predicted(kind: TaskKind[Any], output: Output) -> Any:
    return kind.predict(output, len(kind.labels))


def _differences(kind: TaskKind[Any], known: Sequence[Reference], outputs: Sequence[Output]) -> Any:
    pairs = zip(known, outputs, strict=True)
    return np.array([each.difference(kind, _predicted(kind, output)) for each, output in pairs])


def _objects(pairs: Sequence[tuple[Reference, Any]]) -> ObjectCounts | None:
    """What both have in common; None for kinds without objects."""
    counts = ObjectCounts(0, 0, 0, 0)
    for each, served in pairs:
        if not (isinstance(each, WholeReference) and isinstance(each.prediction, Detection)):
            return None
        (boxes, classes), (others, of_others) = arrays(each.prediction), arrays(served)
        same = (Counter(classes.tolist()) & Counter(of_others.tolist())).total()
        found = (len(classes), len(of_others), same, matches(others, of_others, boxes, classes))
        counts = ObjectCounts(*map(sum, zip(counts, found, strict=True)))
    return counts


def _better_reading(
    kind: TaskKind[Any], served: StageRun, variant: Variant, known: Sequence[Reference], images: Bodies, mean: float
) -> tuple[str | None, float]:
    """The other options of the decoder that come closest, as options, and the mean difference that they leave.

    The best of them are named where something is not stated, else only what leaves clearly less.
    """
    changes = other_readings(variant)
    left = np.zeros(len(changes))
    for each, outputs in zip(known, served.read_as(images, changes), strict=True):
        left += [1.0 if o is None else each.difference(kind, _predicted(kind, o)) / len(known) for o in outputs]
    if not changes or not (UNSTATED in variant.decoder_options.values() or left.min() <= CLEARLY * mean):
        return None, float("nan")
    best = int(left.argmin())  # the smallest change of those that leave the same
    words = (f"--decoder-option {name}={str(value).lower()}" for name, value in changes[best].items())
    return " ".join(words), float(left[best])


def _better(
    kind: TaskKind[Any],
    served: StageRun,
    spec: InputSpec,
    known: Sequence[Reference],
    images: Bodies,
    mean: float,
) -> tuple[str | None, float]:
    """The other preparation that comes closest, as options, and the mean difference that it leaves.

    First fit and order of channels are changed, then for the best of these the interpolation.
    """

    def remaining(other: InputSpec, *, reverse: bool) -> float:
        outputs = served.over(images, other, reversed_channels=reverse)[0]
        return float(_differences(kind, known, outputs).mean())

    tried = [(mean, 0, spec, False)]
    fits = [(other, reverse) for other in _fits(spec) for reverse in (False, True) if (other, reverse) != (spec, False)]
    tried += [(remaining(other, reverse=reverse), at, other, reverse) for at, (other, reverse) in enumerate(fits, 1)]
    _, _, fitted, reverse = min(tried, key=lambda each: each[:2])
    scaled = [
        msgspec.structs.replace(fitted, interpolation=each)
        for each in _interpolations()
        if each != fitted.interpolation
    ]
    tried += [(remaining(other, reverse=reverse), at, other, reverse) for at, other in enumerate(scaled, len(tried))]
    least, _, best, reverse = min(tried, key=lambda each: each[:2])
    return (_words(best, spec, reverse=reverse) if least <= CLEARLY * mean else None), least


def _fits(spec: InputSpec) -> Iterator[InputSpec]:
    """Ways to fit images to the input, the given one first."""
    yield spec
    ways = [("crop", crop) for crop in dict.fromkeys((spec.crop_fraction, *CROPS))]
    for fit, crop in (*ways, ("stretch", 1.0), ("letterbox", 1.0)):
        other = msgspec.structs.replace(
            spec, fit=fit, crop_fraction=crop,
            pad_value=spec.pad_value if fit == "letterbox" else 114,
            pad_position=spec.pad_position if fit == "letterbox" else "centre",
        )  # fmt: skip
        if other != spec:
            yield other


def _interpolations() -> list[Interpolation]:
    """Those that can be tried here."""
    found: list[Interpolation] = list(get_args(Interpolation))
    return [each for each in found if not each.startswith("pillow_") or importlib.util.find_spec("PIL") is not None]


def _words(best: InputSpec, spec: InputSpec, *, reverse: bool) -> str:
    """The preparation as options of `models add`."""
    swapped = "bgr" if spec.channel_order == "rgb" else "rgb"
    words = [f"--fit {best.fit}", *([f"--crop-fraction {best.crop_fraction:g}"] if best.fit == "crop" else [])]
    words += [f"--interpolation {best.interpolation}"]
    words += [f"--channel-order {swapped if reverse else spec.channel_order}"]
    return " ".join(words)
