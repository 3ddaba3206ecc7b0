"""Native code, compiled once on the machine that runs it, with the system's compiler.

The name of a library file says everything that must be checked before it is loaded:

    kernel-<digest of the recipe>-<digest of the compiler>-<SHA-256 of the file>.so

A damaged file is detected and compiled again, and another compiler, version or flag makes another file. Files that
another user may have written are not loaded. If code cannot be stored or run in the folder (mounted `noexec` or
read-only), nothing is compiled.
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


def open_library(
    recipe: LibraryRecipe, folder: Path, *, make_room: Callable[[Path], None] | None = None
) -> ctypes.CDLL:
    """Load the library from a folder, compiling it if it is missing or damaged.

    Without a compiler, a library made by any compiler is used. `make_room` is called with the folder before a new file
    is written.

    Raises:
        BackendError: if another user may have written the file.
        CompileError: if it cannot be compiled, stored or loaded; says why.
    """
    kept = find_kept(recipe, folder)
    if kept is not None:
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:  # another system made it, or the folder allows no code
            check_place(folder)
            log.warning("%s: compiled again, because it cannot be loaded: %s", kept, error)
            kept.unlink(missing_ok=True)
    made = make_library(recipe, folder, make_room=make_room)
    try:
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CompileError(f"{made}: cannot be loaded: {error}") from None


def find_kept(recipe: LibraryRecipe, folder: Path, *, by_anyone: bool = False) -> Path | None:
    """The newest intact file of a library made by this machine's compiler, or by any if it has none; else None.

    Damaged files are removed if possible, and logged. `by_anyone` accepts any compiler's file, for folders that come
    with a package.

    Raises:
        BackendError: if another user may have written the file.
        CompileError: if the folder cannot be read.
    """
    maker = "*"
    if not by_anyone:
        with contextlib.suppress(CompileError):
            maker = _identity(find_compiler(recipe.language))
    found: list[tuple[float, Path]] = []
    try:
        for path in folder.glob(f"{recipe.name}-{recipe.made_of()}-{maker}-*.so"):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                found.append((path.lstat().st_mtime, path))
    except OSError as error:
        raise CompileError(f"{folder}: cannot read the folder: {error.strerror}") from None
    for _, path in sorted(found, reverse=True):
        check_ours(path)
        if is_sound(path):
            return path
        log.warning("%s: damaged; compiled again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def is_sound(path: Path) -> bool:
    """Whether a file has the SHA-256 in its name."""
    try:
        return path.stem.endswith(f"-{sha256_of(path.read_bytes())}")
    except OSError:  # a failing disk
        return False


def make_library(recipe: LibraryRecipe, folder: Path, *, make_room: Callable[[Path], None] | None = None) -> Path:
    """Compile a library into a folder, which is made if needed. The file appears whole or not at all.

    Raises:
        CompileError: if it cannot be compiled or stored; says why. It is not compiled if it cannot be stored.
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
                log.info("%s: trying with %s: %s", recipe.source.name, " ".join(recipe.instead), error.message)
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
    """Check that code can be stored in a folder and run from there. The folder is made if needed.

    Raises:
        CompileError: if it cannot be stored, or cannot run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(mmap.PAGESIZE))
            trial.flush()
            try:
                mmap.mmap(trial.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
            except PermissionError:
                raise CompileError(f"{folder}: code cannot run there: its file system is mounted noexec") from None
    except OSError as error:
        reason = "its file system is read-only" if error.errno == errno.EROFS else error.strerror
        raise CompileError(f"{folder}: cannot write: {reason}") from None


def _compile(command: list[str], source: Path, built: Path) -> None:
    """Compile a source file. The compiler's temporary files go beside the result.

    Raises:
        CompileError: if it fails, or was ended.
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
