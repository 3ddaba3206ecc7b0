"""How an image is sent over the datagram transport: unchanged, cut along its own segments, or encoded anew.

    image, loss and rate of the link ─► Planner ─► plan ─► prepare ─► fragments

No sockets and no clock; `connection_manager` keeps the connection.
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
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.sender import BURSTY, PARITY_SPREAD_S
from hawkvision.transport.coding.fec import parity_count
from hawkvision.transport.coding.image_coding import Coded, Plan, encode, opaque, reframe
from hawkvision.transport.coding.rate_fec_control import (
    FINE,
    FINE_SIZE,
    SELDOM,
    choose,
    incomplete_probability,
)
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.protocol.frames import MAX_META, fragment_room
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.wire import MAX_NACKS, REPAIR_GROWTH

Image: TypeAlias = bytes | Pixels
"""An encoded image, or RGB pixels (height, width, 3)."""

SMALL_FRAGMENTS: Final = 3
"""Images of so few fragments travel unchanged: encoding them anew would save none and lose quality."""
OVERSAMPLING: Final = 2
"""A JPEG is decoded to at least this multiple of the useful side before areas are averaged, as `imaging` does."""
MAX_PIXELS: Final = 50_000_000
"""Of an image that is decoded here; the default limit of nodes."""
INLINE_PIXELS: Final = 400_000
INLINE_BYTES: Final = 100_000
"""Larger images are prepared on a thread, so that the event loop stays free."""

MAX_SPARE: Final = 3.0
"""The most that is sent if there is room, in multiples of the plain image's bytes."""
SPARE_S: Final = 0.01
SPARE_SHARE: Final = 0.1
"""The time for sending an image with parity: a tenth of the deadline, at most 10 ms."""
ANSWER_S: Final = 0.035
"""The part of a deadline, beside a round trip, for the peer's work (`RESERVE_S` of the datacenter) and the wait for
overdue fragments."""
MIN_SEND_S: Final = 0.008
"""The least of the link's time that an image gets, even if its response is then late."""
PLAIN_BYTES_PER_PIXEL: Final = 0.25
"""At quality 80, typically."""

GOOD_S: Final = 5.0
"""How long the loss must stay clearly lower before parity is reduced."""
LOWER_RATIO: Final = 1.25
LOWER_MIN: Final = 0.005
"""A clearly lower value is lower even when multiplied by the first and increased by the second."""


def prepare(
    image: Image, plan: Plan, useful_side: int, room: int, *, may_reframe: bool = True, lossless: bool = False
) -> tuple[Coded, bytes]:
    """An image as fragments, and the JPEG header that the peer must know (empty: none).

    Small images travel unchanged, unless not every node reads their format. JPEGs with restart segments are cut along
    them, unless the plan asks for a lower quality or the image is larger than useful. All others are decoded, scaled so
    that their shorter side has at most `useful_side` pixels, and encoded at the plan's quality.

    Args:
        image: encoded, or RGB pixels.
        plan: quality and parity.
        useful_side: the pixels of the shorter side that the peer can use.
        room: the bytes of a symbol.
        may_reframe: whether a JPEG's own header may be used.
        lossless: send an encoded image unchanged, however many fragments it takes.

    Raises:
        BadImage, UnsupportedMedia: if the image cannot be read.
        TooLarge: if it has more than `MAX_PIXELS`, or does not fit 255 fragments (`lossless`: unchanged).
        BadField: if pixels are not uint8 (height, width, 3).
    """
    if not isinstance(image, bytes):
        return encode(_shrunk(checked_pixels(image), useful_side), plan, room), b""
    header = probe(image)
    if lossless or (header.format.native and len(image) <= SMALL_FRAGMENTS * room):
        as_it_is = opaque(image, plan.parity, room)
        if as_it_is is not None:
            return as_it_is, b""
        if lossless:
            raise TooLarge(f"the image has {len(image)} bytes; at most {MAX_SYMBOLS * room} travel unchanged")
    if may_reframe and min(header.width, header.height) <= useful_side:
        cut = reframe(image, plan.parity, room)
        if cut is not None and (plan.quality >= FINE or cut[0].format.quality <= plan.quality):
            return cut
    return encode_anew(image, plan, useful_side, room), b""


