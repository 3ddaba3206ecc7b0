"""`hawkvision models check`: agreement with the owner's predictions, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import pytest
from PIL import Image

from hawkvision.core.errors import ConfigError
from hawkvision.core.types import Pixels
from hawkvision.model_zoo.own.checking import Checked, check
from hawkvision.model_zoo.own.graphs.owner_facts import OwnerFacts
from hawkvision.system.onnx_runtime import ort
from hawkvision.tasks.class_scores import softmax
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.own.exports import MEAN, STD, as_torch_takes, enter, save_torch_style
from tests.hawkvision.model_zoo.own.small_cnn import LABELS, SIDE, SmallCnn, shape_images

HEIGHT, WIDTH = 18, 32


def owner_prepares(pixels: Pixels) -> Pixels:
    """The owner stretches images, and never below half of a side, where servers would average areas."""
    return np.stack([cv2.resize(each, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR) for each in pixels])


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide images, and what the owner's program predicts of them."""
    root = tmp_path_factory.mktemp("owned")
    images, labels = shape_images(500, 0, HEIGHT, WIDTH)
    net = SmallCnn((4, 8), len(LABELS))
    net.train(as_torch_takes(owner_prepares(images)), labels, 2)
    save_torch_style(net, root / "net.onnx", SIDE)
    shown, _ = shape_images(40, 1, HEIGHT, WIDTH)
    probabilities = softmax(net.logits(as_torch_takes(owner_prepares(shown))))
    rows = ["image,class,score"]
    for index, (image, row) in enumerate(zip(shown, probabilities, strict=True)):
        assert cv2.imwrite(str(root / f"{index}.png"), image[..., ::-1])
        rows.append(f"{index}.png,{LABELS[row.argmax()]},{row.max():.6f}")
    (root / "predictions.csv").write_text("\n".join(rows) + "\n")
    return root


def added(owned: Path, root: Path, **changed: Any) -> list[str]:
    """The options that name the task."""
    facts: dict[str, Any] = {"scale": 1 / 255, "mean": MEAN, "std": STD, "channel_order": "rgb", "fit": "stretch"}
    enter(owned / "net.onnx", OwnerFacts(**facts | {"interpolation": "bilinear"} | changed), root=root)
    return ["--task", "shapes", "--models-dir", str(root / "models"), "--cache-dir", str(root / "cache")]


def checked(reference: Path, words: list[str]) -> Any:
    return invoke("models", "check", "--reference", str(reference), *words)


def compared(reference: Path, words: list[str], data: Path, tolerance: float = 0.05) -> Checked:
    models, cache = Path(words[3]), Path(words[5])
    return check("shapes", reference, data=data, stage=None, tolerance=tolerance, models=models, cache=cache)


def test_a_stage_that_is_prepared_as_its_owner_does_agrees(owned: Path, tmp_path: Path) -> None:
    done = checked(owned / "predictions.csv", [*added(owned, tmp_path), "--tolerance", "0.001"])
    assert done.exit_code == 0, done.output
    assert "net: 40 images; worst difference 0.000" in done.output


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"fit": "crop", "crop_fraction": 1.0}, "with --fit stretch --interpolation bilinear --channel-order rgb"),
        ({"channel_order": "bgr"}, "--channel-order rgb"),
        ({"mean": (0.0, 0.0, 0.0)}, "check --scale, --mean and --std"),
    ],
)
def test_a_wrong_preparation_is_noticed_and_the_right_one_named(
    changed: dict[str, Any], says: str, owned: Path, tmp_path: Path
) -> None:
    done = checked(owned / "predictions.csv", added(owned, tmp_path, **changed))
    assert done.exit_code == 1
    assert says in " ".join(done.output.split())


