"""Native code of ours: compiled on the machine that runs it, once, by whatever compiler it has.

A library is kept in a file whose name says all that must be known before it is loaded:

    kernel-<what it was made of>-<which compiler made it>-<SHA-256 of the file>.so

So a file that a power cut or a failing disk has changed is found out, and made anew, instead of ending the process
with SIGBUS; and another compiler, version or flag makes another file. None that another user may have written is
loaded. Where code cannot be kept or run (a cache that is mounted `noexec` or read-only), nothing is compiled at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hawkvision.core.errors import ArtifactError, CompileError
from hawkvision.system.files import check_ours, sha256_of, write_atomic
from hawkvision.system.subprocess_runner import run

log = logging.getLogger("hawkvision.system.native_build")

Language: TypeAlias = Literal["C", "C++"]

COMPILERS: Final[dict[Language, tuple[str, ...]]] = {"C": ("cc", "gcc", "clang"), "C++": ("c++", "g++", "clang++")}
"""As they are looked for on the path."""
PACKAGES: Final[dict[Language, str]] = {"C": "gcc", "C++": "g++"}
"""Debian's."""
COMPILE_CPU_S: Final = 120
"""A minute is what the slowest source takes on a Raspberry Pi, two seconds on a server's core."""
COMPILE_WALL_S: Final = 300.0
"""Whoever starts a node waits for it."""
VERSION_WALL_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class LibraryRecipe:
    """What a library is made of."""

    name: str
    """Of the library's files, in front of what tells them apart."""
    language: Language
    source: Path
    """Is compiled."""
    included: tuple[Path, ...]
    """Files that the source includes."""
    flags: tuple[str, ...]
    instead: tuple[str, ...] = ()
    """Flags to add where it cannot be compiled without."""
    machine: str = ""
    """What more decides the result, such as the processor that `-march=native` stands for."""

    def made_of(self) -> str:
        """Tells this recipe from others, in 32 digits."""
        whole = hashlib.sha256("\0".join((self.language, *self.flags, "|", *self.instead, "|", self.machine)).encode())
        for path in (self.source, *self.included):
            content = path.read_bytes()
            whole.update(len(content).to_bytes(8, "little") + content)
        return whole.hexdigest()[:32]


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


def open_library(
    recipe: LibraryRecipe, folder: Path, *, make_room: Callable[[Path], None] | None = None
) -> ctypes.CDLL:
    """The library that is kept in a folder, made if it is missing or damaged; it is compiled once at most.

    Without a compiler, one that another compiler has made serves. `make_room` is called with the folder before a new
    file is put there.

    Raises:
        BackendError: if another user may have written it.
        CompileError: if it cannot be made, kept or loaded; says why.
    """
    kept = find_kept(recipe, folder)
    if kept is not None:
        try:
            return ctypes.CDLL(str(kept))
        except (
            OSError
        ) as error:  # the bytes are those that were made: another system made them, or code may not lie here
            check_place(folder)
            log.warning("%s: made anew, for it cannot be loaded: %s", kept, error)
            kept.unlink(missing_ok=True)
    made = make_library(recipe, folder, make_room=make_room)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CompileError(f"{made}: cannot be loaded: {error}") from None


