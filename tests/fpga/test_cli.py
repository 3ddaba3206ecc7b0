"""`hawkvision fpga`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fpga.build import LOCK
from fpga.compiler.folding import check_folding, parse_folding
from hawkvision.integer.onnx_writer import write
from hawkvision.model_zoo.own.qonnx_export import write_qonnx
from tests.hawkvision.command import invoke
from tests.hawkvision.integer.graphs import fashion_shape
from tests.hawkvision.integer.quantised_nets import random_net

GRAPH = fashion_shape()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which a quantised model is built."""
    folder = tmp_path / "models" / "fashion_mnist"
    folder.mkdir(parents=True)
    (folder / "tiny_w4.onnx").write_bytes(write(GRAPH))
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    result = invoke("fpga", *words)
    return result.exit_code, result.output


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


@pytest.mark.parametrize("out", ["", "file/folding.json"])
def test_folding_that_cannot_be_written_is_an_error(cache: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    status, said = run("fold", "--cache-dir", str(cache), "--rate", "500", "--out", str(tmp_path / out))
    assert status == 1
    assert "cannot write" in said


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """A folder in which another build works, so that one there says what it would do and ends."""
    folder.mkdir()
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_command_of_a_build_names_every_option_that_decides_it(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "my board.lpf").write_text("")
    words = ["--rate", "500", "--mhz", "100", "--target-mhz", "110", "--pins", str(tmp_path / "my board.lpf")]
    with in_use(tmp_path / "out"):
        status, said = run("build", "--cache-dir", str(cache), *words, "--out", str(tmp_path / "out"))
    assert status == 1
    assert " --rate 500 --mhz 100 --target-mhz 110 --pins 'my board.lpf' " in said
    assert "another build works there" in said


def test_build_of_a_file_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.onnx").write_bytes(write_qonnx(random_net(side=8, planes=1), "own"))
    with in_use(Path("fpga-fashion_mnist-own-lfe5u-45f")):
        status, said = run("build", "--model", "own.onnx")
    assert status == 1
    assert "--variant own --device lfe5u-45f --model own.onnx " in said
    assert "fpga-fashion_mnist-own-lfe5u-45f: another build works there" in said


@pytest.mark.parametrize(
    "words",
    [("--pins", "nowhere.lpf"), ("--out", "{file}"), ("--reports-dir", "{file}"), ("--mhz", "inf"), ("--rate", "inf")],
)
def test_build_refuses_bad_options_before_any_work(cache: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    (tmp_path / "file").write_text("")
    option, value = words[0], words[1].format(file=tmp_path / "file")
    status, said = run("build", "--cache-dir", str(cache), option, value)
    assert status != 0
    assert f"error: {option}" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "lfe5u-12f"), "unknown device 'lfe5u-12f'"),
        (("--rate", "1000000"), "a second at 120 MHz would need"),
        (("--folding", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--model", "nowhere.onnx"), "nowhere.onnx: cannot be read"),
        (("--model", "/dev/zero"), "/dev/zero: more than 25165824 bytes"),
        (("--folding", "nowhere.json", "--rate", "1"), "exclude one another"),
    ],
)
def test_impossible_orders_are_refused(cache: Path, words: tuple[str, ...], says: str) -> None:
    status, said = run("estimate", "--cache-dir", str(cache), *words)
    assert status == 1
    assert says in said
