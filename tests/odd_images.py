"""Images that every viewer shows whole though they are not as the standard wants them, made on the spot; and cut ones.

{kind: body} = odd_jpegs(pixels)          each shows `sound_jpeg(pixels)`, or what its own twin shows
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import cv2
import numpy as np
from numpy.typing import NDArray

from hawkvision.core.types import Pixels
from hawkvision.transport.coding.jpeg import STANDARD_CODES

RESTART: Final = re.compile(rb"\xff[\xd0-\xd7]")
FACTORS: Final = (
    "1x1 1x1 1x1", "2x1 1x1 1x1", "1x2 1x1 1x1", "2x2 1x1 1x1", "4x1 1x1 1x1", "1x4 1x1 1x1", "4x2 1x1 1x1",
    "2x4 1x1 1x1", "3x1 1x1 1x1", "1x3 1x1 1x1", "3x2 1x1 1x1", "2x3 1x1 1x1", "1x1 2x1 2x1", "1x1 2x2 2x2",
    "2x1 1x1 2x1", "2x2 2x1 2x1", "2x2 1x2 1x2", "1x2 1x2 1x2", "2x1 2x1 2x1", "2x1 2x2 2x2", "3x1 3x1 3x1",
    "4x1 2x1 2x1", "4x1 1x1 2x1", "2x2 2x1 1x1", "1x1", "2x2", "4x1",
)  # fmt: skip
"""Across x down of each component: kinds of all that the standard allows and libjpeg decodes."""

_ZIGZAG: Final = sorted(range(64), key=lambda i: (i // 8 + i % 8, (i % 8 if (i // 8 + i % 8) % 2 == 0 else i // 8)))
_DCT: Final = np.array(
    [[np.sqrt((1 if u == 0 else 2) / 8) * np.cos((2 * x + 1) * u * np.pi / 16) for x in range(8)] for u in range(8)]
)


@dataclass(frozen=True, slots=True)
class Odd:
    """A body, and the one that shows the same and is as the standard wants it."""

    body: bytes
    twin: bytes


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def sampled_jpeg(pixels: Pixels, factors: str, interval: int = 0, step: int = 3) -> bytes:
    """A baseline JPEG of RGB pixels (height, width, 3) with any sampling factors; of one component, grey."""
    height, width = pixels.shape[:2]
    pairs = [(int(pair[0]), int(pair[2])) for pair in factors.split()]
    planes = cv2.split(cv2.cvtColor(pixels, cv2.COLOR_RGB2YCrCb))
    planes = [planes[0], planes[2], planes[1]][: len(pairs)]
    most_across, most_down = max(a for a, _ in pairs), max(d for _, d in pairs)
    alone = len(pairs) == 1
    across, down = (1, 1) if alone else (most_across, most_down)
    columns, rows = -(-width // (8 * across)), -(-height // (8 * down))
    blocks = []
    for plane, (h, v) in zip(planes, pairs, strict=True):
        h, v = (1, 1) if alone else (h, v)
        size = -(-width * h // across), -(-height * v // down)
        small = cv2.resize(plane, size, interpolation=cv2.INTER_AREA)
        padded = np.pad(small, ((0, rows * v * 8 - size[1]), (0, columns * h * 8 - size[0])), mode="edge")
        grid = padded.reshape(rows * v, 8, columns * h, 8).swapaxes(1, 2).astype(np.float64) - 128
        coefficients = np.rint(_DCT @ grid @ _DCT.T / step).astype(int).reshape(rows * v, columns * h, 64)[..., _ZIGZAG]
        blocks.append(coefficients)
    frame = struct.pack(">BHHB", 8, height, width, len(pairs))
    frame += b"".join(bytes((i + 1, h << 4 | v, min(i, 1))) for i, (h, v) in enumerate(pairs))
    scan = bytes((len(pairs),)) + b"".join(bytes((i + 1, 0x11 * min(i, 1))) for i in range(len(pairs))) + b"\0\x3f\0"
    parts = [b"\xff\xd8", segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0")]
    parts += [segment(0xDB, bytes((place,)) + bytes((step,)) * 64) for place in (0, 1)]
    parts += [segment(0xC0, frame), *(segment(0xC4, bytes((p,)) + table) for p, table in STANDARD_CODES.items())]
    parts += [segment(0xDD, struct.pack(">H", interval))] if interval else []
    shapes = [(1, 1)] if alone else pairs
    return b"".join((*parts, segment(0xDA, scan), _coded(blocks, shapes, rows, columns, interval), b"\xff\xd9"))


def _coded(
    blocks: list[NDArray[np.int_]], shapes: list[tuple[int, int]], rows: int, columns: int, interval: int
) -> bytes:
    codes = {place: _codes(table) for place, table in STANDARD_CODES.items()}
    pieces: list[bytes] = []
    bits: list[str] = []
    before = [0] * len(blocks)
    for unit in range(rows * columns):
        if interval and unit and unit % interval == 0:
            pieces.append(_stuffed("".join(bits)))
            bits, before = [], [0] * len(blocks)
        row, column = divmod(unit, columns)
        for index, (grid, (h, v)) in enumerate(zip(blocks, shapes, strict=True)):
            for y in range(row * v, row * v + v):
                for x in range(column * h, column * h + h):
                    bits.append(_block(grid[y, x].tolist(), before[index], codes, min(index, 1)))
                    before[index] = int(grid[y, x, 0])
    pieces.append(_stuffed("".join(bits)))
    return b"".join((b"\xff" + bytes((0xD0 + (i - 1) % 8,)) if i else b"") + piece for i, piece in enumerate(pieces))


def _block(values: list[int], before: int, codes: dict[int, dict[int, str]], table: int) -> str:
    size, extra = _size(values[0] - before)
    bits, run = [codes[table][size], extra], 0
    for value in values[1:]:
        if not value:
            run += 1
            continue
        bits += [codes[0x10 | table][0xF0]] * (run // 16)
        size, extra = _size(value)
        bits += [codes[0x10 | table][(run % 16) << 4 | size], extra]
        run = 0
    return "".join((*bits, codes[0x10 | table][0] if run else ""))


def _size(value: int) -> tuple[int, str]:
    size = abs(value).bit_length()
    return size, f"{value if value > 0 else value + (1 << size) - 1:0{size}b}" if size else ""


def _codes(table: bytes) -> dict[int, str]:
    code, at, found = 0, 16, {}
    for bits, count in enumerate(table[:16], 1):
        for symbol in table[at : at + count]:
            found[symbol] = f"{code:0{bits}b}"
            code += 1
        code, at = code << 1, at + count
    return found


def _stuffed(bits: str) -> bytes:
    padded = bits + "1" * (-len(bits) % 8)
    return int(padded or "1" * 8, 2).to_bytes(max(1, len(padded) // 8), "big").replace(b"\xff", b"\xff\0")


# Surgery on sound files


def scan_start(body: bytes) -> int:
    at = body.index(b"\xff\xda")
    return at + 2 + int.from_bytes(body[at + 2 : at + 4], "big")


def between_restarts(body: bytes, change: Callable[[int, bytes], bytes]) -> bytes:
    """Each piece of the scan's data as `change` makes it of its number and itself; restart markers stay."""
    start, end = scan_start(body), len(body) - 2
    data, at, parts = body[start:end], 0, [body[:start]]
    for number, found in enumerate(RESTART.finditer(data)):
        parts += [change(number, data[at : found.start()]), found.group()]
        at = found.end()
    return b"".join((*parts, change(len(parts) // 2, data[at:]), body[end:]))


def renumbered(body: bytes, number: Callable[[int], int]) -> bytes:
    start, count = scan_start(body), iter(range(1 << 20))
    return body[:start] + RESTART.sub(lambda _: bytes((0xFF, 0xD0 + number(next(count)) % 8)), body[start:])


def before_segment(body: bytes, marker: int, inserted: bytes) -> bytes:
    at = body.index(bytes((0xFF, marker)))
    return body[:at] + inserted + body[at:]


def after_start(body: bytes, inserted: bytes) -> bytes:
    return body[:2] + inserted + body[2:]


def profile(number: int, count: int) -> bytes:
    return segment(0xE2, b"ICC_PROFILE\0" + bytes((number, count)) + bytes(40))


def exif(orientation: int) -> bytes:
    entry = struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    return segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4))


def odd_jpegs(pixels: Pixels) -> dict[str, Odd]:
    """A file of each kind that viewers show whole."""
    plain = sampled_jpeg(pixels, "2x2 1x1 1x1")
    cut = sampled_jpeg(pixels, "2x2 1x1 1x1", interval=2)
    progressive = cv2.imencode(".jpg", pixels[..., ::-1], (cv2.IMWRITE_JPEG_PROGRESSIVE, 1))[1].tobytes()
    made = {
        "zeros before each restart": (between_restarts(cut, lambda i, piece: piece + bytes(9)), cut),
        "zeros before some restarts": (between_restarts(cut, lambda i, piece: piece + bytes(i % 3)), cut),
        "a byte before each restart": (between_restarts(cut, lambda i, piece: piece + b"\x80"), cut),
        "stray bytes before each restart": (between_restarts(cut, lambda i, piece: piece + b"maker's own"), cut),
        "stray bytes before some restarts": (
            between_restarts(cut, lambda i, piece: piece + b"\xa5" * (i * 7 % 23)), cut,
        ),
        "fill bytes before restarts": (between_restarts(cut, lambda i, piece: piece + b"\xff\xff"), cut),
        "restarts all 0": (renumbered(cut, lambda i: 0), cut),
        "restarts from 1": (renumbered(cut, lambda i: i + 1), cut),
        "restarts backwards": (renumbered(cut, lambda i: -i), cut),
        "restarts all 3, and padding": (
            renumbered(between_restarts(cut, lambda i, piece: piece + bytes(i % 5)), lambda i: 3), cut,
        ),
        "a restart before the end": (cut[:-2] + b"\xff\xd7\xff\xd9", cut),
        "no end": (plain[:-2], plain),
        "half an end": (plain[:-1], plain),
        "no end, restarts": (cut[:-2], cut),
        "a tag for an end": (plain[:-2] + b"CAM\x01\x02\x03\x04\x05", plain),
        "a tag with a marker for an end": (plain[:-2] + b"CAM\xff\xe7\x00", plain),
        "a long tag for an end": (cut[:-2] + b"serial number 1234567890 " * 9, cut),
        "zeros for an end": (plain[:-2] + bytes(700), plain),
        "zeros before the end": (plain[:-2] + bytes(700) + plain[-2:], plain),
        "text behind the end": (plain + b"\r\n--boundary--\r\n", plain),
        "another image behind the end": (plain + cut, plain),
        "no end, progressive": (progressive[:-2], progressive),
        "a tag for an end, progressive": (progressive[:-2] + b"0123456789", progressive),
        "zeros between scans": (progressive.replace(b"\xff\xda", bytes(3) + b"\xff\xda"), progressive),
        "zeros behind scans": (_behind_scans(progressive, bytes(40)), progressive),
        "stray bytes behind scans": (_behind_scans(progressive, b"\x5a" * 40), progressive),
        "zeros between segments": (before_segment(before_segment(plain, 0xDB, bytes(5)), 0xC4, bytes(1)), plain),
        "stray bytes between segments": (before_segment(plain, 0xC0, b"stray"), plain),
        "stray stuffing between segments": (before_segment(plain, 0xC0, b"\xff\0\xff\0\0"), plain),
        "many fill bytes": (before_segment(plain, 0xC0, b"\xff" * 2000), plain),
        "profile from 0": (after_start(plain, profile(0, 1)), plain),
        "profile beyond its count": (after_start(plain, profile(3, 2)), plain),
        "profile twice": (after_start(plain, profile(1, 1) * 2), plain),
        "profile counts differ": (after_start(plain, profile(1, 2) + profile(2, 3)), plain),
        "short profile": (after_start(plain, segment(0xE2, b"ICC_PROFILE\0")), plain),
        "short JFIF": (b"\xff\xd8" + segment(0xE0, b"JFIF\0") + plain[20:], plain),
        "empty APP0": (after_start(plain, segment(0xE0, b"")), plain),
        "metadata of length 0": (after_start(plain, b"\xff\xe1\0\0"), plain),
        "metadata of length 1": (after_start(plain, b"\xff\xfe\0\1"), plain),
        "short Adobe": (after_start(plain, segment(0xEE, b"Adobe\0")), plain),
        "unknown Adobe transform": (after_start(plain, segment(0xEE, b"Adobe\0\x64\0\0\0\0\x09")), plain),
        "unknown JFIF version": (b"\xff\xd8" + segment(0xE0, b"JFIF\0\x07\x09\0\0\1\0\1\0\0") + plain[20:], plain),
        "short Exif": (after_start(plain, segment(0xE1, b"Exif\0\0II")), plain),
        "spectral selection to 0": (plain.replace(b"\x03\x11\0\x3f\0", b"\x03\x11\0\0\0"), plain),
        "spectral selection from 1": (plain.replace(b"\x03\x11\0\x3f\0", b"\x03\x11\x01\x40\0"), plain),
        "successive approximation": (plain.replace(b"\x03\x11\0\x3f\0", b"\x03\x11\0\x3f\x21"), plain),
        "height told behind the scan": (_height_later(plain), plain),
        "first orientation counts": (after_start(plain, exif(6) + exif(1)), after_start(plain, exif(6))),
        "first orientation is upright": (after_start(plain, exif(1) + exif(6)), plain),
        "orientation told late": (before_segment(plain, 0xDA, exif(6)), after_start(plain, exif(6))),
    }  # fmt: skip
    found = {kind: Odd(*bodies) for kind, bodies in made.items()}
    for factors in FACTORS:
        restarting = sampled_jpeg(pixels, factors, 3)
        padded = renumbered(between_restarts(restarting, lambda i, piece: piece + bytes(i % 4)), lambda i: 5)
        found[f"{factors}, and all else"] = Odd(padded[:-2], sampled_jpeg(pixels, factors))
    return found


def _behind_scans(body: bytes, stray: bytes) -> bytes:
    start = scan_start(body)
    return body[:start] + body[start:].replace(b"\xff\xc4", stray + b"\xff\xc4")


def _height_later(body: bytes) -> bytes:
    at = body.index(b"\xff\xc0") + 5
    return body[:at] + b"\0\0" + body[at + 2 : -2] + segment(0xDC, body[at : at + 2]) + body[-2:]


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def bad_chunk(kind: bytes, payload: bytes) -> bytes:
    whole = chunk(kind, payload)
    return whole[:-1] + bytes((whole[-1] ^ 1,))


def odd_pngs(pixels: Pixels) -> dict[str, Odd]:
    """A PNG of each kind that viewers show whole."""
    whole = cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
    head, data = whole[:33], zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    end = chunk(b"IEND", b"")
    rest = whole[33:]
    made = {
        "comment's checksum": head + bad_chunk(b"tEXt", b"Comment\0spoilt") + rest,
        "profile's checksum": head + bad_chunk(b"iCCP", b"p\0\0junk") + rest,
        "orientation's checksum": head + bad_chunk(b"eXIf", exif(6)[10:]) + rest,
        "transparency's checksum": head + bad_chunk(b"tRNS", b"\0\1\0\1\0\1") + rest,
        "no palette's business": head + chunk(b"PLTE", bytes(7)) + rest,
        "transparency of no use": head + chunk(b"tRNS", b"\0") + rest,
        "gamma of 0": head + chunk(b"gAMA", bytes(4)) + rest,
        "profile of no use": head + chunk(b"iCCP", b"p\0\0junk") + rest,
        "no end": whole[:-12],
        "half an end": whole[:-5],
        "end's checksum": whole[:-1] + bytes((whole[-1] ^ 1,)),
        "a tag for an end": whole[:-12] + b"camera no. 1234567890",
        "data's checksum cut off": head + chunk(b"IDAT", data)[:-2],
        "data cut behind the raster": head + chunk(b"IDAT", data)[:-6],
        "raster's checksum wrong": head + chunk(b"IDAT", data[:-1] + bytes((data[-1] ^ 1,))) + end,
        "raster's checksum missing": head + chunk(b"IDAT", data[:-4]) + end,
        "bytes behind the raster": head + chunk(b"IDAT", data + b"stray") + end,
        "a comment amid the data": (
            head + chunk(b"IDAT", data[:99]) + chunk(b"tEXt", b"a\0b") + chunk(b"IDAT", data[99:]) + end
        ),
        "stray bytes behind the end": whole + bytes(99),
    }  # fmt: skip
    return {kind: Odd(body, whole) for kind, body in made.items()}
