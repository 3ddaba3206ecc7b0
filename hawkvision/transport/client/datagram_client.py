"""One peer over the datagram transport: send an image, get its response.

    image ─► connection ─► plan ─► prepare ─► send ─┬──────────────────────────────────────────────► response
                 ▲                                  ├─ not received, late response wanted ─► small ─► response
                 └──────── reconnect ◄── connection lost

`encoding_plan` and `lossless` decide what is sent, `connection_manager` keeps the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from hawkvision.core.errors import DeadlineMissed, HawkVisionError
from hawkvision.imaging.preprocessing import probe
from hawkvision.transport.client.connection import ClientConnection, Exhausted
from hawkvision.transport.client.connection_manager import Connection, ConnectionManager, Discover
from hawkvision.transport.client.encoding_plan import (
    ANSWER_S,
    Image,
    LosslessPlanner,
    Planner,
    plain_bytes,
    prepare_off_loop,
    spare_ratio,
)
from hawkvision.transport.client.pending_responses import ConnectionLost, ignore_interim
from hawkvision.transport.client.sender import PARITY_SPREAD_S
from hawkvision.transport.coding.image_coding import Coded, Plan
from hawkvision.transport.coding.rate_fec_control import SELDOM
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.wire import Status

StatusAndBody: TypeAlias = tuple[Status, bytes]

NOT_RECEIVED: Final = (Status.EXPIRED, Status.NO_TEMPLATE)
"""The peer did not get the image or its request in time; the same image may succeed next time."""


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The arguments of `DatagramLink.ask`; times are the loop's."""

    template: bytes
    image: Image
    meta: bytes
    lossless: bool
    deadline: float | None
    until: float
    on_interim: Callable[[bytes], None]


def first_response(done: Iterable[asyncio.Future[StatusAndBody]]) -> StatusAndBody | None:
    """A response among ended tasks other than `NOT_RECEIVED`, preferably `OK`; None if there is none.

    Raises:
        HawkVisionError, TimeoutError: a task's, if none has such a response.
    """
    failed = [each for each in done if each.exception() is not None]
    answers = [each.result() for each in done if each.exception() is None]
    for status, body in sorted(answers, key=lambda answer: answer[0] is not Status.OK):
        if status not in NOT_RECEIVED:
            return status, body
    return failed[0].result() if failed else None


MAX_ASKS: Final = 3
"""Connections on which one image is sent, one after the other."""
SILENCE_CHECK_S: Final = 0.25
"""Between checks for silence."""
LATE_S: Final = 0.5
"""The wait for a response after its deadline, unless late responses are wanted."""
OVERDUE_S: Final = 0.03
MAX_OVERDUE_S: Final = 0.25
"""A response is overdue this long after a round trip, at most the second, but not before its deadline."""
RECHECK_S: Final = 0.02
"""Between checks whether a silent link is heard again."""
MAX_LATE_RESENDS: Final = 3
"""Small images sent for one whose late response is wanted."""
MAX_LATE: Final = 24
"""Callers that wait for late responses; further ones get `DeadlineMissed`. After an outage, more would delay the images
that are not late."""
SMALL_RATIO: Final = 0.35
"""The bytes sent into a link that may have become slow, as a share of a plain image's: six fragments, not eighteen."""
MAX_DOUBLED: Final = 2
"""Images in progress up to which a small one is sent twice; the second half delays other images."""
LOSSLESS_PAUSE_S: Final = 2.0
"""After an unchanged image did not arrive in time, images are encoded anew for this long."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """The present state of a link."""

    connected: bool
    loss: float
    burst: float
    known: bool
    """Whether `loss` and `burst` were measured."""
    rtt_s: float | None
    plan: Plan | None
    """The last image's."""
    outcomes: int = 0
    """The datagrams that `loss` is measured on."""
    silent_s: float = 0.0
    """How long the peer has left datagrams unanswered."""
    least_rtt_s: float | None = None
    """Without queues, such as an image makes that travels over TCP."""


