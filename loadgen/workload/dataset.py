"""The images of a load test, with labels where they have any: a folder, an npz file, or a few built-in ones.

The split `held_out` keeps to the images that a calibration set aside; `auto` does so if the task's calibration used
this very data, else takes those that no model was trained on, if the data set says so, and else all. Bodies are sent as
they are.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import LabelledImages, read_annotated, read_unlabelled
from hawkvision.models.image_sets.folder_classes import directory_classes
from hawkvision.models.image_sets.idx_reader import holds_idx_files
from hawkvision.models.manifest import load_labels, load_manifest
from loadgen.workload.judging import KindSpec, Label, kind_of_task, truths, written


class HeldOutIndices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The images that a calibration set aside, by number, and the data set they number."""

    data_sha256: str
    indices: tuple[int, ...]


def read_indices(path: Path, images: LabelledImages) -> NDArray[np.intp]:
    """The held-out images' numbers.

    Raises:
        ConfigError: if the file is missing, unreadable or malformed, or numbers another data set.
    """
    try:
        held_out = msgspec.json.decode(path.read_bytes(), type=HeldOutIndices)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `hawkvision calibrate` writes it beside the profile") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if held_out.data_sha256 != images.sha256:
        raise ConfigError(
            f"{path} numbers images of the data with sha256 {held_out.data_sha256[:12]}…, but {images.name} has "
            f"{images.sha256[:12]}…; pass the data of the calibration, or --split all for data it never saw"
        )
    if not held_out.indices:
        raise ConfigError(
            f"{path}: the calibration held no images out; pass --split auto for those that no model was trained on, or "
            "--split all"
        )
    indices = np.array(held_out.indices, np.intp)
    if len(np.unique(indices)) < len(indices) or not _within(indices, len(images)):
        raise ConfigError(f"{path}: indices: expected distinct numbers from 0 to {len(images) - 1}")
    return indices


def _within(indices: NDArray[np.intp], n: int) -> bool:
    return bool(indices.min() >= 0 and indices.max() < n)


def thin(chosen: NDArray[np.intp], limit: int | None) -> NDArray[np.intp]:
    """At most `limit` of the numbers, evenly spread over them, since data sets are often sorted by class.

    Raises:
        ConfigError: if the limit leaves nothing.
    """
    if limit is None or limit >= len(chosen):
        return chosen
    if limit < 1:
        raise ConfigError(f"--limit: expected at least 1, got {limit}")
    return chosen[np.linspace(0, len(chosen) - 1, limit).round().astype(np.intp)]


