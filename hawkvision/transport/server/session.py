"""One client at the server: its receiver, its addresses, and a task per image.

    sealed datagrams ─► Receiver ─► Incoming ─► handler ─► response ─► datagrams, to each path's address (`addresses`)
                                                              └──────► the control stream, if no report confirms them

A client's hello opens a session, which ends with its QUIC connection (`listener`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

import msgspec

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import HawkVisionError, InternalError
from hawkvision.servers.keys import NOBODY_ASKED, Caller
from hawkvision.transport.coding.image_coding import Arrived
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.endpoint.quic import ControlProtocol
from hawkvision.transport.endpoint.udp import TICK_S, send
from hawkvision.transport.protocol.control import CloseCode, StreamAnswer
from hawkvision.transport.protocol.packet_protection import Header, Secret
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.assembly import Budget, ReceivedImage, ReceiveTimeouts
from hawkvision.transport.server.receiver import Receiver

log = logging.getLogger("hawkvision.transport")

MAX_UNACKNOWLEDGED: Final = 256 * 1024
"""Bytes of responses in QUIC that a client has not acknowledged."""


def _discard_interim(_: bytes) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Incoming:
    """An image for the handler. Times are on the clock of `time.monotonic`."""

    template: bytes
    meta: bytes
    arrived: Arrived
    started: float
    deadline: Deadline | None
    better: asyncio.Future[Incoming] | None = None
    """The image after the repair of its missing fragments, complete or not; None if no repair is under way."""
    send_interim: Callable[[bytes], None] = _discard_interim
    """Sends an interim response, which may be lost; see `Receiver.interim`."""
    caller: Caller = NOBODY_ASKED
    """Who sent it; `Keys.admit` checks the rate."""
    network: str = ""
    """The sender's network, see `network_of`."""


Handler = Callable[[Incoming], Awaitable[tuple[Status, bytes]]]


class SessionHost(Protocol):
    """What a session needs of its server."""

    handler: Handler
    timeouts: ReceiveTimeouts
    budget: Budget
    transport: asyncio.DatagramTransport
    sent_bytes: int
    congestion: CongestionFactory
    changed: asyncio.Event


class Session:
    """One client: its receiver, its addresses, and the tasks of its images."""

    def __init__(
        self, server: SessionHost, number: int, protocol: ControlProtocol, caller: Caller, network: str = ""
    ) -> None:
        self.number = number
        self.network = network
        self.caller = caller
        self.secrets = (Secret.random(), Secret.random())  # the client's, the server's
        channel = Channel[Any](number, self.secrets[1], self.secrets[0], server.congestion)
        self.receiver = Receiver(channel, server.budget)
        self.receiver.timeouts = server.timeouts
        self._server = server
        self._protocol = protocol
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._better: dict[int, asyncio.Future[Incoming]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._closed = False

    def datagram(self, header: Header, data: bytes, address: Any) -> None:
        """Take in a sealed datagram."""
        if self.receiver.receive(header, data, monotonic(), address):
            self.schedule_flush()

    @property
    def answering(self) -> bool:
        """Whether a handler is running."""
        return bool(self._tasks)

    def schedule_flush(self) -> None:
        """Flush once, after all datagrams that have arrived."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._closed:  # a flush scheduled before must not set the timer again
            return
        now = monotonic()
        receiver, transport = self.receiver, self._server.transport
        self._send(transport, now)
        while receiver.events:
            self._start(receiver.events.popleft())
        while receiver.cancelled:
            self._cancel(receiver.cancelled.popleft())
        while receiver.unconfirmed:
            number, status, body = receiver.unconfirmed.popleft()
            if self._protocol.unacknowledged_bytes < MAX_UNACKNOWLEDGED:  # otherwise only datagrams repeat it
                self._protocol.send_message(StreamAnswer(number, status, body))
        if receiver.channel.key_exhausted:
            self._protocol.close(CloseCode.KEY_EXHAUSTED, "the key has protected as many datagrams as it may")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = receiver.next_timer(now)
        if at < math.inf:
            self._timer = self._loop.call_later(max(at - now, TICK_S), self._flush)
        self._server.changed.set()

    def _send(self, transport: asyncio.DatagramTransport, now: float) -> None:
        channel = self.receiver.channel
        for address, datagram in channel.asides:
            self._server.sent_bytes += len(datagram)
            send(transport, datagram, address)
        channel.asides.clear()
        for path, datagram in self.receiver.poll(now):
            for address in channel.paths[path].where.destinations(len(datagram), now):
                self._server.sent_bytes += len(datagram)
                send(transport, datagram, address)

    def _start(self, image: ReceivedImage) -> None:
        better = self._better.pop(image.number, None)
        incoming = Incoming(
            image.template,
            image.meta,
            image.arrived,
            image.started,
            image.deadline,
            send_interim=partial(self._send_interim, image.number),
            caller=self.caller,
            network=self.network,
        )
        if better is not None:
            if not better.done():
                better.set_result(incoming)
            return
        if not image.final:
            self._better[image.number] = future = self._loop.create_future()
            incoming = replace(incoming, better=future)
        task = self._loop.create_task(self._answer(image.number, incoming))
        self._tasks[image.number] = task

    async def _answer(self, number: int, incoming: Incoming) -> None:
        try:
            status, body = await self._server.handler(incoming)
        except HawkVisionError as error:
            status, body = Status.REFUSED, _refusal(error)
        except Exception:  # process boundary: one image's defect must not reach the next
            log.exception("an image's handler failed")
            status, body = Status.REFUSED, _refusal(InternalError("the node failed on this request; its log says why"))
        finally:
            self._tasks.pop(number, None)
            self._better.pop(number, None)
        self.receiver.answer(number, status, body, monotonic())
        self.schedule_flush()

    def _send_interim(self, number: int, body: bytes) -> None:
        self.receiver.interim(number, body, monotonic())
        self.schedule_flush()

    def _cancel(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()
        self._better.pop(number, None)

    def close(self) -> None:
        """Stop all tasks and timers."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._tasks):
            self._cancel(number)
        self.receiver.close()


def _refusal(error: HawkVisionError) -> bytes:
    return msgspec.json.encode({**error.body(), "status": error.status})
