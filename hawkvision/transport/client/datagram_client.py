"""One peer over the datagram transport, for callers who have an image and want its answer.

    image ─► probe ─► connection ─► plan ─► prepare ─► asked ─┬─────────────────────────────────────────► answer
                            ▲                                   ├─ came to nothing, wanted late ─► small ───► answer
                            └──── anew ◄── connection lost ◄────┘

What is sent, `encoding_plan` decides; the connection, `connection_manager` keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hawkvision.core.errors import DeadlineMissed, HawkVisionError
from hawkvision.imaging.preprocessing import probe
from hawkvision.transport.client.connection import DatagramClient, Exhausted
from hawkvision.transport.client.connection_manager import Connection, Connections, Discover
from hawkvision.transport.client.encoding_plan import (
    ANSWER_S,
    SMALL_FRAGMENTS,
    Image,
    Planner,
    plain_bytes,
    prepare_off_loop,
    repairs,
    spare_ratio,
)
from hawkvision.transport.client.pending_responses import ConnectionLost, ignore_interim
from hawkvision.transport.client.sender import BURSTY, PARITY_SPREAD_S
from hawkvision.transport.coding.fec import parity_count
from hawkvision.transport.coding.image_coding import Coded, Plan
from hawkvision.transport.coding.rate_fec_control import FINE, SELDOM, LinkState, incomplete_probability
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.protocol.frames import MAX_META, fragment_room
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.status import Status

MAX_ASKS: Final = 3
"""Connections that one question is asked on, one after the other."""
SILENCE_CHECK_S: Final = 0.25
"""Between looks for silence."""
LATE_S: Final = 0.5
"""How long after its deadline an answer is still waited for, unless even late ones are wanted."""
OVERDUE_S: Final = 0.03
MOST_OVERDUE_S: Final = 0.25
"""How much more than a round trip after its image was sent, if not before its deadline, an answer is overdue, and how
long after that at most."""
SOON_S: Final = 0.02
"""Between looks whether a link that was silent then is heard again."""
NOTHING: Final = (Status.EXPIRED, Status.NO_TEMPLATE)
"""Of an image that did not arrive, or whose question had not when it was too late: the same may do next time."""
MAX_INSISTS: Final = 3
"""Small images sent for one whose late answer is wanted."""
MAX_LATE: Final = 24
"""Callers who wait for late answers; the next ones are told that they missed. After an outage they would be too many in
the way of those who are not late."""
SMALL_RATIO: Final = 0.35
"""Of a plain image's bytes, what is sent into a link that may have become slow: six fragments instead of eighteen."""
MOST_TWICE: Final = 2
"""Images under way, itself one of them, up to which a small one is sent twice; others wait for the second half."""
WHOLE_SHARE: Final = 0.25
WHOLE_MOST_S: Final = 0.25
"""Of the deadline, and in all, what an image's very bytes with their parity may take of the link. They are two to
three times as many as at quality 80, but only of whole images is the full accuracy guaranteed, and may an intermediate
stage answer. Other questions wait behind them, and may be in a hurry."""
SOME_PARITY: Final = (0.1, 0.2, 0.3, 0.5)
"""Of an image that travels as it is, if so much is enough. If not, and there is time to send again what is lost, the
least: after a burst of loss, plans have up to three times an image's bytes."""
WHOLE_PAUSE_S: Final = 2.0
"""After an image that was to travel whole did not arrive in time, the next ones are coded anew for so long."""


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
    """Of the last image."""
    outcomes: int = 0
    """Datagrams that `loss` rests on."""
    silent_s: float = 0.0
    """For how long the peer has left datagrams unanswered."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `DatagramLink.ask` was told; times are the loop's."""

    template: bytes
    image: Image
    meta: bytes
    exact: bool
    deadline: float | None
    until: float
    on_interim: Callable[[bytes], None]