def encode_anew(image: bytes, plan: Plan, useful_side: int, room: int) -> Coded:
    """An encoded image, made as small as is useful and then encoded at the plan's quality.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: as `prepare`.
    """
    pixels = decode(image, probe(image), max_pixels=MAX_PIXELS, min_side=OVERSAMPLING * useful_side)
    return encode(_shrunk(pixels, useful_side), plan, room)


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
    """The approximate bytes of an image without parity, at the best quality.

    Raises:
        BadImage, UnsupportedMedia, BadField: if it cannot be read.
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
    """The bytes that may be sent, in multiples of the plain image's.

    At least 1, in halves. If the link is too slow to carry the image once and return the response in time, less than 1,
    in twentieths. The image never gets less than `MIN_SEND_S`.

    Args:
        plain_s: the link's time for the plain image.
        deadline_s: the response's; None for none.
        rtt_s: a round trip.
        answer_s: the part of the deadline for the peer's work.
    """
    allowed_s = SPARE_S if deadline_s is None else min(SPARE_S, SPARE_SHARE * deadline_s)
    ratio = max(1.0, math.floor(2.0 * min(MAX_SPARE, allowed_s / max(plain_s, 1e-9))) / 2.0)
    if deadline_s is None:
        return ratio
    # Plans count in images of quality 85; `plain_s` is for a fine one.
    in_time = max(MIN_SEND_S, deadline_s - rtt_s - answer_s) / max(plain_s, 1e-9) * FINE_SIZE
    return ratio if in_time >= ratio else math.floor(20.0 * in_time) / 20.0


def repairs(left_s: float, repair_s: float) -> int:
    """How many rounds of repair fit the time that is left.

    The first takes `repair_s`, the next ones longer.
    """
    for done in range(MAX_NACKS):
        left_s -= repair_s * REPAIR_GROWTH**done
        if left_s < 0.0:
            return done
    return MAX_NACKS


class Planner:
    """Plans the next image: more protection at once, less only after a time of clearly less loss."""

    def __init__(self) -> None:
        self._loss: _PeakHold | None = None
        self._burst: _PeakHold | None = None

    def plan(self, measured: LossEstimate, spare: float, now: float) -> Plan:
        """The plan for a link with this loss at `now`."""
        return choose(self.held(measured, now), spare)

    def held(self, measured: LossEstimate, now: float) -> LossEstimate:
        """The loss that plans assume; unknown before the first measurement."""
        if self._loss is None or self._burst is None:
            if not measured.known:
                return measured
            self._loss, self._burst = _PeakHold(measured.ratio), _PeakHold(measured.burst)
        elif measured.known:
            self._loss.update(measured.ratio, now)
            self._burst.update(measured.burst, now)
        return LossEstimate(self._loss.value, self._burst.value, known=True)


class _PeakHold:
    """A value that rises at once, and falls after `GOOD_S` of clearly lower values, to the highest of them."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._good_since = math.inf
        self._most = value

    def update(self, value: float, now: float) -> None:
        """Take in a value measured at `now`."""
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
) -> tuple[Coded, bytes]:
    """`prepare`, on a thread if the image is large."""
    if isinstance(image, bytes):
        large = len(image) > INLINE_BYTES or probe(image).pixels > INLINE_PIXELS
    else:
        large = image.size > 3 * INLINE_PIXELS
    if large:
        return await asyncio.to_thread(prepare, image, plan, side, room, may_reframe=may_reframe, lossless=lossless)
    return prepare(image, plan, side, room, may_reframe=may_reframe, lossless=lossless)


LOSSLESS_SHARE: Final = 0.25
LOSSLESS_MAX_S: Final = 0.25
"""The most of the link's time that an unchanged image with its parity may take: a share of the deadline, and seconds.
It has two to three times the bytes of quality 80, and other images wait behind it. But the full accuracy is guaranteed
only for unchanged images, and only for them may an intermediate stage answer."""
PARITY_STEPS: Final = (0.1, 0.2, 0.3, 0.5)
"""The parity of an unchanged image: the first that suffices. If none does and there is time for repairs, the first;
after a burst of loss, plans have up to three times an image's bytes."""


@dataclass(frozen=True, slots=True)
class LosslessPlanner:
    """Finds the parity of unchanged images on one connection."""

    connection: ClientConnection
    answer_s: float
    """The part of a deadline that the peer's work takes."""

    def parity(self, plan: Plan, size: int, deadline_s: float, may_miss: float) -> float | None:
        """The parity with which an image of `size` bytes misses the deadline at most `SELDOM`, else `may_miss`.

        It reckons with the present loss, where a plan remembers earlier loss: if the attempt fails, the image can still
        be encoded anew.

        Returns:
            None if the image would take too long or does not fit, and while the loss is unknown.
        """
        seldom = self._parity(SELDOM, plan, size, deadline_s)
        if seldom is not None or may_miss <= SELDOM:
            return seldom
        return self._parity(may_miss, plan, size, deadline_s)

    def _parity(self, may_miss: float, plan: Plan, size: int, deadline_s: float) -> float | None:
        """One of `PARITY_STEPS`, or the plan's own; losses of different rounds count as independent."""
        link, rtt_s = self.connection.loss(), self.connection.rtt_s()
        if not link.known or rtt_s is None:
            return None
        k = -(-size // fragment_room(bytes(MAX_META)))
        left_s = deadline_s - rtt_s - self.answer_s
        max_s = min(left_s, LOSSLESS_SHARE * deadline_s, LOSSLESS_MAX_S)

        def suffices(parity: float) -> bool:
            incomplete = incomplete_probability(k, k + parity_count(k, parity), link)
            return self._transmission_s(k, size, parity) <= max_s and incomplete <= may_miss

        enough = next(filter(suffices, PARITY_STEPS), None)
        if enough is not None:
            return enough
        little = plan.parity if k <= SMALL_FRAGMENTS else PARITY_STEPS[0]
        transmission_s = self._transmission_s(k, size, little)
        if transmission_s <= max_s:
            spread_s = PARITY_SPREAD_S if link.burst > BURSTY else 0.0
            rounds = repairs(left_s - transmission_s - spread_s, self.connection.repair_s())
            if rounds and k * link.ratio ** (1 + rounds) <= may_miss:
                return little
        return plan.parity if not plan.base and plan.quality >= FINE and suffices(plan.parity) else None

    def _transmission_s(self, k: int, size: int, parity: float) -> float:
        if math.ceil(k * (1.0 + parity)) > MAX_SYMBOLS:
            return math.inf
        return self.connection.spare_s(math.ceil(size * (1.0 + parity)) + self.connection.queued_bytes)
