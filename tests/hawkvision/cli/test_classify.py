"""`hawkvision classify` and `detect`: files and folders, concurrently, in order."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from pathlib import Path

import pytest

from hawkvision.core.errors import BadImage, NotReady
from hawkvision.tasks.detection import DetectedObject, Detection
from tests.hawkvision.client.client_node import ANSWER, Reply, Start, ok, refusal
from tests.hawkvision.command import Ran, invoke
from tests.images import encoded


def classify(*words: str) -> Ran:
    return invoke("classify", *words)


FOUND = dataclasses.replace(
    ANSWER,
    prediction=Detection(
        (DetectedObject("dog", 1, 0.9, (0.1, 0.2, 0.5, 0.9)), DetectedObject("dog", 1, 0.6, (0.5, 0.5, 1.0, 1.0))), 0.8
    ),
)


def detect(*words: str) -> Ran:
    return invoke("detect", *words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for name in ("b.jpg", "a.PNG", "below/c.webp", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_a_folder_is_every_image_below_it(start: Start, folder: Path) -> None:
    node = start()
    result = classify(str(folder), "--url", node.url, "--json", "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert [Path(json.loads(line)["image"]).name for line in result.stdout.splitlines()] == [
        "a.PNG",
        "b.jpg",
        "c.webp",
    ]
    assert node.bodies == [b"a.PNG", b"b.jpg", b"below/c.webp"]


def test_one_that_fails_is_named_and_the_others_are_answered(start: Start, folder: Path) -> None:
    node = start(ok(), refusal(BadImage("the image is no image")), ok())
    result = classify(str(folder), "--url", node.url, "--concurrency", "1")
    assert result.exit_code == 1
    assert f"{folder / 'b.jpg'}: the image is no image" in result.stderr
    assert result.stdout.count("tabby") == 2


def test_a_folder_without_images_is_said_to_be_one(start: Start, tmp_path: Path) -> None:
    result = classify(str(tmp_path), "--url", start().url)
    assert result.exit_code == 1
    assert "expected images" in result.output


def test_a_pattern_is_every_file_of_that_name_and_one_for_nothing_is_named(start: Start, folder: Path) -> None:
    node = start()
    result = classify(f"{folder}/**/*.[jw]*", "--url", node.url, "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert sorted(node.bodies) == [b"b.jpg", b"below/c.webp"]
    nothing = classify(f"{folder}/*.gif", "--url", node.url)
    assert nothing.exit_code == 1
    assert "no file matches this pattern" in nothing.output


def test_answers_and_errors_become_rows_of_a_csv_file(start: Start, folder: Path, tmp_path: Path) -> None:
    node = start(ok(), refusal(BadImage('no image,\nsaid "we"')), ok())
    out = tmp_path / "answers.csv"
    result = classify(str(folder), "--url", node.url, "--concurrency", "1", "--out", str(out))
    assert result.exit_code == 1
    assert f"2 answers and 1 errors written to {out}" in result.stdout
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows] == ["a.PNG", "b.jpg", "c.webp"]
    assert [row["label"] for row in rows] == ["tabby", "", "tabby"]
    assert (rows[0]["confidence"], rows[0]["total_ms"]) == ("0.83", "5.2")
    assert rows[1]["error"] == 'no image, said "we"'


def test_a_file_that_cannot_be_written_is_said_before_anything_is_sent(start: Start, folder: Path) -> None:
    node = start()
    result = classify(str(folder), "--url", node.url, "--out", str(folder / "none" / "answers.csv"))
    assert result.exit_code == 1
    assert "--out" in result.output
    assert node.bodies == []


def test_it_waits_for_a_node_that_is_starting(start: Start, folder: Path) -> None:
    ready: Reply = 200, {}, b'{"status": "ready", "task": "imagenet", "variant": "tiny"}'
    node = start(refusal(NotReady("loading")), refusal(NotReady("loading")), ready, ok())
    result = classify(str(folder / "b.jpg"), "--url", node.url, "--wait", "60")
    assert result.exit_code == 0, result.output
    assert "tabby" in result.stdout
    assert len(node.bodies) == 4


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.jpg", "b.png"):
        (folder / name).write_bytes(encoded(Path(name).suffix, height=60, width=100))
    return folder


def test_objects_are_listed(start: Start, photos: Path) -> None:
    node = start((200, {}, json.dumps(FOUND.to_json()).encode()))
    result = detect(str(photos), "--url", node.url)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("2 dog") == 2


def test_an_empty_word_is_refused_before_anything_is_asked(start: Start) -> None:
    node = start()
    refused = detect("", "--url", node.url)
    assert refused.exit_code == 1
    assert "got an empty word" in refused.output
    assert not node.bodies


def test_each_object_is_a_row_of_one_line_whatever_the_files_name(start: Start, photos: Path, tmp_path: Path) -> None:
    node, out = start((200, {}, json.dumps(FOUND.to_json()).encode())), tmp_path / "objects.csv"
    odd = [photos / "new\nline\x1b[31m.jpg", photos / os.fsdecode(b"no\xffunicode.jpg")]
    for path in odd:
        path.write_bytes(encoded())
    shown = detect(*map(str, odd), "--url", node.url)
    assert shown.exit_code == 0, shown.output
    assert "new?line?[31m.jpg" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert detect(*map(str, odd), "--url", node.url, "--out", str(out)).exit_code == 0
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["image"]).name for row in rows][::2] == ["new\nline\x1b[31m.jpg", "no\\udcffunicode.jpg"]
    expected = [("dog", "0.9", "0.1", "0.9"), ("dog", "0.6", "0.5", "1.0")]
    assert [(row["label"], row["confidence"], row["x1"], row["y2"]) for row in rows] == 2 * expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_disk_is_said_in_a_line(start: Start, photos: Path) -> None:
    result = detect(str(photos), "--url", start().url, "--out", "/dev/full")
    assert result.exit_code == 1
    assert result.stderr == "error: --out: /dev/full: cannot write: No space left on device\n"


def test_a_task_of_any_kind_is_asked_with_infer(start: Start, photos: Path) -> None:
    listed = {"tasks": [{"task": "imagenet", "kind": "detection", "status": "ready"}]}
    node = start((200, {}, json.dumps({**FOUND.to_json(), **listed}).encode()))  # to either request
    result = invoke("infer", str(photos / "a.jpg"), "--url", node.url)
    assert result.exit_code == 0, result.output
    assert "2 dog" in result.stdout
