"""What an image is sent as over the datagram transport: as it is, cut along its own segments, or coded anew.

    image, what the link loses and carries ─► Planner ─► plan ─► prepare ─► fragments

No sockets here, and no clock but what callers say; `datagram_client` keeps the connection.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import cv2
import numpy as np

from hawkvision.core.errors import BadField, TooLarge
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.transport.coding.image_coding import Coded, Plan, encode, opaque, reframe
from hawkvision.transport.coding.rate_fec_control import FINE, FINE_SIZE, LinkState, choose
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.status import MAX_NACKS, REPAIR_GROWTH

Image: TypeAlias = bytes | Pixels
"""An encoded image, or RGB pixels (height, width, 3)."""

SMALL_FRAGMENTS: Final = 3
"""Images of so few fragments go as they are: coding them anew would not save one, and lose quality."""
OVERSAMPLING: Final = 2
"""How much larger than useful a JPEG is at least decoded before areas are averaged, as `imaging.preprocessing` does."""
MAX_PIXELS: Final = 50_000_000
"""Of an image that is decoded here; what nodes accept unless told otherwise."""
INLINE_PIXELS: Final = 400_000
INLINE_BYTES: Final = 100_000
"""Larger images are prepared on a thread, so that the event loop does not stand still meanwhile."""

MAX_SPARE: Final = 3.0
"""Times the plain image's bytes that are sent at most because there is room."""
SPARE_S: Final = 0.01
SPARE_SHARE: Final = 0.1
"""The time that sending an image may take where loss asks for it: a tenth of the deadline, 10 ms at most."""
ANSWER_S: Final = 0.035
"""Of the deadline, beside a round trip, for the other end's work (`RESERVE_S` of the datacenter) and for waiting for
fragments that are overdue."""
MIN_SEND_S: Final = 0.008
"""The least of the link's time that an image is given, even if its answer will be late for it."""
PLAIN_BYTES_PER_PIXEL: Final = 0.25
"""At quality 80, typically."""

GOOD_S: Final = 5.0
"""How long the loss must have stayed clearly lower before parity is taken back."""
LOWER_RATIO: Final = 1.25
LOWER_MIN: Final = 0.005
"""Clearly lower is what would still be lower if it were a quarter and half a percent higher."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image as it will be sent, and the JPEG header that the peer must know (empty: none)."""

    coded: Coded
    header: bytes = b""


def prepare(
    image: Image, plan: Plan, useful_side: int, room: int, *, may_reframe: bool = True, lossless: bool = False
) -> Prepared:
    """An image as fragments.

    Small ones go as they are, unless in a format that not every node reads; JPEGs with restart segments are cut along
    them unless the plan asks for a lower quality or the image is larger than useful; all others are decoded, shrunk
    so that their shorter side is `useful_side` pixels at most, and coded at the plan's quality.

    Args:
        image: encoded, or RGB pixels.
        plan: quality and parity.
        useful_side: pixels of the shorter side beyond which the peer gains nothing.
        room: bytes of a symbol.
        may_reframe: whether a JPEG's own header may be used.
        lossless: send an encoded image's very bytes, whatever the plan and however many fragments that takes.

    Raises:
        BadImage, UnsupportedMedia: if the image cannot be read.
        TooLarge: if it has more than `MAX_PIXELS`, or does not fit 255 fragments even so (`lossless`: as it is).
        BadField: if pixels are not uint8 (height, width, 3).
    """
    if not isinstance(image, bytes):
        return Prepared(encode(_shrunk(checked_pixels(image), useful_side), plan, room))
    header = probe(image)
    if lossless or (header.format.native and len(image) <= SMALL_FRAGMENTS * room):
        as_it_is = opaque(image, plan.parity, room)
        if as_it_is is not None:
            return Prepared(as_it_is)
        if lossless:
            raise TooLarge(f"the image has {len(image)} bytes; at most {MAX_SYMBOLS * room} go as they are")
    if may_reframe and min(header.width, header.height) <= useful_side:
        cut = reframe(image, plan.parity, room)
        if cut is not None and (plan.quality >= FINE or cut[0].format.quality <= plan.quality):
            return Prepared(*cut)
    pixels = decode(image, header, max_pixels=MAX_PIXELS, min_side=OVERSAMPLING * useful_side)
    return Prepared(encode(_shrunk(pixels, useful_side), plan, room))


