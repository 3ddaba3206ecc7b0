"""The format of an image, which each of its fragments carries. `WIRE.md` §5."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from hawkvision.transport.protocol.wire import MAX_DATAGRAM, WireError

MAX_PIXELS: Final = 4096 * 4096
MAX_SIDE: Final = 65500
"""libjpeg's bound (JPEG_MAX_DIMENSION)."""
MAX_SYMBOLS: Final = 255
"""n fits one byte; the field would allow 256."""
MAX_REDRAWN_PIXELS: Final = 1 << 20
"""Of an image whose holes are filled by decoding and encoding, 20 ms for a megapixel. Larger ones keep copies."""


class Kind(IntEnum):
    """The content of the symbols."""

    SEGMENTS = 0
    """Restart segments of a JPEG; fewer than k symbols give part of the image."""
    OPAQUE = 1
    """Slices of any body; fewer than k symbols give nothing."""


@dataclass(frozen=True, slots=True)
class WireImageFormat:
    """The format of one image.

    Attributes:
        kind: the content of the symbols.
        width: of the image in pixels; OPAQUE: the body's length divided by 65,536.
        height: of the image in pixels; OPAQUE: the remainder.
        quality: 1..100 on libjpeg's scale; estimated if the tables are the caller's own; OPAQUE: 0.
        interval: MCUs per restart segment, 1..255; OPAQUE: 1.
        k: data symbols; any k of the n symbols give them all.
        n: symbols, at most 255.
        base_k: any base_k fragments give the base image; 0 if there is none.
        tables: 0 if the quality implies the JPEG's header; else the number of a registered header.

    Raises:
        WireError: names the invalid value.
    """

    kind: Kind
    width: int
    height: int
    quality: int
    interval: int
    k: int
    n: int
    base_k: int = 0
    tables: int = 0

    def __post_init__(self) -> None:
        self._need("width", 0 <= self.width <= 65535, "0 to 65535")
        self._need("height", 0 <= self.height <= 65535, "0 to 65535")
        self._need("interval", 1 <= self.interval <= 255, "1 to 255")
        self._need("n", 1 <= self.n <= MAX_SYMBOLS, f"1 to {MAX_SYMBOLS}")
        self._need("k", 1 <= self.k <= self.n, f"1 to n = {self.n}")
        self._need("base_k", 0 <= self.base_k <= self.n, f"0 to n = {self.n}")
        self._need("tables", self.tables >= 0, "at least 0")
        if self.kind is Kind.OPAQUE:
            self._need("quality", self.quality == 0, "0 for an opaque body")
            self._need("base_k", self.base_k == 0, "0 for an opaque body")
            self._need("tables", self.tables == 0, "0 for an opaque body")
            most = self.k * MAX_DATAGRAM
            self._need("body_bytes", self.k <= self.body_bytes <= most, f"{self.k} to {most} for k = {self.k}")
        else:
            self._need("quality", 1 <= self.quality <= 100, "1 to 100")
            self._need("width", 0 < self.width <= MAX_SIDE, f"1 to {MAX_SIDE}")
            most = min(MAX_SIDE, MAX_PIXELS // self.width)
            self._need("height", 0 < self.height <= most, f"1 to {most} beside a width of {self.width}")
            based = self.tables == 0 and self.width * self.height <= MAX_REDRAWN_PIXELS
            self._need("base_k", based or self.base_k == 0, f"0 with own tables or above {MAX_REDRAWN_PIXELS} pixels")

    @property
    def body_bytes(self) -> int:
        """Length of an OPAQUE body."""
        return self.width * 65536 + self.height

    def _need(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise WireError(f"image format: {name} is {getattr(self, name)}; expected {expected}")
