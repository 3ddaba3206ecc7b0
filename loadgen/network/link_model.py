"""What a link does to packets: pure and seeded; a packet's size and the time in, arrival times out.

    packet ─► queue (drop-tail, rate) ─► air (loss, then duplication) ─► delay, jitter, reordering ─► arrival

Loss comes after the bottleneck, so a lost packet has used the link's time, as on a radio. A rate counts whole IP
packets. `Direction` is the model; `LinkPipe` holds the packets under way.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from loadgen.network.link_spec import GilbertElliott, IidLoss, LinkSpec, LinkTrace, Loss, Outages, TraceStep

BATCH: Final = 64
"""Packets read from one socket before others get their turn."""
MAX_IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
"""What a pipe holds, bookkeeping included: half a second of 1 Gbit/s. More is dropped and counted as the relay's."""
BOOKKEEPING_BYTES: Final = 256
"""What Python spends per held packet on tuples, floats and headers of objects, so that tiny packets count too."""


class PacketCounts(msgspec.Struct, frozen=True):
    """What one direction has done since it was made."""

    offered: int
    offered_bytes: int
    delivered: int
    """Copies that a `LinkPipe` gave out; 0 where there is only a `Direction`."""
    lost_air: int
    lost_queue: int
    lost_cut: int
    """Offered to a dead link, or under way when it died."""
    lost_relay: int
    """Beyond the relay's own bounds or refused by the kernel: unless 0, the emulation is not what the spec says."""
    duplicated: int
    held_back: int
    """Packets delayed so that others may overtake them."""
    late_mean_ms: float
    """How much later than the model said packets were given out: the emulation's own error."""
    late_max_ms: float


class Direction:
    """The model of one direction, without sockets or clock: two with one seed, name and input do the same.

    A new `spec` takes effect with the next packet and begins its random sequence and its trace anew; what is queued
    or under way keeps its times, and counting goes on. `name` tells apart the directions and paths of one seed.
    """

    def __init__(self, spec: LinkSpec, name: str = "") -> None:
        self._name = name
        self._queue: deque[tuple[float, int]] = deque()
        """(when its last bit is sent, bytes) of each packet not yet sent, bounded by `queue_bytes`."""
        self._queued_bytes = 0
        self._free_at = -math.inf
        self._last_arrival = -math.inf
        self.offered = self.offered_bytes = self.lost_air = self.lost_queue = self.duplicated = self.held_back = 0
        self.spec = spec

    @property
    def spec(self) -> LinkSpec:
        """What the link is told to do."""
        return self._spec

    @spec.setter
    def spec(self, spec: LinkSpec) -> None:
        self._spec = spec
        self._random = random.Random(f"{spec.seed} {self._name}")  # noqa: S311 - a link trace, no secret
        self._lost = _loss_process(spec.loss, self._random)
        trace = spec.trace or LinkTrace((TraceStep(1.0, spec.rate_bit_s, spec.delay_ms, 0.0),), loop=False)
        self._state = _LinkState(trace)
        self._begun_at: float | None = None

    def offer(self, packet: bytes | int, now: float) -> tuple[float, ...]:
        """When a packet (or a number of bytes) arrives: nothing if lost, twice if duplicated. `now` never decreases."""
        size = packet if isinstance(packet, int) else len(packet)
        self.offered += 1
        self.offered_bytes += size
        if self._begun_at is None:
            self._begun_at = now
        sent_at = self._send(size, now)
        if sent_at is None:
            self.lost_queue += 1
            return ()
        step = self._state.at(sent_at - self._begun_at)
        if self._lost(sent_at) or (step.loss_ratio > 0 and self._random.random() < step.loss_ratio):
            self.lost_air += 1
            return ()
        arrival = self._arrive(sent_at, step.delay_ms)
        spec = self._spec
        if spec.duplicate_ratio > 0 and self._random.random() < spec.duplicate_ratio:
            self.duplicated += 1
            return arrival, arrival
        return (arrival,)

    def _send(self, size: int, now: float) -> float | None:
        """When the last bit leaves the queue, or None if the packet does not fit into it."""
        queue = self._queue
        while queue and queue[0][0] <= now:
            self._queued_bytes -= queue.popleft()[1]
        if queue and self._queued_bytes + size > self._spec.queue_bytes:
            return None
        assert self._begun_at is not None
        start = max(now, self._free_at)
        sent_at = self._begun_at + self._state.sent(start - self._begun_at, 8.0 * size)
        self._free_at = sent_at = max(sent_at, start)  # adding and subtracting the origin may round down
        if sent_at > now:
            queue.append((sent_at, size))
            self._queued_bytes += size
        return sent_at

    def _arrive(self, sent_at: float, delay_ms: float) -> float:
        spec = self._spec
        arrival = sent_at + delay_ms / 1e3
        if spec.jitter_ms > 0:
            arrival += self._random.random() * spec.jitter_ms / 1e3
        if spec.reorder_ratio > 0 and self._random.random() < spec.reorder_ratio:
            self.held_back += 1
            return arrival + spec.reorder_delay_ms / 1e3
        if spec.jitter_reorders:
            return arrival
        # Under one delay, an earlier packet arrives within its own jitter, so waiting for it stays within ours.
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival


