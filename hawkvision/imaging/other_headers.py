"""Headers of GIF, BMP, TIFF, HEIF and AVIF, read within bounds before a library sees the file.

    GIF         screen, palette { extension { length:1 data }* 0 }*  image descriptor
    BMP         "BM" … header length, width, height, bits, compression
    TIFF        order, place of the directory: count { tag type number value }*    BigTIFF: the same, 64 bits wide
    HEIF, AVIF  boxes { length:4 type:4 payload }*  meta { pitm, iloc, iinf, iprp { ipco { ispe, irot … } ipma } }

No more is read than `MAX_…` items, so this may run on an event loop. Libraries have no such bounds. What a decoder does
not need of a GIF or TIFF is not given to it (`reduced`).
Sources: GIF89a, TIFF 6.0 with Adobe's BigTIFF, ISO/IEC 14496-12 §8.11 and 23008-12 §6.5 (HEIF).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from hawkvision.core.errors import BadImage, TooLarge
from hawkvision.imaging.image_header import Encoded, ImageFormat, ImageHeader

MAX_BLOCKS: Final = 4096
"""Extensions and their parts before the image of a GIF: 1 MB. The largest are colour profiles and XMP."""
MAX_RUNS_BYTES: Final = 1 << 20
"""Largest BMP whose pixels are run-length coded, because Pillow decodes each run in Python."""
MAX_TAGS: Final = 2048
"""Tags of a TIFF's directory; cameras and maps write up to a hundred."""
MAX_TILE_SIDE: Final = 1024
"""Largest side of a TIFF's tile in pixels, unless the image is larger: a decoder holds a whole tile."""
MAX_BOXES: Final = 2048
"""Boxes of an HEIF or AVIF file, without those in unknown ones. Phones write a few hundred."""
MAX_DEPTH: Final = 8
MAX_ITEMS: Final = 1024
"""Items of an HEIF or AVIF file; the tiles of an image count."""
MAX_COPIES: Final = 4
"""Largest sum of the items' lengths, in lengths of the file: a library copies metadata when it opens a file."""

_TIFF_TYPES: Final = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}
_TIFF_BYTES: Final = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)
_WIDTH, _HEIGHT, _ORIENTATION, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 274, 322, 323
_TIFF_TAGS: Final = {
    **dict.fromkeys((_WIDTH, _HEIGHT, 259, 262, 266, _ORIENTATION, 277, 278, 284), 1),
    **dict.fromkeys((292, 293, 317, _TILE_WIDTH, _TILE_HEIGHT, 332, 334), 1),
    **dict.fromkeys((258, 338, 339, *range(512, 522), *range(529, 533)), 16),
    **dict.fromkeys((273, 279, 324, 325, 347), 1 << 16),  # places and lengths of strips and tiles; JPEG's tables
    320: 3 << 16,  # palette
}
"""Tags that decoding needs, and how many values each may have."""
_CONTAINERS: Final = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"iref": 4, b"grpl": 0, b"moov": 0, b"trak": 0, b"mdia": 0,
                      b"minf": 0, b"stbl": 0, b"dinf": 0, b"udta": 0, b"edts": 0}  # fmt: skip
"""Boxes that hold boxes, and the bytes before these."""


def probe(body: Encoded, kind: ImageFormat) -> ImageHeader:
    """Read the header of an image of these formats. Size and orientation are as Pillow's plugins show the image.

    They turn an image while they decode it, so that size is the upright one and orientation 1; AVIF's does not.

    Raises:
        BadImage: if the header is cut off, breaks its format, or holds more than the bounds of this module.
        TooLarge: if a BMP has more than `MAX_RUNS_BYTES` of runs.
    """
    view = memoryview(body).cast("B")
    orientation = 1
    match kind:
        case ImageFormat.GIF:
            width, height = _gif(view).size
        case ImageFormat.BMP:
            width, height = _bmp(view)
        case ImageFormat.TIFF:
            width, height = _tiff(view).size
        case _:
            width, height, orientation = _iso(view, kind)
    if width <= 0 or height <= 0:
        raise BadImage(f"{kind.upper()}: the header declares {width}x{height} pixels; expected at least 1x1")
    return ImageHeader(kind, width, height, orientation, 3)


def reduced(body: bytes, kind: ImageFormat) -> bytes:
    """The file without what decoding its first image does not need: metadata, and a TIFF's other images.

    Raises:
        BadImage: as `probe`.
    """
    view = memoryview(body)
    if kind is ImageFormat.GIF:
        gif = _gif(view)
        return b"".join((view[: gif.palette_end], gif.control, view[gif.image :]))
    if kind is not ImageFormat.TIFF:
        return body
    tiff = _tiff(view)
    at = len(body) + len(body) % 2
    directory = struct.pack(tiff.order + tiff.number, len(tiff.tags)) + b"".join(map(tiff.tags.__getitem__, tiff.tags))
    place = struct.calcsize("<" + tiff.place)
    head = body[:place] + struct.pack(tiff.order + tiff.place, at)
    return b"".join((head, view[2 * place :], bytes(at - len(body)), directory, bytes(place)))


