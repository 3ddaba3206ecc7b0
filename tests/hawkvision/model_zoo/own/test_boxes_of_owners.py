"""How a detector's numbers are read: what is not stated is asked for, and `models check` says what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.tasks.decoders.registry import open_decoder
from tests.hawkvision.command import Ran, invoke
from tests.hawkvision.model_zoo.own.exports import enter, save_constants
from tests.hawkvision.tasks.decoders.raw import CLASSES, EXPORTS, NANODET_G, SPEC, Objects

FOUND = Objects(np.array([[0.1, 0.55, 0.35, 0.95], [0.4, 0.1, 0.7, 0.3]]), np.array([0.9, 0.8]), np.array([1, 2]))
LABELS = tuple("abc")[:CLASSES]
G = {name: value for name, value in NANODET_G.items() if name != "centre"}


def entered(root: Path, export: str, options: dict[str, Any]) -> Any:
    decoder, _, encode = EXPORTS[export]
    save_constants(root / "d.onnx", encode(FOUND), (SPEC.height, SPEC.width))
    facts = OwnerFacts(
        scale=1, mean=[0], std=[1], channel_order="rgb", fit="stretch", interpolation="bilinear", decoder=decoder,
        decoder_options=options,
    )  # fmt: skip
    return enter(root / "d.onnx", facts, LABELS, kind="detection")


def checked(root: Path, found: Objects = FOUND) -> Ran:
    """Against what the owner's program finds in two images."""
    lines = []
    objects = [
        {"label": LABELS[at], "confidence": score, "box": list(box)}
        for box, score, at in zip(found.boxes, found.scores, found.classes, strict=True)
    ]
    for name in ("0.png", "1.png"):
        Image.new("RGB", (32, 24)).save(root / name)
        lines.append(json.dumps({"file": name, "objects": objects}))
    (root / "predictions.jsonl").write_text("\n".join(lines))
    words = ["--task", "shapes", "--models-dir", str(root / "models"), "--cache-dir", str(root / "cache")]
    return invoke("models", "check", "--reference", str(root / "predictions.jsonl"), *words)


@pytest.mark.parametrize(
    ("export", "options", "asked", "fits"),
    [
        ("PP-YOLOE", {"outputs": {"boxes": "a", "scores": "b"}, "scale": "pixels"}, ["order"], "order=xyxy"),
        ("SSD", {"background": True, "order": "cxcywh"}, [], "order=yxyx"),
        ("D-FINE after its processing", {}, ["first_class", "scale"], "scale=pixels first_class=0"),
        ("TensorFlow's detections", {}, ["first_class"], "first_class=1"),
        ("NanoDet-g", G, ["centre"], "centre=0.5"),
        ("yolov8", {"order": "xywh"}, [], "order=cxcywh"),
        ("yolov10", {"order": "yxyx"}, [], "order=xyxy"),
        ("RT-DETR", {"order": "xyxy"}, [], "order=cxcywh"),
    ],
)
def test_what_no_tensor_shows_is_asked_for_and_found_by_a_comparison(
    export: str, options: dict[str, Any], asked: list[str], fits: str, tmp_path: Path
) -> None:
    added = entered(tmp_path, export, options)
    assert sorted(added.unstated) == asked
    for name in asked:
        with pytest.raises(
            ManifestError, match=r"is not stated: expected .*; `hawkvision models check` says which fits"
        ):
            open_decoder(added.variant, CLASSES)
        assert f"{name} is not stated" in checked(tmp_path).output or len(asked) > 1
    ran = checked(tmp_path)
    words = " ".join(f"--decoder-option {each}" for each in fits.split())
    assert ran.exit_code == 1
    assert f"with {words} the mean difference of the worst images is 0.0000" in ran.output, ran.output
    stated = dict(each.split("=") for each in fits.split())
    numbers = {
        name: float(value) if "." in value else int(value) for name, value in stated.items() if value[0].isdigit()
    }
    assert not entered(tmp_path, export, {**options, **stated, **numbers}).unstated
    assert checked(tmp_path).exit_code == 0


def test_missing_and_moved_objects_are_counted(tmp_path: Path) -> None:
    entered(tmp_path, "yolov8", {})
    boxes = np.concatenate([FOUND.boxes, [[0.7, 0.7, 0.9, 0.9]]])
    boxes[0] += [0.0, -0.5, 0.3, -0.5]
    said = checked(tmp_path, Objects(boxes, np.array([0.9, 0.8, 0.7]), np.array([1, 2, 0]))).output
    assert "2 of your 6 objects have another box; 2 of your 6 objects are missing; no other order, form" in said
    assert "--scale, --mean" not in said


def test_names_of_tensorflow_say_the_order(tmp_path: Path) -> None:
    assert entered(tmp_path, "SSD", {"background": True}).variant.decoder_options["order"] == "yxyx"
    assert checked(tmp_path).exit_code == 0
    with pytest.raises(ConfigError, match="scores of 4 classes for 3; background = true drops a first one"):
        entered(tmp_path, "SSD", {})
