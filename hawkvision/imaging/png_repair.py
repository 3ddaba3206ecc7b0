"""Reduces a PNG or WebP to the chunks that decoding needs, if these are intact and hold the whole image.

    PNG    IHDR  iCCP  PLTE  tRNS  IDAT  tEXt  IDAT  ...  (IEND missing)  ──►  IHDR  PLTE  tRNS  IDAT  IEND
    WebP   RIFF  VP8X  ICCP  VP8  EXIF ... (cut off here)                 ──►  RIFF  VP8

Metadata are removed unread, because they change no pixel and libpng writes to stderr about some. An image is accepted
if its data inflate to the full raster. Checksums of the header, the palette and the image data must be right. The end
chunk and the checksum at the end of the compressed data may be missing.
Sources: PNG third edition §5.3 (chunks), §7 and §8 (raster, interlacing), §13.2 (errors); RFC 1950, 1951, 9649.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from itertools import islice
from typing import Final

from hawkvision.core.errors import BadImage
from hawkvision.imaging.image_header import MAX_CHUNKS, PNG_SIGNATURE, png_chunk_is_sound, png_chunks

MAX_REWRITTEN_BYTES: Final = 128 << 20
"""Largest raster in bytes that is inflated here and compressed anew, because its data have no valid end."""
MAX_PACKED_BYTES: Final = 32 << 20
"""Largest result in bytes: three times the largest body."""
MAX_PNG_CHUNKS: Final = 16_384
"""Chunks of one file: a body of 10 MiB in chunks of 640 bytes. Encoders write 8 KiB or more into each."""
STEP_BYTES: Final = 1 << 20
"""Bytes that are inflated at a time."""

_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Adam7: first column, first row, and steps across and down."""
_ESSENTIAL: Final = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))


def sound_png(data: bytes) -> bytes:
    """The parts of a PNG that a decoder needs; the same object if nothing is to be removed or repaired.

    Raises:
        BadImage: if an essential part is damaged, or the image is incomplete.
    """
    view = memoryview(data)
    kept: list[tuple[bytes, int, int]] = []
    ended = spoilt = False
    for kind, start, end in _chunks(view):
        if kind not in _ESSENTIAL and _is_critical(kind):
            if not any(each[0] == b"IDAT" for each in kept):
                raise BadImage(f"PNG: the chunk {kind!r} at byte {start - 8} is essential, and not known")
            break  # something else is in the place of the end chunk
        if kind in _ESSENTIAL and not png_chunk_is_sound(view, start, end):
            if kind in (b"IHDR", b"PLTE", b"IDAT"):
                raise BadImage(f"PNG: the checksum of chunk {kind!r} at byte {start - 8} is wrong")
            spoilt = True
        elif kind in _ESSENTIAL:
            kept.append((kind, start, end))
            spoilt |= kind in (b"PLTE", b"tRNS")  # examined further
        else:
            spoilt = True
        ended = kind == b"IEND"
    if not ended:
        return rewritten_png(data)
    return data if not spoilt else _reduced(view, kept)


def rewritten_png(data: bytes) -> bytes:
    """A PNG with its image data compressed anew, for data without a valid end.

    Raises:
        BadImage: if the image is incomplete.
    """
    view = memoryview(data)
    chunks = _chunks(view)
    kept = [chunk for chunk in chunks if chunk[0] in _ESSENTIAL and png_chunk_is_sound(view, *chunk[1:])]
    parts = [view[start:end] for kind, start, end in kept if kind == b"IDAT"]
    if chunks[-1][0] != b"IEND":
        parts.append(_begun_idat(view, chunks[-1][2] + 4))
    row_bytes, expected = _raster_bytes(data)
    if expected > MAX_REWRITTEN_BYTES:
        raise BadImage(f"PNG: the image has no sound end, and more than {MAX_REWRITTEN_BYTES} bytes; it is not mended")
    packed, size = _repacked(parts, expected)
    if size < expected:
        height = int.from_bytes(data[20:24], "big")
        there = f"{size // row_bytes} of {height} rows" if row_bytes else f"{size} of {expected} bytes"
        raise BadImage(f"PNG: the image is cut off or damaged: {there} are there; expected all of them")
    return _reduced(view, [chunk for chunk in kept if chunk[0] != b"IDAT"], packed)


