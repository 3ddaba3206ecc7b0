"""Labelled images from npz files and directories, and how broken ones are refused."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import image_times, read_images, read_unlabelled
from tests.images import encoded

LABELS = ("cat", "dog", "rocket")


def write_npz(path: Path, **changes: Any) -> Path:
    bodies = [encoded(seed=i) for i in range(4)]
    arrays: dict[str, Any] = {
        "data": np.frombuffer(b"".join(bodies), np.uint8),
        "offsets": np.cumsum([0, *map(len, bodies)]).astype(np.uint32),
        "labels": np.array([0, 1, 2, 1], np.int16),
        "source": np.array(["a", "a", "b", "b"]),
    }
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return path


def test_npz_gives_back_every_image_label_and_source(tmp_path: Path) -> None:
    images = read_images(write_npz(tmp_path / "set.npz"), LABELS)
    assert list(images.bodies) == [encoded(seed=i) for i in range(4)]
    assert images.labels.tolist() == [0, 1, 2, 1]
    assert images.sources.tolist() == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"labels": None}, "labels is missing"),
        ({"labels": np.array([0, 1, 3, 1])}, "from 0 to 2"),
        ({"labels": np.array([0, -1, 2, 1])}, "from 0 to 2"),
        ({"labels": np.array([0.5, 1, 2, 1])}, "whole numbers"),
        ({"labels": np.array([0, 1, 2])}, "n >= 1 labels and n \\+ 1 offsets, got 3 and 5"),
        ({"offsets": np.array([0, 5, 4, 8, 9])}, "offsets must rise"),
        ({"offsets": np.array([0, 1, 2, 3, 10**9])}, "offsets must rise"),
        ({"data": np.zeros((2, 2), np.uint8)}, "flat arrays"),
        ({"data": np.zeros(5, np.float32)}, "flat arrays"),
        ({"labels": np.array([{}], dtype=object)}, "not a readable npz"),
        ({"source": np.array(["a"])}, "as many sources as labels"),
    ],
)
def test_broken_npz_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write_npz(tmp_path / "set.npz", **changes)
    with pytest.raises(ConfigError, match=rf"set\.npz: .*{says}"):
        read_images(path, LABELS)


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def test_a_folder_says_when_its_oldest_and_newest_image_were_taken_and_an_npz_file_when_it_was_packed(
    tmp_path: Path,
) -> None:
    for number, name in enumerate(("b.jpg", "deep/a.png", "c.jpg", "notes.txt")):
        path = tmp_path / "site" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"")
        os.utime(path, times=(0, 1000.5 - 10 * number))
    assert image_times(tmp_path / "site", at(5000)) == (at(980), at(1000))
    assert image_times(tmp_path / "site", at(985)) == (at(980), at(985)), "none was taken later than now"
    packed = write_npz(tmp_path / "set.npz")
    os.utime(packed, times=(0, 2000))
    assert image_times(packed, at(5000)) == (None, at(2000))


def test_directories_are_classes_by_label_or_number(tmp_path: Path) -> None:
    for folder, count in (("cat", 2), ("2", 1)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            (tmp_path / folder / f"{i}.jpg").write_bytes(encoded(seed=i))
        (tmp_path / folder / "notes.txt").write_text("not an image")
    images = read_images(tmp_path, LABELS)
    assert sorted(images.labels.tolist()) == [0, 0, 2]


def test_a_directory_that_is_no_class_is_named(tmp_path: Path) -> None:
    (tmp_path / "horse").mkdir()
    with pytest.raises(
        ConfigError, match="horse: the directory is named after no class; expected a label such as 'cat'"
    ):
        read_images(tmp_path, LABELS)


def test_empty_and_missing_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no images in class directories"):
        read_images(tmp_path, LABELS)
    with pytest.raises(ConfigError, match="expected an npz file or a directory"):
        read_images(tmp_path / "nowhere", LABELS)


def test_the_hash_follows_content_and_labels(tmp_path: Path) -> None:
    hashes = set()
    for folder in ("cat", "dog"):
        for seed in (1, 2):
            root = tmp_path / f"{folder}{seed}"
            (root / folder).mkdir(parents=True)
            (root / folder / "a.jpg").write_bytes(encoded(seed=seed))
            hashes.add(read_images(root, LABELS).sha256)
    assert len(hashes) == 4


def test_npz_tells_test_images_apart(tmp_path: Path) -> None:
    images = read_images(write_npz(tmp_path / "set.npz", is_test=np.array([0, 1, 0, 1], np.uint8)), LABELS)
    assert images.is_test.tolist() == [False, True, False, True]
    assert not read_images(write_npz(tmp_path / "plain.npz"), LABELS).is_test.any()


@pytest.mark.parametrize("is_test", [np.array([0, 1, 2, 0]), np.array([True]), np.array(["a", "b", "c", "d"])])
def test_marks_that_are_not_one_boolean_an_image_are_refused(tmp_path: Path, is_test: Any) -> None:
    with pytest.raises(ConfigError, match=r"set\.npz: is_test must be \(4,\) booleans"):
        read_images(write_npz(tmp_path / "set.npz", is_test=is_test), LABELS)


def test_unlabelled_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, seed in (("b.jpg", 2), ("a.JPG", 1), ("c.png", 3)):
        (tmp_path / name).write_bytes(encoded(seed=seed))
    (tmp_path / "notes.txt").write_text("not an image")
    images = read_unlabelled(tmp_path)
    assert images.bodies == [encoded(seed=i) for i in (1, 2, 3)]
    (tmp_path / "a.JPG").write_bytes(encoded(seed=4))
    assert read_unlabelled(tmp_path).sha256 != images.sha256


def test_unlabelled_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no images \(expected files ending in \.jpg"):
        read_unlabelled(tmp_path)
    with pytest.raises(ConfigError, match="expected a folder of images"):
        read_unlabelled(tmp_path / "nowhere")
