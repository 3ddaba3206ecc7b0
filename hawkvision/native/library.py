"""The kernels as a shared library, compiled once per machine with the system's C++ compiler.

The library is beside its source if `python -m hawkvision.native` put it there, for example in a container image, else
in the cache of compiled code (`hawkvision.system.build_cache`). A process tries once to open it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from hawkvision.core.errors import BackendError, CompileError, HawkVisionError
from hawkvision.system.native_build import LibraryRecipe, find_library, make_library, open_library

log = logging.getLogger("hawkvision.inference")

FOLDER: Final = Path(__file__).parent
SOURCES: Final = ("network.cpp", "amx.h", "layers.h", "program.h")
NEEDS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
"""Required processor features, as compilers name them."""
TILES: Final = ("amx_tile", "amx_int8")
"""Further features for convolutions by tiles (AMX), as Linux names them."""
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # products are rounded before they are added
    *(f"-m{feature}" for feature in NEEDS),
    "-fPIC",
    "-shared",
    "-pthread",
)
WITHOUT_TILES: Final = "-DWITHOUT_TILES"
"""For assemblers without AMX: binutils before 2.36."""


def unsupported_reason() -> str | None:
    """Why this machine's processor cannot run the kernels; None if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"its processor is {platform.machine() or 'unknown'}, not x86-64"
    has = set(cpuinfo("flags").split())
    if not has:
        return "/proc/cpuinfo does not list the features of its processor"
    lacks = [feature for feature in NEEDS if feature.replace("vnni", "_vnni") not in has]
    return f"its processor has no {', '.join(lacks)}" if lacks else None


@functools.cache
def has_tiles() -> bool:
    """Whether processor and system support tiles (Intel AMX) for this process.

    Raises:
        BackendError: as `library`.
    """
    if not set(TILES) <= set(cpuinfo("flags").split()):
        return False
    refused = library().network_tiles()
    if refused:
        log.info("int8: the system does not allow the processor's tiles: %s", os.strerror(refused))
    return not refused


def cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo, such as `flags` or `model name`; empty if it is absent."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


RECIPE: Final = LibraryRecipe(
    name="kernel",
    language="C++",
    source=FOLDER / SOURCES[0],
    included=tuple(FOLDER / name for name in SOURCES[1:]),
    flags=FLAGS,
    instead=(WITHOUT_TILES,),
)


def packaged() -> Path | None:
    """The intact library beside its source; None if there is none.

    Raises:
        BackendError: if another user may have written it.
    """
    return find_library(RECIPE, FOLDER)


def library() -> ctypes.CDLL:
    """The library, compiled if needed.

    Raises:
        BackendError: if the processor cannot run it, it cannot be compiled or stored, or another user may have written
            the file. The first failure is logged; the process does not try again.
    """
    loaded = _library()
    if isinstance(loaded, BackendError):
        raise loaded
    return loaded


_opening: Final = threading.Lock()


def _library() -> ctypes.CDLL | BackendError:
    with _opening:
        return _opened()


@functools.cache
def _opened() -> ctypes.CDLL | BackendError:
    lacking = unsupported_reason()
    if lacking:
        return BackendError(f"int8: this machine cannot: {lacking}")
    try:
        loaded = _loaded()
    except HawkVisionError as error:
        log.warning("int8: the kernels cannot be used: %s", error.message)
        return BackendError(f"int8: {error.message}")
    except OSError as error:  # an unreadable folder
        log.warning("int8: the kernels cannot be used: %s", error)
        return BackendError(f"int8: the kernel cannot be loaded: {error}")
    loaded.network_open.restype = ctypes.c_void_p
    loaded.network_open.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    loaded.network_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    loaded.network_helper.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    loaded.network_close.restype = None
    loaded.network_close.argtypes = [ctypes.c_void_p]
    return loaded


def _loaded() -> ctypes.CDLL:
    beside = packaged()
    if beside is not None:
        with suppress(OSError):  # made on another system
            return ctypes.CDLL(str(beside))
    return open_library(RECIPE)


def digest(loaded: ctypes.CDLL) -> str:
    """The SHA-256 of a loaded library's file.

    Raises:
        BackendError: if the file is gone.
    """
    try:
        return hashlib.sha256(Path(loaded._name).read_bytes()).hexdigest()
    except OSError as error:
        raise BackendError(f"int8: {loaded._name}: {error.strerror}") from None


def unavailable_reason() -> str | None:
    """Why this machine cannot run the kernels, after compiling them if needed; None if it can."""
    try:
        library()
    except BackendError as error:
        return error.message
    return None


def build(folder: Path) -> Path:
    """Compile the library into a folder. The file appears whole or not at all.

    Raises:
        BackendError: if it cannot be compiled or stored; says why.
    """
    try:
        return make_library(RECIPE, folder)
    except CompileError as error:
        raise BackendError(f"int8: {error.message}") from None
