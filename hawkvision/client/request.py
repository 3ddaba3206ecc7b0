"""A question as it travels: its fields as a query or as the datagram transport's template, its image as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypedDict, Unpack
from urllib.parse import urlencode

import numpy as np

from hawkvision.core.errors import BadField
from hawkvision.core.types import OnMiss, Pixels, Quality

Image: TypeAlias = bytes | str | os.PathLike[str] | Pixels
"""An encoded image, the path of one, or uint8 pixels (height, width, 3)."""

Encoding: TypeAlias = Literal["png", "jpeg"]
Color: TypeAlias = Literal["rgb", "bgr"]
ENCODINGS: Final = ("png", "jpeg")
COLORS: Final = ("rgb", "bgr")
JPEG_QUALITY: Final = 95
"""Of pixels sent as JPEG, on the scale of libjpeg: a tenth of the bytes of a PNG of a photograph."""

LONGEST_LINK_DEADLINE_MS: Final = 60_000.0
"""Fragments count milliseconds in 16 bits; longer deadlines are the node's alone."""
MAX_META: Final = 64
"""Bytes that fragments carry of their own, here the stream's name; a longer one makes a template of its own."""

SAME_MOMENT_S: Final = 1e-3
"""An attempt that begins so soon has all of its deadline."""

TARGETS: Final = ("min_accuracy", "max_accuracy_drop", "quality", "min_confidence")
"""The fields of which one is the target."""


class ClassifyFields(TypedDict, total=False):
    """What may be asked of an image; DESIGN §3. At most one of the first four, the target."""

    min_accuracy: float | None
    max_accuracy_drop: float | None
    quality: Quality | str | None
    min_confidence: float | None
    deadline_ms: float | None
    on_miss: OnMiss | str | None
    stream: str | None
    top_k: int | None
    task: str | None


def query_fields(**fields: Unpack[ClassifyFields]) -> dict[str, str]:
    """The fields as query parameters; None says nothing.

    Raises:
        BadField: if more than one target is given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    targets = [name for name in TARGETS if name in given]
    if len(targets) > 1:
        raise BadField(f"expected at most one of {', '.join(TARGETS)}; got {' and '.join(targets)}")
    # Enums are written by value; repr gives floats their shortest exact form.
    return {name: repr(float(v)) if isinstance(v, float) else f"{v}" for name, v in given.items()}


def waits_beyond_deadline(fields: ClassifyFields) -> bool:
    """Whether the caller wants the answer whenever it comes."""
    return fields.get("on_miss") == OnMiss.WAIT


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long one attempt may take, and what of the deadline is left if it is the deadline that says so."""

    seconds: float
    deadline_ms: float | None = None
    """What the caller gave, if it has passed by the end of the attempt."""
    left_ms: float | None = None
    """Of the deadline, for an attempt that is not the first."""

    @classmethod
    def after(cls, elapsed_s: float, timeout_s: float, deadline_ms: float | None, late_s: float) -> TimeLimit:
        """The limit of an attempt that begins `elapsed_s` after the call; None is no deadline, or none that counts."""
        if deadline_ms is None:
            return cls(timeout_s)
        left_ms = deadline_ms - elapsed_s * 1e3 if elapsed_s > SAME_MOMENT_S else None
        left_s = deadline_ms / 1e3 - elapsed_s
        seconds = min(timeout_s, left_s + late_s)
        return cls(seconds, deadline_ms if left_s <= seconds else None, left_ms)

    def applied(self, query: dict[str, str]) -> dict[str, str]:
        """The query, with what is left of its deadline."""
        return query if self.left_ms is None else query | {"deadline_ms": repr(self.left_ms)}


@dataclass(frozen=True, slots=True)
class DatagramRequest:
    """The fields of an image as the datagram transport carries them: what many images share, and what is its own."""

    template: bytes
    meta: bytes
    deadline_s: float | None
    fast: bool = False
    """Whether speed counts before accuracy, and an image coded anew will do where there is time for it whole."""
    insist: bool = True
    """Whether an answer after the deadline is better than none, as it is but for `on_miss=fail`."""


def datagram_request(query: dict[str, str]) -> DatagramRequest:
    """The deadline leaves the template for the fragments where they can carry it and it is the link's to keep.

    What the node is to refuse stays in the template, so that it does.
    """
    shared = dict(query)
    deadline_s = None
    with contextlib.suppress(ValueError):  # the node says what is wrong with it
        deadline_ms = float(shared.get("deadline_ms", 0.0))
        if shared.get("on_miss") != "wait" and 0.0 < deadline_ms <= LONGEST_LINK_DEADLINE_MS:
            del shared["deadline_ms"]
            deadline_s = deadline_ms / 1e3
    meta = shared.get("stream", "").encode()
    if len(meta) <= MAX_META:
        shared.pop("stream", None)
    else:
        meta = b""
    fast = shared.get("quality") == Quality.FAST.value
    insist = shared.get("on_miss") != OnMiss.FAIL.value
    return DatagramRequest(urlencode(sorted(shared.items())).encode(), meta, deadline_s, fast, insist)


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How pixels are meant, and as what they are sent."""

    encoding: Encoding | None = None
    color: Color | None = None
    """The order of the channels; None is RGB."""

    def check(self, image: Image) -> None:
        """Refuse what says nothing about this image.

        Raises:
            BadField: if a form is given for an image that is encoded already, or there is no such form.
        """
        for name, value, known in (("encoding", self.encoding, ENCODINGS), ("color", self.color, COLORS)):
            if value is None:
                continue
            if value not in known:
                raise BadField(f"{name}: expected one of {', '.join(known)}, got {value!r}")
            if not isinstance(image, np.ndarray):
                raise BadField(f"{name}: only for arrays of pixels; got {type(image).__name__}, sent as it is")

    async def sendable(self, image: Image, *, pixels: bool) -> bytes | Pixels:
        """The bytes to send, or with `pixels` RGB pixels where no encoding was asked for.

        Raises:
            BadField: if the array is no image.
            OSError: if the path cannot be read.
        """
        if isinstance(image, bytes):
            return image
        if not isinstance(image, np.ndarray):
            return await asyncio.to_thread(Path(image).read_bytes)
        if pixels and self.encoding is None:
            return np.ascontiguousarray(image[..., ::-1]) if self.color == "bgr" else image
        return await asyncio.to_thread(self._encoded, image)

    def _encoded(self, pixels: Pixels) -> bytes:
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
            raise BadField(f"image: expected uint8 (height, width, 3), got {pixels.dtype} {pixels.shape}")
        # Imported here because most callers send encoded images, and OpenCV takes 100 ms to load.
        import cv2

        suffix, options = (
            (".jpg", [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]) if self.encoding == "jpeg" else (".png", [])
        )
        written_as_bgr = pixels if self.color == "bgr" else pixels[:, :, ::-1]
        done, written = cv2.imencode(suffix, written_as_bgr, options)
        if not done:
            raise BadField(f"image: {pixels.shape} cannot be encoded as {suffix[1:].upper()}")
        return bytes(written)
