"""One peer over the lossy transport, for callers who have a picture and want its answer.

    picture ─► probe ─► connection (made on first use, made anew when it ended) ─► plan ─► prepare ─► ask ─► answer
                             ▲                                                                          │
                             └────────────── ended, or silent for `SILENCE_S`: asked again ─────────────┘

`prepare` and `Planner` decide and know no sockets; `LossyLink` keeps the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import cv2
import numpy as np

from hawkvision.errors import BadField, HawkVisionError, TooLarge
from hawkvision.hop import LossyOffer
from hawkvision.transport.coding import Coded, Plan, encode, opaque, reframe
from hawkvision.transport.erasure import MAX_SYMBOLS
from hawkvision.transport.frames import MAX_META, fragment_room
from hawkvision.transport.receiver import Status
from hawkvision.transport.redundancy import QUALITIES, SIZES, LinkState, choose
from hawkvision.transport.udp import ConnectionLost, LossyClient, Route
from hawkvision.types import Pixels
from hawkvision.vision.image import decode, probe

Picture: TypeAlias = bytes | Pixels
"""An encoded picture, or RGB pixels (height, width, 3)."""
Discover: TypeAlias = Callable[[], Awaitable[LossyOffer]]
"""Asks the peer, some other way, where it listens. `ConnectionLost` lets the link try again, other errors do not."""

SMALL_FRAGMENTS: Final = 3
"""Pictures of so few fragments go as they are: coding them anew would not save one, and lose quality."""
OVERSAMPLING: Final = 2
"""How much larger than useful a JPEG is at least decoded before areas are averaged, as `vision.image` does."""
MAX_PIXELS: Final = 50_000_000
"""Of a picture that is decoded here; what nodes accept unless told otherwise."""
INLINE_PIXELS: Final = 400_000
INLINE_BYTES: Final = 100_000
"""Larger pictures are prepared on a thread. Measured on two shared cores: a JPEG of 256x256 takes 0.7 ms, of 640x480
3 ms, of 1280x720 6.5 ms, of 12 megapixels 19 ms, during which the loop would stand still; handing over 0.1 to 0.3."""

MOST_SPARE: Final = 3.0
"""Times the plain picture's bytes that are sent at most because there is room."""
SPARE_S: Final = 0.01
SPARE_SHARE: Final = 0.1
"""The time that sending a picture may take where loss asks for it: a tenth of the deadline, 10 ms at most."""
ANSWER_S: Final = 0.035
"""Of the deadline, beside a round trip, for the other end's work (`RESERVE_S` of the datacenter) and for waiting for
fragments that are overdue."""
PLAIN_BYTES_PER_PIXEL: Final = 0.25
"""At quality 80: 17 KB of 256x256, measured on the pictures of the study."""

CALM_S: Final = 5.0
"""How long the loss must have stayed clearly lower before parity is taken back."""
CLEARLY: Final = 1.25
CLEARLY_LEAST: Final = 0.005
"""Clearly lower is what would still be lower if it were a quarter and half a percent higher."""

CONNECT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Between attempts to connect, doubling."""
MAX_CONNECTS: Final = 3
"""Attempts that one question waits for."""
MAX_ASKS: Final = 3
"""Connections that one question is asked on, one after the other."""
SILENCE_S: Final = 1.0
"""Of the peer while datagrams are unanswered, before another connection is tried beside this one, which itself gives up
only later: a radio link may be back any moment."""
LOOK_S: Final = 0.25
"""Between looks for silence."""
LATE_S: Final = 0.5
"""How long after its deadline an answer is still waited for."""
MAX_HEADERS: Final = 64
"""JPEG headers registered on one connection; a camera has one, a collection of photographs any number."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A picture as it will be sent, and the JPEG header that the peer must know (empty: none)."""

    coded: Coded
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class LinkView:
    """What is known of a link now."""

    connected: bool
    loss: float
    burst: float
    known: bool
    """Whether `loss` and `burst` were measured."""
    rtt_s: float | None
    plan: Plan | None
    """Of the last picture."""
    outcomes: int = 0
    """Datagrams that `loss` rests on."""
    silent_s: float = 0.0
    """For how long the peer has left datagrams unanswered."""


