"""Data sets with boxes or several labels per image: npz files, COCO annotations, YOLO folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import LabelledImages, read_annotated, read_images
from tests.images import encoded

LABELS = ("cat", "dog", "rocket")
BODIES = [encoded(height=40, width=80, seed=i) for i in range(3)]
UNREAL = {"id": 0, "file_name": "no.jpg", "width": 1, "height": 1}
BOXES = np.array([[0.0, 0.25, 0.5, 0.75], [0.5, 0.5, 1.0, 1.0]], np.float32)


def write_npz(path: Path, **changes: Any) -> Path:
    """Two objects in the first image, none in the others."""
    arrays: dict[str, Any] = {
        "data": np.frombuffer(b"".join(BODIES), np.uint8),
        "offsets": np.cumsum([0, *map(len, BODIES)]),
        "boxes": BOXES,
        "classes": np.array([0, 2], np.int16),
        "box_offsets": np.array([0, 2, 2, 2]),
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def write_coco(folder: Path, name: str = "instances_val.json", **changes: Any) -> Path:
    """The same as a COCO file beside a folder of images."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, body in enumerate(BODIES):
        (folder / "images" / f"{number:012}.jpg").write_bytes(body)
    sizes = {"width": 80, "height": 40}
    document: dict[str, Any] = {
        "info": {"about": "anything"},
        "images": [{"id": i, "file_name": f"{i:012}.jpg", **sizes} for i in range(3)],
        "annotations": [
            {"id": 1, "image_id": 0, "category_id": 17, "bbox": [0, 10, 40, 20], "iscrowd": 0, "area": 800},
            {"id": 2, "image_id": 0, "category_id": 90, "bbox": [40, 20, 60, 30]},
            {"id": 3, "image_id": 1, "category_id": 17, "bbox": [0, 0, 80, 40], "iscrowd": 1},
            {"id": 4, "image_id": 1, "category_id": 17, "bbox": [5, 5, 0, 7]},
        ],
        "categories": [{"id": 17, "name": "cat"}, {"id": 90, "name": "rocket", "supercategory": "vehicle"}],
    }
    path = folder / name
    path.write_text(json.dumps(document | changes))
    return path


def write_yolo(root: Path, first: str = "0 0.25 0.5 0.5 0.5\n2 0.75 0.75 0.5 0.5\n", split: str = "") -> Path:
    """The same as YOLO folders; the third image has no file of labels."""
    for folder in ("images", "labels"):
        (root / folder / split).mkdir(parents=True)
    for number, body in enumerate(BODIES):
        (root / "images" / split / f"{number}.jpg").write_bytes(body)
    (root / "labels" / split / "0.txt").write_text(first)
    (root / "labels" / split / "1.txt").write_text("\n")
    return root


def check(images: LabelledImages) -> None:
    """Whether the set is that of `write_npz`."""
    assert list(images.bodies) == BODIES
    first, *others = images.annotated()
    assert first.classes.tolist() == [0, 2]
    assert first.boxes is not None
    np.testing.assert_allclose(first.boxes, BOXES, atol=1e-6)
    assert [len(each.classes) for each in others] == [0, 0]


def test_the_same_objects_are_read_from_each_form(tmp_path: Path) -> None:
    check(read_annotated(write_npz(tmp_path / "a.npz"), LABELS))
    check(read_annotated(write_coco(tmp_path / "coco"), LABELS))
    check(read_annotated(write_coco(tmp_path / "other" / "annotations").parent / "instances_val.json", LABELS))
    check(read_annotated(write_yolo(tmp_path / "yolo"), LABELS))


def test_indices_of_other_names_are_those_of_the_task(tmp_path: Path) -> None:
    named = np.array(["rocket", "dog", "cat"])
    npz = write_npz(tmp_path / "a.npz", class_names=named, classes=np.array([2, 0]))
    check(read_annotated(npz, LABELS))
    yolo = write_yolo(tmp_path / "yolo", "2 0.25 0.5 0.5 0.5\n0 0.75 0.75 0.5 0.5\n")
    (yolo / "classes.txt").write_text("rocket\ndog\ncat\n")
    check(read_annotated(yolo, LABELS))
    with pytest.raises(ConfigError, match="no label 'cow'"):
        read_annotated(write_npz(tmp_path / "b.npz", class_names=np.array(["cow", "dog", "cat"])), LABELS)


