from __future__ import annotations

import os
from pathlib import Path

import pytest

from hawkvision.core.errors import ArtifactError, ConfigError
from hawkvision.models.artifacts import load_verified
from hawkvision.system.files import check_writable, sha256_of, write_atomic


def test_verified_bytes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "models" / "imagenet" / "small.onnx"
    write_atomic(path, b"graph")
    assert load_verified(path, sha256_of(b"graph")) == b"graph"


def test_missing_artefact_says_how_to_build_it(tmp_path: Path) -> None:
    path = tmp_path / "imagenet" / "small.onnx"
    with pytest.raises(ArtifactError, match=r"hawkvision models build --task imagenet small`") as caught:
        load_verified(path, "0" * 64)
    assert str(path) in str(caught.value)


def test_corrupt_artefact_is_refused_with_both_hashes(tmp_path: Path) -> None:
    path = tmp_path / "imagenet" / "small.onnx"
    write_atomic(path, b"grapj")
    with pytest.raises(ArtifactError) as caught:
        load_verified(path, sha256_of(b"graph"))
    for fact in (sha256_of(b"graph"), sha256_of(b"grapj"), "corrupt", "models build"):
        assert fact in str(caught.value)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="taken"):
        write_atomic(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    assert (target / "inside").is_dir()


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to(target)
    for data in (b"new", b"newer"):
        write_atomic(link, data)
        assert (link.is_symlink(), target.read_bytes()) == (True, data)
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, b"new")
        assert os.read(reading, 9) == b"new"
    finally:
        os.close(reading)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("place", "said"),
    [("", "got a folder"), ("none/a", "no such folder: .*none"), ("file/a", "no such folder: .*file"), ("far", "none")],
)
def test_what_cannot_be_written_is_known_beforehand(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "far").symlink_to(tmp_path / "none" / "a")
    with pytest.raises(ConfigError, match=said):
        check_writable(tmp_path / place)


def test_file_systems_that_take_no_files_are_known_beforehand() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    with pytest.raises(ConfigError, match="/proc/a: cannot write"):
        check_writable(Path("/proc/a"))


def test_checking_leaves_what_is_there_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for place in (tmp_path / "file", tmp_path / "new", Path("/dev/null")):
        check_writable(place)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError, match="file"):
        write_atomic(tmp_path / "file" / "small.onnx", b"new")


def test_serving_does_not_load_onnx(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, hawkvision.models.artifacts; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
