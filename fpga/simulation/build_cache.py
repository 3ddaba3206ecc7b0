"""What was compiled for this machine and is kept: how much of it at most, and whether it may be loaded.

All of it lies in `<cache>/fpga`, under names that are hashes of what it was made of: simulations (`sim-*/`),
Verilator's own part of them (`verilated*.o`) and kernels (`kernel-*.so`, `netlist-*.so`). What is missing is
made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEPT: Final = 256
"""Things at most. This project's own tests make some 80, a device in use one."""
KEPT_BYTES: Final = 1 << 29
"""… and so much of them: half a gibibyte, a thousand simulations of the ladders' small networks."""
IN_USE_S: Final = 3600.0
"""What was asked for so recently stays whatever it takes: someone may be about to load it, which takes a second."""
ABANDONED_S: Final = 86_400.0
"""After so long an unfinished build has no one who works on it."""
KINDS: Final = ("sim-*", "kernel-*.so", "netlist-*.so", "verilated*.o")
UNFINISHED: Final = (".sim-*", ".runtime-*", ".gone-*")


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Of what is kept."""

    things: int = KEPT
    size: int = KEPT_BYTES
    in_use_s: float = IN_USE_S


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    used_at: float
    path: Path
    size: int


def mark_used(thing: Path) -> None:
    """Note that it was wanted now; where the cache cannot be written to, nothing is removed either."""
    with suppress(OSError):
        os.utime(thing)


def tidy(folder: Path, now: float | None = None, bounds: CacheBounds | None = None) -> None:
    """Remove what killed builds have left, and of what is kept, beyond the bounds, that which was used longest ago.

    `now` is a file system's time; None asks the clock. Two processes never do it at once: the second leaves it to the
    first. A thing is renamed before it is taken apart, so another process finds it whole or not at all; and it can take
    apart what others have loaded, which stays in their memory.
    """
    now, bounds = time.time() if now is None else now, bounds or CacheBounds()
    with _alone(folder) as alone:
        if not alone:
            return
        for path in _matching(folder, UNFINISHED):
            with suppress(OSError):
                if now - path.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
        things = sorted(_things(folder), key=lambda thing: thing.used_at)
        count, size = len(things), sum(thing.size for thing in things)
        for thing in things:
            if count <= bounds.things and size <= bounds.size:
                return
            with suppress(OSError):
                # Looked at again: it may have been wanted since.
                if now - thing.path.stat().st_mtime > bounds.in_use_s:
                    _remove(thing.path)
                    count, size = count - 1, size - thing.size


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process tidies the folder meanwhile, nor will."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another has it, or the file system knows no locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _things(folder: Path) -> Iterator[_CacheEntry]:
    for path in _matching(folder, KINDS):
        with suppress(OSError):  # removed meanwhile
            files = [path, *path.iterdir()] if path.is_dir() else [path]
            yield _CacheEntry(path.stat().st_mtime, path, sum(file.stat().st_size for file in files))


def _remove(path: Path) -> None:
    gone = Path(tempfile.mkdtemp(prefix=".gone-", dir=path.parent))
    path.rename(gone / path.name)
    shutil.rmtree(gone, ignore_errors=True)