class DatagramLink:
    """A peer and the connection to it. Used on one event loop; close it."""

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
            host: of the peer.
            discover: says port, certificate and name; asked before the first connection, and again after one failed.
            local: this machine's addresses to send from, each a path of its own; empty lets the system choose one.
            api_key: of the peer, if it asks for one.
            may_miss: which share of the images that travel as they are may arrive too late, or not at all, where no
                parity makes it `SELDOM`.
            answer_s: of a deadline, what the peer's work takes, and the wait for fragments that are overdue.
            congestion: makes each path's congestion controller.
        """
        self._connections = Connections(host, discover, local, api_key, congestion)
        self._may_miss = may_miss
        self._answer_s = answer_s
        self._planner = Planner()
        self._plan: Plan | None = None
        self._whole_from = -math.inf
        self._late = 0
        """Callers who wait for a late answer."""
        self._under_way = 0
        """Images that wait for an answer."""

    async def ask(
        self,
        template: bytes,
        image: Image,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
        exact: bool = False,
        on_interim: Callable[[bytes], None] = ignore_interim,
        insist: bool = False,
    ) -> tuple[Status, bytes]:
        """Send an image and wait for its answer.

        Args:
            template: the request; equal ones are sent once per connection.
            image: what to send.
            meta: what belongs to this image alone, at most 64 bytes.
            deadline_s: of the answer, counted from when there is a connection: preparing the image takes of it.
            timeout_s: how long to wait at most, for everything.
            exact: see `prepare`.
            on_interim: called with what the peer says before its answer, if it does and that arrives.
            insist: want an answer even after the deadline, if only to a small image: see `_insisted`.

        Raises:
            RequestError: if the image is none, before it is sent; `Unauthorized` for a wrong key.
            BadField: if the template is too long.
            TimeoutError: if no answer came in time; `LATE_S` after the deadline is no time any more, but for `insist`.
            DeadlineMissed: if `insist` asks for one late answer too many.
            ConnectionLost: if there was no connection.
        """
        if isinstance(image, bytes):
            probe(image)  # refused before anything is sent
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        deadline: float | None = None
        for attempt in range(MAX_ASKS):
            connection = await self._connections.get(until)
            if deadline_s is not None and deadline is None:
                deadline = loop.time() + deadline_s
                until = until if insist else min(until, deadline + LATE_S)

            heard = ignore_interim if attempt else on_interim  # nothing less than was heard already
            asked = _Asked(template, image, meta, exact, deadline, until, heard)
            insisting = insist and deadline is not None
            asking = self._insisted(connection, asked) if insisting else self._sent(connection, asked)
            try:
                return await self._watched(connection, asyncio.ensure_future(asking))
            except ConnectionLost as error:
                if attempt + 1 == MAX_ASKS or self._connections.closed:
                    raise
                if isinstance(error, Exhausted):
                    self._connections.retire(connection)
        raise AssertionError("the last attempt returns or raises")

    def carries_whole(self, image: Image, deadline_s: float, *, surely: bool = False) -> bool:
        """Whether an image may as well travel as it is, `exact`: the link is quick, and loses hardly more than parity
        mends, or what is sent again. Sent so, it arrives whole or not at all; `surely` allows that only `SELDOM`.

        Raises:
            BadImage, UnsupportedMedia: if it is no image.
        """
        connection = self._connections.alive
        if connection is None or not isinstance(image, bytes):
            return False
        if asyncio.get_running_loop().time() < self._whole_from or connection.client.behind:
            return False
        plan = self._planned(connection, image, deadline_s)
        most = SELDOM if surely else self._may_miss
        return self._whole_parity(connection, plan, len(image), deadline_s, most) is not None

    async def probe(self, timeout_s: float) -> None:
        """Connect if there is no connection, and send a small datagram: `state` stays true while no images go.

        A peer that has been silent for long is connected to anew, in the background.

        Raises:
            ConnectionLost: if there was no connection.
            HawkVisionError: for what trying again does not mend.
        """
        connection = await self._connections.get(asyncio.get_running_loop().time() + timeout_s)
        self._connections.begin_anew_if_gone(connection)
        connection.client.probe()

    def state(self) -> LinkView:
        """What is known of the link now."""
        connection = self._connections.alive
        if connection is None:
            return LinkView(False, 0.0, 1.0, False, None, self._plan)
        client, loss = connection.client, connection.client.loss()
        return LinkView(
            True, loss.ratio, loss.burst, loss.known, client.rtt_s(), self._plan, loss.outcomes, client.silent_s()
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of datagrams sent so far, over all connections."""
        return self._connections.sent_bytes

    async def close(self) -> None:
        """End the connection; whoever still waits is told so. Closing twice does no harm."""
        await self._connections.close()

    # ----------------------------------------------------------------------------------------- images

    async def _prepared(
        self, connection: Connection, image: Image, meta: bytes, deadline_s: float | None, *, exact: bool
    ) -> Coded:
        client = connection.client
        plan = self._planned(connection, image, deadline_s)
        if exact and isinstance(image, bytes) and deadline_s is not None:
            parity = self._whole_parity(connection, plan, len(image), deadline_s, self._may_miss)
            plan = plan if parity is None else replace(plan, parity=parity)
        self._plan = plan
        room, side = fragment_room(meta), client.useful_side
        prepared = await prepare_off_loop(image, plan, side, room, may_reframe=True, exact=exact)
        if not prepared.header:
            return prepared.coded
        number = connection.registered(prepared.header)
        if number is None:
            return (await prepare_off_loop(image, plan, side, room, may_reframe=False, exact=exact)).coded
        return replace(prepared.coded, format=replace(prepared.coded.format, tables=number))

    def _planned(self, connection: Connection, image: Image, deadline_s: float | None) -> Plan:
        """What an image would get now; little, if its time is up or may be."""
        client = connection.client
        plain_s = client.spare_s(round(plain_bytes(image, client.useful_side)))
        spare = spare_ratio(plain_s, deadline_s, client.rtt_s() or 0.0, self._answer_s)
        if deadline_s == 0.0 or (deadline_s is not None and client.behind):
            spare = min(spare, SMALL_RATIO)
        plan = self._planner.plan(_seen(client), spare, asyncio.get_running_loop().time())
        quick = SMALL_RATIO * plain_s <= PARITY_SPREAD_S and not _is_silent(client)
        if spare <= SMALL_RATIO and quick and self._under_way <= MOST_TWICE:
            # A burst of loss may take so few fragments all at once; twice as many, spread over time, it does not.
            return replace(plan, parity=max(plan.parity, 1.0))
        return plan

    def _whole_parity(
        self, connection: Connection, plan: Plan, size: int, deadline_s: float, may_miss: float
    ) -> float | None:
        """With which parity so many bytes arrive in time as they are, but for `SELDOM`, or else for `may_miss`.

        By what is lost now, not by what was lost before it became less, as plans are made: whoever dares in vain has
        another way.

        None where that takes too long, where nobody knows what is lost, and where the image does not fit.
        """
        seldom = self._parity_but_for(SELDOM, connection, plan, size, deadline_s)
        if seldom is not None or may_miss <= SELDOM:
            return seldom
        return self._parity_but_for(may_miss, connection, plan, size, deadline_s)

    def _parity_but_for(
        self, may_miss: float, connection: Connection, plan: Plan, size: int, deadline_s: float
    ) -> float | None:
        """Some parity, the least where what it does not mend can be sent again, else the plan's. Losses of different
        rounds are taken to be independent.
        """
        client = connection.client
        link, rtt_s = _seen(client), client.rtt_s()
        if not link.known or rtt_s is None:
            return None
        k = -(-size // fragment_room(bytes(MAX_META)))
        left_s = deadline_s - rtt_s - self._answer_s
        most_s = min(left_s, WHOLE_SHARE * deadline_s, WHOLE_MOST_S)

        def carry_s(parity: float) -> float:
            if math.ceil(k * (1.0 + parity)) > MAX_SYMBOLS:
                return math.inf
            return client.spare_s(math.ceil(size * (1.0 + parity)) + client.queued_bytes)

        def mends(parity: float) -> bool:
            return (
                carry_s(parity) <= most_s and incomplete_probability(k, k + parity_count(k, parity), link) <= may_miss
            )

        enough = next(filter(mends, SOME_PARITY), None)
        if enough is not None:
            return enough
        little = plan.parity if k <= SMALL_FRAGMENTS else SOME_PARITY[0]
        if carry_s(little) <= most_s:
            spread_s = PARITY_SPREAD_S if link.burst > BURSTY else 0.0
            rounds = repairs(left_s - carry_s(little) - spread_s, client.repair_s())
            if rounds and k * link.loss ** (1 + rounds) <= may_miss:
                return little
        return plan.parity if not plan.base and plan.quality >= FINE and mends(plan.parity) else None

    async def _sent(self, connection: Connection, asked: _Asked, *, small: bool = False) -> tuple[Status, bytes]:
        """The answer to an image, as it is planned now, or to a small one, which may be late."""
        loop, deadline = asyncio.get_running_loop(), asked.deadline
        whole = asked.exact and not small
        left_s = None if deadline is None else 0.0 if small else max(0.0, deadline - loop.time())
        self._under_way += 1
        try:
            coded = await self._prepared(connection, asked.image, asked.meta, left_s, exact=whole)
            now = loop.time()
            status, answer = await connection.client.ask(
                asked.template,
                coded,
                meta=asked.meta,
                deadline_s=None if deadline is None else max(0.0, deadline - now),
                timeout_s=max(0.0, asked.until - now),
                on_interim=asked.on_interim,
                late_s=asked.until - deadline if small and deadline is not None else 0.0,
            )
        finally:
            self._under_way -= 1
        if whole and status is Status.EXPIRED:
            self._whole_from = loop.time() + WHOLE_PAUSE_S
        return status, answer

    async def _insisted(self, connection: Connection, asked: _Asked) -> tuple[Status, bytes]:
        """The first answer that is one: to the image, or to a small one that is sent if that came to nothing.

        It did if too little arrived to be decoded, or what was asked of it came too late. It may have if its answer is
        overdue although others' reports are not; where they are, the link has become slow, and what is on its way may
        all arrive.
        """
        assert asked.deadline is not None
        loop, client = asyncio.get_running_loop(), connection.client
        overdue_s = min(MOST_OVERDUE_S, (client.rtt_s() or 0.0) + OVERDUE_S)
        overdue_at = max(asked.deadline, loop.time() + overdue_s)
        tasks = [loop.create_task(self._sent(connection, asked))]
        waiting, late = set(tasks), False
        try:
            while True:
                left_s = max(SOON_S, overdue_at - loop.time()) if len(tasks) == 1 else None
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                found = answer_among(done)
                if found is not None:
                    return found
                if done and not waiting and len(tasks) > MAX_INSISTS:
                    return done.pop().result()
                if not late:
                    if self._late >= MAX_LATE:
                        raise DeadlineMissed(f"no answer came in time, and {MAX_LATE} late ones are waited for already")
                    self._late, late = self._late + 1, True
                if len(tasks) <= MAX_INSISTS and (done or not (_is_silent(client) or client.behind)):
                    tasks.append(loop.create_task(self._sent(connection, asked, small=True)))
                    waiting.add(tasks[-1])
        finally:
            self._late -= late
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watched(
        self, connection: Connection, asking: asyncio.Future[tuple[Status, bytes]]
    ) -> tuple[Status, bytes]:
        """The answer; meanwhile another connection is tried if the peer falls silent on this one."""
        try:
            while True:
                done, _ = await asyncio.wait({asking}, timeout=SILENCE_CHECK_S)
                if done:
                    return asking.result()
                self._connections.begin_anew_if_gone(connection)
        finally:
            if not asking.done():
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, HawkVisionError, TimeoutError):
                    await asking


def answer_among(done: Iterable[asyncio.Future[tuple[Status, bytes]]]) -> tuple[Status, bytes] | None:
    """An answer among what has ended, if there is one; of several, one that is no error.

    Raises:
        HawkVisionError, TimeoutError: what ended one, if none is an answer.
    """
    failed = [each for each in done if each.exception() is not None]
    answers = [each.result() for each in done if each.exception() is None]
    for status, body in sorted(answers, key=lambda answer: answer[0] is not Status.OK):
        if status not in NOTHING:
            return status, body
    return failed[0].result() if failed else None


def _seen(client: DatagramClient) -> LinkState:
    estimate = client.loss()
    return LinkState(estimate.ratio, estimate.burst, estimate.known)


def _is_silent(client: DatagramClient) -> bool:
    """Whether nothing is heard that should be: what such a link holds may all arrive, and more would wait behind it."""
    return client.silent_s() > (client.rtt_s() or 0.0) + OVERDUE_S