def test_several_labels_per_image_are_read_without_boxes(tmp_path: Path) -> None:
    several = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    path = write_npz(tmp_path / "a.npz", labels=several, boxes=None, classes=None, box_offsets=None)
    found = list(read_annotated(path, LABELS).annotated())
    assert [each.classes.tolist() for each in found] == [[0, 2], [], [1]]
    assert all(each.boxes is None for each in found)
    with pytest.raises(ConfigError, match="expected one class per image"):
        read_images(path, LABELS)


def test_images_that_a_model_was_trained_on_are_marked(tmp_path: Path) -> None:
    def trained(path: Path, clean_ids: Path | None = None) -> list[bool] | None:
        found = read_annotated(path, LABELS, clean_ids=clean_ids).trained
        return None if found is None else found.tolist()

    clean, split = np.array([True, False, True]), np.array(["val2017", "val2017", "train2017"])
    assert trained(write_npz(tmp_path / "a.npz")) is None
    assert trained(write_npz(tmp_path / "b.npz", clean=clean)) == [False, True, False]
    assert trained(write_npz(tmp_path / "c.npz", split=split)) == [False, False, True]
    assert trained(write_npz(tmp_path / "d.npz", clean=clean, split=split)) == [False, True, True]
    ids = tmp_path / "ids.txt"
    ids.write_text("0\n2\n")
    assert trained(write_coco(tmp_path / "coco")) is None
    assert trained(write_coco(tmp_path / "coco"), ids) == [False, True, False]
    assert trained(write_coco(tmp_path / "coco", "instances_train2017.json")) == [True] * 3
    (tmp_path / "coco" / "clean_ids.txt").write_text("1")
    assert trained(write_coco(tmp_path / "coco")) == [True, False, True]
    assert trained(write_yolo(tmp_path / "yolo"), ids) == [False, True, False]
    assert trained(write_yolo(tmp_path / "split", split="train")) == [True] * 3
    assert trained(write_yolo(tmp_path / "train")) == [True] * 3
    assert trained(write_coco(tmp_path / "training", "_annotations.coco.json")) == [True] * 3
    assert trained(write_coco(tmp_path / "more" / "train", "_annotations.coco.json")) == [True] * 3
    assert trained(write_yolo(tmp_path / "trains")) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"classes": None}, "classes is missing"),
        ({"classes": np.array([0, 3])}, "classes must be from 0 to 2"),
        ({"classes": np.array([0.0, 1.0])}, "whole numbers"),
        ({"boxes": BOXES[:, ::-1]}, "x1 <= x2 and y1 <= y2"),
        ({"boxes": BOXES * 300}, "in 0..1"),
        ({"boxes": BOXES * np.nan}, "in 0..1"),
        ({"boxes": BOXES[:, :3]}, r"boxes \(m, 4\)"),
        ({"box_offsets": np.array([0, 2, 1, 2])}, "box_offsets must rise"),
        ({"box_offsets": np.array([0, 1, 1, 1])}, "box_offsets must rise from 0 to 2"),
        ({"box_offsets": np.array([0, 2])}, r"box_offsets \(4\)"),
        ({"clean": np.array([1, 0])}, "clean must be"),
        ({"split": np.array(["val"])}, "as many splits as labels"),
        ({"labels": np.array([[1, 2, 0]] * 3)}, "of 0 and 1"),
    ],
)
def test_broken_npz_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"set\.npz: .*{says}"):
        read_annotated(write_npz(tmp_path / "set.npz", **changes), LABELS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images": []}, "images"),
        ({"categories": [{"id": 17, "name": "cow"}]}, "category 'cow' is no label of the task; expected 'cat'"),
        ({"annotations": [{"image_id": 9, "category_id": 17, "bbox": [0, 0, 1, 1]}]}, "image 9"),
        ({"annotations": [{"image_id": 1, "category_id": 17, "bbox": [0, 0, 1]}]}, "bbox"),
        ({"annotations": 3}, "annotations"),
        ({"images": [UNREAL | {"file_name": "../a.jpg"}], "annotations": []}, "must lie below"),
        ({"images": [UNREAL], "annotations": []}, "'no.jpg' is missing"),
        ({"images": [UNREAL, UNREAL], "annotations": []}, "ids repeat"),
        ({"annotations": [{"image_id": 1, "category_id": 17, "bbox": [90, 0, 10, 10]}]}, "image 1: a box lies outside"),
        ({"annotations": [{"image_id": 1, "category_id": 17, "bbox": [0.1, 0.2, 0.5, 0.5]}]}, "not in fractions"),
    ],
)
def test_broken_coco_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"val\.json: .*{says}"):
        read_annotated(write_coco(tmp_path, **changes), LABELS)


