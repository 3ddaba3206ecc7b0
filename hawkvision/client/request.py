"""Requests of the client: fields as a query or as a datagram template, and the image as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack, get_args
from urllib.parse import urlencode

import numpy as np

from hawkvision.core.errors import BadField
from hawkvision.core.types import OnMiss, Pixels, Quality

Image: TypeAlias = bytes | bytearray | memoryview | str | os.PathLike[str] | Pixels
"""An encoded image, the path of one, or uint8 pixels (height, width, 3)."""

Encoding: TypeAlias = Literal["png", "jpeg"]
Color: TypeAlias = Literal["rgb", "bgr"]
JPEG_QUALITY: Final = 95
"""Quality of pixels sent as JPEG, on libjpeg's scale; a photograph takes a tenth of a PNG's bytes."""

LONGEST_LINK_DEADLINE_MS: Final = 60_000.0
"""Fragments have 16 bits for milliseconds; the node alone applies longer deadlines."""
MAX_META: Final = 64
"""Longest metadata of a fragment, here the stream's name; a longer name goes into the template."""

TARGETS: Final = ("min_accuracy", "max_accuracy_drop", "quality", "min_confidence")
"""The fields that state a target."""


class ClassifyFields(TypedDict, total=False):
    """The fields of a request, and how to send pixels. At most one of the first four may be given, the target."""

    min_accuracy: float | None
    max_accuracy_drop: float | None
    quality: Quality | str | None
    min_confidence: float | None
    deadline_ms: float | None
    on_miss: OnMiss | str | None
    stream: str | None
    top_k: int | None
    task: str | None
    encoding: Encoding | None
    """Of pixels: `png` is lossless and the default over HTTP; `jpeg` takes a tenth of the bytes. The datagram transport
    encodes pixels as the link allows, unless an encoding is given."""
    color: Color | None
    """The order of the channels of pixels: `rgb`, the default, or `bgr`, as in OpenCV."""


def query_fields(**fields: Unpack[ClassifyFields]) -> dict[str, str]:
    """The fields as query parameters; None is left out.

    Raises:
        BadField: if more than one target is given, or the deadline is no number above 0, by which the client waits.
    """
    given = {name: value for name, value in fields.items() if value is not None and name not in ("encoding", "color")}
    deadline_ms: Any = given.get("deadline_ms", 1.0)
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, Real) or not 0.0 < float(deadline_ms) < math.inf:
        raise BadField(f"deadline_ms: expected milliseconds, a number above 0; got {deadline_ms!r:.60}")
    targets = [name for name in TARGETS if name in given]
    if len(targets) > 1:
        raise BadField(f"expected at most one of {', '.join(TARGETS)}; got {' and '.join(targets)}")
    # Enums are formatted by value; repr gives floats their shortest exact form.
    return {name: repr(float(v)) if isinstance(v, float) else f"{v}" for name, v in given.items()}


def waited_ms(fields: ClassifyFields) -> float | None:
    """The deadline that ends the wait for an answer; None if an answer is accepted at any time."""
    return None if fields.get("on_miss") == OnMiss.WAIT else fields.get("deadline_ms")


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time limit of one attempt, and the rest of the deadline."""

    seconds: float
    deadline_ms: float | None = None
    """The caller's deadline, if it ends the attempt."""
    left_ms: float | None = None
    """Rest of the deadline, for attempts after the first."""

    @classmethod
    def after(cls, elapsed_s: float, timeout_s: float, deadline_ms: float | None, late_s: float) -> TimeLimit:
        """The limit of an attempt that begins `elapsed_s` after the first; `deadline_ms` None is no deadline."""
        if deadline_ms is None:
            return cls(timeout_s)
        left_ms = deadline_ms - elapsed_s * 1e3 if elapsed_s > 0.0 else None
        left_s = deadline_ms / 1e3 - elapsed_s
        seconds = min(timeout_s, left_s + late_s)
        return cls(seconds, deadline_ms if left_s <= seconds else None, left_ms)

    def applied(self, query: dict[str, str]) -> dict[str, str]:
        """The query with the rest of its deadline."""
        return query if self.left_ms is None else query | {"deadline_ms": repr(self.left_ms)}


def datagram_template(query: dict[str, str]) -> tuple[bytes, bytes, float | None]:
    """The request for a query: its template, its metadata, and its deadline in seconds.

    The deadline goes into the fragments if they can carry it, except for `on_miss=wait`. Invalid fields stay in the
    template, so that the node refuses them.
    """
    shared = dict(query)
    deadline_s = None
    with contextlib.suppress(ValueError):  # the node reports the error
        deadline_ms = float(shared.get("deadline_ms", 0.0))
        if shared.get("on_miss") != "wait" and 0.0 < deadline_ms <= LONGEST_LINK_DEADLINE_MS:
            del shared["deadline_ms"]
            deadline_s = deadline_ms / 1e3
    meta = shared.get("stream", "").encode()
    if 0 < len(meta) <= MAX_META:
        shared.pop("stream", None)
    else:
        meta = b""
    return urlencode(sorted(shared.items())).encode(), meta, deadline_s


def check_image(image: Image, fields: ClassifyFields) -> None:
    """Refuse what is no image, and options of pixels that do not apply to this one.

    Raises:
        BadField: if an option is unknown, or is given for an encoded image, or if this is of another type.
    """
    if not isinstance(image, bytes | bytearray | memoryview | str | os.PathLike | np.ndarray):
        raise BadField(
            f"image: expected an encoded image, a path, or an array of pixels, such as np.asarray(...) of a PIL "
            f"image in RGB; got {type(image).__name__}"
        )
    for name, value, known in (
        ("encoding", fields.get("encoding"), get_args(Encoding)),
        ("color", fields.get("color"), get_args(Color)),
    ):
        if value is None:
            continue
        if value not in known:
            raise BadField(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        if not isinstance(image, np.ndarray):
            raise BadField(f"{name}: only for arrays of pixels; got {type(image).__name__}, sent as it is")


async def sendable(image: Image, fields: ClassifyFields, *, pixels: bool) -> bytes | Pixels:
    """The bytes to send, or with `pixels` RGB pixels where no encoding was asked for.

    Raises:
        BadField: if the array is no image.
        OSError: if the path cannot be read.
    """
    encoding, color = fields.get("encoding"), fields.get("color")
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, np.ndarray):
        return await asyncio.to_thread(_read, image)
    if pixels and encoding is None:
        return np.ascontiguousarray(image[..., ::-1]) if color == "bgr" else image
    return await asyncio.to_thread(_encoded, image, encoding, color)


def _encoded(pixels: Pixels, encoding: Encoding | None, color: Color | None) -> bytes:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        advice = "; an encoded image is sent as bytes" if pixels.ndim == 1 else ""
        raise BadField(f"image: expected uint8 (height, width, 3), got {pixels.dtype} {pixels.shape}{advice}")
    # Imported here because most callers send encoded images, and OpenCV takes 100 ms to load.
    import cv2

    suffix, options = (".jpg", [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]) if encoding == "jpeg" else (".png", [])
    written_as_bgr = pixels if color == "bgr" else pixels[:, :, ::-1]
    done, written = cv2.imencode(suffix, written_as_bgr, options)
    if not done:
        raise BadField(f"image: {pixels.shape} cannot be encoded as {suffix[1:].upper()}")
    return bytes(written)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except ValueError as error:  # a null character
        raise BadField(f"image: {path!r:.60} is no path: {error}") from None
