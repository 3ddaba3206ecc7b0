"""A bad link, emulated: what it does to packets (pure, seeded), and a relay on this machine that does it to UDP.

    packet ─► queue (drop-tail, rate) ─► air (loss, then duplication) ─► delay, jitter, reordering ─► arrival

Loss comes after the bottleneck, so a lost packet has used the link's time, as on a radio. A rate counts whole IP
packets. `Direction` is the model: a packet's size and `now` in, arrival times out. `Pipe` keeps what is under way.
`UdpRelay` (sockets, below) needs no privileges; `loadgen.tun_link` does the same to real kernel TCP and needs root.

    python -m loadgen.link --upstream 127.0.0.1:4433 --link rate=20mbit,delay=20ms,loss=5%,burst=4,seed=1
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import ctypes
import heapq
import itertools
import math
import os
import random
import re
import socket
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from hawkvision.errors import ConfigError, HawkVisionError, NotReady

DEFAULT_QUEUE_BYTES: Final = 100_000
"""The bandwidth-delay product of 20 Mbit/s and 40 ms, the usual size of a router's buffer and that of our study."""
MAX_TRACE_STEPS: Final = 360_000
"""An hour in steps of 10 ms."""
MAX_IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
"""What a pipe holds, bookkeeping included: half a second of 1 Gbit/s. More is dropped and counted as the relay's."""
BOOKKEEPING_BYTES: Final = 256
"""What Python spends per held packet on tuples, floats and headers of objects, so that tiny packets count too."""
UDP_OVERHEAD_BYTES: Final = 28
"""IPv4 and UDP headers, which the relay does not see and the link would carry."""
BATCH: Final = 64
"""Packets read from one socket before others get their turn."""


# ── What a link is told to do ──────────────────────────────────────────────────────────────────────────────────────


class NoLoss(msgspec.Struct, frozen=True, tag="none"):
    """Nothing is lost in the air."""


class IidLoss(msgspec.Struct, frozen=True, tag="iid"):
    """Every packet is lost with probability `ratio` (0..1), whatever happened to others."""

    ratio: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 1.0)


class GilbertElliott(msgspec.Struct, frozen=True, tag="gilbert_elliott"):
    """Bursts counted in packets: a two-state chain that steps once per packet and loses all of them while bad.

    Packets are lost with probability `ratio` in runs of `mean_burst` on average, at least `ratio / (1 - ratio)`, below
    which the good state would be left more than surely. A sender that stops after a loss freezes the chain, so TCP
    may hang in one burst for minutes: compare with TCP under `Outages`.
    """

    ratio: float
    mean_burst: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 0.99)
        _within("burst", self.mean_burst, max(1.0, self.ratio / (1.0 - self.ratio)), 1e6)


class Outages(msgspec.Struct, frozen=True, tag="outages"):
    """Bursts counted in time: the link is dead for a share `ratio` of the time, `mean_ms` at a stretch.

    Both states last exponentially long, so knowing the state of the last packet is knowing all there is.
    """

    ratio: float
    mean_ms: float

    def __post_init__(self) -> None:
        _within("loss", self.ratio, 0.0, 0.99)
        _within("outage (ms)", self.mean_ms, 0.01, 600_000.0)


Loss: TypeAlias = NoLoss | IidLoss | GilbertElliott | Outages


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A link's weather for some time. A rate of 0 sends nothing and lets packets queue; None is unlimited."""

    seconds: float
    rate_bit_s: float | None
    delay_ms: float
    loss_ratio: float

    def __post_init__(self) -> None:
        _within("seconds", self.seconds, 0.001, 1e7)
        if self.rate_bit_s is not None and self.rate_bit_s != 0:
            _within("rate_bit_s", self.rate_bit_s, 1e3, 1e11)
        _within("delay_ms", self.delay_ms, 0.0, 60_000.0)
        _within("loss_ratio", self.loss_ratio, 0.0, 1.0)