class DatagramLink:
    """A peer and the connection to it. Belongs to one event loop; close it."""

    def __init__(
        self,
        host: str,
        discover: Discover,
        *,
        local: Sequence[str] = (),
        api_key: str | None = None,
        may_miss: float = SELDOM,
        answer_s: float = ANSWER_S,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        """Prepare a link; nothing is sent yet.

        Args:
            host: the peer's.
            discover: tells port, certificate and name; called before the first connection and after a failed one.
            local: this machine's addresses to send from, each a path of its own; empty lets the system choose one.
            api_key: the peer's, if it asks for one.
            may_miss: the share of unchanged images that may arrive too late or not at all if no parity makes it
                `SELDOM`.
            answer_s: the part of a deadline for the peer's work and the wait for overdue fragments.
            congestion: makes each path's congestion controller.
        """
        self._connections = ConnectionManager(host, discover, local, api_key, congestion)
        self._may_miss = may_miss
        self._answer_s = answer_s
        self._planner = Planner()
        self._plan: Plan | None = None
        self._lossless_from = -math.inf
        self._late = 0
        """Callers that wait for a late response."""
        self._in_progress = 0
        """Images without a response."""

    async def ask(
        self,
        template: bytes,
        image: Image,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
        lossless: bool = False,
        on_interim: Callable[[bytes], None] = ignore_interim,
        accept_late: bool = False,
    ) -> StatusAndBody:
        """Send an image and wait for its response.

        Args:
            template: the request; equal ones are sent once per connection.
            image: what to send.
            meta: what belongs to this image alone, at most 64 bytes.
            deadline_s: the response's, from when there is a connection; preparing the image counts.
            timeout_s: the longest wait in all.
            lossless: see `prepare`.
            on_interim: takes what the peer sends before its response.
            accept_late: whether a response after the deadline is wanted, if only to a small image.

        Raises:
            RequestError: if the image cannot be read, before it is sent; `Unauthorized` for a wrong key.
            BadField: if the template is too long.
            TimeoutError: if no response came in time, or within `LATE_S` after the deadline without `accept_late`.
            DeadlineMissed: if too many callers wait for late responses.
            ConnectionLost: if there was no connection.
        """
        if isinstance(image, bytes):
            probe(image)  # refuses it before anything is sent
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        deadline: float | None = None
        for attempt in range(MAX_ASKS):
            connection = await self._connections.get(until)
            if deadline_s is not None and deadline is None:
                deadline = loop.time() + deadline_s
                until = until if accept_late else min(until, deadline + LATE_S)
            on_this = ignore_interim if attempt else on_interim  # a second attempt would repeat interims
            request = ImageRequest(template, image, meta, lossless, deadline, until, on_this)
            if accept_late and deadline is not None:
                sending = self._ask_accepting_late(connection, request)
            else:
                sending = self._send_image(connection, request)
            try:
                return await self._reconnecting_if_silent(connection, asyncio.ensure_future(sending))
            except ConnectionLost as error:
                if attempt + 1 == MAX_ASKS or self._connections.closed:
                    raise
                if isinstance(error, Exhausted):
                    self._connections.retire(connection)
        raise AssertionError("the last attempt returns or raises")

    def fits_lossless(self, image: Image, deadline_s: float, *, strict: bool = False) -> bool:
        """Whether an image may travel unchanged (`lossless`): the link is quick, and parity or repairs mend its loss.

        An unchanged image arrives whole or not at all. `strict` allows only `SELDOM` that it does not.

        Raises:
            BadImage, UnsupportedMedia: if the image cannot be read.
        """
        connection = self._connections.alive
        if connection is None or not isinstance(image, bytes):
            return False
        if asyncio.get_running_loop().time() < self._lossless_from or connection.client.behind:
            return False
        plan = self._planned(connection, image, deadline_s)
        may_miss = SELDOM if strict else self._may_miss
        return self._lossless(connection).parity(plan, len(image), deadline_s, may_miss) is not None

    async def probe(self, timeout_s: float) -> None:
        """Connect if there is no connection, and send a small datagram, which keeps `state` up to date.

        If the peer has been silent for long, a new connection is tried in the background.

        Raises:
            ConnectionLost: if there was no connection.
            HawkVisionError: for what a retry does not mend.
        """
        connection = await self._connections.get(asyncio.get_running_loop().time() + timeout_s)
        self._connections.begin_anew_if_gone(connection)
        connection.client.probe()

    def state(self) -> LinkView:
        """The present state of the link."""
        connection = self._connections.alive
        if connection is None:
            return LinkView(False, 0.0, 1.0, False, None, self._plan)
        client, loss = connection.client, connection.client.loss()
        return LinkView(
            True,
            loss.ratio,
            loss.burst,
            loss.known,
            client.rtt_s(),
            self._plan,
            loss.outcomes,
            client.silent_s(),
            client.least_rtt_s(),
        )

    @property
    def sent_bytes(self) -> int:
        """The bytes of datagrams sent, over all connections."""
        return self._connections.sent_bytes

    async def close(self) -> None:
        """End the connection; pending calls of `ask` raise `ConnectionLost`. The second call does nothing."""
        await self._connections.close()

    # ----------------------------------------------------------------------------------------- images

    def _lossless(self, connection: Connection) -> LosslessPlanner:
        return LosslessPlanner(connection.client, self._answer_s)

    async def _prepared(
        self, connection: Connection, request: ImageRequest, deadline_s: float | None, *, lossless: bool
    ) -> Coded:
        client, image = connection.client, request.image
        plan = self._planned(connection, image, deadline_s)
        if lossless and isinstance(image, bytes) and deadline_s is not None:
            parity = self._lossless(connection).parity(plan, len(image), deadline_s, self._may_miss)
            plan = plan if parity is None else replace(plan, parity=parity)
        self._plan = plan
        room, side = fragment_room(request.meta), client.useful_side
        coded, header = await prepare_off_loop(image, plan, side, room, may_reframe=True, lossless=lossless)
        if not header:
            return coded
        number = connection.registered(header)
        if number is None:
            return (await prepare_off_loop(image, plan, side, room, may_reframe=False, lossless=lossless))[0]
        return replace(coded, format=replace(coded.format, tables=number))

    def _planned(self, connection: Connection, image: Image, deadline_s: float | None) -> Plan:
        """The plan for an image now; a small one if its deadline is past, or if the link may have become slow."""
        client = connection.client
        plain_s = client.spare_s(round(plain_bytes(image, client.useful_side)))
        spare = spare_ratio(plain_s, deadline_s, client.rtt_s() or 0.0, self._answer_s)
        if deadline_s == 0.0 or (deadline_s is not None and client.behind):
            spare = min(spare, SMALL_RATIO)
        plan = self._planner.plan(client.loss(), spare, asyncio.get_running_loop().time())
        quick = SMALL_RATIO * plain_s <= PARITY_SPREAD_S and not _is_silent(client)
        if spare <= SMALL_RATIO and quick and self._in_progress <= MAX_DOUBLED:
            # A burst of loss can take so few fragments all at once, but not twice as many, spread over time.
            return replace(plan, parity=max(plan.parity, 1.0))
        return plan

    async def _send_image(self, connection: Connection, request: ImageRequest, *, small: bool = False) -> StatusAndBody:
        """The response to an image as planned now; `small` sends a small image, whose response may be late."""
        loop, deadline = asyncio.get_running_loop(), request.deadline
        lossless = request.lossless and not small
        left_s = None if deadline is None else 0.0 if small else max(0.0, deadline - loop.time())
        self._in_progress += 1
        try:
            coded = await self._prepared(connection, request, left_s, lossless=lossless)
            now = loop.time()
            status, body = await connection.client.ask(
                request.template,
                coded,
                meta=request.meta,
                deadline_s=None if deadline is None else max(0.0, deadline - now),
                timeout_s=max(0.0, request.until - now),
                on_interim=request.on_interim,
                late_s=request.until - deadline if small and deadline is not None else 0.0,
            )
        finally:
            self._in_progress -= 1
        if lossless and status is Status.EXPIRED:
            self._lossless_from = loop.time() + LOSSLESS_PAUSE_S
        return status, body

    async def _ask_accepting_late(self, connection: Connection, request: ImageRequest) -> StatusAndBody:
        """The first proper response: to the image, or to a small one that is sent if the image did not arrive.

        A small one is sent if the peer reports `NOT_RECEIVED`, or if the response is overdue while reports on other
        datagrams are not. If those are overdue too, the link has become slow and all that is under way may arrive.
        """
        assert request.deadline is not None
        loop, client = asyncio.get_running_loop(), connection.client
        overdue_s = min(MAX_OVERDUE_S, (client.rtt_s() or 0.0) + OVERDUE_S)
        overdue_at = max(request.deadline, loop.time() + overdue_s)
        tasks = [loop.create_task(self._send_image(connection, request))]
        waiting, late = set(tasks), False
        try:
            while True:
                left_s = max(RECHECK_S, overdue_at - loop.time()) if len(tasks) == 1 else None
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                found = first_response(done)
                if found is not None:
                    return found
                if done and not waiting and len(tasks) > MAX_LATE_RESENDS:
                    return done.pop().result()
                if not late:
                    if self._late >= MAX_LATE:
                        raise DeadlineMissed(
                            f"no response in time, and {MAX_LATE} callers already wait for late responses"
                        )
                    self._late, late = self._late + 1, True
                if len(tasks) <= MAX_LATE_RESENDS and (done or not (_is_silent(client) or client.behind)):
                    tasks.append(loop.create_task(self._send_image(connection, request, small=True)))
                    waiting.add(tasks[-1])
        finally:
            self._late -= late
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reconnecting_if_silent(
        self, connection: Connection, sending: asyncio.Future[StatusAndBody]
    ) -> StatusAndBody:
        """The response; a new connection is tried meanwhile if the peer falls silent on this one."""
        try:
            while True:
                done, _ = await asyncio.wait({sending}, timeout=SILENCE_CHECK_S)
                if done:
                    return sending.result()
                self._connections.begin_anew_if_gone(connection)
        finally:
            if not sending.done():
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, HawkVisionError, TimeoutError):
                    await sending


def _is_silent(client: ClientConnection) -> bool:
    """Whether a report is overdue: what the link holds may still arrive, and more would wait behind it."""
    return client.silent_s() > (client.rtt_s() or 0.0) + OVERDUE_S
