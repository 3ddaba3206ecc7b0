"""`hawkvision classify`: files and folders, concurrently, in order."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hawkvision.cli import app
from hawkvision.core.errors import BadImage, NotReady
from tests.hawkvision.client.client_node import Reply, Start, ok, refusal


def classify(*words: str) -> Result:
    return CliRunner().invoke(app, ["classify", *words])


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
    assert "expected images" in str(result.exception)


def test_a_pattern_is_every_file_of_that_name_and_one_for_nothing_is_named(start: Start, folder: Path) -> None:
    node = start()
    result = classify(f"{folder}/**/*.[jw]*", "--url", node.url, "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert sorted(node.bodies) == [b"b.jpg", b"below/c.webp"]
    nothing = classify(f"{folder}/*.gif", "--url", node.url)
    assert nothing.exit_code == 1
    assert "no file matches this pattern" in str(nothing.exception)


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
    assert "--out" in str(result.exception)
    assert node.bodies == []


def test_it_waits_for_a_node_that_is_starting(start: Start, folder: Path) -> None:
    ready: Reply = 200, {}, b'{"status": "ready", "task": "imagenet", "variant": "tiny"}'
    node = start(refusal(NotReady("loading")), refusal(NotReady("loading")), ready, ok())
    result = classify(str(folder / "b.jpg"), "--url", node.url, "--wait", "60")
    assert result.exit_code == 0, result.output
    assert "tabby" in result.stdout
