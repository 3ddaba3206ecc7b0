"""Class directories may be named by label, index, class id or a class map; anything else is refused."""

import json
from pathlib import Path

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.models.datasets import read_images
from hawkvision.models.image_sets.folder_classes import class_numbers, directory_classes
from hawkvision.models.manifest import load_labels, load_manifest, models_dir
from loadgen.workload.dataset import read_labelled
from tests.images import encoded

MODELS = models_dir(None)
LABELS = ("cat", "dog", "grey owl")


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "a.jpg").write_bytes(encoded())
    return root


def test_labels_indices_and_wordnet_ids_name_the_same_classes(tmp_path: Path) -> None:
    labels = load_labels(load_manifest("imagenet", MODELS), MODELS)
    names = ["tench", "281", "n02012849"]
    read = read_labelled(folder_of(tmp_path / "images", *names), "imagenet", MODELS)
    assert [labels[each] for each in sorted(read.labels.tolist())] == ["tench", "crane (bird)", "tabby"]


@pytest.mark.parametrize(
    "text",
    [
        "mine,dog\nyours,2\n",
        "mine\tdog\nyours\tgrey owl\n\n",
        json.dumps({"mine": "dog", "yours": 2}),
        json.dumps({"1": ["mine", "dog"], "2": ["yours", "an owl"]}),
    ],
)
def test_a_class_map_names_directories(text: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_text(text, encoding="utf-8")
    assert directory_classes(LABELS, tmp_path, path) == {"mine": 1, "yours": 2}


def test_a_class_map_overrides_what_a_directory_would_mean(tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_text("7,tench", encoding="utf-8")
    assert read_labelled(folder_of(tmp_path / "images", "7"), "imagenet", MODELS, path).labels.tolist() == [0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine", "map:1: expected DIRECTORY,LABEL"),
        ("mine,cat\nmine,dog", "map:2: directory 'mine' comes twice"),
        ("mine,horse", "'horse' is no class; expected a label such as 'cat', or an index from 0 to 2"),
        ('{"mine": {}}', "expected an object of directories and classes"),
        ("mine,3", "'3' is no class"),
    ],
)
def test_a_class_map_that_names_no_class_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        directory_classes(LABELS, tmp_path, path)


def test_a_directory_of_no_class_is_refused_with_what_names_may_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"horse: .*'tench', or an index from 0 to 999, or a name such as 'n0"):
        read_labelled(folder_of(tmp_path / "images", "horse"), "imagenet", MODELS)


def test_labels_that_are_numbers_are_never_taken_for_indices(tmp_path: Path) -> None:
    assert class_numbers(("cat", "dog")) == {"cat": 0, "dog": 1, "0": 0, "1": 1}
    assert class_numbers(("0", "1")) == {"0": 0, "1": 1}
    assert class_numbers(("10", "2", "cat")) == {"10": 0, "2": 1, "cat": 2}
    assert class_numbers(("cat", "7")) == {"cat": 0, "7": 1, "0": 0, "1": 1}
    folders = folder_of(tmp_path / "images", "1", "2", "10")
    assert read_images(folders, ("1", "10", "2")).labels.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="expected a label such as '1'; --class-map"):
        read_images(folder_of(tmp_path / "others", "0"), ("1", "10", "2"))


def test_names_of_directories_may_be_composed_in_either_way(tmp_path: Path) -> None:
    folders = folder_of(tmp_path, "e\u0301te\u0301", ".ipynb_checkpoints")
    assert read_images(folders, ("cat", "\u00e9t\u00e9")).labels.tolist() == [1]


def test_images_of_formats_that_are_not_read_are_not_left_out_silently(tmp_path: Path) -> None:
    folders = folder_of(tmp_path, "cat")
    (folders / "cat" / "b.BMP").write_bytes(b"BM")
    with pytest.raises(ConfigError, match=r"1 images are of formats that are not read here, such as b.BMP"):
        read_images(folders, LABELS)
