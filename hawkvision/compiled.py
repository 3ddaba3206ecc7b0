"""Native code of ours: compiled on the machine that runs it, once, by whatever compiler it has.

Libraries are kept under names that are hashes of what they were made of. None that another user may have written is
loaded, and what is missing or damaged is made again.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hawkvision.artifacts import check_ours, write_atomic
from hawkvision.command import run
from hawkvision.errors import ArtifactError, CompileError

Language: TypeAlias = Literal["C", "C++"]

COMPILERS: Final[dict[Language, tuple[str, ...]]] = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}
"""As they are looked for on the path."""
PACKAGES: Final[dict[Language, str]] = {"C": "gcc", "C++": "g++"}
"""Debian's."""
COMPILE_CPU_S: Final = 120
"""A minute is what the slowest source takes on a Raspberry Pi, two seconds on a server's core."""
COMPILE_WALL_S: Final = 300.0
"""Whoever starts a node waits for it."""


def find_compiler(language: Language) -> str:
    """The file of one.

    Raises:
        CompileError: if none is on the path.
    """
    names = COMPILERS[language]
    found = next((found for name in names if (found := shutil.which(name))), None)
    if found is None:
        package = PACKAGES[language]
        raise CompileError(f"no {language} compiler ({', '.join(names)}); install one, on Debian the package {package}")
    return found


def compile_library(command: Sequence[str], source: Path, path: Path) -> None:
    """Compile a source into the shared library `path`, which is whole or not there; its folder is made if needed.

    Raises:
        CompileError: if it cannot be compiled, or not written, saying why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hawkvision-compiled-") as scratch:
            built = Path(scratch) / "library.so"
            _compile([*command, "-o", str(built), str(source)], source)
            write_atomic(path, built.read_bytes())
    except OSError as error:
        raise CompileError(f"{path}: cannot write: {error.strerror}") from None
    except ArtifactError as error:
        raise CompileError(error.message) from None


def _compile(command: Sequence[str], source: Path) -> None:
    try:
        ran = run(
            command[0],
            command[1:],
            cpu_limit_s=COMPILE_CPU_S,
            wall_limit_s=COMPILE_WALL_S,
            env={"LC_ALL": "C"},
        )
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from None
    if ran.status > 0:
        said = next((line for line in ran.output.splitlines() if "error" in line.lower()), ran.output[-200:])
        raise CompileError(f"{command[0]} cannot compile {source.name}: {said}")
    ran.check()


def load_library(path: Path, make: Callable[[], object]) -> ctypes.CDLL:
    """A library, made anew if it cannot be loaded: a failing disk has changed it, or it comes from another system.

    Raises:
        BackendError: if another user may have written it.
        CompileError: if it cannot be loaded even so; and whatever `make` raises.
    """
    check_ours(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        make()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(f"{path}: cannot be loaded: {error}") from None
