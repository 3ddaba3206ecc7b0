"""Labels in a CSV file: which rows are taken, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import read_unlabelled
from hawkvision.models.image_sets.folder_classes import class_numbers
from hawkvision.models.image_sets.labelled_images import UnlabelledImages
from hawkvision.models.image_sets.labels_file import read_labels
from tests.images import encoded

NUMBERS = class_numbers(["cat", "dog", "égal"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> UnlabelledImages:
    """Four files, of which `copy.jpg` has the bytes of `a.jpg`."""
    folder = tmp_path_factory.mktemp("site")
    for seed, name in enumerate(["a.jpg", "b c.jpg", "d,e.jpg"]):
        (folder / name).write_bytes(encoded(seed=seed))
    (folder / "copy.jpg").write_bytes(encoded(seed=0))
    return read_unlabelled(folder)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("file,label\na.jpg,dog\n", {"a.jpg": 1}),
        ("\ufefffile,label\r\na.jpg, dog \r\n\r\nb c.jpg,0\r\n", {"a.jpg": 1, "b c.jpg": 0}),
        ('label,answer_1,file\ncat,dog,"d,e.jpg"\n,dog,a.jpg\n', {"d,e.jpg": 0}),
        ("file,label\ncopy.jpg,dog\na.jpg,1\n", {"a.jpg": 1}),
        ("file,label\na.jpg,e\u0301gal\n", {"a.jpg": 2}),
        ("file,label\na.jpg,neither\nb c.jpg,cannot_tell\n", {"a.jpg": 3}),
        ('file,label,again\na.jpg,cat,0\nb c.jpg,cat,dog\n"d,e.jpg",cat,cannot_tell\n', {"a.jpg": 0}),
        ("file,label,again\na.jpg,cat,dog\na.jpg,cat,\nb c.jpg,cat\n", {"b c.jpg": 0}),
    ],
)
def test_labels_are_those_of_the_rows(
    images: UnlabelledImages, tmp_path: Path, text: str, found: dict[str, int]
) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8", newline="")
    labels = read_labels(tmp_path / "labels.csv", images, NUMBERS)
    assert {Path(f).name: label for f, label in zip(images.files, labels, strict=True) if label is not None} == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "file,label\nz.jpg,cat\na.jpg,cow\n",
            r"2 rows .*line 2: no image is called 'z.jpg'; line 3: 'cow' is no class",
        ),
        ("file,label\n" + "z.jpg,cat\n" * 9, r"9 rows .*line 6: .*; and 4 more; expected names"),
        ("file,label\na.jpg,cat\ncopy.jpg,dog\n", r"line 3: 'copy.jpg', or a copy of it, has another label above"),
        (
            "file,label,again\na.jpg,cat,dog\na.jpg,cat,cat\n",
            "line 3: 'a.jpg', or a copy of it, has another label above",
        ),
        ("file,label\na.jpg,\n", "no row has a label"),
        ("file,label\na.jpg,cannot_tell\n", "no row has a label"),
        ("file,label,again\na.jpg,cat,cow\n", "line 2: 'cow' is no class"),
        ("name,label\na.jpg,cat\n", r"columns file,label, got \['name', 'label'\]"),
        ("", "columns file,label"),
        ('file,label\n"a.jpg,cat\n', "expected a CSV file"),
    ],
)
def test_what_cannot_be_used_is_named(images: UnlabelledImages, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_labels(tmp_path / "labels.csv", images, NUMBERS)


def test_a_missing_file_and_one_that_is_no_text_are_refused(images: UnlabelledImages, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"file,label\n\xff,cat\n")
    for name, says in (("labels.csv", "UTF-8"), ("none.csv", "No such file")):
        with pytest.raises(ConfigError, match=says):
            read_labels(tmp_path / name, images, NUMBERS)
