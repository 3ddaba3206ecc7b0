"""Shared libraries of C and C++, compiled once on the machine that runs them, with the system's compiler.

The entry in the cache (`build_cache`) is named after the sources, the flags and the compiler:

    kernel-<digest of the recipe>-<digest of the compiler>/library.so
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hawkvision.core.errors import CompileError
from hawkvision.system.build_cache import build_cache_dir, build_once, check_place, is_intact, remove
from hawkvision.system.subprocess_runner import run

log = logging.getLogger("hawkvision.system.native_build")

Language: TypeAlias = Literal["C", "C++"]

LIBRARY: Final = "library.so"
"""The file of an entry."""

COMPILERS: Final[dict[Language, tuple[str, ...]]] = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}
"""Compilers, in the order in which the path is searched for them."""
PACKAGES: Final[dict[Language, str]] = {"C": "gcc", "C++": "g++"}
"""Debian packages of the compilers."""
COMPILE_CPU_S: Final = 120
"""The slowest source takes a minute on a Raspberry Pi."""
COMPILE_WALL_S: Final = 300.0
"""The start of a node waits this long at most."""
VERSION_WALL_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class LibraryRecipe:
    """Source and flags of a library."""

    name: str
    """Prefix of the library's file names."""
    language: Language
    source: Path
    """The file to compile."""
    included: tuple[Path, ...]
    """Files that the source includes."""
    flags: tuple[str, ...]
    instead: tuple[str, ...] = ()
    """Flags to add if compilation fails without them."""
    machine: str = ""
    """Further facts that decide the result, such as the processor that `-march=native` means."""

    def made_of(self) -> str:
        """A digest of the recipe in 32 digits."""
        whole = hashlib.sha256("\0".join((self.language, *self.flags, "|", *self.instead, "|", self.machine)).encode())
        for path in (self.source, *self.included):
            content = path.read_bytes()
            whole.update(len(content).to_bytes(8, "little") + content)
        return whole.hexdigest()[:32]


def find_compiler(language: Language) -> str:
    """The path of a compiler.

    Raises:
        CompileError: if there is none on the path.
    """
    names = COMPILERS[language]
    found = next((found for name in names if (found := shutil.which(name))), None)
    if found is None:
        package = PACKAGES[language]
        raise CompileError(f"no {language} compiler ({', '.join(names)}); install one, on Debian the package {package}")
    return found


def open_library(recipe: LibraryRecipe, folder: Path | None = None) -> ctypes.CDLL:
    """Load the library, compiling it if it is missing or damaged. `folder` replaces the cache.

    Without a compiler, a library made by any compiler is used.

    Raises:
        BackendError: if another user may have written the file.
        CompileError: if it cannot be compiled, stored or loaded; says why.
        ConfigError: if there is no cache folder.
    """
    made = make_library(recipe, build_cache_dir() if folder is None else folder)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:  # another system made it, or the folder allows no code
        check_place(made.parent.parent)
        log.warning("%s: compiled again, because it cannot be loaded: %s", made, error)
        remove(made.parent)
    made = make_library(recipe, made.parent.parent)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CompileError(f"{made}: cannot be loaded: {error}") from None


def make_library(recipe: LibraryRecipe, folder: Path) -> Path:
    """The library in a folder, compiled if it is missing or damaged. It appears whole or not at all.

    Raises:
        BackendError: if another user may have written the file.
        CompileError: if it cannot be compiled or stored; says why. It is not compiled if it cannot be stored.
    """
    try:
        compiler = find_compiler(recipe.language)
    except CompileError:
        made = find_library(recipe, folder)
        if made is None:
            raise
        return made
    entry = folder / f"{recipe.name}-{recipe.made_of()}-{_identity(compiler)}"
    return build_once(entry, functools.partial(_make, recipe, compiler)) / LIBRARY


def find_library(recipe: LibraryRecipe, folder: Path) -> Path | None:
    """An intact library in a folder, made by any compiler; None if there is none.

    Raises:
        BackendError: if another user may have written the file.
        CompileError: if the folder cannot be read.
    """
    entries = sorted(folder.glob(f"{recipe.name}-{recipe.made_of()}-*"))
    return next((entry / LIBRARY for entry in entries if is_intact(entry)), None)


def _make(recipe: LibraryRecipe, compiler: str, work: Path) -> None:
    log.info("compiling %s with %s, once", recipe.source.name, compiler)
    try:
        _compile([compiler, *recipe.flags], recipe.source, work / LIBRARY)
    except CompileError as error:
        if not recipe.instead:
            raise
        log.info("%s: trying with %s: %s", recipe.source.name, " ".join(recipe.instead), error.message)
        _compile([compiler, *recipe.flags, *recipe.instead], recipe.source, work / LIBRARY)


def _compile(command: list[str], source: Path, built: Path) -> None:
    """Compile a source file. The compiler's temporary files go into a folder beside the result.

    Raises:
        CompileError: if it fails, or was ended.
    """
    temporary = built.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    try:
        ran = run(
            command[0],
            [*command[1:], "-o", str(built), str(source)],
            cpu_limit_s=COMPILE_CPU_S,
            wall_limit_s=COMPILE_WALL_S,
            env={"LC_ALL": "C", "TMPDIR": str(temporary)},
        )
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from None
    if ran.status > 0:
        said = next((line for line in ran.output.splitlines() if "error" in line.lower()), ran.output[-200:])
        raise CompileError(f"{command[0]} cannot compile {source.name}: {said}")
    ran.check()


@functools.cache
def _identity(compiler: str) -> str:
    """A digest of a compiler and its version in 16 digits.

    Raises:
        CompileError: if it cannot be run.
    """
    try:
        reported = run(
            compiler, ["--version"], cpu_limit_s=COMPILE_CPU_S, wall_limit_s=VERSION_WALL_S, env={"LC_ALL": "C"}
        ).output
    except OSError as error:
        raise CompileError(f"{compiler} cannot be run: {error}") from None
    return hashlib.sha256(f"{os.path.realpath(compiler)}\0{reported}".encode()).hexdigest()[:16]
