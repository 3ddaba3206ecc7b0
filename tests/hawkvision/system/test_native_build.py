"""Libraries that are compiled here: made once, never run damaged, and not made where they cannot be kept."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hawkvision.core.errors import CompileError
from hawkvision.system.native_build import LIBRARY, LibraryRecipe, make_library, open_library
from tests.hawkvision.system.mounts import mounted
from tests.waiting import until

ANSWER = "int answer(void) { return 42; }\n"


@pytest.fixture
def recipe(tmp_path: Path) -> LibraryRecipe:
    source = tmp_path / "answer.c"
    source.write_text(ANSWER)
    return LibraryRecipe(name="answer", language="C", source=source, included=(), flags=("-shared", "-fPIC"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/{LIBRARY}"))


def test_a_library_is_compiled_once(recipe: LibraryRecipe, kept: Path) -> None:
    assert open_library(recipe, kept).answer() == 42
    (first,) = libraries(kept)
    made = first.stat().st_ino
    assert open_library(recipe, kept).answer() == 42
    assert [path.stat().st_ino for path in libraries(kept)] == [made]


def test_other_flags_sources_and_processors_make_other_libraries(recipe: LibraryRecipe, kept: Path) -> None:
    for other in (recipe, replace(recipe, flags=(*recipe.flags, "-O1")), replace(recipe, machine="another")):
        assert open_library(other, kept).answer() == 42
    recipe.source.write_text(ANSWER.replace("42", "43"))
    assert open_library(recipe, kept).answer() == 43
    assert len(libraries(kept)) == 4


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's, as a script that can be changed and that writes a line for each time it compiles."""
    real, script = shutil.which("cc"), tmp_path / "bin" / "cc"
    script.parent.mkdir()
    counts = f'case "$*" in *--version*) ;; *) echo >> {tmp_path / "compiled"};; esac'
    script.write_text(f'#!/bin/sh\n{counts}\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return script


OPEN = """
import logging, sys
from pathlib import Path
from hawkvision.system.native_build import LibraryRecipe, open_library
from hawkvision.core.errors import HawkVisionError
logging.basicConfig(level=logging.INFO)
recipe = LibraryRecipe(name="answer", language="C", source=Path(sys.argv[1]), included=(), flags=("-shared", "-fPIC"))
try:
    print(open_library(recipe, Path(sys.argv[2])).answer())
except HawkVisionError as error:
    print(error)
"""


def opened(recipe: LibraryRecipe, folder: Path, *prefix: str) -> str:
    """What another process, which knows no compiler yet, has of the library."""
    command = [*prefix, sys.executable, "-c", OPEN, str(recipe.source), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_another_version_of_the_compiler_makes_a_library_of_its_own(
    recipe: LibraryRecipe, kept: Path, compiler: Path, tmp_path: Path
) -> None:
    assert [opened(recipe, kept) for _ in range(2)] == ["42", "42"]
    assert (tmp_path / "compiled").read_text() == "\n"
    compiler.write_text(compiler.read_text().replace("*--version*) ;;", "*--version*) echo 99.1;;"))
    assert opened(recipe, kept) == "42"
    assert (tmp_path / "compiled").read_text() == "\n\n"


def test_without_a_compiler_what_another_has_made_serves(
    recipe: LibraryRecipe, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_library(recipe, kept)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert open_library(recipe, kept).answer() == 42
    with pytest.raises(CompileError, match="no C compiler"):
        open_library(replace(recipe, machine="another"), kept)


@pytest.mark.parametrize(
    ("options", "reason"), [("noexec", "its file system is mounted noexec"), ("ro", "its file system is read-only")]
)
def test_what_cannot_be_kept_or_run_is_not_even_compiled(
    recipe: LibraryRecipe, kept: Path, compiler: Path, tmp_path: Path, options: str, reason: str
) -> None:
    kept.mkdir()
    assert opened(recipe, kept, *mounted(kept, options)).endswith(reason)
    assert not (tmp_path / "compiled").exists()


def test_a_sound_library_in_a_folder_without_execution_is_not_made_anew(
    recipe: LibraryRecipe, kept: Path, compiler: Path, tmp_path: Path
) -> None:
    made = make_library(recipe, tmp_path / "made")
    (tmp_path / "compiled").unlink()
    kept.mkdir()
    filled = ["sh", "-c", f'cp -pr {made.parent} {kept}/ && exec "$@"', "sh"]
    assert "mounted noexec" in opened(recipe, kept, *mounted(kept, "noexec"), *filled)
    assert not (tmp_path / "compiled").exists()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    recipe: LibraryRecipe, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe.source.write_text("int answer(void) { return }\n")
    with caplog.at_level(logging.INFO), pytest.raises(CompileError, match=r"cannot compile answer\.c: .*error"):
        open_library(replace(recipe, instead=("-DAGAIN",)), kept)
    assert "trying with -DAGAIN" in caplog.text
    assert libraries(kept) == []


def test_a_command_that_is_told_to_end_takes_its_compilers_processes_with_it(
    recipe: LibraryRecipe, kept: Path, compiler: Path, tmp_path: Path
) -> None:
    """A compiler's driver starts others, which a signal to the driver alone would leave running."""
    started = tmp_path / "started"
    script = f'#!/bin/sh\ncase "$*" in *--version*) exit;; esac\nsleep 600 & echo $! > {started}.new\n'
    compiler.write_text(f"{script}mv {started}.new {started}\nwait\n")
    reported = OPEN.replace(
        "try:", "from hawkvision.system.child_server import exit_on_sigterm\nexit_on_sigterm()\ntry:"
    )
    process = subprocess.Popen([sys.executable, "-c", reported, str(recipe.source), str(kept)])
    asyncio.run(until(started.exists))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    child = Path("/proc") / started.read_text().strip()
    asyncio.run(until(lambda: not child.exists() or "(zombie)" in (child / "status").read_text()))
