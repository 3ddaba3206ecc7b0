"""Fills an image's holes with its received parts, so that the result is an ordinary JPEG.

First each lost segment becomes a copy of the nearest one that came. Where the header is the implied one, the holes are
then drawn anew from smaller pieces: each lost block of 16×16 pixels becomes the nearest one that came, mirrored so that
seams meet, and the lost segments alone are taken from that image, coded again. What came stays as it came.

Copied texture keeps a network's features alive, where smooth filling looks better and classifies worse
(`docs/design/concealment.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from hawkvision.core.types import Pixels
from hawkvision.transport.coding.jpeg import Layout, compress

MAX_FILLED_BYTES: Final = 4 << 20
"""Of an image with holes. 255 datagrams carry 0.3 MB; copying one large segment into 65,000 holes would make 70 MB."""

_CELLS: Final = 1 << 20
"""Distances between holes and columns that are looked at in one go: 8 MB each time."""
_FAR: Final = 1 << 20


def copied(segments: Sequence[bytes | None], layout: Layout) -> list[bytes]:
    """All segments, the lost ones (None) replaced by the nearest that came.

    Nearest is by how far the pixels are moved, from middle to middle, so that of an interval of four the segment above
    or below comes before those beside. A last segment with fewer MCUs than the others is neither copied nor filled by
    a copy; it becomes blank, and so do all if copies exceed `MAX_FILLED_BYTES`.
    """
    came = np.fromiter((segment is not None for segment in segments), np.bool_, layout.segments)
    short = layout.last_mcus != layout.interval
    whole, holes = came.copy(), np.flatnonzero(~came)
    if short:
        whole[-1] = False
        holes = holes[holes != layout.segments - 1]
    filled = list(segments)
    if whole.any() and len(holes):
        row, column = np.divmod(np.arange(layout.segments) * layout.interval + layout.interval // 2, layout.columns)
        marks = np.full((layout.rows, layout.columns), -1, np.intp)
        marks[row[whole], column[whole]] = np.flatnonzero(whole)
        sources = nearest(marks, row[holes], column[holes])
        sizes = np.fromiter((len(segment or b"") for segment in segments), np.int64, layout.segments)
        if sizes.sum() + sizes[sources].sum() <= MAX_FILLED_BYTES:
            for hole, source in zip(holes.tolist(), sources.tolist(), strict=True):
                filled[hole] = segments[source]
    blank, end = layout.blank(layout.interval), layout.blank(layout.last_mcus)
    inner = [blank if segment is None else segment for segment in filled[:-1]]
    return [*inner, end if filled[-1] is None else filled[-1]]


def redrawn(body: bytes, came: NDArray[np.bool_], layout: Layout, quality: int) -> list[bytes] | None:
    """Segments of an image whose holes are drawn anew, block by block, for those that did not come.

    Args:
        body: the image with the implied header, its holes filled by `copied`; so colours that are blended over
            edges are nearly right there.
        came: (rows, columns), the MCUs that came; at least one.
        layout: of the image, at most `MAX_REDRAWN_PIXELS`.
        quality: the image's.

    Returns:
        None if the body cannot be decoded: what came was damaged before it was sent.
    """
    pixels = decoded(body, layout.width, layout.height)
    if pixels is None:
        return None
    right, bottom = layout.columns * 16 - layout.width, layout.rows * 16 - layout.height
    padded: Pixels = cv2.copyMakeBorder(pixels, 0, bottom, 0, right, cv2.BORDER_REPLICATE)
    block = padded.reshape(layout.rows, 16, layout.columns, 16, 3).swapaxes(1, 2)
    row, column = np.nonzero(~came)
    marks = np.where(came, np.arange(came.size).reshape(came.shape), -1)
    from_row, from_column = np.divmod(nearest(marks, row, column), layout.columns)
    flip_rows, flip_columns = (from_row - row) % 2 == 1, (from_column - column) % 2 == 1
    for upside_down, sideways in itertools.product((False, True), repeat=2):
        these = (flip_rows == upside_down) & (flip_columns == sideways)
        source = block[from_row[these], from_column[these]]
        block[row[these], column[these]] = source[:, :: -1 if upside_down else 1, :: -1 if sideways else 1]
    return compress(padded[: layout.height, : layout.width], quality, layout.interval)


def decoded(body: bytes, width: int, height: int) -> Pixels | None:
    """A JPEG as BGR (height, width, 3); None if it is damaged beyond decoding."""
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(body, "BGR", strict=False)
    except ValueError:
        return None
    assert pixels.shape == (height, width, 3), "the header was ours"
    return pixels


def nearest(marks: NDArray[np.intp], row: NDArray[np.intp], column: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each cell of a list the nearest mark (≥ 0) of a grid (rows, columns); at least one must be set.

    Ties go to the left, then upwards. Costs cells × columns: the exact transform of Meijster and others (2000), with
    its second pass only where it is asked for.
    """
    columns = np.flatnonzero((marks >= 0).any(0))
    marks = marks[:, columns]
    rows = np.arange(len(marks))[:, None]
    above = np.maximum.accumulate(np.where(marks >= 0, rows, -_FAR), 0)
    below = np.minimum.accumulate(np.where(marks >= 0, rows, _FAR)[::-1], 0)[::-1]
    found = np.empty(len(row), np.intp)
    step = max(1, _CELLS // len(columns))
    for start in range(0, len(row), step):
        here = row[start : start + step]
        up, down = here[:, None] - above[here], below[here] - here[:, None]
        beside = column[start : start + step, None] - columns
        best = np.argmin(np.minimum(up, down) ** 2 + beside**2, 1)
        cell = np.arange(len(here)), best
        found[start : start + step] = marks[np.where(up[cell] <= down[cell], here - up[cell], here + down[cell]), best]
    return found


def blocks(mcus: NDArray[np.bool_], layout: Layout) -> NDArray[np.bool_]:
    """From MCUs to blocks of 16×16 pixels, which are true if all of their MCUs are."""
    rows, columns = -(-layout.height // 16), -(-layout.width // 16)
    units = np.repeat(np.repeat(mcus, layout.mcu_height // 8, 0), layout.mcu_width // 8, 1)[: 2 * rows, : 2 * columns]
    padded = np.ones((2 * rows, 2 * columns), np.bool_)
    padded[: units.shape[0], : units.shape[1]] = units
    return np.asarray(padded.reshape(rows, 2, columns, 2).all((1, 3)))