def _read(kind: str, form: str, view: memoryview, at: int) -> tuple[Any, ...]:
    if at + struct.calcsize(form) > len(view):
        raise BadImage(f"{kind}: the data end at byte {len(view)}, inside the header")
    return struct.unpack_from(form, view, at)


class _Gif(NamedTuple):
    size: tuple[int, int]
    palette_end: int
    control: bytes
    """The extension that names the transparent colour."""
    image: int
    """Where the first image's descriptor begins."""


def _gif(view: memoryview) -> _Gif:
    width, height, flags = _read("GIF", "<HHB", view, 6)
    at = palette_end = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    control, begun = b"", -1
    for _ in range(MAX_BLOCKS):
        (byte,) = _read("GIF", "B", view, at)
        if begun >= 0:  # a part of an extension; its length, 0 at the end
            at += 1 + byte
            if not byte:
                control = bytes(view[begun:at]) if view[begun + 1] == 0xF9 else control
                begun = -1
        elif byte == ord("!"):
            begun, at = at, at + 2
        elif byte == ord(","):
            left, top, columns, rows = _read("GIF", "<HHHH", view, at + 1)
            return _Gif((max(width, left + columns), max(height, top + rows)), palette_end, control, at)
        elif byte == ord(";"):
            break
        else:
            at += 1
    raise BadImage(f"GIF: no image within the first {MAX_BLOCKS} blocks")


def _bmp(view: memoryview) -> tuple[int, int]:
    (length,) = _read("BMP", "<I", view, 14)
    width, height = _read("BMP", "<HH" if length == 12 else "<ii", view, 18)
    if length >= 40 and _read("BMP", "<I", view, 30)[0] in (1, 2) and len(view) > MAX_RUNS_BYTES:
        raise TooLarge(f"BMP: {len(view)} bytes with runs of pixels; at most {MAX_RUNS_BYTES} are read")
    return width, abs(height)


class _Tiff(NamedTuple):
    size: tuple[int, int]
    order: str
    number: str
    place: str
    tags: dict[int, bytes]
    """The entries of `_TIFF_TAGS` that are there, as they are stored."""


def _tiff(view: memoryview) -> _Tiff:
    order = "<" if bytes(view[:2]) == b"II" else ">"
    big = 43 in (view[2], view[3])
    count, place, entry = ("Q", "Q", "HHQ8s") if big else ("H", "I", "HHI4s")
    (at,) = _read("TIFF", order + place, view, 8 if big else 4)
    (number,) = _read("TIFF", order + count, view, at)
    if number > MAX_TAGS:
        raise BadImage(f"TIFF: a directory of {number} tags; at most {MAX_TAGS} are read")
    at += struct.calcsize("<" + count)
    length = struct.calcsize("<" + entry)
    tags: dict[int, bytes] = {}
    whole: dict[int, int] = {}
    for start in range(at, at + number * length, length):
        tag, form, values, value = _read("TIFF", order + entry, view, start)
        if tag not in _TIFF_TAGS:
            continue
        size = values * (_TIFF_BYTES[form] if form < len(_TIFF_BYTES) else 0)
        outside = size > len(value) and struct.unpack(order + place, value)[0] + size > len(view)
        if not size or values > _TIFF_TAGS[tag] or outside:
            raise BadImage(
                f"TIFF: tag {tag} has {values} values of type {form}; expected 1 to {_TIFF_TAGS[tag]} in the file"
            )
        tags[tag] = bytes(view[start : start + length])
        if form in _TIFF_TYPES and values == 1:
            whole[tag] = struct.unpack_from(order + _TIFF_TYPES[form], value)[0]
    width, height = whole.get(_WIDTH, 0), whole.get(_HEIGHT, 0)
    for tag, side in ((_TILE_WIDTH, width), (_TILE_HEIGHT, height)):
        if tag in tags and not 0 < whole.get(tag, 0) <= max(side, MAX_TILE_SIDE):
            raise BadImage(f"TIFF: tiles of {whole.get(tag)} pixels a side in an image of {width}x{height}")
    upright = (height, width) if whole.get(_ORIENTATION, 1) in (5, 6, 7, 8) else (width, height)
    return _Tiff(upright, order, count, place, dict(sorted(tags.items())))


def _boxes(
    kind: str, view: memoryview, start: int, end: int, most: int = MAX_BOXES
) -> Iterator[tuple[bytes, int, int]]:
    """Each box as (type, payload start and end). A box may be cut off by the end of the data, as in a cut-off file."""
    for _ in range(most):
        if start + 8 > end:
            return
        length, name = _read(kind, ">I4s", view, start)
        header = 8
        if length == 1:
            (length,) = _read(kind, ">Q", view, start + 8)
            header = 16
        stop = end if length == 0 else start + length
        if stop < start + header:
            raise BadImage(f"{kind}: the box at byte {start} has {length} bytes; expected at least {header}")
        yield name, start + header, min(stop, end)
        start = stop
    if start + 8 <= end:
        raise BadImage(f"{kind}: more than {MAX_BOXES} boxes")


