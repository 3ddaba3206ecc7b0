"""Moves a model's memory into pages of 2 MB instead of 4 kB, which takes fewer page table look-ups.

The weights and buffers of a small network occupy thousands of pages, more than a processor caches the addresses of.
Linux 6.1 and later moves memory into large pages on request (madvise(2), MADV_COLLAPSE), whatever its policy for
transparent huge pages. A node asks once, when it is warm; later allocations are not affected.

If memory cannot be moved, work goes on without. Figures: `docs/design/inference-threads.md`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("hawkvision.inference")

_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS: Final = Path("/proc/self/maps")
_PAGEMAP: Final = Path("/proc/self/pagemap")
_COLLAPSE: Final = 25
"""MADV_COLLAPSE of madvise(2)."""
_ENTRY: Final = struct.Struct("=Q")
_PRESENT: Final = 1 << 63
"""Of an entry of pagemap (proc(5))."""
LEAST_USED: Final = 0.5
"""Share of a large page that must be in use: the rest of it is memory that nobody needs."""


def take_large_pages() -> int:
    """Have this process's own memory moved into large pages, where it is in use.

    Takes a few milliseconds for each 2 MB, in which other threads that touch them wait. Never raises.

    Returns: how many bytes lie in large pages now; 0 where the kernel has none, or does not know the request.
    """
    moved = 0
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            size = int(_SIZE.read_text())
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            moved = sum(size for start in _used(size) if madvise(start, size, _COLLAPSE) == 0)
    log.info("%.0f MB lie in large pages", moved / 1e6)
    return moved


def _used(size: int) -> Iterator[int]:
    """Where such stretches of private memory begin, aligned, that are in use for the most part."""
    pages = size // mmap.PAGESIZE
    with _PAGEMAP.open("rb", buffering=0) as pagemap:
        for first, end in _private():
            for start in range(-(-first // size) * size, end - size + 1, size):
                entries = os.pread(pagemap.fileno(), pages * _ENTRY.size, start // mmap.PAGESIZE * _ENTRY.size)
                if sum(bool(entry & _PRESENT) for (entry,) in _ENTRY.iter_unpack(entries)) >= LEAST_USED * pages:
                    yield start


def _private() -> Iterator[tuple[int, int]]:
    """Start and end of the process's writable memory that is no file's: a line `7f00-7f80 rw-p 0 00:00 0 [name]`."""
    for line in _MAPS.read_text().splitlines():
        where, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name == ["[heap]"]):
            first, _, end = where.partition("-")
            yield int(first, 16), int(end, 16)
