"""A session of the datagram transport under simulated time: `Sender` and `Receiver`, joined by pipes of
`loadgen.network.link_model`.

No sockets and no wall clock; time moves from event to event, so a minute of link takes a second or two of a core. Both
ends are driven as `connection` and `session` drive them: flushed once after each batch of arrivals, and by their
timers, at least half a millisecond apart.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hawkvision.core.clock import Deadline
from hawkvision.transport.client.sender import Sender
from hawkvision.transport.coding.image_coding import Coded, opaque
from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.protocol.packet_protection import Secret, peek
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.assembly import STRICT, Budget, ReceivedImage, ReceiveTimeouts
from hawkvision.transport.server.receiver import Receiver
from loadgen.network.link_model import LinkPipe
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UDP_OVERHEAD_BYTES

TICK_S = 0.0005
"""The least that `udp` waits for a timer."""
MANY_BYTES = 1 << 30
TEMPLATE = b"quality=fast"


def small_image(k: int = 6, parity: float = 0.5) -> Coded:
    """Symbols of an image that needs no decoding, so that seeds are cheap."""
    coded = opaque(bytes(range(256)) * (k * 4), parity, 1024)
    assert coded is not None
    assert coded.format.k == k
    return coded


@dataclass
class Route:
    """One path's pipes, as the client sees them."""

    up: LinkPipe[bytes]
    down: LinkPipe[bytes]

    def cut(self, dead: bool) -> None:
        self.up.dead = self.down.dead = dead


@dataclass
class Asked:
    """What happened to one image, in seconds of simulated time."""

    at: float
    deadline: Deadline | None
    answered_at: float | None = None
    status: int | None = None
    body: bytes = b""
    provisional: list[ReceivedImage] = field(default_factory=list)
    final: list[ReceivedImage] = field(default_factory=list)
    handed_at: float | None = None


