"""The cache of code that was compiled for this machine: its bounds, and the removal of the least recently used entries.

Everything lies in `<cache>/fpga` under names that are hashes of the inputs: simulations (`sim-*/`), Verilator's own
objects (`verilated*.o`) and kernels (`kernel-*.so`, `netlist-*.so`). Missing entries are built again.
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

from hawkvision.system.files import sha256_of

KEPT: Final = 256
"""Entries at most."""
KEPT_BYTES: Final = 1 << 29
"""Bytes at most."""
IN_USE_S: Final = 3600.0
"""Entries used this recently are never removed: a process may be about to load them."""
ABANDONED_S: Final = 86_400.0
"""Age after which an unfinished build counts as abandoned."""
KINDS: Final = ("sim-*", "kernel-*.so", "netlist-*.so", "verilated*.o")
UNFINISHED: Final = (".sim-*", ".runtime-*", ".gone-*")


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Bounds of the cache."""

    things: int = KEPT
    size: int = KEPT_BYTES
    in_use_s: float = IN_USE_S


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    used_at: float
    path: Path
    size: int


def is_sound(path: Path) -> bool:
    """Whether a file has the SHA-256 in its name."""
    try:
        return path.stem.endswith(f"-{sha256_of(path.read_bytes())}")
    except OSError:  # a failing disk
        return False


def mark_used(thing: Path) -> None:
    """Note that an entry is used now. A cache that cannot be written to is never tidied, so errors are ignored."""
    with suppress(OSError):
        os.utime(thing)


def tidy(folder: Path, now: float | None = None, bounds: CacheBounds | None = None) -> None:
    """Remove abandoned builds, and the entries used longest ago beyond the bounds.

    `now` is a time of the file system; None takes the clock's. Of two processes, the second leaves the work to the
    first. An entry is renamed before it is removed, so other processes see it whole or not at all.
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
                # Checked again, because it may have been used since.
                if now - thing.path.stat().st_mtime > bounds.in_use_s:
                    _remove(thing.path)
                    count, size = count - 1, size - thing.size


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether this process may tidy the folder; no other process does meanwhile."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has the lock, or the file system has no locks
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
