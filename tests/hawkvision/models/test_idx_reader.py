"""Directories of the MNIST family: what comes out, and how broken files are refused."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import read_images

LABELS = tuple("0123456789")
IMAGES = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(5, 6, 7)


def images_file(images: NDArray[np.uint8]) -> bytes:
    return struct.pack(">4I", 0x803, *images.shape) + images.tobytes()


def labels_file(labels: list[int]) -> bytes:
    return struct.pack(">2I", 0x801, len(labels)) + bytes(labels)


def write_set(root: Path, suffix: str = "") -> Path:
    files = {
        "train-images-idx3-ubyte": images_file(IMAGES[:3]),
        "train-labels-idx1-ubyte": labels_file([1, 2, 3]),
        "t10k-images-idx3-ubyte": images_file(IMAGES[3:]),
        "t10k-labels-idx1-ubyte": labels_file([4, 5]),
    }
    root.mkdir(exist_ok=True)
    for name, data in files.items():
        (root / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    return root


def test_training_images_come_first_and_the_others_are_marked(tmp_path: Path) -> None:
    images = read_images(write_set(tmp_path), LABELS)
    assert images.labels.tolist() == [1, 2, 3, 4, 5]
    assert images.is_test.tolist() == [False, False, False, True, True]
    assert images.sources.tolist() == ["train"] * 3 + ["t10k"] * 2
    for body, image in zip(images.bodies, IMAGES, strict=True):
        np.testing.assert_array_equal(cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_UNCHANGED), image)


def test_bare_and_gzipped_files_are_the_same_set(tmp_path: Path) -> None:
    bare, gzipped = (
        read_images(write_set(tmp_path / name, suffix), LABELS) for name, suffix in (("a", ""), ("b", ".gz"))
    )
    assert bare.sha256 == gzipped.sha256
    (tmp_path / "a" / "t10k-labels-idx1-ubyte").write_bytes(labels_file([5, 4]))
    assert read_images(tmp_path / "a", LABELS).sha256 != bare.sha256


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("train-labels-idx1-ubyte", None, r"train-labels-idx1-ubyte\[\.gz\] is missing"),
        ("train-labels-idx1-ubyte", labels_file([1, 2]), r"expected images \(n, height, width\) and labels \(n,\)"),
        ("train-labels-idx1-ubyte", labels_file([1, 2, 10]), "a label is 10; expected 0 to 9"),
        ("train-labels-idx1-ubyte", images_file(IMAGES), "and labels"),
        ("train-images-idx3-ubyte", b"", "cannot read"),
        ("train-images-idx3-ubyte", b"PNG garbage", "begins with 0x504e4720"),
        ("train-images-idx3-ubyte", images_file(IMAGES)[:-1], "expected 210 bytes after the header, found 209"),
        ("train-images-idx3-ubyte", images_file(IMAGES) + b"x", "expected 210 bytes after the header, found more"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x803, 0, 28, 28), r"the header says \(0, 28, 28\)"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x803, 2**31, 512, 512), "expected 1 to 1073741824 bytes"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 0x803, 1, 513, 1) + bytes(513), "sides of at most 512"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    file = write_set(tmp_path) / name
    file.unlink() if data is None else file.write_bytes(data)
    with pytest.raises(ConfigError, match=says) as caught:
        read_images(tmp_path, LABELS)
    assert str(tmp_path) in str(caught.value)