class Trace(msgspec.Struct, frozen=True):
    """Steps one after another from the first packet on; then again from the start (`loop`), or the last one for ever.

    As a file: one step a line, `seconds rate_bit_s delay_ms loss_ratio`, the rate `-` where unlimited; `#` begins a
    comment. `seconds` is how long the line holds, so that a loop has a length.
    """

    steps: tuple[Step, ...]
    loop: bool = True
    source: str = "trace"

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MAX_TRACE_STEPS:
            raise ConfigError(f"{self.source}: {len(self.steps)} steps; expected 1 to {MAX_TRACE_STEPS}")
        if all(step.rate_bit_s == 0 for step in (self.steps if self.loop else self.steps[-1:])):
            raise ConfigError(f"{self.source}: its rate stays 0 and packets queue for ever; end with another rate")

    @classmethod
    def read(cls, path: Path, loop: bool = True) -> Trace:
        """The trace in a file.

        Raises:
            ConfigError: naming file and line.
        """
        steps: list[Step] = []
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    words = line.partition("#")[0].split()
                    if words and len(steps) == MAX_TRACE_STEPS:
                        raise ConfigError(f"{path}:{number}: more than {MAX_TRACE_STEPS} steps")
                    if words:
                        steps.append(_read_step(words, f"{path}:{number}"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None
        return cls(tuple(steps), loop, str(path))


def _read_step(words: list[str], where: str) -> Step:
    try:
        seconds, rate, delay, loss = words
        return Step(float(seconds), None if rate == "-" else float(rate), float(delay), float(loss))
    except ValueError:
        raise ConfigError(
            f"{where}: {' '.join(words)!r}; expected 'seconds rate_bit_s delay_ms loss_ratio', rate '-' if unlimited"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One direction of a link. The default is a perfect one.

    As text (`parse`, `str`) and as a mapping of TOML values (`from_mapping`) it has the keys
    `rate=20mbit delay=20ms jitter=5ms jitter_reorders=no loss=5% burst=4 | outage=10ms reorder=1% reorder_delay=5ms
    duplicate=1% queue=100kB trace=FILE trace_end=loop|hold seed=1`.
    """

    rate_bit_s: float | None = None
    delay_ms: float = 0.0
    """One way."""
    jitter_ms: float = 0.0
    """Uniform between 0 and this, on top of the delay."""
    jitter_reorders: bool = False
    """Whether jitter may let a packet overtake another. If not, one that would waits for the other."""
    loss: Loss = NoLoss()
    reorder_ratio: float = 0.0
    """Probability that a packet is held back while those behind it go on."""
    reorder_delay_ms: float = 5.0
    duplicate_ratio: float = 0.0
    """Probability that a packet that got through arrives twice, at the same time."""
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    """Bytes waiting for or in transmission beyond which a packet is dropped; an idle link takes any one packet."""
    trace: Trace | None = None
    """Weather in the place of rate, delay and loss."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate_bit_s is not None:
            _within("rate (bit/s)", self.rate_bit_s, 1e3, 1e11)
        _within("delay (ms)", self.delay_ms, 0.0, 60_000.0)
        _within("jitter (ms)", self.jitter_ms, 0.0, 60_000.0)
        _within("reorder", self.reorder_ratio, 0.0, 1.0)
        _within("reorder_delay (ms)", self.reorder_delay_ms, 0.0, 60_000.0)
        _within("duplicate", self.duplicate_ratio, 0.0, 1.0)
        _within("queue (bytes)", self.queue_bytes, 0, 100_000_000)
        _within("seed", self.seed, 0, 2**63 - 1)
        if self.trace is not None and (self.rate_bit_s is not None or self.delay_ms or self.loss != NoLoss()):
            raise ConfigError("trace: it says rate, delay and loss itself; leave those out")

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """A link from `key=value,key=value`; empty text is a perfect link.

        Raises:
            ConfigError: for an unknown, doubled or contradictory key or a value without its unit.
        """
        values: dict[str, object] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            key, equals, value = map(str.strip, part.partition("="))
            if not equals or not value:
                raise ConfigError(f"link {text!r}: {part!r}; expected key=value")
            if key in values:
                raise ConfigError(f"link {text!r}: {key} is given twice")
            values[key] = value
        return cls.from_mapping(values, f"link {text!r}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], where: str = "link") -> LinkSpec:
        """A link from TOML values: text with a unit, or a number where there is none (ratios, burst, seed).

        Raises:
            ConfigError: as `parse`, beginning with `where`.
        """
        try:
            return _from_mapping(values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}") from None

    def __str__(self) -> str:
        """The text that `parse` reads back."""
        return ",".join(f"{key}={value}" for key, value in _shown(self))


_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "rate": {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9},
    "time": {"us": 1e-3, "ms": 1.0, "s": 1e3},
    "size": {"b": 1.0, "kb": 1e3, "mb": 1e6, "kib": 1024.0, "mib": 1048576.0},
    "ratio": {"": 1.0, "%": 0.01},
    "number": {"": 1.0},
}
_KINDS: Final[Mapping[str, str]] = {
    "rate": "rate",
    "delay": "time",
    "jitter": "time",
    "jitter_reorders": "yes or no",
    "loss": "ratio",
    "burst": "number",
    "outage": "time",
    "reorder": "ratio",
    "reorder_delay": "time",
    "duplicate": "ratio",
    "queue": "size",
    "trace": "file",
    "trace_end": "loop or hold",
    "seed": "number",
}
_QUANTITY: Final = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z%]*)", re.IGNORECASE)
_FIELDS: Final[Mapping[str, str]] = {
    "rate": "rate_bit_s",
    "delay": "delay_ms",
    "jitter": "jitter_ms",
    "reorder": "reorder_ratio",
    "reorder_delay": "reorder_delay_ms",
    "duplicate": "duplicate_ratio",
}


def _from_mapping(values: Mapping[str, object]) -> LinkSpec:
    unknown = sorted(values.keys() - _KINDS.keys())
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; expected one of {', '.join(_KINDS)}")
    given = {key: _quantity(key, value) for key, value in values.items() if _KINDS[key] in _UNITS}
    plain = LinkSpec()
    trace = None
    if "trace" in values:
        trace = Trace.read(Path(str(values["trace"])), _choice(values, "trace_end", "loop", "hold"))
    elif "trace_end" in values:
        raise ConfigError("trace_end says how a trace ends, and there is none")
    return LinkSpec(
        **{field: given[key] for key, field in _FIELDS.items() if key in given},
        jitter_reorders=not _choice(values, "jitter_reorders", "no", "yes"),
        loss=_loss(given),
        queue_bytes=_whole("queue", given.get("queue", plain.queue_bytes)),
        trace=trace,
        seed=_whole("seed", given.get("seed", plain.seed)),
    )


def _loss(given: Mapping[str, float]) -> Loss:
    burst, outage = given.get("burst"), given.get("outage")
    if burst is not None and outage is not None:
        raise ConfigError("burst (in packets) and outage (in time) contradict each other")
    if "loss" not in given:
        if burst is not None or outage is not None:
            raise ConfigError("burst and outage say how losses come together; loss says how many and is missing")
        return NoLoss()
    if burst is not None:
        return GilbertElliott(given["loss"], burst)
    if outage is not None:
        return Outages(given["loss"], outage)
    return IidLoss(given["loss"])


def _quantity(key: str, value: object) -> float:
    units = _UNITS[_KINDS[key]]
    found = _QUANTITY.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    if found is None or found[2].lower() not in units:
        wanted = " or ".join(unit or "no unit" for unit in units)
        raise ConfigError(f"{key} = {value!r}; expected a {_KINDS[key]}: a number with {wanted}")
    return float(found[1]) * units[found[2].lower()]


def _choice(values: Mapping[str, object], key: str, first: str, second: str) -> bool:
    """Whether the first of two words was chosen; it is the default."""
    value = values.get(key, first)
    word = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    if word not in (first, second):
        raise ConfigError(f"{key} = {value!r}; expected {first} or {second}")
    return word == first


def _whole(key: str, value: float) -> int:
    if not math.isfinite(value) or abs(value - round(value)) > 1e-6:
        raise ConfigError(f"{key} = {value}; expected a whole number")
    return round(value)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # not a number is not within either
        raise ConfigError(f"{name} = {value:g}; expected {low:g} to {high:g}")


def _shown(spec: LinkSpec) -> list[tuple[str, str]]:
    plain = LinkSpec()
    units = {"rate": "bit", "time": "ms", "ratio": ""}
    shown = [
        (key, _number(value) + units[_KINDS[key]])
        for key, field in _FIELDS.items()
        if (value := getattr(spec, field)) != getattr(plain, field)
    ]
    match spec.loss:
        case IidLoss(ratio=ratio):
            shown.append(("loss", _number(ratio)))
        case GilbertElliott(ratio=ratio, mean_burst=burst):
            shown += [("loss", _number(ratio)), ("burst", _number(burst))]
        case Outages(ratio=ratio, mean_ms=mean):
            shown += [("loss", _number(ratio)), ("outage", f"{_number(mean)}ms")]
        case NoLoss():
            pass
    if spec.jitter_reorders:
        shown.append(("jitter_reorders", "yes"))
    if spec.queue_bytes != plain.queue_bytes:
        shown.append(("queue", f"{spec.queue_bytes}B"))
    if spec.trace is not None:
        shown += [("trace", spec.trace.source), ("trace_end", "loop" if spec.trace.loop else "hold")]
    if spec.seed != plain.seed:
        shown.append(("seed", str(spec.seed)))
    return shown


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


# ── What it does to packets ────────────────────────────────────────────────────────────────────────────────────────


class Counts(msgspec.Struct, frozen=True):
    """What one direction has done since it was made."""

    offered: int
    offered_bytes: int
    delivered: int
    """Copies that a `Pipe` gave out; 0 where there is only a `Direction`."""
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
        self._random = random.Random(f"{spec.seed} {self._name}")  # noqa: S311 - weather, not secrets
        self._lost = _loss_process(spec.loss, self._random)
        trace = spec.trace or Trace((Step(1.0, spec.rate_bit_s, spec.delay_ms, 0.0),), loop=False)
        self._weather = _Weather(trace)
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
        step = self._weather.at(sent_at - self._begun_at)
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
        sent_at = self._begun_at + self._weather.sent(start - self._begun_at, 8.0 * size)
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


class _Weather:
    """A trace's rate, delay and loss at any time, counted in seconds from its beginning."""

    def __init__(self, trace: Trace) -> None:
        self._steps = trace.steps
        self._loop = trace.loop
        *self._starts, self._length_s = itertools.accumulate((step.seconds for step in trace.steps), initial=0.0)
        self._round_bits = sum(math.inf if s.rate_bit_s is None else s.rate_bit_s * s.seconds for s in trace.steps)

    def at(self, at_s: float) -> Step:
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
        case NoLoss():
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


class Pipe(Generic[Item]):
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
    def counts(self) -> Counts:
        """What happened so far."""
        model = self.direction
        return Counts(
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


# ── The relay: UDP on this machine, without privileges ─────────────────────────────────────────────────────────────


Address: TypeAlias = tuple[str, int]
_SocketAddress: TypeAlias = tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True, eq=False)
class _Client:
    """One client and the socket that stands for it before the upstream."""

    address: _SocketAddress
    upstream: socket.socket
    active_at: float


class UdpRelay:
    """A UDP relay on loopback that treats what passes as a link would. Use it as an async context manager.

    Clients send to `address`; each gets a socket of its own towards `upstream`, so the upstream sees one address per
    client. All share one bottleneck per direction. Specs may be set, and the path cut, while packets are under way.

    Args:
        upstream: where packets go.
        up: the link from clients to the upstream; `down` is the way back, the same spec if None.
        listen: where clients send; port 0 takes a free one.
        max_clients: sockets towards the upstream; beyond that, packets of new clients are dropped (`refused`).
        idle_s: silence after which a client's socket is closed.
    """

    def __init__(
        self,
        upstream: Address,
        up: LinkSpec,
        down: LinkSpec | None = None,
        *,
        listen: Address = ("127.0.0.1", 0),
        max_clients: int = 64,
        idle_s: float = 60.0,
    ) -> None:
        self.refused = 0
        """Packets of clients beyond the bound."""
        self._upstream = upstream
        self._listen = listen
        self._max_clients = max_clients
        self._idle_s = idle_s
        self._up: Pipe[tuple[_Client, bytes]] = Pipe(up, "up")
        self._down: Pipe[tuple[_Client, bytes]] = Pipe(up if down is None else down, "down")
        self._clients: OrderedDict[_SocketAddress, _Client] = OrderedDict()
        """By address, the longest silent first."""
        self._listener: socket.socket | None = None

    @property
    def address(self) -> Address:
        """Where clients send to."""
        assert self._listener is not None, "the relay has not been entered"
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def clients(self) -> int:
        """Clients with a socket."""
        return len(self._clients)

    @property
    def up(self) -> LinkSpec:
        """The link from clients to the upstream."""
        return self._up.direction.spec

    @up.setter
    def up(self, spec: LinkSpec) -> None:
        self._up.direction.spec = spec

    @property
    def down(self) -> LinkSpec:
        """The link from the upstream to clients."""
        return self._down.direction.spec

    @down.setter
    def down(self, spec: LinkSpec) -> None:
        self._down.direction.spec = spec

    @property
    def counts(self) -> tuple[Counts, Counts]:
        """What happened (up, down)."""
        return self._up.counts, self._down.counts

    def blackhole(self, dead: bool) -> None:
        """Cut both directions, or mend them. Nobody is told: packets disappear, those under way as well."""
        self._up.dead = self._down.dead = dead
        self._pump()

    async def __aenter__(self) -> UdpRelay:
        self._loop = asyncio.get_running_loop()
        family, self._target = await self._resolve(self._upstream)
        listen_family, listen = await self._resolve(self._listen)
        if family != listen_family:
            raise ConfigError(f"relay: {self._listen[0]} and {self._upstream[0]} are not of one IP version")
        self._family = family
        self._listener = _udp_socket(family)
        try:
            self._listener.bind(listen)
        except OSError as error:
            self._listener.close()
            where = f"{self._listen[0]}:{self._listen[1]}"
            raise ConfigError(f"relay: cannot listen on {where}: {error.strerror}") from None
        self._alarm = _Alarm(self._loop, self._pump)
        self._loop.add_reader(self._listener, self._from_clients, self._listener)
        self._sweep()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._sweeping.cancel()
        self._alarm.close()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._clients:
            self._forget(next(iter(self._clients.values())))

    async def _resolve(self, address: Address) -> tuple[int, _SocketAddress]:
        try:
            found = await self._loop.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        except OSError as error:
            raise ConfigError(f"relay: {address[0]}:{address[1]}: {error.strerror}") from None
        family, _, _, _, resolved = found[0]
        return family, (str(resolved[0]), int(resolved[1]))

    def _from_clients(self, listener: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                data, address = listener.recvfrom(65535)
            except OSError:  # nothing more, or an earlier answer found no client
                break
            now = time.monotonic()
            client = self._client(address, now)
            if client is None:
                self.refused += 1
            else:
                self._up.put(len(data) + UDP_OVERHEAD_BYTES, (client, data), now)
        self._pump()

    def _from_upstream(self, client: _Client) -> None:
        for _ in range(BATCH):
            try:
                data = client.upstream.recv(65535)
            except OSError:  # nothing more, or an earlier packet found no upstream
                break
            now = time.monotonic()
            self._touch(client, now)
            self._down.put(len(data) + UDP_OVERHEAD_BYTES, (client, data), now)
        self._pump()

    def _pump(self) -> None:
        """Send on what has arrived, and wake for what arrives next."""
        assert self._listener is not None
        now = time.monotonic()
        for client, data in self._up.due(now):
            self._send(self._up, client.upstream, data, None)
        for client, data in self._down.due(now):
            self._send(self._down, self._listener, data, client.address)
        self._alarm.set(min((at for at in (self._up.next_at, self._down.next_at) if at is not None), default=None))

    @staticmethod
    def _send(pipe: Pipe[tuple[_Client, bytes]], way: socket.socket, data: bytes, to: _SocketAddress | None) -> None:
        for _ in range(2):
            try:
                if to is None:
                    way.send(data)
                else:
                    way.sendto(data, to)
            except ConnectionRefusedError:  # reports that nobody took an earlier packet; this one has not been sent yet
                continue
            except OSError:  # a full buffer, or the socket of a client that fell silent meanwhile
                pipe.lost_relay += 1
            return

    def _client(self, address: _SocketAddress, now: float) -> _Client | None:
        client = self._clients.get(address)
        if client is None:
            if len(self._clients) >= self._max_clients:
                self._expire(now)
            if len(self._clients) >= self._max_clients:
                return None
            client = _Client(address, _udp_socket(self._family), now)
            client.upstream.connect(self._target)
            self._clients[address] = client
            self._loop.add_reader(client.upstream, self._from_upstream, client)
        self._touch(client, now)
        return client

    def _touch(self, client: _Client, now: float) -> None:
        client.active_at = now
        self._clients.move_to_end(client.address)

    def _expire(self, now: float) -> None:
        while self._clients:
            client = next(iter(self._clients.values()))
            if now - client.active_at < self._idle_s:
                return
            self._forget(client)

    def _forget(self, client: _Client) -> None:
        del self._clients[client.address]
        self._loop.remove_reader(client.upstream)
        client.upstream.close()

    def _sweep(self) -> None:
        self._expire(time.monotonic())
        self._sweeping = self._loop.call_later(self._idle_s, self._sweep)


def _udp_socket(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, 4 * 1024 * 1024)  # the kernel caps it silently
    return made


class _Alarm:
    """Calls back once at a time of `time.monotonic`.

    By a Linux timerfd, because the loop's own timers are rounded up to the next millisecond (epoll_wait), which
    would be the largest error of the whole emulation; elsewhere by the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._at: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._timer: int | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._timer < 0:
                raise NotReady(f"relay: no timer: {os.strerror(ctypes.get_errno())}")
            loop.add_reader(self._timer, self._rung)

    def set(self, at: float | None) -> None:
        """Ring at this time, at once if it has passed, never if None; replaces what was set before."""
        if at == self._at:
            return
        self._at = at
        if self._timer is None:
            if self._handle is not None:
                self._handle.cancel()
            wait_s = 0.0 if at is None else max(0.0, at - time.monotonic())
            self._handle = None if at is None else self._loop.call_later(wait_s, self._rung)
        else:
            # struct itimerspec {interval {s, ns}, value {s, ns}}; a value of 0 disarms.
            seconds, nanos = (0, 0) if at is None else divmod(max(1, round(at * 1e9)), 1_000_000_000)
            spec = (ctypes.c_long * 4)(0, 0, seconds, nanos)
            self._libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, spec, None)

    def close(self) -> None:
        """Never ring again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._timer is not None:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)

    def _rung(self) -> None:
        if self._timer is not None:
            with contextlib.suppress(BlockingIOError):  # it was set anew between ringing and now
                os.read(self._timer, 8)
        self._at = None
        self._ring()


_TFD_TIMER_ABSTIME: Final = 1


async def _relay(options: argparse.Namespace) -> None:
    host, _, port = options.upstream.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--upstream {options.upstream!r}; expected HOST:PORT")
    up = LinkSpec.parse(options.link if options.up is None else options.up)
    down = LinkSpec.parse(options.link if options.down is None else options.down)
    async with UdpRelay((host, int(port)), up, down, listen=(options.host, options.port)) as relay:
        print(f"ready: {relay.address[0]}:{relay.address[1]}", flush=True)  # noqa: T201
        try:
            await asyncio.Event().wait()
        finally:
            for way, counts in zip(("up", "down"), relay.counts, strict=True):
                print(way, msgspec.json.encode(counts).decode(), flush=True)  # noqa: T201


def main(argv: Sequence[str] | None = None) -> int:
    """Relay until interrupted; then print what happened. The exit status is 1 for an error that was explained."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.link", description="A UDP relay that is a bad link.")
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT", help="where packets go")
    parser.add_argument("--link", default="", metavar="SPEC", help="both ways, as rate=20mbit,delay=20ms,loss=5%%")
    parser.add_argument("--up", metavar="SPEC", help="towards the upstream, in the place of --link")
    parser.add_argument("--down", metavar="SPEC", help="from the upstream, in the place of --link")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="where to listen (default: a free one, printed)")
    try:
        asyncio.run(_relay(parser.parse_args(argv)))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