def checked_pixels(pixels: Pixels) -> Pixels:
    """The same pixels.

    Raises:
        BadField: if they are not uint8 (height, width, 3).
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise BadField(f"image: expected uint8 RGB (height, width, 3), got {pixels.dtype} {pixels.shape}")
    return pixels


def _shrunk(pixels: Pixels, useful_side: int) -> Pixels:
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    if shorter <= useful_side:
        return np.ascontiguousarray(pixels)
    size = (round(width * useful_side / shorter), round(height * useful_side / shorter))
    small: Pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return small


def plain_bytes(image: Image, useful_side: int) -> float:
    """About how many bytes an image takes without parity, at the best quality.

    Raises:
        BadImage, UnsupportedMedia, BadField: if it is no image.
    """
    native = False
    if isinstance(image, bytes):
        header = probe(image)
        width, height, native = header.width, header.height, header.format.native
    else:
        height, width = checked_pixels(image).shape[:2]
    shrink = min(1.0, useful_side / min(width, height))
    coded = PLAIN_BYTES_PER_PIXEL * width * height * shrink**2
    return min(coded, len(image)) if native else coded


def spare_ratio(plain_s: float, deadline_s: float | None, rtt_s: float = 0.0, answer_s: float = ANSWER_S) -> float:
    """How many times the plain image may be sent for what the link takes `plain_s` to carry once.

    In halves, and at least once; but in twentieths of an image where the link is too slow to carry it once and bring
    the answer back in time, of which `answer_s` and a round trip are not the image's, and `MIN_SEND_S` in any case is.
    """
    allowed_s = SPARE_S if deadline_s is None else min(SPARE_S, SPARE_SHARE * deadline_s)
    ratio = max(1.0, math.floor(2.0 * min(MAX_SPARE, allowed_s / max(plain_s, 1e-9))) / 2.0)
    if deadline_s is None:
        return ratio
    # Plans reckon in images of quality 85, `plain_s` is of a fine one.
    in_time = max(MIN_SEND_S, deadline_s - rtt_s - answer_s) / max(plain_s, 1e-9) * FINE_SIZE
    return ratio if in_time >= ratio else math.floor(20.0 * in_time) / 20.0


def repairs(left_s: float, repair_s: float) -> int:
    """How often a receiver can ask for what is missing of an image so that it comes in the time that is left.

    The first time it waits `repair_s` for what it asked for, and longer from round to round.
    """
    for done in range(MAX_NACKS):
        left_s -= repair_s * REPAIR_GROWTH**done
        if left_s < 0.0:
            return done
    return MAX_NACKS


class Planner:
    """Which plan the next image gets: more protection at once, less only after a while of clearly less loss."""

    def __init__(self) -> None:
        self._loss: _PeakHold | None = None
        self._burst: _PeakHold | None = None

    def plan(self, seen: LinkState, spare: float, now: float) -> Plan:
        """The plan for a link that is seen to lose so much at `now`."""
        return choose(self.held(seen, now), spare)

    def held(self, seen: LinkState, now: float) -> LinkState:
        """What the link is taken to lose; not known before it was seen once."""
        if self._loss is None or self._burst is None:
            if not seen.known:
                return seen
            self._loss, self._burst = _PeakHold(seen.loss), _PeakHold(seen.burst)
        elif seen.known:
            self._loss.see(seen.loss, now)
            self._burst.see(seen.burst, now)
        return LinkState(self._loss.value, self._burst.value, known=True)


class _PeakHold:
    """A number that rises at once and falls after `GOOD_S` of clearly less, to the most of that time."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._good_since = math.inf
        self._most = value

    def see(self, value: float, now: float) -> None:
        """Take in what is measured at `now`."""
        if LOWER_RATIO * value + LOWER_MIN >= self.value:
            self.value, self._good_since = max(self.value, value), math.inf
        elif self._good_since == math.inf:
            self._good_since, self._most = now, value
        else:
            self._most = max(self._most, value)
            if now - self._good_since >= GOOD_S:
                self.value, self._good_since = self._most, math.inf


async def prepare_off_loop(
    image: Image, plan: Plan, side: int, room: int, *, may_reframe: bool, lossless: bool
) -> Prepared:
    """`prepare`, on a thread if the image is large."""
    if isinstance(image, bytes):
        large = len(image) > INLINE_BYTES or probe(image).pixels > INLINE_PIXELS
    else:
        large = image.size > 3 * INLINE_PIXELS
    if large:
        return await asyncio.to_thread(prepare, image, plan, side, room, may_reframe=may_reframe, lossless=lossless)
    return prepare(image, plan, side, room, may_reframe=may_reframe, lossless=lossless)