def find_kept(recipe: LibraryRecipe, folder: Path, *, by_anyone: bool = False) -> Path | None:
    """The file of a library that is sound, of this machine's compiler, or of any where there is none; or None.

    Damaged files are removed, where that is possible, and the log says so. `by_anyone` takes any compiler's in any
    case, for folders that a package brings.

    Raises:
        BackendError: if another user may have written it.
        CompileError: if the folder cannot be looked into.
    """
    maker = "*"
    if not by_anyone:
        with contextlib.suppress(CompileError):
            maker = _identity(find_compiler(recipe.language))
    found: list[tuple[float, Path]] = []
    try:
        for path in folder.glob(f"{recipe.name}-{recipe.made_of()}-{maker}-*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                found.append((path.lstat().st_mtime, path))
    except OSError as error:
        raise CompileError(f"{folder}: cannot be looked into: {error.strerror}") from None
    for _, path in sorted(found, reverse=True):
        check_ours(path)
        if is_sound(path):
            return path
        log.warning("%s: is damaged; it is made anew", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def is_sound(path: Path) -> bool:
    """Whether a file has the SHA-256 that its name ends with."""
    try:
        return path.stem.endswith(f"-{sha256_of(path.read_bytes())}")
    except OSError:  # a failing disk says so when it is read
        return False


def make_library(recipe: LibraryRecipe, folder: Path, *, make_room: Callable[[Path], None] | None = None) -> Path:
    """Compile a library into a folder, in which it is whole or not there; the folder is made if needed.

    Raises:
        CompileError: if it cannot be compiled, or kept there, saying why; what cannot be kept is not compiled.
    """
    compiler = find_compiler(recipe.language)
    stem = f"{recipe.name}-{recipe.made_of()}-{_identity(compiler)}"
    check_place(folder)
    if make_room is not None:
        make_room(folder)
    log.info("compiling %s with %s, once", recipe.source.name, compiler)
    try:
        with tempfile.TemporaryDirectory(prefix="hawkvision-compiled-") as scratch:
            built = Path(scratch) / "library.so"
            try:
                _compile([compiler, *recipe.flags], recipe.source, built)
            except CompileError as error:
                if not recipe.instead:
                    raise
                log.info("%s: once more, with %s: %s", recipe.source.name, " ".join(recipe.instead), error.message)
                _compile([compiler, *recipe.flags, *recipe.instead], recipe.source, built)
            code = built.read_bytes()
            path = folder / f"{stem}-{sha256_of(code)}.so"
            write_atomic(path, code)
    except OSError as error:
        raise CompileError(f"{folder}: cannot write: {error.strerror}") from None
    except ArtifactError as error:
        raise CompileError(error.message) from None
    return path


def check_place(folder: Path) -> None:
    """State that code can be put into a folder and run from there; the folder is made if needed.

    Raises:
        CompileError: saying which of both it is that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(mmap.PAGESIZE))
            trial.flush()
            try:
                mmap.mmap(trial.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
            except PermissionError:
                raise CompileError(f"{folder}: no code runs from there, its file system is mounted noexec") from None
    except OSError as error:
        reason = "its file system is read-only" if error.errno == errno.EROFS else error.strerror
        raise CompileError(f"{folder}: cannot write: {reason}") from None


def _compile(command: list[str], source: Path, built: Path) -> None:
    """Compile; the compiler's own temporary files lie beside what it builds.

    Raises:
        CompileError: if it cannot, or was ended.
    """
    try:
        ran = run(
            command[0],
            [*command[1:], "-o", str(built), str(source)],
            cpu_limit_s=COMPILE_CPU_S,
            wall_limit_s=COMPILE_WALL_S,
            env={"LC_ALL": "C", "TMPDIR": str(built.parent)},
        )
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from None
    if ran.status > 0:
        said = next((line for line in ran.output.splitlines() if "error" in line.lower()), ran.output[-200:])
        raise CompileError(f"{command[0]} cannot compile {source.name}: {said}")
    ran.check()


@functools.cache
def _identity(compiler: str) -> str:
    """Tells a compiler from others, and from other versions of itself, in 16 digits.

    Raises:
        CompileError: if it cannot be run.
    """
    try:
        told = run(
            compiler, ["--version"], cpu_limit_s=COMPILE_CPU_S, wall_limit_s=VERSION_WALL_S, env={"LC_ALL": "C"}
        ).output
    except OSError as error:
        raise CompileError(f"{compiler} cannot be run: {error}") from None
    return hashlib.sha256(f"{os.path.realpath(compiler)}\0{told}".encode()).hexdigest()[:16]