class _LinkState:
    """A trace's rate, delay and loss at any time, counted in seconds from its beginning."""

    def __init__(self, trace: LinkTrace) -> None:
        self._steps = trace.steps
        self._loop = trace.loop
        *self._starts, self._length_s = itertools.accumulate((step.seconds for step in trace.steps), initial=0.0)
        self._round_bits = sum(math.inf if s.rate_bit_s is None else s.rate_bit_s * s.seconds for s in trace.steps)

    def at(self, at_s: float) -> TraceStep:
        return self._steps[self._place(at_s)[0]]

    def sent(self, start_s: float, bits: float) -> float:
        """When so many bits are through that start at `start_s`; at most one round of the trace is walked."""
        index, left_s = self._place(start_s)
        at_s = start_s
        if self._loop and bits > self._round_bits:
            rounds = bits // self._round_bits
            at_s += rounds * self._length_s
            bits -= rounds * self._round_bits
        while True:
            rate = self._steps[index].rate_bit_s
            if rate is None:
                return at_s
            if rate > 0 and bits <= rate * left_s:
                return at_s + bits / rate
            bits -= rate * left_s
            at_s += left_s
            index = (index + 1) % len(self._steps)
            left_s = self._step_s(index)

    def _place(self, at_s: float) -> tuple[int, float]:
        """(step, seconds left of it)."""
        if self._loop:
            at_s %= self._length_s
        index = bisect.bisect_right(self._starts, at_s) - 1
        return index, self._starts[index] + self._step_s(index) - at_s

    def _step_s(self, index: int) -> float:
        held = not self._loop and index == len(self._steps) - 1
        return math.inf if held else self._steps[index].seconds


def _loss_process(loss: Loss, source: random.Random) -> Callable[[float], bool]:
    """A function that says of each packet sent at a time, in order, whether the air loses it."""
    match loss:
        case IidLoss(ratio=ratio):
            return lambda _: source.random() < ratio
        case GilbertElliott():
            return _Bursts(loss, source)
        case Outages():
            return _DeadTimes(loss, source)
        case None:
            return lambda _: False


class _Bursts:
    """`GilbertElliott`, begun in its stationary distribution."""

    def __init__(self, loss: GilbertElliott, source: random.Random) -> None:
        self._stay = 1.0 - 1.0 / loss.mean_burst
        self._begin = loss.ratio / (1.0 - loss.ratio) / loss.mean_burst
        self._random = source.random
        self._bad = self._random() < loss.ratio

    def __call__(self, _: float) -> bool:
        bad = self._bad
        self._bad = self._random() < (self._stay if bad else self._begin)
        return bad


class _DeadTimes:
    """`Outages`, looked at only when a packet passes: P(dead at t + dt | state at t) in closed form, so that an hour
    of silence costs no more than a millisecond.
    """

    def __init__(self, loss: Outages, source: random.Random) -> None:
        self._ratio = loss.ratio
        self._decay_per_s = 1e3 / loss.mean_ms / (1.0 - loss.ratio)
        self._random = source.random
        self._dead = self._random() < loss.ratio
        self._at: float | None = None

    def __call__(self, now: float) -> bool:
        memory = 1.0 if self._at is None else math.exp(-(now - self._at) * self._decay_per_s)
        self._at = now
        dead = self._ratio * (1.0 - memory) + (memory if self._dead else 0.0)
        self._dead = self._random() < dead
        return self._dead


Item = TypeVar("Item")


class LinkPipe(Generic[Item]):
    """A direction and what is under way in it, soonest first. `now` never decreases."""

    def __init__(self, spec: LinkSpec, name: str = "") -> None:
        self.direction = Direction(spec, name)
        self._under_way: list[tuple[float, int, int, Item]] = []
        self._number = 0
        self._held_bytes = 0
        self._dead = False
        self._delivered = self._lost_cut = self.lost_relay = 0
        self._late_max_ms = self._late_sum_ms = 0.0

    @property
    def next_at(self) -> float | None:
        """When the next packet is due."""
        return self._under_way[0][0] if self._under_way else None

    @property
    def dead(self) -> bool:
        """Whether the link is cut: nothing gets in, and what was under way is lost."""
        return self._dead

    @dead.setter
    def dead(self, dead: bool) -> None:
        if dead:
            self._lost_cut += len(self._under_way)
            self._under_way.clear()
            self._held_bytes = 0
        self._dead = dead

    def put(self, size: int, item: Item, now: float) -> None:
        """Offer a packet of `size` bytes on the wire, carried as `item`."""
        if self._dead:
            self._lost_cut += 1
            self.direction.offered += 1
            self.direction.offered_bytes += size
            return
        for arrival in self.direction.offer(size, now):
            if self._held_bytes + size + BOOKKEEPING_BYTES > MAX_IN_FLIGHT_BYTES:
                self.lost_relay += 1
                continue
            self._number += 1  # equal times leave in the order in which they came
            self._held_bytes += size + BOOKKEEPING_BYTES
            heapq.heappush(self._under_way, (arrival, self._number, size, item))

    def due(self, now: float) -> list[Item]:
        """Take out what has arrived."""
        items = []
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            arrival, _, size, item = heapq.heappop(under_way)
            self._held_bytes -= size + BOOKKEEPING_BYTES
            late_ms = (now - arrival) * 1e3
            self._late_sum_ms += late_ms
            self._late_max_ms = max(self._late_max_ms, late_ms)
            items.append(item)
        self._delivered += len(items)
        return items

    @property
    def counts(self) -> PacketCounts:
        """What happened so far."""
        model = self.direction
        return PacketCounts(
            offered=model.offered,
            offered_bytes=model.offered_bytes,
            delivered=self._delivered,
            lost_air=model.lost_air,
            lost_queue=model.lost_queue,
            lost_cut=self._lost_cut,
            lost_relay=self.lost_relay,
            duplicated=model.duplicated,
            held_back=model.held_back,
            late_mean_ms=self._late_sum_ms / max(1, self._delivered),
            late_max_ms=self._late_max_ms,
        )
