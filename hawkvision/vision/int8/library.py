"""The kernel as a shared library: compiled for this machine once, by whatever C++ compiler the system has.

It lies beside its source if `python -m hawkvision.vision.int8` put it there, as when an image is built, else in
`<cache>/int8`, under a name that is a hash of what it was made of.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from hawkvision.artifacts import check_ours, write_atomic
from hawkvision.errors import ArtifactError, BackendError
from hawkvision.manifest import cache_dir

log = logging.getLogger("hawkvision.vision")

FOLDER: Final = Path(__file__).parent
SOURCES: Final = ("network.cpp", "amx.h", "layers.h", "program.h")
COMPILERS: Final = ("c++", "g++", "clang++")
NEEDS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
"""Of the processor, as compilers call it."""
TILES: Final = ("amx_tile", "amx_int8")
"""What more it has where convolutions are computed by tiles, as Linux calls it."""
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # a product that is rounded before it is added must stay so
    *(f"-m{feature}" for feature in NEEDS),
    "-fPIC",
    "-shared",
    "-pthread",
)
COMPILE_S: Final = 120.0
"""It takes two seconds on one EPYC core."""
KEPT: Final = 4
"""Libraries in the cache: this version's, and those of others that run beside it."""


def unable() -> str | None:
    """What this machine's processor lacks; None if nothing."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"its processor is {platform.machine() or 'unknown'}, not x86-64"
    has = _features()
    if not has:
        return "what its processor can do is not told in /proc/cpuinfo"
    lacks = [feature for feature in NEEDS if feature.replace("vnni", "_vnni") not in has]
    return f"its processor has no {', '.join(lacks)}" if lacks else None


@functools.cache
def tiles() -> bool:
    """Whether processor and system have tiles for this process (Intel AMX).

    Raises:
        BackendError: as `library`.
    """
    return set(TILES) <= _features() and bool(library().network_tiles())


def _features() -> set[str]:
    """Of the processor, as Linux calls them; none where it tells nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


@functools.cache
def _digest() -> str:
    """Of the source, and how it is compiled."""
    whole = hashlib.sha256(" ".join(FLAGS).encode())
    for source in SOURCES:
        whole.update((FOLDER / source).read_bytes())
    return whole.hexdigest()[:32]


def beside_source() -> Path:
    """Where the library is looked for first."""
    return FOLDER / f"kernel-{_digest()}.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The library, compiled if it has not been.

    Raises:
        BackendError: if the processor cannot run it, there is no compiler that can make it, or nowhere to put it; or if
            another user may have written what is there.
    """
    lacking = unable()
    if lacking:
        raise BackendError(f"int8: this machine cannot: {lacking}")
    try:
        loaded = _loaded(beside_source() if beside_source().is_file() else _in_cache())
    except OSError as error:
        raise BackendError(f"int8: the kernel cannot be loaded: {error}") from None
    loaded.network_open.restype = ctypes.c_void_p
    loaded.network_open.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    loaded.network_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    loaded.network_helper.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    loaded.network_close.restype = None
    loaded.network_close.argtypes = [ctypes.c_void_p]
    return loaded


def _in_cache() -> Path:
    path = cache_dir() / "int8" / beside_source().name
    if not path.is_file():
        build(path)
    return path


def _loaded(path: Path) -> ctypes.CDLL:
    check_ours(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a file that a failing disk has changed, or one made on another system
        if path == beside_source():
            return _loaded(_in_cache())
        build(path)
        return ctypes.CDLL(str(path))


def digest(loaded: ctypes.CDLL) -> str:
    """Tells the library from others, by its code.

    Raises:
        BackendError: if its file is gone.
    """
    try:
        return hashlib.sha256(Path(loaded._name).read_bytes()).hexdigest()
    except OSError as error:
        raise BackendError(f"int8: {loaded._name}: {error.strerror}") from None


def why_not() -> str | None:
    """Why this machine cannot run the kernels, which are compiled if they have not been; None if it can."""
    try:
        library()
    except BackendError as error:
        return error.message
    return None


def build(path: Path) -> None:
    """Compile the library into that file, which is whole or not there.

    Raises:
        BackendError: saying why it cannot be.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BackendError(f"int8: no C++ compiler ({', '.join(COMPILERS)}); install one, on Debian the package g++")
    log.info("int8: compiling the kernel with %s, once", compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hawkvision-int8-") as scratch:
            built = Path(scratch) / "kernel.so"
            done = subprocess.run(  # noqa: S603
                [compiler, *FLAGS, "-o", str(built), str(FOLDER / SOURCES[0])],
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
                raise BackendError(f"int8: {compiler} cannot compile {SOURCES[0]}: {said}")
            write_atomic(path, built.read_bytes())
    except OSError as error:
        raise BackendError(f"int8: {path}: cannot write: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BackendError(f"int8: {compiler} did not end within {COMPILE_S:.0f} s") from None
    except ArtifactError as error:
        raise BackendError(f"int8: {error.message}") from None
    tidy(path.parent, "kernel-*.so", KEPT)


def tidy(folder: Path, pattern: str, kept: int) -> None:
    """Remove all but the newest files of that name. Another process that has one loaded keeps it in its memory."""
    with suppress(OSError):
        found = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in found[kept:]:
            file.unlink(missing_ok=True)