class World:
    """Client, server, and the links between them."""

    def __init__(
        self,
        links: Sequence[tuple[str, str]],
        seed: int,
        timeouts: ReceiveTimeouts = STRICT,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        rng = random.Random(seed)
        client, server = (Secret.from_bytes(rng.randbytes(28)) for _ in range(2))
        self.now = 100.0
        self.seed = seed
        self.routes = [
            Route(*(LinkPipe(seeded(spec, seed), f"{way}{n}") for way, spec in zip(("up", "down"), pair, strict=True)))
            for n, pair in enumerate(links)
        ]
        self.sender = Sender(Channel[Any](7, client, server, congestion))
        self.budget = Budget(MANY_BYTES)
        self.receiver = Receiver(Channel[Any](7, server, client, congestion), self.budget)
        self.receiver.timeouts = timeouts
        self.receiver.register_template(0, TEMPLATE)
        self.asked: dict[int, Asked] = {}
        self.answer_partial = False
        self.service_s = 0.002
        self.when_answered: Callable[[int], None] = suspended
        self.stream_s = 0.5
        """How long QUIC's stream takes to deliver over a bad link."""
        self.by_stream = 0
        self.sent = Counter[str]()
        self.flushes = Counter[str]()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake = {"client": self.now, "server": self.now}
        for number in range(len(links)):
            self.sender.channel.path(number, self.now, proven=True)
        self.sender.ping(self.now)

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def ask(
        self, coded: Coded, deadline_s: float | None = None, *, template: int = 0, late_s: float = 0.0
    ) -> int | None:
        """Submit an image now; None if the sender is full."""
        if self.sender.full:
            return None
        deadline = None if deadline_s is None else Deadline.after_s(deadline_s, self.now)
        number = self.sender.submit(template, coded, deadline, b"", self.now, late_s=late_s)
        self.asked[number] = Asked(self.now, deadline)
        self._wake["client"] = self.now
        return number

    def ping(self) -> None:
        """Ask for a report now."""
        self.sender.ping(self.now)
        self._wake["client"] = self.now

    def stream(self, coded: Coded, count: int, every_s: float, deadline_s: float | None = None) -> None:
        """Ask many, at fixed times."""
        for n in range(count):
            self.at(self.now + n * every_s, lambda: suspended(self.ask(coded, deadline_s)))

    def run(self, until: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until then or until there is something else to do."""
        while not unless():
            then = min(
                *self._wake.values(),
                *(at for route in self.routes for at in (route.up.next_at, route.down.next_at) if at is not None),
                self._events[0][0] if self._events else math.inf,
                math.inf,
            )
            if then > until:
                break
            self.now = max(self.now, then)
            self._step()
        else:
            return
        self.now = until

    def _step(self) -> None:
        now = self.now
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()
        for route in self.routes:
            for datagram in route.up.due(now):
                if self._arrived(datagram):
                    self._wake["server"] = now
            for datagram in route.down.due(now):
                if self.sender.receive(peek(datagram), datagram, now):
                    self._wake["client"] = now
        if self._wake["server"] <= now:
            self._flush_server()
        if self._wake["client"] <= now:
            self._flush_client()

    def _flush_client(self) -> None:
        now = self.now
        self.flushes["client"] += 1
        for path, datagram in self.sender.poll(now):
            self._up(path, datagram)
        while self.sender.answered:
            number, status, body = self.sender.answered.popleft()
            asked = self.asked[number]
            assert asked.answered_at is None, f"seed {self.seed}: image {number} was answered twice"
            asked.answered_at, asked.status, asked.body = now, status, body
            self.when_answered(number)
        self._wake["client"] = max(self.sender.next_timer(now), now + TICK_S)

    def _flush_server(self) -> None:
        now = self.now
        self.flushes["server"] += 1
        for path, datagram in self.receiver.poll(now):
            self._down(path, datagram)
        while self.receiver.events:
            self._handed(self.receiver.events.popleft())
        while self.receiver.unconfirmed:
            self.at(now + self.stream_s, partial(self._by_stream, *self.receiver.unconfirmed.popleft()))
        self._wake["server"] = max(self.receiver.next_timer(now), now + TICK_S)

    def _up(self, path: int, datagram: bytes) -> None:
        self.sent["up"] += 1
        self.routes[path].up.put(len(datagram) + UDP_OVERHEAD_BYTES, datagram, self.now)

    def _arrived(self, datagram: bytes) -> bool:
        return self.receiver.receive(peek(datagram), datagram, self.now)

    def _down(self, path: int, datagram: bytes) -> None:
        self.sent["down"] += 1
        self.routes[path].down.put(len(datagram) + UDP_OVERHEAD_BYTES, datagram, self.now)

    def _by_stream(self, number: int, status: int, body: bytes) -> None:
        """QUIC's stream is reliable; it delivers as soon as a path lives."""
        if all(route.up.dead for route in self.routes):
            self.at(self.now + self.stream_s, partial(self._by_stream, number, status, body))
            return
        self.by_stream += 1
        self.sender.answer(number, status, body)
        self._wake["client"] = self.now

    def _handed(self, image: ReceivedImage) -> None:
        asked = self.asked[image.number]
        assert not asked.final, f"seed {self.seed}: image {image.number} was handed over again after its final event"
        (asked.final if image.final else asked.provisional).append(image)
        asked.handed_at = self.now if asked.handed_at is None else asked.handed_at
        if image.final or self.answer_partial:
            number = image.number
            self.at(self.now + self.service_s, lambda: self._answer(number))

    def _answer(self, number: int) -> None:
        self.receiver.answer(number, Status.OK, b"answer %d" % number, self.now)
        self._wake["server"] = self.now

    # --------------------------------------------------------------------------------------- what came of it

    @property
    def unanswered(self) -> list[int]:
        return [number for number, asked in self.asked.items() if asked.answered_at is None]

    @property
    def latencies(self) -> list[float]:
        """Of the answered, in the order of asking."""
        return [a.answered_at - a.at for a in self.asked.values() if a.answered_at is not None]

    def air_loss(self) -> float:
        """The share of datagrams that the way up has lost so far."""
        ways = [route.up.direction for route in self.routes]
        return sum(way.lost_air for way in ways) / max(1, sum(way.offered for way in ways))


def seeded(spec: str, seed: int) -> LinkSpec:
    """A link of this text and seed."""
    fields = LinkSpec.parse(spec)
    return LinkSpec(**{name: getattr(fields, name) for name in fields.__struct_fields__} | {"seed": seed})


def suspended(_: object) -> None:
    """Throw a result away."""
