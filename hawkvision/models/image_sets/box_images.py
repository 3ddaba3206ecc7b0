"""Images with boxes: a COCO annotation file, or folders as YOLO's tools write them.

COCO: `{"images": [{id, file_name, width, height}], "annotations": [{image_id, category_id, bbox: [x, y, w, h]}],
"categories": [{id, name}]}`. Categories are found by name among the task's labels. Regions marked `iscrowd` and boxes
without area are left out. The images lie where `_places` looks.

YOLO: `images/**/NAME.jpg` and for each `labels/**/NAME.txt`, whose lines are `CLASS X Y W H`: the class index, centre
and size of a box as fractions of the image. An image with an empty file shows nothing, and so does one without a file
where most have one. A file `classes.txt` (one name a line) or `data.yaml` (`names`) says that indices are not those of
the task.

A model was trained on the images of a split whose name begins with "train" (`instances_train2017.json`,
`images/train/`, `train/images/`), and if there is a list of clean ids, on all that it lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.core.text_files import read_text
from hawkvision.models.image_sets.labelled_images import (
    SUFFIXES,
    Annotation,
    LabelledImages,
    is_training_split,
    read_files,
)

CLEAN_IDS: Final = "clean_ids.txt"
MAX_BYTES: Final = 1 << 30
"""The largest annotation file; COCO's largest has 470 MB."""


class _Image(msgspec.Struct):
    id: int
    file_name: Annotated[str, Meta(min_length=1)]
    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]


class _Object(msgspec.Struct):
    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    iscrowd: int = 0


class _Category(msgspec.Struct):
    id: int
    name: str


class _Coco(msgspec.Struct):
    images: Annotated[list[_Image], Meta(min_length=1)]
    annotations: list[_Object]
    categories: list[_Category]


def holds_boxes(root: Path) -> bool:
    """Whether a directory is one of YOLO's."""
    return (root / "images").is_dir() and (root / "labels").is_dir()


def other_form(root: Path) -> str | None:
    """What a directory holds, and what to give instead, if it holds boxes in another way than those that are read."""
    if any((root / "Annotations").glob("*.xml")) or any(root.glob("*.xml")):
        return "this is Pascal VOC's form, which is not read; convert it to COCO's"
    annotations = sorted(p for p in root.glob("*.json") if p.is_file())
    if annotations:
        return f"annotations lie in it; give their file, such as {annotations[0]}"
    splits = sorted(p for p in root.iterdir() if p.is_dir() and holds_boxes(p))
    if splits:
        return f"splits lie in it; give one, such as {splits[-1]}"
    if any(p.with_suffix(".txt").is_file() for p in root.iterdir() if p.suffix.lower() in SUFFIXES):
        return "annotations lie beside the images; move both into `images` and `labels`"
    return None


def read_coco(path: Path, names: Mapping[str, int], clean_ids: Path | None = None) -> LabelledImages:
    """Read a COCO annotation file and its images.

    Args:
        path: of the annotation file.
        names: of classes, with their indices.
        clean_ids: see `hawkvision.models.datasets.read_annotated`.

    Raises:
        ConfigError: naming the file and what was expected there.
    """
    coco = _decoded(path)
    used = {each.category_id for each in coco.annotations}
    classes = {}
    for category in coco.categories:
        if category.name in names:
            classes[category.id] = names[category.name]
        elif category.id in used:
            raise ConfigError(f"{path}: category {category.name!r} is no label of the task; expected {_some(names)}")
    objects: dict[int, list[_Object]] = {image.id: [] for image in coco.images}
    for each in coco.annotations:
        if each.image_id not in objects or each.category_id not in classes:
            named = f"image {each.image_id}, category {each.category_id}"
            raise ConfigError(f"{path}: an annotation names {named}; expected both to be listed")
        objects[each.image_id].append(each)
    _refuse_fractions(path, coco)
    annotations = [_annotation(path, image, objects[image.id], classes) for image in coco.images]
    files = _files_of(path, coco.images)
    trained = _trained(clean_ids, path.parent, [str(image.id) for image in coco.images])
    if "train" in path.stem or is_training_split(path.parent.name):
        trained = np.ones(len(files), np.bool_)
    sizes = tuple((image.width, image.height) for image in coco.images)
    return _labelled(path, files, annotations, trained, sizes)


