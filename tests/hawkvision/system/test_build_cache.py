"""The cache of compiled code: each thing is built once, is whole or not there, and is bounded."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hawkvision.core.errors import BackendError, CompileError
from hawkvision.system.build_cache import ABANDONED_S, SUMS, VARIABLE, build_cache_dir, build_once, is_intact, tidy
from hawkvision.system.files import check_ours

NOW = 1e9


def writing(content: bytes, log: list[bytes] | None = None) -> Callable[[Path], None]:
    def build(work: Path) -> None:
        (work / "scratch").mkdir()
        (work / "scratch" / "object.o").write_bytes(b"")
        (work / "library.so").write_bytes(content)
        if log is not None:
            log.append(content)

    return build


def test_an_entry_is_built_once_and_keeps_no_scratch(tmp_path: Path) -> None:
    entry, built = tmp_path / "cache" / "thing-1", list[bytes]()
    for _ in range(2):
        assert build_once(entry, writing(b"code", built)) == entry
    assert built == [b"code"]
    assert {path.name for path in entry.iterdir()} == {"library.so", SUMS}
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


def test_one_variable_moves_the_cache_and_so_does_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_cache_dir() == tmp_path / "hawkvision" / "compiled"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    assert build_cache_dir() == tmp_path / "own"


@pytest.mark.parametrize("damaged", ["library.so", SUMS])
@pytest.mark.parametrize("content", [b"", b"cod", b"codes", None])
def test_what_is_damaged_or_missing_is_built_again(
    tmp_path: Path, damaged: str, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build_once(tmp_path / "thing-1", writing(b"code"))
    (entry / damaged).unlink()
    if content is not None:
        (entry / damaged).write_bytes(content)
    build_once(entry, writing(b"code"))
    assert is_intact(entry)
    assert "damaged; built again" in caplog.text


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(work: Path) -> None:
        writing(b"half")(work)
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        build_once(tmp_path / "thing-1", build)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys, time
from pathlib import Path
from hawkvision.system.build_cache import build_once

def build(work):
    print("building", flush=True)
    sys.stdin.readline()
    (work / "library.so").write_bytes(b"code")

build_once(Path(sys.argv[1]), build)
print("done", flush=True)
"""


def process(entry: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(entry)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


def test_of_two_processes_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    with process(tmp_path / "thing-1") as first:
        assert line(first) == "building"
        with process(tmp_path / "thing-1") as second:
            first.communicate("\n")
            assert line(second) == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["thing-1"]


def test_a_builder_that_is_killed_hands_over_to_the_one_that_waits(tmp_path: Path) -> None:
    with process(tmp_path / "thing-1") as first:
        assert line(first) == "building"
        with process(tmp_path / "thing-1") as second:
            first.send_signal(signal.SIGKILL)
            assert line(second) == "building"
            assert second.communicate("\n")[0] == "done\n"
    assert is_intact(tmp_path / "thing-1")


def test_where_there_are_no_locks_the_first_to_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    entry = tmp_path / "thing-1"

    def build(work: Path) -> None:
        build_once(entry, writing(b"code"))  # as another process does meanwhile
        writing(b"code")(work)

    assert is_intact(build_once(entry, build))


def test_threads_build_one_thing_once(tmp_path: Path) -> None:
    built: list[bytes] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build_once(tmp_path / "thing-1", writing(b"code", built)), range(8)))
    assert built == [b"code"]


def kept(folder: Path, name: str, used_at: float, size: int = 100) -> Path:
    entry = build_once(folder / name, writing(bytes(size)))
    os.utime(entry, (used_at, used_at))
    return entry


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    for name, age in (("sim-a", 9000), ("netlist-b", 8000), ("kernel-c", 7000), ("sim-d", 6000)):
        kept(tmp_path, name, NOW - age)
    tidy(tmp_path, NOW, kept=2)
    assert names(tmp_path) == {"kernel-c", "sim-d"}
    kept(tmp_path, "sim-large", NOW - 9000, size=1 << 20)
    tidy(tmp_path, NOW, kept_bytes=1 << 19)
    assert names(tmp_path) == {"kernel-c", "sim-d"}


def test_what_was_just_used_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    entry = kept(tmp_path, "sim-old", 0)
    build_once(entry, writing(b""))
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".new-being-built").mkdir()
    tidy(tmp_path, entry.stat().st_mtime + 10, kept=0)
    assert names(tmp_path) == {"sim-old", "notes.txt", "folder", ".new-being-built"}
    tidy(tmp_path, entry.stat().st_mtime + 2 * ABANDONED_S, kept=0)
    assert names(tmp_path) == {"notes.txt", "folder"}
    tidy(tmp_path / "none", NOW)


def test_many_processes_and_threads_tidy_at_once(tmp_path: Path) -> None:
    for number in range(40):
        kept(tmp_path, f"sim-{number:02}", NOW - 9000 + number)
    program = f"from hawkvision.system.build_cache import *; tidy(Path({str(tmp_path)!r}), {NOW}, kept=20)"
    with subprocess.Popen([sys.executable, "-c", program]) as other, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: tidy(tmp_path, NOW, kept=20), range(8)))
        assert other.wait(60) == 0
    assert names(tmp_path) == {f"sim-{number}" for number in range(20, 40)}


def test_code_that_others_may_write_or_that_is_no_file_is_refused(tmp_path: Path) -> None:
    code = build_once(tmp_path / "thing-1", writing(b"code")) / "library.so"
    code.chmod(0o664)
    with pytest.raises(BackendError, match="only its owner may write, found mode 664; remove it"):
        build_once(tmp_path / "thing-1", writing(b"code"))
    (tmp_path / "link.so").symlink_to(code)
    with pytest.raises(BackendError, match=r"link\.so: expected a file of code that we compiled"):
        check_ours(tmp_path / "link.so")
    with pytest.raises(BackendError, match="No such file"):
        check_ours(tmp_path / "none.so")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_code_of_another_user_is_refused(tmp_path: Path) -> None:
    entry = build_once(tmp_path / "thing-1", writing(b"code"))
    os.chown(entry / "library.so", 12345, -1)
    with pytest.raises(BackendError, match="expected code of user 0, found that of user 12345"):
        build_once(entry, writing(b"code"))
