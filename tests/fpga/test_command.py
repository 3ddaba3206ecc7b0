"""`hawkvision fpga`: what it prints and writes, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fpga.folding import check_folding, parse_folding
from fpga.integer_onnx import write
from hawkvision.cli import app
from tests.fpga.graphs import fashion_shape

GRAPH = fashion_shape()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which a quantised model is built."""
    folder = tmp_path / "models" / "fashion_mnist"
    folder.mkdir(parents=True)
    (folder / "tiny_w4.onnx").write_bytes(write(GRAPH))
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fpga", *words])
    return result.exit_code, result.output if result.exception is None else f"{result.output}{result.exception}"


def test_fold_writes_a_folding_that_fits_and_estimate_reads_it(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "folding.json"
    common = ("--device", "lfe5u-25f", "--cache-dir", str(cache))
    status, said = run("fold", *common, "--rate", "1000", "--out", str(file))
    assert status == 0, said
    check_folding(GRAPH, parse_folding(file.read_bytes(), "file"))
    status, again = run("estimate", *common, "--folding", str(file))
    assert status == 0
    assert again.strip() in said
    assert "estimated: " in again


def test_missing_model_is_named_with_the_command_that_builds_it(tmp_path: Path) -> None:
    status, said = run("estimate", "--cache-dir", str(tmp_path))
    assert status == 1
    assert "build it with `hawkvision models build --task fashion_mnist tiny_w4`" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "lfe5u-12f"), "unknown device 'lfe5u-12f'"),
        (("--rate", "1000000"), "a second at 120 MHz would need"),
        (("--folding", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--folding", "nowhere.json", "--rate", "1"), "exclude one another"),
    ],
)
def test_impossible_orders_are_refused(cache: Path, words: tuple[str, ...], says: str) -> None:
    status, said = run("estimate", "--cache-dir", str(cache), *words)
    assert status == 1
    assert says in said