def test_predictions_as_json_lines_are_compared_by_the_kind(owned: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in (owned / "predictions.csv").read_text().splitlines()[1:]]
    rows[3][1] = next(label for label in LABELS if label != rows[3][1])
    lines = [
        msgspec.json.encode({"file": f, "top_k": [{"label": label, "confidence": float(p)}]}).decode()
        for f, label, p in rows
    ]
    (tmp_path / "reference.jsonl").write_text("\n".join(lines))
    words = added(owned, tmp_path)
    found = compared(tmp_path / "reference.jsonl", words, owned)
    assert not found.agrees
    assert [each.file for each in found.images if each.difference > 0] == ["3.png"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n0.png,ring", "expected a header with file, label and probability; found a, b"),
        (
            "file,label\n0.png,dog",
            "line 2: 'dog' is no label of the task and no index below 5",
        ),
        ("file,label,score\n0.png,ring,1.5", "line 2: expected a probability of 0 to 1, got '1.5'"),
        ("file,label\n", "expected a row per image"),
        ("file,label\nnone.png,ring", r"none.png: cannot read the image: .*--data names the folder"),
        ('{"file": "0.png"}', "line 1: .*top_k"),
        ("file,label\n\n0.png,ring\n\n1.png,dog\n", "line 5: 'dog' is no label"),
        ("file,label\n0.png," + "1" * 5000, "line 2: '111.*is no label of the task and no index below 5"),
        ('file,label\n0.png,"' + "x" * 200_000, "line 2: field larger than field limit"),
        ('file,label\n"a\nb.png",ring\nc.png,9', "line 4: '9' is no label"),
        ("", "expected 1 to 1000000 lines, got 0"),
    ],
)
def test_what_is_wrong_with_a_reference_is_named(text: str, says: str, owned: Path, tmp_path: Path) -> None:
    words = added(owned, tmp_path)
    (tmp_path / "r.csv").write_text(text)
    with pytest.raises(ConfigError, match=says):
        compared(tmp_path / "r.csv", words, owned)


def test_an_owner_who_shrinks_images_by_another_library_is_told_which(owned: Path, tmp_path: Path) -> None:
    shown, _ = shape_images(30, 3, 4 * HEIGHT, 4 * WIDTH)
    session = ort.InferenceSession(str(owned / "net.onnx"))
    rows = ["file,label,probability"]
    for index, image in enumerate(shown):
        assert cv2.imwrite(str(tmp_path / f"{index}.png"), image[..., ::-1])
        small = np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        row = softmax(session.run(None, {"input": as_torch_takes(small[np.newaxis])})[0])[0]
        rows.append(f"{index}.png,{LABELS[row.argmax()]},{row.max():.6f}")
    (tmp_path / "p.csv").write_text("\n".join(rows))
    done = checked(tmp_path / "p.csv", [*added(owned, tmp_path), "--tolerance", "0.001"])
    assert done.exit_code == 1
    assert "with --fit stretch --interpolation pillow_bicubic" in " ".join(done.output.split())
    words = added(owned, tmp_path, interpolation="pillow_bicubic")
    done = checked(tmp_path / "p.csv", [*words, "--tolerance", "0.001"])
    assert done.exit_code == 0, done.output


def tables(rows: list[list[str]]) -> dict[str, str]:
    """The same predictions in the forms that programs write."""
    per_label = [[f, *(p if label == each else "0" for each in LABELS)] for f, label, p in rows]
    return {
        "semicolons": "\n".join(map(";".join, [["file", "label", "probability"], *rows])),
        "tabs": "\n".join(map("\t".join, [["File Name", "Predicted_Label", "Score"], *rows])),
        "per cent": "\r\n".join(f"{f},{label},{100 * float(p):.4f}%" for f, label, p in [["file", "label", "0"], *rows])
        .replace("file,label,0.0000%", "file,label,probability"),
        "indices of a table": "\n".join(["path,index", *(f"{f},{LABELS.index(label)}.0" for f, label, _ in rows)]),
        "a column per label": "\n".join(map(",".join, [["file", *LABELS], *per_label])),
        "json lines": "\n".join(f'{{"file": "{f}", "label": "{label}", "probability": {p}}}' for f, label, p in rows),
    }  # fmt: skip


def test_predictions_are_read_from_the_tables_that_programs_write(owned: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in (owned / "predictions.csv").read_text().splitlines()[1:]]
    words = added(owned, tmp_path)
    for name, text in tables(rows).items():
        (tmp_path / "r").write_text(text)
        found = compared(tmp_path / "r", words, owned, 0.001)
        assert found.agrees, name
        assert len(found.images) == len(rows), name