@pytest.mark.parametrize(
    "line",
    ["3 0.5 0.5 0.1 0.1", "-1 0.5 0.5 0.1 0.1", "cat 0.5 0.5 0.1 0.1", "0 0.5 0.5 0.1", "0 0.5 0.5 0 1", "0 40 20 9 9"],
)
def test_broken_lines_of_yolo_files_are_refused_by_number(tmp_path: Path, line: str) -> None:
    root = write_yolo(tmp_path / "yolo", f"0 0.25 0.5 0.5 0.5\n{line}\n")
    with pytest.raises(ConfigError, match=r"0\.txt:2: expected `CLASS X Y W H` with a class from 0 to 2"):
        read_annotated(root, LABELS)


def test_ids_are_listed_with_and_without_zeros_in_front(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "yolo")
    for name in ("0007", "²", "000"):
        (root / "images" / f"{name}.jpg").write_bytes(BODIES[0])
        (root / "labels" / f"{name}.txt").touch()
    (root / "clean_ids.txt").write_text("7 0 ²")
    trained = read_annotated(root, LABELS).trained
    assert trained is not None
    assert trained.tolist() == [False, False, False, True, True, False]


def test_yolo_folders_that_do_not_fit_one_another_are_refused(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "yolo")
    (root / "labels" / "1.txt").unlink()
    with pytest.raises(ConfigError, match=r"1\.txt: 2 of 3 images have no such file; expected one for each"):
        read_annotated(root, LABELS)
    other = write_yolo(tmp_path / "other")
    (other / "labels" / "2.jpg.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(ConfigError, match=r"2\.txt: 1 of 3 images have no such file, and .*2\.jpg\.txt belongs to no"):
        read_annotated(other, LABELS)


@pytest.mark.parametrize("place", ["classes.txt", "labels/classes.txt", "data.yaml", "../data.yaml"])
def test_class_indices_of_yolo_are_those_of_the_list_beside_them(place: str, tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "set" / "valid")
    names = ["rocket", "dog", "cat"]
    text = (
        "\n".join(names)
        if place.endswith("txt")
        else "nc: 3\nnames:\n" + "".join(f"  {i}: {n}\n" for i, n in enumerate(names))
    )
    (root / place).write_text(text)
    annotations = read_annotated(root, LABELS).annotations
    assert annotations is not None
    assert annotations[0].classes.tolist() == [2, 0]
    (root / place).write_text(text.replace("dog", "horse"))
    with pytest.raises(ConfigError, match="'horse' is no label of the task"):
        read_annotated(root, LABELS)


def test_a_description_without_names_is_refused(tmp_path: Path) -> None:
    root = write_yolo(tmp_path / "yolo")
    for text in ("nc: 3", "names: 3", "[1", "names: {a: b}"):
        (root / "data.yaml").write_text(text)
        with pytest.raises(ConfigError, match="expected `names` of the classes"):
            read_annotated(root, LABELS)


def test_categories_that_no_annotation_uses_need_no_label(tmp_path: Path) -> None:
    categories = [{"id": 0, "name": "things"}, {"id": 17, "name": "cat"}, {"id": 90, "name": "rocket"}]
    assert len(read_annotated(write_coco(tmp_path, categories=categories), LABELS)) == 3


def test_other_forms_of_annotations_are_named(tmp_path: Path) -> None:
    (tmp_path / "voc" / "Annotations").mkdir(parents=True)
    (tmp_path / "voc" / "Annotations" / "a.xml").write_text("<annotation/>")
    write_coco(tmp_path / "coco")
    write_yolo(tmp_path / "splits" / "valid")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.jpg").write_bytes(BODIES[0])
    (tmp_path / "flat" / "a.txt").write_text("0 0.5 0.5 0.1 0.1")
    said = {
        "voc": "Pascal VOC", "voc/Annotations": "Pascal VOC", "coco": r"give their file, such as .*instances_val.json",
        "splits": "give one, such as .*valid", "flat": "beside the images", "voc/Annotations/a.xml": "another form",
        "nowhere": "no such file",
    }  # fmt: skip
    for place, says in said.items():
        with pytest.raises(ConfigError, match=says):
            read_annotated(tmp_path / place, LABELS)