def read_yolo(root: Path, classes: int, names: Mapping[str, int], clean_ids: Path | None = None) -> LabelledImages:
    """Read YOLO folders.

    Args:
        root: the folder that holds `images` and `labels`.
        classes: the number of the task's labels.
        names: of classes, with their indices.
        clean_ids: see `hawkvision.models.datasets.read_annotated`.

    Raises:
        ConfigError: naming the file, the line and what was expected there.
    """
    files = sorted(p for p in (root / "images").rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise ConfigError(f"{root / 'images'}: no images (expected files ending in {', '.join(SUFFIXES)})")
    indices = _own_classes(root, names) or list(range(classes))
    parts = [file.relative_to(root / "images") for file in files]
    labels = [(root / "labels" / part).with_suffix(".txt") for part in parts]
    _refuse_unlabelled(root, labels)
    annotations = [_lines(file, indices) for file in labels]
    trained = _trained(clean_ids, root, [file.stem for file in files])
    named = [is_training_split(part.parts[0] if len(part.parts) > 1 else root.name) for part in parts]
    if any(named):
        trained = np.array(named) if trained is None else trained | np.array(named)
    return _labelled(root, files, annotations, trained)


def _decoded(path: Path) -> _Coco:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: expected an annotation file of at most {MAX_BYTES} bytes, got {size}")
        coco = msgspec.json.decode(path.read_bytes(), type=_Coco)
    except MALFORMED as error:
        raise ConfigError(f"{path}: expected COCO annotations with `images` and `categories`: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    if len({image.id for image in coco.images}) != len(coco.images):
        raise ConfigError(f"{path}: expected each image once; ids repeat")
    return coco


def _annotation(path: Path, image: _Image, objects: Sequence[_Object], classes: Mapping[int, int]) -> Annotation:
    kept = [each for each in objects if not each.iscrowd]
    corners = np.array([each.bbox for each in kept], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    boxes = np.clip(corners / np.array([image.width, image.height] * 2), 0.0, 1.0)
    if not np.isfinite(corners).all():
        raise ConfigError(f"{path}: image {image.id}: expected boxes of finite numbers")
    middle = (corners[:, :2] + corners[:, 2:]) / 2.0
    outside = (middle < 0.0) | (middle > [image.width, image.height])
    if outside.any():
        raise ConfigError(
            f"{path}: image {image.id}: a box lies outside of its {image.width} x {image.height} pixels; expected "
            "bbox = [x, y, width, height] in pixels"
        )
    solid = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    found = np.array([classes[each.category_id] for each in kept], np.int64)
    return Annotation(found[solid], boxes[solid].astype(np.float32))


def _refuse_fractions(path: Path, coco: _Coco) -> None:
    """Raises: ConfigError if no box of a whole file reaches beyond the first pixel: then they are fractions."""
    reach = [max(each.bbox[0] + each.bbox[2], each.bbox[1] + each.bbox[3]) for each in coco.annotations]
    if reach and max(reach) <= 1.0 and all(max(image.width, image.height) > 1 for image in coco.images):
        raise ConfigError(f"{path}: all boxes lie in the first pixel; expected bbox in pixels, not in fractions")


def _refuse_unlabelled(root: Path, labels: Sequence[Path]) -> None:
    """Refuse folders whose files do not fit one another, which would read as images that show nothing.

    Raises:
        ConfigError: if most images have no file of labels, or some have none and some files have no image.
    """
    missing = [file for file in labels if not file.is_file()]
    if not missing:
        return
    written = {file for file in (root / "labels").rglob("*.txt") if file.name != "classes.txt"}
    stray = sorted(written - set(labels))
    if stray or 2 * len(missing) > len(labels):
        also = f", and {stray[0]} belongs to no image" if stray else ""
        raise ConfigError(
            f"{missing[0]}: {len(missing)} of {len(labels)} images have no such file{also}; expected one for each "
            "image, which is empty if the image shows nothing"
        )


def _places(path: Path) -> list[Path]:
    """Where the images of an annotation file may lie."""
    split = path.stem.removeprefix("instances_")
    parts = ("", "images", split, f"images/{split}")
    return [folder / part for folder in (path.parent, path.parent.parent) for part in parts]


def _files_of(path: Path, images: Sequence[_Image]) -> list[Path]:
    places = _places(path)
    found: list[Path] = []
    for image in images:
        name = Path(image.file_name)
        if name.is_absolute() or ".." in name.parts:
            raise ConfigError(f"{path}: file_name must lie below the images' folder, got {image.file_name!r}")
        file = next((place / name for place in places if _is_file(place / name)), None)
        if file is None:
            looked = ", ".join(dict.fromkeys(str(place) for place in places))
            raise ConfigError(f"{path}: image {image.file_name!r} is missing; looked in {looked}")
        found.append(file)
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for the file system
        return False


def _own_classes(root: Path, names: Mapping[str, int]) -> list[int] | None:
    """The label's index of each class in the files; None if nothing names the classes."""
    lists = [p for p in (root / "classes.txt", root / "labels" / "classes.txt") if p.is_file()]
    descriptions = [p for folder in (root, root.parent) for p in sorted(folder.glob("data.y*ml"))]
    if lists:
        file, found = lists[0], [line.strip() for line in _text(lists[0]).splitlines() if line.strip()]
    elif descriptions:
        file, found = descriptions[0], described_classes(descriptions[0])
    else:
        return None
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ConfigError(f"{file}: {unknown[0]!r} is no label of the task; expected {_some(names)}")
    return [names[name] for name in found]


def described_classes(file: Path) -> list[str]:
    """The names of classes in a `data.yaml`: a list, or a table by index.

    Raises:
        ConfigError: if there are none.
    """
    import yaml  # comes with uvicorn[standard]; servers do not need it

    try:
        names = yaml.safe_load(_text(file))["names"]
        found = [names[index] for index in range(len(names))]
    except (yaml.YAMLError, RecursionError, TypeError, KeyError, IndexError):
        raise ConfigError(f"{file}: expected `names` of the classes, as a list or by index from 0") from None
    return [str(name) for name in found]


def _lines(file: Path, indices: Sequence[int]) -> Annotation:
    classes: list[int] = []
    boxes: list[list[float]] = []
    for number, line in enumerate(_text(file).splitlines() if file.is_file() else (), 1):
        if not line.strip():
            continue
        try:
            own, *place = line.split()
            x, y, width, height = map(float, place)
            classes.append(indices[int(own)] if int(own) >= 0 else -1)
        except (ValueError, IndexError):
            x = y = width = height = np.nan
        if not (0.0 <= x <= 1.0 and 0.0 <= y <= 1.0 and 0.0 < width <= 1.0 and 0.0 < height <= 1.0) or classes[-1] < 0:
            raise ConfigError(
                f"{file}:{number}: expected `CLASS X Y W H` with a class from 0 to {len(indices) - 1} and fractions of "
                f"the image, got {line[:80]!r}"
            )
        boxes.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
    corners = np.clip(np.array(boxes, np.float64).reshape(-1, 4), 0.0, 1.0)
    return Annotation(np.array(classes, np.int64), corners.astype(np.float32))


def _trained(clean_ids: Path | None, folder: Path, ids: Sequence[str]) -> NDArray[np.bool_] | None:
    file = clean_ids or folder / CLEAN_IDS
    if clean_ids is None and not file.is_file():
        return None
    clean = set(_text(file).split())
    known = [_is_listed(each, clean) for each in ids]
    return ~np.array(known, np.bool_)


def _is_listed(name: str, listed: set[str]) -> bool:
    """Ids may be padded with zeros, as COCO's file names are."""
    return name in listed or (name.isascii() and name.isdigit() and (name.lstrip("0") or "0") in listed)


def _labelled(
    path: Path,
    files: Sequence[Path],
    annotations: Sequence[Annotation],
    trained: NDArray[np.bool_] | None,
    sizes: tuple[tuple[int, int], ...] = (),
) -> LabelledImages:
    bodies = read_files(path, files)
    digest = hashlib.sha256()
    for part in _digested(bodies, annotations, trained):
        digest.update(part)
    n = len(bodies)
    return LabelledImages(
        path.name,
        digest.hexdigest(),
        bodies,
        np.full(n, -1, np.int64),
        np.full(n, path.name),
        np.zeros(n, np.bool_),
        tuple(annotations),
        trained,
        tuple(map(str, files)),
        sizes,
    )


def _digested(
    bodies: Sequence[bytes], annotations: Sequence[Annotation], trained: NDArray[np.bool_] | None
) -> Iterator[bytes]:
    for body, annotation in zip(bodies, annotations, strict=True):
        assert annotation.boxes is not None
        yield f"{len(annotation.classes)}:{len(body)}:".encode()
        yield annotation.classes.astype("<i8").tobytes() + annotation.boxes.astype("<f4").tobytes()
        yield body
    yield b"" if trained is None else np.packbits(trained).tobytes()


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot read: {error}") from None


def _some(names: Mapping[str, int]) -> str:
    return ", ".join(repr(name) for name in list(names)[:3]) + ("" if len(names) <= 3 else ", …")