def prepare(
    picture: Picture, plan: Plan, useful_side: int, room: int, *, may_reframe: bool = True, exact: bool = False
) -> Prepared:
    """A picture as fragments.

    Small ones go as they are; JPEGs with restart segments are cut along them unless the plan asks for a lower quality
    or the picture is larger than useful; all others are decoded, shrunk so that their shorter side is `useful_side`
    pixels at most, and coded at the plan's quality.

    Args:
        picture: encoded, or RGB pixels.
        plan: quality and parity.
        useful_side: pixels of the shorter side beyond which the peer gains nothing.
        room: bytes of a symbol.
        may_reframe: whether a JPEG's own header may be used.
        exact: send an encoded picture's very bytes, whatever the plan and however many fragments that takes.

    Raises:
        BadImage, UnsupportedMedia: if the picture cannot be read.
        TooLarge: if it has more than `MAX_PIXELS`, or does not fit 255 fragments even so (`exact`: as it is).
        BadField: if pixels are not uint8 (height, width, 3).
    """
    if not isinstance(picture, bytes):
        return Prepared(encode(_shrunk(checked_pixels(picture), useful_side), plan, room))
    header = probe(picture)
    if exact or len(picture) <= SMALL_FRAGMENTS * room:
        as_it_is = opaque(picture, plan.parity, room)
        if as_it_is is not None:
            return Prepared(as_it_is)
        if exact:
            raise TooLarge(f"the picture has {len(picture)} bytes; at most {MAX_SYMBOLS * room} go as they are")
    if may_reframe and min(header.width, header.height) <= useful_side:
        cut = reframe(picture, plan.parity, room)
        if cut is not None and (plan.quality >= QUALITIES[0] or cut[0].format.quality <= plan.quality):
            return Prepared(*cut)
    pixels = decode(picture, header, max_pixels=MAX_PIXELS, min_side=OVERSAMPLING * useful_side)
    return Prepared(encode(_shrunk(pixels, useful_side), plan, room))


