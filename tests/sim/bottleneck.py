"""One bottleneck, simulated: a drop-tail queue, a variable rate, delay, jitter, random loss, and the flows that share
it.

Pure and seeded; time moves from event to event, so ten seconds of link take about one second of a core. `Camera` uses a
`RateController` as a session does. `Cubic` and `Bbr` are simplified bulk TCP flows: how much they keep in flight, and
when they yield.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.packet_trains import Arrival
from hawkvision.transport.congestion.rate_control import RateController

REORDERING = 8
REPORT_AFTER = 16
REPORT_DELAY_S = 0.008
REPORT_REACH = 128


class Simulation:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


class Independent:
    """Each datagram is lost with the same probability."""

    def __init__(self, ratio: float, rng: random.Random) -> None:
        self._ratio, self._rng = ratio, rng

    def __call__(self) -> bool:
        return self._rng.random() < self._ratio


class Gilbert:
    """Losses in runs of a mean length (a two-state chain per datagram, lost in the bad state)."""

    def __init__(self, ratio: float, burst: float, rng: random.Random) -> None:
        self._leave = 1.0 / burst
        self._enter = self._leave * ratio / (1.0 - ratio)
        self._bad = False
        self._rng = rng

    def __call__(self) -> bool:
        draw = self._rng.random()
        self._bad = draw >= self._leave if self._bad else draw < self._enter
        return self._bad


@dataclass
class Link:
    """The way there, with the bottleneck; the way back is free but for delay and loss."""

    sim: Simulation
    rate: float
    """Bytes per second; may be changed while it runs."""
    delay_s: float = 0.02
    queue: int = 100_000
    """Bytes that wait at most."""
    loss: Callable[[], bool] = lambda: False
    back_loss: Callable[[], bool] = lambda: False
    lossy_before: bool = False
    """Whether loss falls on the near side of the bottleneck."""
    jitter_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    busy_until: float = 0.0
    overflowed: int = 0

    @property
    def queue_s(self) -> float:
        return max(0.0, self.busy_until - self.sim.now)

    def send(self, size: int, arrive: Callable[[], None]) -> None:
        lost = self.loss()
        if lost and self.lossy_before:
            return
        if self.queue_s * self.rate + size > self.queue:
            self.overflowed += 1
            return
        self.busy_until = max(self.busy_until, self.sim.now) + size / self.rate
        if not lost:
            self.sim.at(self.busy_until + self.delay_s + self.rng.random() * self.jitter_s, arrive)

    def send_back(self, arrive: Callable[[], None]) -> None:
        if not self.back_loss():
            self.sim.at(self.sim.now + self.delay_s + self.rng.random() * self.jitter_s, arrive)


@dataclass
class _Sent:
    size: int
    at: float
    image: int


class Camera:
    """Sends images as the session does: a queue that forgets stale images, reports, losses, timeouts."""

    MOST_WAITING = 3

    def __init__(
        self,
        link: Link,
        image: int,
        every_s: float,
        clock_offset_s: float = 4711.0,
        congestion: CongestionFactory = LossTolerant,
    ) -> None:
        self.link, self.sim = link, link.sim
        self.rate = RateController(self.sim.now, congestion)
        self.image, self.every_s, self._offset = image, every_s, clock_offset_s
        self.waiting: deque[tuple[int, int]] = deque()
        self.out: dict[int, _Sent] = {}
        self.delivered = 0
        self.sent = 0
        self.started: dict[int, float] = {}
        self.left: dict[int, float] = {}
        """When the last datagram of an image left, after its image was taken."""
        self.arrived: dict[int, float] = {}
        """When the last datagram of an image that arrived did so, after its image was taken."""
        self.reachable = True
        self._numbers, self._images = itertools.count(), itertools.count()
        self._wake: float | None = None
        self._received: dict[int, float] = {}
        self._unreported = 0
        self._report_due = self._expiring = False
        self._received_at = self._silent_at = self.sim.now
        self._lost: set[int] = set()
        self.sim.at(self.sim.now, self._take_image)

    def _take_image(self) -> None:
        number = next(self._images)
        self.started[number] = self.sim.now
        size = self.image
        while size > 0:
            self.waiting.append((min(size, 1200), number))
            size -= 1200
        while self.waiting and self.waiting[0][1] <= number - self.MOST_WAITING:
            self.waiting.popleft()
        self.sim.at(self.sim.now + self.every_s, self._take_image)
        self._send()

    def _send(self) -> None:
        while self.waiting:
            size, image = self.waiting[0]
            at = self.rate.release_at(size, self.sim.now)
            if at > self.sim.now:
                if self._wake is None or at < self._wake or self._wake <= self.sim.now:
                    self._wake = at
                    self.sim.at(at, self._send)
                break
            self.waiting.popleft()
            number = next(self._numbers)
            self.out[number] = _Sent(size, self.sim.now, image)
            self.rate.on_packet_sent(size, self.sim.now)
            self.sent += size
            self.left[image] = self.sim.now - self.started[image]
            if self.reachable:
                self.link.send(size, lambda n=number, s=size, p=image: self._arrive(n, s, p))  # type: ignore[misc]
            if not self._expiring:
                self._expiring = True
                self.sim.at(self.sim.now + self.rate.timeout_s(), self._expire)

    def _arrive(self, number: int, size: int, image: int) -> None:
        self.delivered += size
        self.arrived[image] = self.sim.now - self.started[image]
        self._received[number] = self.sim.now + self._offset
        if len(self._received) > REPORT_REACH:
            del self._received[min(self._received)]
        self._unreported += 1
        if self._unreported >= REPORT_AFTER:
            self._report()
        elif not self._report_due:
            self._report_due = True
            self.sim.at(self.sim.now + REPORT_DELAY_S, self._report)

    def _report(self) -> None:
        self._report_due = False
        if self._unreported and self.reachable:
            self._unreported = 0
            reported, at = dict(self._received), self.sim.now
            self.link.send_back(lambda: self._reported(reported, at))

    def _reported(self, reported: dict[int, float], at: float) -> None:
        now = self.sim.now
        self._received_at = now
        newest = max(reported, key=lambda number: reported[number])
        rtt = None
        if newest in self.out:
            rtt = now - self.out[newest].at - (at + self._offset - reported[newest])
        pairs = [(reported[number], self.out.pop(number)) for number in sorted(reported) if number in self.out]
        pairs.sort(key=lambda pair: pair[0])
        arrivals = [Arrival(sent.size, sent.at, round(time / 64e-6) * 64e-6) for time, sent in pairs]
        self._lose([number for number in self.out if number <= max(reported) - REORDERING], arrivals, rtt)
        self._send()

    def _expire(self) -> None:
        now, timeout = self.sim.now, self.rate.timeout_s()
        late = [number for number, sent in self.out.items() if sent.at + timeout <= now]
        if late:
            self._lose(late, [], None)
            if self._received_at < now - timeout and self._silent_at < now - timeout:
                self._silent_at = now
                self.rate.on_silence(now)
        if self.out:
            oldest = next(iter(self.out.values()))
            self.sim.at(max(oldest.at + self.rate.timeout_s(), now + 0.001), self._expire)
        else:
            self._expiring = False
        self._send()

    def _lose(self, numbers: list[int], arrivals: list[Arrival], rtt: float | None) -> None:
        self._lost.update(numbers)
        runs = sum(number - 1 not in self._lost for number in numbers)
        times = [self.out.pop(number).at for number in numbers]
        if arrivals or times or rtt is not None:
            self.rate.on_report(arrivals, times, rtt, self.sim.now, runs)


class Bulk:
    """A TCP flow with unlimited data: 1,500-byte segments, a window, a loss found after three later ones came."""

    SEGMENT = 1500

    def __init__(self, link: Link) -> None:
        self.link, self.sim = link, link.sim
        self.window = 10.0
        self.delivered = 0
        self.rtt_s = 2 * link.delay_s
        self._next = 0
        self._stopped = False
        self._out: dict[int, float] = {}
        self._recovered_at = self._acked_at = self.sim.now
        self.sim.at(self.sim.now, self._send)
        self.sim.at(self.sim.now + 1.0, self._watch)

    def stop(self) -> None:
        """There is no more data."""
        self._stopped = True

    def _send(self) -> None:
        while len(self._out) < self.window and not self._stopped:
            number, self._next = self._next, self._next + 1
            self._out[number] = self.sim.now
            self.link.send(self.SEGMENT, lambda n=number: self._arrive(n))  # type: ignore[misc]

    def _arrive(self, number: int) -> None:
        self.delivered += self.SEGMENT
        self.link.send_back(lambda: self._acked(number))

    def _acked(self, number: int) -> None:
        now = self.sim.now
        sent = self._out.pop(number, None)
        self._acked_at = now
        if sent is not None:
            self.rtt_s += ((now - sent) - self.rtt_s) / 8
            self.on_ack(now, now - sent)
        lost = list(itertools.takewhile(lambda n: n <= number - 3, self._out))
        if lost:
            last_sent = self._out[lost[-1]]
            for other in lost:
                del self._out[other]
            if last_sent > self._recovered_at:
                self._recovered_at = now
                self.on_loss(now)
        self._send()

    def _watch(self) -> None:
        """A retransmission timeout."""
        if self.sim.now - self._acked_at > 1.0:
            self._out.clear()
            self.on_loss(self.sim.now)
            self._send()
        self.sim.at(self.sim.now + 0.5, self._watch)

    def on_ack(self, now: float, rtt_s: float) -> None:
        raise NotImplementedError

    def on_loss(self, now: float) -> None:
        raise NotImplementedError


class Cubic(Bulk):
    """RFC 9438, with slow start and the Reno-friendly region."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._threshold = 1e9
        self._most = self.window
        self._epoch = 0.0
        self._reno = self.window

    def on_ack(self, now: float, rtt_s: float) -> None:
        if self.window < self._threshold:
            self.window += 1
            return
        k = (self._most * 0.3 / 0.4) ** (1 / 3)
        self._reno += 0.53 / self._reno
        target = 0.4 * (now - self._epoch + self.rtt_s - k) ** 3 + self._most
        self.window += max(0.0, min(target, 1.5 * self.window) - self.window) / self.window
        self.window = max(self.window, self._reno)

    def on_loss(self, now: float) -> None:
        self._most = self.window
        self.window = self._threshold = self._reno = max(2.0, 0.7 * self.window)
        self._epoch = now


class Bbr(Bulk):
    """What of BBR (version 1) matters to neighbours: twice the largest rate times the least round trip in flight."""

    CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._speeds: deque[float] = deque(maxlen=10)
        self._least = 2 * link.delay_s
        self._round_at, self._round_delivered, self._acked_bytes, self._rounds = 0.0, 0, 0, 0
        self._probed_at = 0.0

    def on_ack(self, now: float, rtt_s: float) -> None:
        self._least = min(self._least, rtt_s)
        self._acked_bytes += self.SEGMENT
        if now - self._round_at < rtt_s:
            if self._rounds < 8:
                self.window += 1
            return
        self._speeds.append((self._acked_bytes - self._round_delivered) / (now - self._round_at))
        self._round_at, self._round_delivered = now, self._acked_bytes
        self._rounds += 1
        if self._rounds < 8:
            return
        gain = self.CYCLE[self._rounds % len(self.CYCLE)]
        self.window = max(4.0, (1 + gain) * max(self._speeds) * self._least / self.SEGMENT)
        if now - self._probed_at > 10.0:
            self._probed_at = now
            self.window = 4.0

    def on_loss(self, now: float) -> None:
        """BBR hears none."""
