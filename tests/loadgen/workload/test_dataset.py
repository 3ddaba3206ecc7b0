"""Images of load tests: which are taken, in which order."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.manifest import models_dir
from loadgen.workload.dataset import GENERATED, Dataset, generated, photographs, read_dataset
from loadgen.workload.judging import path_of
from tests.images import encoded
from tests.loadgen.oracle import write_set

MODELS = models_dir(None)


def read(data: Path | str | None, **options: object) -> Dataset:
    return read_dataset(None if data is None else str(data), "imagenet", MODELS, **{"limit": None, **options})  # type: ignore[arg-type]


def test_npz_gives_labelled_images(tmp_path: Path) -> None:
    dataset = read(write_set(tmp_path, [5, 3, 9]))
    assert (dataset.numbers, dataset.labels) == ((0, 1, 2), (5, 3, 9))
    assert list(dataset.bodies) == [b"0", b"1", b"2"]


def test_folder_of_images_has_no_labels(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(seed=number))
    (tmp_path / "notes.txt").write_text("not an image")
    dataset = read(tmp_path)
    assert (len(dataset), dataset.labels) == (3, None)
    assert dataset.bodies[1] == encoded(seed=1)


def test_auto_takes_all_of_what_no_calibration_saw(tmp_path: Path) -> None:
    assert len(read(write_set(tmp_path, [0, 1]))) == 2
    with pytest.raises(ConfigError, match="--split all"):
        read(write_set(tmp_path, [0, 1]), split="held_out")


def test_held_out_of_what_has_no_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match="no calibration"):
        read(None, split="held_out")


def test_built_in_images_are_images() -> None:
    for body in (*read(None).bodies, *photographs(), *map(generated, range(GENERATED))):
        assert cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR) is not None


def test_limit_thins(tmp_path: Path) -> None:
    assert read(write_set(tmp_path, list(range(9))), limit=3).numbers == (0, 4, 8)


def test_order_shows_every_image_before_any_comes_again(tmp_path: Path) -> None:
    order = read(write_set(tmp_path, list(range(6)))).order(15, seed=2)
    assert sorted(order[:6]) == sorted(order[6:12]) == list(range(6))
    assert order.tolist() != sorted(order.tolist())
    assert len(order) == 15


def test_boxes_are_labels_and_images_that_a_model_was_trained_on_are_left_out(tmp_path: Path) -> None:
    images = [encoded(seed=seed) for seed in range(3)]
    offsets = np.cumsum([0, *map(len, images)]).astype(np.uint32)
    boxes = np.array([[0.1, 0.1, 0.5, 0.5], [0.0, 0.0, 1.0, 1.0], [0.2, 0.2, 0.4, 0.9]], np.float32)
    np.savez(
        tmp_path / "boxes.npz", data=np.frombuffer(b"".join(images), np.uint8), offsets=offsets, boxes=boxes,
        box_offsets=np.array([0, 1, 1, 3], np.uint32), classes=np.array([0, 2, 0], np.int16),
        class_names=np.array(["person", "bicycle", "car"]), clean=np.array([True, False, True]),
    )  # fmt: skip
    dataset = read_dataset(str(tmp_path / "boxes.npz"), "coco", MODELS, limit=None)
    assert (dataset.numbers, list(dataset.bodies)) == ((0, 2), [images[0], images[2]])
    assert dataset.kind is not None
    assert (dataset.kind.name, path_of(dataset.kind)) == ("detection", "/v1/detect")
    assert dataset.labels is not None
    (found, classes) = dataset.labels[1]
    assert (found == boxes[1:]).all()
    assert classes.tolist() == [2, 0]
    assert "no model was trained on" in dataset.name
    assert len(read_dataset(str(tmp_path / "boxes.npz"), "coco", MODELS, split="all", limit=None)) == 3
