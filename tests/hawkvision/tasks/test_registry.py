"""Kinds are found by the names that manifests use, with the labels and options of their task."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import load_manifest, models_dir, parse_manifest
from hawkvision.tasks.registry import kind_class, load_kind

TEXT = """
format = 1
task = "digits"
labels = "labels.txt"
classes = 2
cascade = { edge = ["a"], dc = ["a"], default_edge = "a" }
variants = [{ name = "a", architecture = "cnn", precision = "fp32", license = "MIT", source = SOURCE, input = INPUT }]
"""
SOURCE = f'{{ file = "a.onnx", sha256 = "{"a" * 64}" }}'
INPUT = "{ height = 32, width = 32, mean = [0.0, 0.0, 0.0], std = [1.0, 1.0, 1.0] }"
GOOD = TEXT.replace("SOURCE", SOURCE).replace("INPUT", INPUT)


def test_a_manifest_without_a_kind_is_classification() -> None:
    kind = load_kind(load_manifest("cifar10", models_dir()), models_dir())
    assert type(kind) is kind_class("classification")
    assert kind.labels[:2] == ("airplane", "automobile")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ('kind = "divination"', r"task 'digits': kind 'divination' is not installed; there are .*classification"),
        ("options = { depth = 3 }", r"task 'digits': options of kind 'classification': unknown option 'depth'"),
    ],
)
def test_an_unknown_kind_or_option_is_refused_with_its_task(field: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "labels.txt").write_text("zero\none\n")
    with pytest.raises(ManifestError, match=says):
        load_kind(parse_manifest(f"{field}\n{GOOD}", "here"), tmp_path)