def _iso(view: memoryview, kind: ImageFormat) -> tuple[int, int, int]:
    """Width, height and orientation of the primary item."""
    name = kind.upper()
    found: dict[bytes, tuple[int, int]] = {}
    properties: list[tuple[bytes, int, int]] = []
    waiting, boxes = [(0, len(view), 0)], 0
    while waiting:
        start, end, depth = waiting.pop(0)
        for box, at, stop in _boxes(name, view, start, end, MAX_BOXES - boxes):
            boxes += 1
            found.setdefault(box, (at, stop))
            if box == b"ipco" and found[box] == (at, stop):
                properties = list(_boxes(name, view, at, stop))
            if box in _CONTAINERS and depth < MAX_DEPTH:
                waiting.append((at + _CONTAINERS[box], stop, depth + 1))
    for needed in (b"pitm", b"ipma", b"iloc", b"iinf"):
        if needed not in found:
            raise BadImage(f"{name}: the file has no box {needed.decode()!r}, so no still image")
    (version,) = _read(name, "B", view, found[b"iinf"][0])
    (items,) = _read(name, ">I" if version else ">H", view, found[b"iinf"][0] + 4)
    if items > MAX_ITEMS:
        raise BadImage(f"{name}: {items} items; at most {MAX_ITEMS} are read")
    if (length := _items_length(name, view, found[b"iloc"][0])) > MAX_COPIES * len(view):
        raise BadImage(f"{name}: items of {length} bytes in a file of {len(view)}; at most {MAX_COPIES} times as many")
    (version,) = _read(name, "B", view, found[b"pitm"][0])
    (primary,) = _read(name, ">I" if version else ">H", view, found[b"pitm"][0] + 4)
    chosen = [properties[i - 1] for i in _associated(name, view, found[b"ipma"][0], primary) if i <= len(properties)]
    return _shown(name, view, {box: at for box, at, _ in chosen}, turned=kind is ImageFormat.AVIF)


def _items_length(name: str, view: memoryview, at: int) -> int:
    """The sum of the lengths of all items (`iloc`)."""
    version, sizes = _read(name, ">B3xH", view, at)
    offset, length, base, index = (2 * (sizes >> shift & 15) for shift in (12, 8, 4, 0))
    index = index if version else 0
    wide = version == 2
    (items,) = _read(name, ">I" if wide else ">H", view, at + 6)
    at += 10 if wide else 8
    step, parts, total = (index + offset + length) // 2, 0, 0
    for _ in range(min(items, MAX_ITEMS)):
        at += (4 if wide else 2) + (2 if version else 0) + 2 + base // 2
        (extents,) = _read(name, ">H", view, at)
        at += 2
        if (parts := parts + extents) > MAX_ITEMS:
            raise BadImage(f"{name}: items of more than {MAX_ITEMS} parts")
        for part in range(at, at + extents * step, step or 1):
            total += int.from_bytes(view[part + step - length // 2 : part + step], "big") or len(view)
        at += extents * step
    return total


def _associated(name: str, view: memoryview, at: int, item: int) -> list[int]:
    """The properties of an item by their numbers from 1 (`ipma`), at most 255."""
    version, flags, items = _read(name, ">BxxBI", view, at)
    at += 8
    for _ in range(min(items, MAX_ITEMS)):
        number, count = _read(name, ">IB" if version else ">HB", view, at)
        at += 5 if version else 3
        wide = 1 + (flags & 1)
        if number == item:
            every = _read(name, f">{count}{'H' if flags & 1 else 'B'}", view, at)
            return [each & (0x7FFF if flags & 1 else 0x7F) for each in every]
        at += count * wide
    raise BadImage(f"{name}: the primary item {item} has no size")


def _shown(name: str, view: memoryview, boxes: dict[bytes, int], *, turned: bool) -> tuple[int, int, int]:
    """Size and orientation by the properties of an item; with `turned` before it is turned."""
    width, height = _read(name, ">4xII", view, boxes[b"ispe"]) if b"ispe" in boxes else (0, 0)
    angle = _read(name, "B", view, boxes[b"irot"])[0] & 3 if b"irot" in boxes else 0
    if turned:
        mirror = 1 + (_read(name, "B", view, boxes[b"imir"])[0] & 1) if b"imir" in boxes else 0
        return width, height, ((1, 4, 2), (8, 5, 7), (3, 2, 4), (6, 7, 5))[angle][mirror]
    if b"clap" in boxes:
        across, of, down, of_down = _read(name, ">IIII", view, boxes[b"clap"])
        width, height = (math.floor(n / d + 0.5) if d else 0 for n, d in ((across, of), (down, of_down)))
    return (height, width, 1) if angle & 1 else (width, height, 1)