def sound_webp(data: bytes) -> bytes:
    """The parts of a WebP that a decoder needs; the same object unless it is shorter than its header says.

    Raises:
        BadImage: if the image itself is incomplete.
    """
    declared = int.from_bytes(data[4:8], "little") + 8
    if declared <= len(data):
        return data
    at, chunks = 12, [data[8:12]]
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            break
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + 8 + size
        if kind == b"VP8X":
            chunks.append(data[at : at + 8] + bytes((data[at + 8] & 0x12,)) + data[at + 9 : end])
        elif end <= len(data) and kind in (b"ALPH", b"VP8 ", b"VP8L", b"ANIM", b"ANMF"):
            chunks.append(data[at:end] + b"\0" * (size & 1))
            if kind in (b"VP8 ", b"VP8L", b"ANMF"):
                payload = b"".join(chunks)
                return b"RIFF" + struct.pack("<I", len(payload)) + payload
        at = end + (size & 1)
    raise BadImage(f"WebP: the image is cut off: {len(data)} of {declared} bytes are there; expected all of them")


def _is_critical(kind: bytes) -> bool:
    """Whether a decoder must know a chunk (PNG §5.4). An invalid chunk name counts as one."""
    return not kind.isalpha() or not kind[0] & 0x20


def _chunks(view: memoryview) -> list[tuple[bytes, int, int]]:
    """See `png_chunks`. The header, which `probe` has read, is among them."""
    chunks = list(islice(png_chunks(view), MAX_PNG_CHUNKS + 1))
    if len(chunks) > MAX_PNG_CHUNKS:
        raise BadImage(f"PNG: more than {MAX_PNG_CHUNKS} chunks")
    return chunks


def _begun_idat(view: memoryview, at: int) -> memoryview:
    """The image data in a last chunk that is cut off."""
    length = int.from_bytes(view[at : at + 4], "big") if bytes(view[at + 4 : at + 8]) == b"IDAT" else 0
    return view[at + 8 : at + 8 + length]


def _raster_bytes(data: bytes) -> tuple[int, int]:
    """Bytes of a row (0 if interlaced), and of all rows with their filter bytes."""
    width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * _CHANNELS[colour]
    if not interlace:
        row = 1 + (width * bits + 7) // 8
        return row, row * height
    total = 0
    for left, top, across, down in _PASSES:
        columns, rows = -(-max(0, width - left) // across), -(-max(0, height - top) // down)
        total += rows * (1 + (columns * bits + 7) // 8) if columns else 0
    return 0, total


def _repacked(parts: Iterable[bytes | memoryview], expected: int) -> tuple[bytes, int]:
    """The raster as far as it is there, compressed quickly, and its size. The checksum behind it is not checked."""
    stream = b"".join(parts)[2:]
    inflater, packer = zlib.decompressobj(-15), zlib.compressobj(1)
    packed, size = bytearray(), 0
    while size < expected and not inflater.eof:
        try:
            piece = inflater.decompress(stream, min(STEP_BYTES, expected - size))
        except zlib.error:
            break
        if not piece:
            break
        stream = inflater.unconsumed_tail
        size += len(piece)
        packed += packer.compress(piece)
        if len(packed) > MAX_PACKED_BYTES:
            raise BadImage(f"PNG: the image has no sound end, and takes more than {MAX_PACKED_BYTES} bytes to mend")
    packed += packer.flush()
    return bytes(packed), size


def _reduced(view: memoryview, kept: list[tuple[bytes, int, int]], packed: bytes | None = None) -> bytes:
    """Header, palette, transparency and image data. The image data come from `packed`, if that is given."""
    whole = {kind: [view[start:end] for each, start, end in kept if each == kind] for kind in _ESSENTIAL}
    colour = view[25]
    palette = bytes(whole[b"PLTE"][0]) if whole[b"PLTE"] else b""
    if colour == 3 and not (0 < len(palette) <= 768 and len(palette) % 3 == 0):
        raise BadImage(f"PNG: the palette has {len(palette)} bytes; expected 3 for each of 1 to 256 colours")
    parts = [PNG_SIGNATURE, _chunk(b"IHDR", bytes(view[16:29]))]
    if colour == 3:
        parts.append(_chunk(b"PLTE", palette))
    if whole[b"tRNS"]:
        transparency = bytes(whole[b"tRNS"][0])
        if len(transparency) == {0: 2, 2: 6}.get(colour) or (
            colour == 3 and 0 < len(transparency) <= len(palette) // 3
        ):
            parts.append(_chunk(b"tRNS", transparency))
    if packed is not None:
        parts.append(_chunk(b"IDAT", packed))
    else:
        parts += [bytes(view[start - 8 : end + 4]) for kind, start, end in kept if kind == b"IDAT"]
    return b"".join((*parts, _chunk(b"IEND", b"")))


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
