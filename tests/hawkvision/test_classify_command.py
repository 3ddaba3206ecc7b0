"""`hawkvision classify`: files and folders, concurrently, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hawkvision.cli import app
from hawkvision.errors import BadImage
from tests.hawkvision.client_node import Start, ok, refusal


def classify(*words: str) -> Result:
    return CliRunner().invoke(app, ["classify", *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    for name in ("b.jpg", "a.PNG", "below/c.webp", "notes.txt"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_a_folder_is_every_picture_below_it(start: Start, folder: Path) -> None:
    node = start()
    result = classify(str(folder), "--url", node.url, "--json", "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert [Path(json.loads(line)["picture"]).name for line in result.stdout.splitlines()] == [
        "a.PNG",
        "b.jpg",
        "c.webp",
    ]
    assert node.bodies == [b"a.PNG", b"b.jpg", b"below/c.webp"]


def test_one_that_fails_is_named_and_the_others_are_answered(start: Start, folder: Path) -> None:
    node = start(ok(), refusal(BadImage("the picture is no picture")), ok())
    result = classify(str(folder), "--url", node.url, "--concurrency", "1")
    assert result.exit_code == 1
    assert f"{folder / 'b.jpg'}: the picture is no picture" in result.stderr
    assert result.stdout.count("tabby") == 2


def test_a_folder_without_pictures_is_said_to_be_one(start: Start, tmp_path: Path) -> None:
    result = classify(str(tmp_path), "--url", start().url)
    assert result.exit_code == 1
    assert "expected pictures" in str(result.exception)
