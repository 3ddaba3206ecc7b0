"""Holes: which segment or block is nearest, and what is never copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.coding.concealment import MAX_FILLED_BYTES, blocks, copied, decoded, nearest, redrawn
from hawkvision.transport.coding.jpeg import Layout, assemble, compress, standard_header, standard_layout


def named(layout: Layout, lost: set[int]) -> list[bytes | None]:
    return [None if i in lost else bytes((i + 1,)) for i in range(layout.segments)]


def sources(layout: Layout, lost: set[int]) -> list[int]:
    return [segment[0] - 1 for segment in copied(named(layout, lost), layout)]


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_nearest_is_nearest(rows: int, columns: int, data: st.DataObject) -> None:
    every = [(r, c) for r in range(rows) for c in range(columns)]
    marked = data.draw(st.sets(st.sampled_from(every), min_size=1))
    marks = np.full((rows, columns), -1)
    for r, c in marked:
        marks[r, c] = r * columns + c
    row, column = np.array(every).T
    for (r, c), mark in zip(every, nearest(marks, row, column).tolist(), strict=True):
        found_r, found_c = divmod(mark, columns)
        assert marks[found_r, found_c] == mark
        assert (found_r - r) ** 2 + (found_c - c) ** 2 == min((mr - r) ** 2 + (mc - c) ** 2 for mr, mc in marked)


def test_a_short_last_segment_is_neither_copied_nor_filled() -> None:
    layout = standard_layout(208, 16, 4)  # 13 MCUs: 4 + 4 + 4 + 1
    assert sources(layout, {0, 1, 2})[:3] == [layout.blank(4)[0] - 1] * 3
    assert copied(named(layout, {3}), layout)[3] == layout.blank(1)


def test_copies_that_would_fill_memory_are_blank() -> None:
    layout = standard_layout(4096, 4096, 1)
    segments: list[bytes | None] = [None] * layout.segments
    segments[7] = b"\x01" * 1100
    filled = copied(segments, layout)
    assert sum(map(len, filled)) < MAX_FILLED_BYTES
    assert filled[8] == layout.blank(1)


def test_a_redrawn_hole_mirrors_its_neighbour() -> None:
    ramp = np.broadcast_to(np.arange(0, 32, dtype=np.uint8)[:, None, None] * 8, (32, 64, 3)).copy()
    layout, came = standard_layout(64, 32, 4), np.array([[True] * 4, [False] * 4])
    whole = assemble(standard_header(64, 32, 95, 4), compress(ramp, 95, 4))
    drawn = redrawn(whole, came, layout, 95)
    assert drawn is not None
    pixels = decoded(assemble(standard_header(64, 32, 95, 4), drawn), 64, 32)
    assert pixels is not None
    assert np.abs(pixels[16:].astype(int) - ramp[15::-1].astype(int)).max() < 12


def test_what_cannot_be_decoded_is_not_redrawn() -> None:
    assert redrawn(b"no image", np.eye(4, dtype=np.bool_), standard_layout(64, 64, 4), 80) is None


@pytest.mark.parametrize(("mcu", "expected"), [((8, 8), 3), ((16, 8), 3), ((16, 16), 3), ((32, 8), 2)])
def test_blocks_are_true_if_all_their_mcus_are(mcu: tuple[int, int], expected: int) -> None:
    layout = Layout(32, 32, *mcu, 1, "00")
    mcus = np.ones((layout.rows, layout.columns), np.bool_)
    mcus[0, 0] = False
    assert blocks(mcus, layout).sum() == expected
    assert not blocks(mcus, layout)[0, 0]
