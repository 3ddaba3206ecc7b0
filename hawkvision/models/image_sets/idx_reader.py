"""The MNIST family's files (http://yann.lecun.com/exdb/mnist, "FILE FORMATS"), bare or gzipped, read within bounds.

    {train,t10k}-images-idx3-ubyte   0x00000803, n, height, width (uint32, big-endian), then n * height * width bytes
    {train,t10k}-labels-idx1-ubyte   0x00000801, n, then n bytes

The header says how long a file must be; nothing beyond that is ever unpacked. Each grey image becomes a PNG, without
loss, so that it can be sent to a node like any other.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError

PARTS: Final = ("train", "t10k")
"""The parts in this order; the second is the test part."""
MAX_BYTES: Final = 1 << 30
"""Largest unpacked file. EMNIST, the largest of the family, has 638 MB."""
MAX_SIDE: Final = 512

_IMAGES_MAGIC: Final = 0x0803
_LABELS_MAGIC: Final = 0x0801


class IdxPart:
    """Grey images (n, height, width) and labels (n,), n ≥ 1."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.name, self.images, self.labels = name, images, labels
        self.is_test = name == PARTS[1]

    def digest(self) -> bytes:
        """SHA-256 over name, shape and contents, the same for bare and gzipped files."""
        head = f"{self.name}:{self.images.shape}:".encode()
        return hashlib.sha256(head + self.labels.tobytes() + self.images.tobytes()).digest()

    def bodies(self) -> Iterator[bytes]:
        """Each image as a PNG."""
        return map(grey_png, self.images)


def holds_idx_files(root: Path) -> bool:
    """Whether a directory has any of the family's files."""
    return any((root / name).exists() for part in PARTS for kind in _names(part) for name in (kind, f"{kind}.gz"))


def read_idx_parts(root: Path) -> tuple[IdxPart, ...]:
    """The parts in a directory, in the order of `PARTS`.

    Raises:
        ConfigError: naming the file that is missing, malformed, too large, or does not fit its counterpart.
    """
    found = []
    for name in PARTS:
        paths = [_find(root, kind) for kind in _names(name)]
        if paths == [None, None]:
            continue
        for kind, path in zip(_names(name), paths, strict=True):
            if path is None:
                raise ConfigError(f"{root}: {kind}[.gz] is missing; images and labels go together")
        images, labels = (_read(path) for path in paths if path is not None)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ConfigError(
                f"{root}: {name}: expected images (n, height, width) and labels (n,), got {images.shape}, "
                f"{labels.shape}"
            )
        found.append(IdxPart(name, images, labels))
    return tuple(found)


def grey_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of 8-bit grey pixels (height, width), without filters."""
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter, 0 for none
    rows[:, 1:] = pixels
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _names(part: str) -> tuple[str, str]:
    return f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"


def _find(root: Path, kind: str) -> Path | None:
    return next((path for name in (kind, f"{kind}.gz") if (path := root / name).is_file()), None)


def _read(path: Path) -> NDArray[np.uint8]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            (magic,) = struct.unpack(">I", file.read(4))
            if magic not in (_IMAGES_MAGIC, _LABELS_MAGIC):
                raise ConfigError(f"{path}: not an idx file of bytes: it begins with {magic:#010x}")
            dimensions = magic & 0xFF
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            size = _size(path, shape)
            data = file.read(size + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ConfigError(f"{path}: cannot read: {error}") from None
    if len(data) != size:
        found = "more" if len(data) > size else f"{len(data)} bytes"
        raise ConfigError(f"{path}: expected {size} bytes after the header, found {found}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _size(path: Path, shape: tuple[int, ...]) -> int:
    """Bytes of an array of that shape, within bounds."""
    size = 1
    for length in shape:
        size *= length
    if size == 0 or size > MAX_BYTES or any(side > MAX_SIDE for side in shape[1:]):
        raise ConfigError(
            f"{path}: the header says {shape}; expected 1 to {MAX_BYTES} bytes in all, sides of at most {MAX_SIDE}"
        )
    return size