def checked_pixels(pixels: Pixels) -> Pixels:
    """The same pixels.

    Raises:
        BadField: if they are not uint8 (height, width, 3).
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise BadField(f"picture: expected uint8 RGB (height, width, 3), got {pixels.dtype} {pixels.shape}")
    return pixels


def _shrunk(pixels: Pixels, useful_side: int) -> Pixels:
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    if shorter <= useful_side:
        return np.ascontiguousarray(pixels)
    size = (round(width * useful_side / shorter), round(height * useful_side / shorter))
    small: Pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return small


def plain_bytes(picture: Picture, useful_side: int) -> float:
    """About how many bytes a picture takes without parity, at the best quality.

    Raises:
        BadImage, UnsupportedMedia, BadField: if it is no picture.
    """
    if isinstance(picture, bytes):
        header = probe(picture)
        width, height = header.width, header.height
    else:
        height, width = checked_pixels(picture).shape[:2]
    shrink = min(1.0, useful_side / min(width, height))
    coded = PLAIN_BYTES_PER_PIXEL * width * height * shrink**2
    return min(coded, len(picture)) if isinstance(picture, bytes) else coded


def spare_ratio(plain_s: float, deadline_s: float | None, rtt_s: float = 0.0) -> float:
    """How many times the plain picture may be sent for what the link takes `plain_s` to carry once.

    In halves, and at least once; but in twentieths of a picture where the link is too slow to carry it once and bring
    the answer back in time.
    """
    allowed_s = SPARE_S if deadline_s is None else min(SPARE_S, SPARE_SHARE * deadline_s)
    ratio = max(1.0, math.floor(2.0 * min(MOST_SPARE, allowed_s / max(plain_s, 1e-9))) / 2.0)
    if deadline_s is None:
        return ratio
    # Plans reckon in pictures of quality 85, `plain_s` is of the best that is sent.
    in_time = max(0.0, deadline_s - rtt_s - ANSWER_S) / max(plain_s, 1e-9) * SIZES[0]
    return ratio if in_time >= ratio else math.floor(20.0 * in_time) / 20.0


class Planner:
    """Which plan the next picture gets: more protection at once, less only after a while of clearly less loss."""

    def __init__(self) -> None:
        self._loss: _Held | None = None
        self._burst: _Held | None = None

    def plan(self, seen: LinkState, spare: float, now: float) -> Plan:
        """The plan for a link that is seen to lose so much at `now`."""
        return choose(self.held(seen, now), spare)

    def held(self, seen: LinkState, now: float) -> LinkState:
        """What the link is taken to lose; not known before it was seen once."""
        if self._loss is None or self._burst is None:
            if not seen.known:
                return seen
            self._loss, self._burst = _Held(seen.loss), _Held(seen.burst)
        elif seen.known:
            self._loss.see(seen.loss, now)
            self._burst.see(seen.burst, now)
        return LinkState(self._loss.value, self._burst.value, known=True)


class _Held:
    """A number that rises at once and falls after `CALM_S` of clearly less, to the most of that time."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._calm_since = math.inf
        self._most = value

    def see(self, value: float, now: float) -> None:
        """Take in what is measured at `now`."""
        if CLEARLY * value + CLEARLY_LEAST >= self.value:
            self.value, self._calm_since = max(self.value, value), math.inf
        elif self._calm_since == math.inf:
            self._calm_since, self._most = now, value
        else:
            self._most = max(self._most, value)
            if now - self._calm_since >= CALM_S:
                self.value, self._calm_since = self._most, math.inf


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection, and the JPEG headers that were registered on it."""

    client: LossyClient
    headers: set[bytes] = field(default_factory=set)


class LossyLink:
    """A peer and the connection to it. Used on one event loop; close it."""

    def __init__(self, host: str, discover: Discover, *, local: Sequence[str] = (), api_key: str | None = None) -> None:
        """Prepare a link; nothing is sent yet.

        Args:
            host: of the peer.
            discover: says port, certificate and name; asked before the first connection, and again after one failed.
            local: this machine's addresses to send from, each a path of its own; empty lets the system choose one.
            api_key: of the peer, if it asks for one.
        """
        self._routes = [Route(address, host) for address in local] or [Route(None, host)]
        self._host = host
        self._discover = discover
        self._api_key = api_key
        self._planner = Planner()
        self._plan: Plan | None = None
        self._offer: LossyOffer | None = None
        self._sent_before = 0
        self._current: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._closed = False

    async def ask(
        self,
        template: bytes,
        picture: Picture,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
        exact: bool = False,
    ) -> tuple[Status, bytes]:
        """Send a picture and wait for its answer.

        Args:
            template: the request; equal ones are sent once per connection.
            picture: what to send.
            meta: what belongs to this picture alone, at most 64 bytes.
            deadline_s: of the answer, counted from when there is a connection: preparing the picture takes of it.
            timeout_s: how long to wait at most, for everything.
            exact: see `prepare`.

        Raises:
            RequestError: if the picture is none, before it is sent; `Unauthorized` for a wrong key.
            TimeoutError: if no answer came in time; `LATE_S` after the deadline is no time any more.
            ConnectionLost: if there was no connection.
        """
        if isinstance(picture, bytes):
            probe(picture)  # refused before anything is sent
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        deadline: float | None = None
        for attempt in range(MAX_ASKS):
            connection = await self._connected(until)
            if deadline_s is not None and deadline is None:
                deadline = loop.time() + deadline_s
                until = min(until, deadline + LATE_S)
            left_s = None if deadline is None else max(0.0, deadline - loop.time())
            coded = await self._prepared(connection, picture, meta, left_s, exact=exact)
            now = loop.time()
            asking = connection.client.ask(
                template,
                coded,
                meta=meta,
                deadline_s=None if deadline is None else max(0.0, deadline - now),
                timeout_s=max(0.0, until - now),
            )
            try:
                return await self._watched(connection, asyncio.ensure_future(asking))
            except ConnectionLost:
                if attempt + 1 == MAX_ASKS or self._closed:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def probe(self, timeout_s: float) -> None:
        """Connect if there is no connection, and send a small datagram: `state` stays true while no pictures go.

        A peer that has been silent for long is connected to anew, in the background.

        Raises:
            ConnectionLost: if there was no connection.
            HawkVisionError: for what trying again does not mend.
        """
        connection = await self._connected(asyncio.get_running_loop().time() + timeout_s)
        if connection.client.silent_s() > SILENCE_S:
            self._begin_connecting()
        connection.client.probe()

    def state(self) -> LinkView:
        """What is known of the link now."""
        connection = self._alive()
        if connection is None:
            return LinkView(False, 0.0, 1.0, False, None, self._plan)
        client, loss = connection.client, connection.client.loss()
        return LinkView(
            True, loss.ratio, loss.burst, loss.known, client.rtt_s(), self._plan, loss.outcomes, client.silent_s()
        )

    def whole_s(self, picture: bytes, deadline_s: float | None = None) -> float:
        """How long the link takes to carry a picture's very bytes, with the parity that it would get now.

        Infinite where it would be given a base or less than the best quality, for then holes must be reckoned with, and
        where it does not fit.

        Raises:
            BadImage, UnsupportedMedia: if it is no picture.
        """
        connection = self._alive()
        if connection is None:
            return math.inf
        plan = self._planned(connection, picture, deadline_s)
        protected = math.ceil(len(picture) * (1.0 + plan.parity))
        fits = protected <= MAX_SYMBOLS * fragment_room(bytes(MAX_META))
        quick = fits and not plan.base and plan.quality >= QUALITIES[0]
        return connection.client.spare_s(protected) if quick else math.inf

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far, over all connections."""
        return self._sent_before + (0 if self._current is None else self._current.client.sent_bytes)

    async def close(self) -> None:
        """End the connection; whoever still waits is told so. Closing twice does no harm."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._current is not None:
            await self._current.client.close()

    # ----------------------------------------------------------------------------------------- pictures

    async def _prepared(
        self, connection: _Connection, picture: Picture, meta: bytes, deadline_s: float | None, *, exact: bool
    ) -> Coded:
        client = connection.client
        plan = self._plan = self._planned(connection, picture, deadline_s)
        room, side = fragment_room(meta), client.useful_side
        prepared = await _off_loop(picture, plan, side, room, may_reframe=True, exact=exact)
        if not prepared.header:
            return prepared.coded
        number = _registered(connection, prepared.header)
        if number is None:
            return (await _off_loop(picture, plan, side, room, may_reframe=False, exact=exact)).coded
        return replace(prepared.coded, format=replace(prepared.coded.format, tables=number))

    def _planned(self, connection: _Connection, picture: Picture, deadline_s: float | None) -> Plan:
        """What a picture would get now."""
        client = connection.client
        estimate = client.loss()
        seen = LinkState(estimate.ratio, estimate.burst, estimate.known)
        plain_s = client.spare_s(round(plain_bytes(picture, client.useful_side)))
        spare = spare_ratio(plain_s, deadline_s, client.rtt_s() or 0.0)
        return self._planner.plan(seen, spare, asyncio.get_running_loop().time())

    # ----------------------------------------------------------------------------------------- connection

    def _alive(self) -> _Connection | None:
        return self._current if self._current is not None and self._current.client.lost is None else None

    async def _connected(self, until: float) -> _Connection:
        """The connection, made if there is none.

        Raises:
            ConnectionLost: if `MAX_CONNECTS` attempts failed, or time is up.
            HawkVisionError: for what trying again does not mend.
        """
        loop = asyncio.get_running_loop()
        failed = "nothing was tried"
        for _ in range(MAX_CONNECTS):
            connection = self._alive()
            if connection is not None:
                return connection
            connecting = self._begin_connecting()
            await asyncio.wait({connecting}, timeout=max(0.0, until - loop.time()))
            if not connecting.done():
                raise ConnectionLost(f"no connection to {self._host} came about in time")
            if connecting.cancelled():
                raise ConnectionLost("the link was closed at this end")
            error = connecting.exception()
            if error is not None and not isinstance(error, ConnectionLost):
                raise error
            failed = str(error)
        connection = self._alive()
        if connection is None:
            raise ConnectionLost(failed)
        return connection

    def _begin_connecting(self) -> asyncio.Task[None]:
        """The one attempt that all questions wait for."""
        if self._closed:
            raise ConnectionLost("the link was closed at this end")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_heard)
        return self._connecting

    async def _connect(self) -> None:
        """Connect, and put the new connection in the place of the old one."""
        await asyncio.sleep(self._pause_s)
        try:
            offer = self._offer or await self._discover()
            client = await LossyClient.connect(
                offer.port,
                offer.certificate,
                offer.name,
                routes=self._routes,
                api_key=self._api_key,
                timeout_s=CONNECT_S,
            )
        except HawkVisionError:
            self._offer = None  # the peer may have been started anew, elsewhere or with another certificate
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            raise
        self._pause_s, self._offer = 0.0, offer
        old, self._current = self._current, _Connection(client)
        if old is not None:
            self._sent_before += old.client.sent_bytes
            await old.client.close()

    async def _watched(
        self, connection: _Connection, asking: asyncio.Future[tuple[Status, bytes]]
    ) -> tuple[Status, bytes]:
        """The answer; meanwhile another connection is tried if the peer falls silent on this one."""
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=LOOK_S)
                if done:
                    return asking.result()
                if connection is self._current and connection.client.silent_s() > SILENCE_S:
                    self._begin_connecting()
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, HawkVisionError, TimeoutError):
                    await asking


def _registered(connection: _Connection, header: bytes) -> int | None:
    """The number by which the peer knows a JPEG header, if it was told of it before; else it is told now.

    The first picture with a header is coded anew instead of waiting for a stream that a lossy link delays.
    """
    if header in connection.headers:
        return connection.client.tables_number(header)
    if len(connection.headers) < MAX_HEADERS:
        connection.headers.add(header)
        connection.client.tables_number(header)
    return None


async def _off_loop(picture: Picture, plan: Plan, side: int, room: int, *, may_reframe: bool, exact: bool) -> Prepared:
    """`prepare`, on a thread if the picture is large."""
    if isinstance(picture, bytes):
        large = len(picture) > INLINE_BYTES or probe(picture).pixels > INLINE_PIXELS
    else:
        large = picture.size > 3 * INLINE_PIXELS
    if large:
        return await asyncio.to_thread(prepare, picture, plan, side, room, may_reframe=may_reframe, exact=exact)
    return prepare(picture, plan, side, room, may_reframe=may_reframe, exact=exact)


def _heard(task: asyncio.Task[None]) -> None:
    """Nobody may be waiting for an attempt any more; its error is not to be logged as never retrieved."""
    if not task.cancelled():
        task.exception()