BUILT_IN: Final = "built-in"
Split: TypeAlias = Literal["auto", "held_out", "all"]
PHOTOGRAPHS: Final = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png", "motorcycle_left.png")
"""Inside scikit-image's wheel."""
GENERATED: Final = 8
"""Images that are made where there are no photographs: smooth noise, JPEG, 256 x 256."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images to ask about, and their numbers in the set that they are of."""

    name: str
    """For the record: the set, the split, how many."""
    bodies: Sequence[bytes]
    numbers: tuple[int, ...]
    labels: tuple[Any, ...] | None
    """As the loss of the task's kind takes them."""
    kind: KindSpec | None = None
    """Of the task; None if its manifest is not here."""
    written: list[Label] | None = None
    """The labels on their way to other processes."""

    def __len__(self) -> int:
        return len(self.bodies)

    def order(self, n: int, seed: int) -> NDArray[np.intp]:
        """Which image each of `n` requests sends: all of them in random order, then all in another, and so on.

        Sets come class by class, and a node rightly takes five hundred cats in a row for other traffic.
        """
        rng = np.random.default_rng(seed)
        rounds = [rng.permutation(len(self)) for _ in range(-(-n // len(self)))]
        return np.concatenate([*rounds, np.empty(0, np.intp)])[:n].astype(np.intp)


def read_dataset(
    data: str | None,
    task: str,
    models: Path,
    *,
    split: str = "auto",
    indices: Path | None = None,
    limit: int | None,
    class_map: Path | None = None,
) -> Dataset:
    """The images at `data` (None or `built-in`: those), chosen by split, at most `limit` evenly spread ones.

    Raises:
        ConfigError: if there are none, or the split does not fit them.
    """
    if data in (None, BUILT_IN):
        _only_all(BUILT_IN, split)
        bodies = photographs() or [generated(seed) for seed in range(GENERATED)]
        return _unlabelled(BUILT_IN, bodies, limit, kind_of_task(task, models))
    path = Path(str(data))
    if path.is_dir() and not holds_idx_files(path) and not any(each.is_dir() for each in path.iterdir()):
        _only_all(path.name, split)
        images = read_unlabelled(path)
        return _unlabelled(images.name, images.bodies, limit, kind_of_task(task, models))
    labelled = read_labelled(path, task, models, class_map)
    chosen, taken = chosen_by(split, labelled, indices or models / task / "held_out.json")
    chosen = thin(chosen, limit)
    spec, annotations = kind_of_task(task, models), list(labelled.annotated())
    assert spec is not None, "the labels are those of the manifest"
    labels = written(annotations[number] for number in chosen)
    return Dataset(
        f"{labelled.name} ({labelled.sha256[:12]}), {len(chosen)} images, {taken}",
        [labelled.bodies[number] for number in chosen],
        tuple(chosen.tolist()),
        tuple(truths(spec.open(), labels)),
        spec,
        labels,
    )


def read_labelled(path: Path, task: str, models: Path, class_map: Path | None = None) -> LabelledImages:
    """Images with labels of a task; a folder's class directories are named as `directory_classes` says.

    Raises:
        ConfigError: naming the file or folder and what was expected there.
    """
    labels = load_labels(load_manifest(task, models), models)
    names = {} if path.is_file() else directory_classes(labels, models / task, class_map)
    return read_annotated(path, labels, names)


def photographs() -> list[bytes]:
    """The photographs inside scikit-image's wheel; none where it is not installed."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "data"
    return [(folder / name).read_bytes() for name in PHOTOGRAPHS if (folder / name).is_file()]


def generated(seed: int) -> bytes:
    """A JPEG that decodes like a photograph and shows nothing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    pixels = cv2.resize(coarse, (256, 256), interpolation=cv2.INTER_CUBIC)
    done, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])
    assert done
    return encoded.tobytes()


def _unlabelled(name: str, bodies: Sequence[bytes], limit: int | None, kind: KindSpec | None) -> Dataset:
    chosen = thin(np.arange(len(bodies)), limit)
    kept = [bodies[number] for number in chosen]
    sha256 = hashlib.sha256(b"".join(kept)).hexdigest()
    return Dataset(f"{name} ({sha256[:12]}), {len(kept)} images", kept, tuple(chosen.tolist()), None, kind)


def chosen_by(split: str, images: LabelledImages, indices: Path) -> tuple[NDArray[np.intp], str]:
    """The numbers of the images that a split takes, and which those are, for the record.

    Args:
        split: as the option `--split`.
        images: of the set.
        indices: the file that lists the held-out images.

    Raises:
        ConfigError: if the calibration held out none of them, and `split` is `held_out`.
    """
    if split == "held_out" or (split == "auto" and _numbers(indices, images)):
        return read_indices(indices, images), "held out"
    if split == "auto" and images.trained is not None and not images.trained.all():
        return np.flatnonzero(~images.trained), "those that no model was trained on"
    return np.arange(len(images)), "all"


def _numbers(indices: Path, images: LabelledImages) -> bool:
    """Whether the calibration's split is of these very images, and held some out."""
    try:
        split = msgspec.json.decode(indices.read_bytes(), type=HeldOutIndices)
        return split.data_sha256 == images.sha256 and bool(split.indices)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{indices}: cannot read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{indices}: {error}") from None


def _only_all(name: str, split: str) -> None:
    if split == "held_out":
        raise ConfigError(f"--split held_out: {name} has no labels, so no calibration saw it; use --split all")
