"""The sending end: images out as fragments, responses in. Sans-I/O.

    submit ─► queue of fragments ─► paths, each at its own rate ─► … ─► response parts ─► `answered`
                    ▲                                     │
                    └── repair: the receiver's NACK, or reports that leave fewer than k fragments alive

A fragment leaves on the living path that may send first, so a second path adds its rate and a dead one is drained.
Parity covers losses; they are not repaired one by one. Only if fewer than k of an image's fragments are delivered or
under way, as many as are needed are sent again, at growing intervals and at most `MAX_ROUNDS` times. A fragment that
would arrive after the deadline is not sent.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from hawkvision.core.clock import Deadline
from hawkvision.transport.coding.image_coding import Coded
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.endpoint.path import Path
from hawkvision.transport.protocol.frames import (
    MAX_META,
    AnswerPart,
    Cancel,
    Fragment,
    Frame,
    Interim,
    Nack,
    Ping,
    encode,
    fragment_room,
)
from hawkvision.transport.protocol.packet_protection import Header
from hawkvision.transport.protocol.wire import MAX_DATAGRAM, OVERHEAD, WireError

FragmentId: TypeAlias = tuple[int, int]
"""The fragment that a datagram carries: the image's number and the fragment's index."""


@dataclass(slots=True)
class FragmentState:
    """What became of one fragment."""

    flying: int = 0
    delivered: bool = False
    sent: int = 0
    sent_at: float = -math.inf
    queued: bool = False


@dataclass(slots=True)
class OutgoingImage:
    """An image without a response."""

    number: int
    template: int
    coded: Coded
    meta: bytes
    deadline: Deadline | None
    expires: float
    """From when on nothing more of it is sent."""
    fragments: list[FragmentState]
    rounds: int = 0
    repair_at: float = -math.inf
    queued_bytes: int = 0
    last_at: float = -math.inf
    """Its last fragment does not leave before this."""
    parts: dict[int, AnswerPart] = field(default_factory=dict)
    latest_interim: int = -1
    """The number of the latest interim response."""

    @property
    def alive(self) -> int:
        """The fragments that are delivered, under way or queued."""
        return sum(f.delivered or f.flying > 0 or f.queued for f in self.fragments)


MAX_IMAGES: Final = 64
"""Unanswered images of one session."""
MAX_ROUNDS: Final = 12
"""Repairs of one image. Every other interval doubles, so they span 126 timeouts: 9 s at a round trip of 40 ms, about as
long as the receiver waits."""
MAX_RESENDS: Final = MAX_ROUNDS
"""Of one fragment, for any reason. An outage of a second uses up fewer."""
FAR_RATIO: Final = 2.0
FAR_S: Final = 0.02
"""A path whose round trip exceeds the shortest by this factor and time carries fragments only if the others may not."""
BURSTY: Final = 2.0
"""From this mean run of losses on, parity is spread over time instead of following at once."""
PARITY_SPREAD_S: Final = 0.02
"""From the data to the last parity fragment on a bursty link; outages of radio links take 10 to 20 ms."""


class _Queued(NamedTuple):
    """A tuple, because the heap compares entries four times per datagram."""

    not_before: float
    order: int
    number: int
    fragment: int


class Sender:
    """Sends images over a channel. Events are taken from `interims` and `answered`."""

    def __init__(self, channel: Channel[FragmentId]) -> None:
        self.channel = channel
        self.answered: deque[tuple[int, int, bytes]] = deque()
        """Responses: the image's number, a status of `WIRE.md` §6, and the body."""
        self.interims: deque[tuple[int, bytes]] = deque(maxlen=MAX_IMAGES)
        """Interim responses: the image's number and the body. If nobody takes them, the oldest are dropped."""
        self._images: dict[int, OutgoingImage] = {}
        self._queue: list[_Queued] = []  # a heap; each fragment is in it at most once
        self._cancels: deque[int] = deque(maxlen=MAX_IMAGES)
        self._next = 0
        self._order = 0
        self._used: Counter[int] = Counter()
        """The count of fragments at each path's last use."""
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether another image must wait for a response to an earlier one."""
        return len(self._images) >= MAX_IMAGES

    def loss(self, now: float) -> LossEstimate:
        """The worst of the living paths' estimates, because they share the fragments."""
        return max((path.rate.loss for path in self.channel.usable(now)), key=lambda loss: loss.ratio)

    def spare_s(self, size: int, now: float) -> float:
        """How long all living paths together take to carry `size` bytes, shared by their rates."""
        rates = [path.rate for path in self.channel.usable(now)]
        whole = max(1.0, sum(rate.pacing_rate for rate in rates))
        return max(rate.transmission_s(size * rate.pacing_rate / whole, now) for rate in rates)

    @property
    def queued_bytes(self) -> int:
        """The bytes that have not left yet."""
        return sum(image.queued_bytes for image in self._images.values())

    def ping(self, now: float) -> None:
        """Ask for a report on every path; its round trip becomes known, and the receiver learns its address."""
        for path in self.channel.paths.values():
            self.channel.replies.append((path.number, self.channel.send(path, encode(Ping()), now)))

    def submit(
        self,
        template: int,
        coded: Coded,
        deadline: Deadline | None,
        meta: bytes,
        now: float,
        late_s: float = 0.0,
    ) -> int:
        """Queue an image, and return its number.

        It is sent until its deadline, or `late_s` longer if a late response is wanted.

        Raises:
            WireError: if the meta is too long, or a symbol does not fit a datagram with it.
        """
        assert not self.full, "the caller waits for room"
        room = fragment_room(meta)
        longest = max(map(len, coded.symbols))
        if len(meta) > MAX_META or longest > room:
            raise WireError(f"meta of {len(meta)}, symbols of {longest} bytes; expected at most {MAX_META} and {room}")
        number = self._next
        self._next = (number + 1) & 0xFFFFFFFF
        expires = math.inf if deadline is None else deadline.at + late_s
        image = OutgoingImage(
            number, template, coded, meta, deadline, expires, [FragmentState() for _ in coded.symbols]
        )
        self._images[number] = image
        k, n = coded.format.k, coded.format.n
        spread = PARITY_SPREAD_S if self.loss(now).known and self.loss(now).burst > BURSTY else 0.0
        for index in range(n):
            wait = spread * max(0, index + 1 - k) / max(1, n - k)
            self._put(image, index, now + wait)
        return number

    def cancel(self, number: int) -> None:
        """Stop sending an image, and tell the receiver."""
        if self._images.pop(number, None) is not None:
            self._cancels.append(number)

    def receive(self, header: Header, datagram: bytes, now: float) -> bool:
        """Take in a datagram; whether it was authentic."""
        frames = self.channel.receive(header, datagram, now)
        if frames is None:
            return False
        for frame in frames:
            self._take(frame, now)
        self._apply_reports(now)
        return True

    def answer(self, number: int, status: int, body: bytes) -> None:
        """Take a response that came by the stream; the first one counts."""
        if self._images.pop(number, None) is not None:
            self.answered.append((number, status, body))

    def poll(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The datagrams to send now, each with its path."""
        self.channel.expire(now)
        self._apply_reports(now)
        yield from self.channel.due(now)
        while self._cancels:
            path = self.channel.best(now)
            yield path.number, self.channel.send(path, encode(Cancel(self._cancels.popleft())), now)
        while self._queue and self._queue[0].not_before <= now:
            entry = self._queue[0]
            image = self._images.get(entry.number)
            if image is None or image.expires <= now:
                heapq.heappop(self._queue)
                if image is not None:
                    self._dequeued(image, entry.fragment)
                continue
            path, when = self._first_free(now)
            if when > now:
                return
            heapq.heappop(self._queue)
            self._dequeued(image, entry.fragment)
            yield path.number, self._send(path, image, entry.fragment, now)

    def next_timer(self, now: float) -> float:
        """When `poll` is due again; +∞ for never."""
        times = list(self.channel.timers(now))
        if self._queue:
            times.append(max(self._queue[0].not_before, self._first_free(now)[1]))
        times.extend(p.repair_at for p in self._images.values() if p.repair_at > now and p.alive < p.coded.format.k)
        return min(times, default=math.inf)

    def _first_free(self, now: float) -> tuple[Path[FragmentId], float]:
        """The living path that may send a whole datagram first; of several the least recently used.

        So all paths share an image, half of it survives the loss of either of two, and each path stays measured.
        """
        usable = self.channel.usable(now)
        if len(usable) == 1:
            return usable[0], usable[0].rate.release_at(MAX_DATAGRAM, now)
        near = FAR_S + FAR_RATIO * min((path.rate.rtt_s or 0.0) for path in usable)
        return min(
            ((path, path.rate.release_at(MAX_DATAGRAM, now)) for path in usable),
            key=lambda pair: (pair[1], (pair[0].rate.rtt_s or 0.0) > near, self._used[pair[0].number]),
        )

    def _put(self, image: OutgoingImage, index: int, not_before: float) -> None:
        fragment = image.fragments[index]
        if fragment.queued or fragment.sent > MAX_RESENDS:
            return
        fragment.queued = True
        image.queued_bytes += len(image.coded.symbols[index]) + OVERHEAD
        image.last_at = max(image.last_at, not_before)
        self._order += 1
        heapq.heappush(self._queue, _Queued(not_before, self._order, image.number, index))

    @staticmethod
    def _dequeued(image: OutgoingImage, index: int) -> None:
        image.fragments[index].queued = False
        image.queued_bytes -= len(image.coded.symbols[index]) + OVERHEAD

    def _send(self, path: Path[FragmentId], image: OutgoingImage, index: int, now: float) -> bytes:
        fragment, coded = image.fragments[index], image.coded
        self._count += 1
        self._used[path.number] = self._count
        fragment.flying += 1
        fragment.sent += 1
        fragment.sent_at = now
        rest_s = max(self.spare_s(image.queued_bytes, now), image.last_at - now)
        left = 0 if image.deadline is None else max(1, round(image.deadline.remaining_ms(now)))
        frame = Fragment(
            image.number, image.template, coded.format, index, left, round(rest_s * 1e3), image.meta,
            coded.symbols[index],
        )  # fmt: skip
        return self.channel.send(path, encode(frame), now, (image.number, index))

    def _take(self, frame: Frame, now: float) -> None:
        match frame:
            case AnswerPart():
                self._take_part(frame, now)
            case Interim(number, count, body):
                image = self._images.get(number)
                if image is not None and count > image.latest_interim:
                    image.latest_interim = count
                    self.interims.append((number, body))
            case Nack(number, asked):
                image = self._images.get(number)
                if image is None:
                    return
                for index in asked:
                    if index < image.coded.format.n:
                        self._again(image, index, now)
                self._put_idle(image, self._with_losses(len(asked), now) - len(asked), now)
            case _:
                pass  # authentic, but meant for the other end

    def _take_part(self, part: AnswerPart, now: float) -> None:
        image = self._images.get(part.image)
        if image is None:
            return  # a copy, or a cancelled image's
        first = next(iter(image.parts.values()), part)
        if (first.status, first.parts) != (part.status, part.parts):
            return
        image.parts[part.part] = part
        if len(image.parts) == part.parts:
            body = b"".join(image.parts[number].body for number in range(part.parts))
            self.answer(part.image, part.status, body)
            for path in self.channel.paths.values():
                if path.report_at is not None:
                    path.report_at = now  # which stops the receiver's repetitions

    def _again(self, image: OutgoingImage, index: int, now: float) -> None:
        """Send a fragment again, unless that happened within the last round trip."""
        rtt = max((path.rate.rtt_s or 0.0 for path in self.channel.usable(now)), default=0.0)
        if now - image.fragments[index].sent_at >= 0.9 * rtt:
            image.fragments[index].delivered = False
            self._put(image, index, now)

    def _apply_reports(self, now: float) -> None:
        """Update fragments from reports and timeouts, and repair their images."""
        touched: set[int] = set()
        for places, delivered in ((self.channel.delivered, True), (self.channel.lost, False)):
            for number, index in places:
                image = self._images.get(number)
                if image is None:
                    continue
                fragment = image.fragments[index]
                fragment.flying = max(0, fragment.flying - 1)
                fragment.delivered = fragment.delivered or delivered
                touched.add(number)
            places.clear()
        for number, image in self._images.items():
            if number in touched or image.repair_at <= now:
                self._repair(image, now)

    def _repair(self, image: OutgoingImage, now: float) -> None:
        """If the fragments under way cannot complete the image, send as many as are needed."""
        short = image.coded.format.k - image.alive
        if short <= 0 or image.rounds >= MAX_ROUNDS or now < image.repair_at:
            return
        if image.rounds == 0 and all(f.sent == 0 for f in image.fragments):
            return
        timeout_s = min((path.rate.timeout_s() for path in self.channel.usable(now)), default=0.2)
        image.repair_at = now + timeout_s * 2.0 ** (image.rounds // 2)
        image.rounds += 1
        self._put_idle(image, self._with_losses(short, now), now)

    def _with_losses(self, wanted: int, now: float) -> int:
        """How many to send so that about `wanted` arrive at the measured loss."""
        loss = self.loss(now)
        return math.ceil(wanted / (1.0 - min(loss.ratio, 0.75)) - 1e-9) if loss.known else wanted

    def _put_idle(self, image: OutgoingImage, count: int, now: float) -> None:
        """Queue `count` fragments that are neither delivered nor under way, the least sent first.

        Otherwise a few unlucky fragments would use up their resends.
        """
        idle = [index for index, f in enumerate(image.fragments) if not (f.delivered or f.flying or f.queued)]
        for index in sorted(idle, key=lambda index: image.fragments[index].sent)[:count]:
            self._put(image, index, now)
