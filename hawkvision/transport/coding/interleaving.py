"""Distributes restart segments over data symbols, neighbours far apart, and restores their order.

    segments in the image's order ── disperse: Bayer order, cut into runs ──► k data symbols
    segments, None where none came  ◄── gather ───────────────────────────────  some of them

A lost symbol leaves small holes all over the image instead of one large hole. A data symbol describes itself, because a
recovered one has no header:

    used length:2  first segment:2  count:1  segment { FFD0 segment }*          (first: in the order of dispersal)
"""

from __future__ import annotations

import functools
import itertools
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from hawkvision.transport.coding.jpeg import SEPARATOR, Layout, is_clean
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS

MAX_COUNT: Final = 255
"""Segments of one symbol; the count is one byte."""

_SYMBOL: Final = struct.Struct(">HHB")
_BAYER: Final = np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]])


def interleave(segments: Sequence[bytes], layout: Layout, room: int) -> list[bytes] | None:
    """Data symbols with all segments; as few as possible, and among those the shortest longest one.

    None if a segment does not fit `room` bytes, or all together do not fit `MAX_SYMBOLS`. Parity symbols are as long as
    the longest data symbol, so that balance saves bytes.
    """
    units = [segments[index] for index in _order(layout)]
    # What a run of units takes is the difference of two sums, less the separator that its last unit does not need.
    sums = [0, *itertools.accumulate(len(unit) + len(SEPARATOR) for unit in units)]
    low, high = max(map(len, units)), room - _SYMBOL.size
    bounds = _boundaries(sums, high) if low <= high else None
    if bounds is None:
        return None
    while low < high:
        intermediate = (low + high) // 2
        tighter = _boundaries(sums, intermediate)
        if tighter is not None and len(tighter) == len(bounds):
            high, bounds = intermediate, tighter
        else:
            low = intermediate + 1
    symbols = []
    for start, stop in itertools.pairwise(bounds):
        run = SEPARATOR.join(units[start:stop])
        symbols.append(_SYMBOL.pack(len(run), start, stop - start) + run)
    return symbols


def deinterleave(symbols: Mapping[int, bytes], layout: Layout) -> list[bytes | None]:
    """The segments in order; None for missing ones. Invalid symbols are ignored, and the first of two claims counts."""
    order = _order(layout)
    placed: list[bytes | None] = [None] * layout.segments
    for symbol in symbols.values():
        if len(symbol) <= _SYMBOL.size:
            continue
        used, first, count = _SYMBOL.unpack_from(symbol)
        run = symbol[_SYMBOL.size : _SYMBOL.size + used]
        if len(run) != used or first + count > layout.segments or not is_clean(run):
            continue
        segments = run.split(SEPARATOR)
        if len(segments) != count or not all(segments):
            continue
        for place, segment in zip(order[first : first + count], segments, strict=True):
            if placed[place] is None:
                placed[place] = segment
    return placed


# 16 orders of 65,000 segments each take 37 MB, whatever peers ask for.
@functools.lru_cache(maxsize=16)
def _order(layout: Layout) -> tuple[int, ...]:
    """Segments in the order in which they are sent: a Bayer matrix over them, so that neighbours are sent far apart."""
    start = np.arange(layout.segments) * layout.interval
    row, column = start // layout.columns, start % layout.columns // layout.interval
    return tuple(np.lexsort((column, row, _BAYER[row % 4, column % 4])).tolist())


def _boundaries(sums: Sequence[int], most: int) -> list[int] | None:
    """Bounds of runs of at most `most` bytes, each as long as it can be; None if that takes too many runs."""
    bounds = [0]
    units = len(sums) - 1
    while bounds[-1] < units:
        start = bounds[-1]
        stop = bisect_right(sums, sums[start] + most + len(SEPARATOR)) - 1
        if stop == start or len(bounds) > MAX_SYMBOLS:
            return None
        bounds.append(min(stop, start + MAX_COUNT))
    return bounds
