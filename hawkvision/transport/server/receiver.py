"""The receiving end: fragments in, images and what is missing of them out. Sans-I/O.

    first fragment ─► assembling ─┬─ k fragments ──────────────────────────────────────► final event (Complete)
                                  ├─ last one is overdue ─► NACK, if a repair fits ─► provisional event (Partial), then
                                  └─ no repair fits, or the deadline nears ────────────► final event (Partial, Expired)

An answer ends an image, whatever still arrives of it; `response_delivery.py` brings it to the peer.

Bounds: `MAX_ASSEMBLING` images and `MAX_SESSION_BYTES` per session, a `Budget` of bytes for all sessions together.
An image beyond them is answered with `Status.OVERLOADED`, never dropped in silence.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from hawkvision.core.clock import Deadline
from hawkvision.transport.coding.image_coding import Arrived, Complete, Expired, decode, missing
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.protocol.addresses import Address
from hawkvision.transport.protocol.frames import Cancel, Fragment, Frame, Nack, encode
from hawkvision.transport.protocol.image_format import ImageFormat, Kind
from hawkvision.transport.protocol.packet_protection import Header
from hawkvision.transport.protocol.status import MAX_NACKS, REPAIR_GROWTH, Status
from hawkvision.transport.protocol.wire import Drop, WireError
from hawkvision.transport.server.response_delivery import MAX_ANSWER_BYTES, Interims, Part, ResponseDelivery

MAX_ASSEMBLING: Final = 32
MAX_SESSION_BYTES: Final = 4 * 1024 * 1024
"""Of fragments: 32 images of 128 KB."""
MAX_TEMPLATES: Final = 256
MAX_REGISTERED_BYTES: Final = 256 * 1024
"""Of a session's templates and JPEG headers: 255 headers of 0.6 KB, as cameras that optimise their tables send, fit."""
LEAST_SHARE: Final = 0.1
EARLY_SHARE: Final = 0.5
"""Of an image's k fragments, so many are looked at in the end, or while others are on their way, if they do not hold
a whole image in coarse. Of fewer an answer is a guess, and decoding takes up to 20 ms, for which a peer should have
to send more than one datagram."""
TOO_LITTLE: Final = "too little of the image arrived before its deadline"
UNTOLD_S: Final = 0.5
"""How long an image waits for what is asked of it, if that is later than its deadline: a lost message of the control
stream is told again after QUIC's probe timeout."""
ABANDONED_S: Final = 10.0
"""Without a deadline and without news an image is given up."""
GUARD_LEAST_S: Final = 0.004
GUARD_MOST_S: Final = 0.03
"""How long after the expected last fragment the receiver waits for those that were overtaken."""


@dataclass(slots=True)
class Budget:
    """Bytes that all sessions may hold together."""

    limit: int
    used: int = 0
    refused: Counter[Status] = field(default_factory=Counter)
    """Images of all sessions that were never handed over, by why."""

    def take(self, size: int) -> bool:
        """Take so much, if it is there."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True


@dataclass(frozen=True, slots=True)
class ReceiveTimeouts:
    """How long images with a deadline are let come in."""

    reserve_s: float = 0.01
    """An image must be handed over so long before its deadline to be answered in time."""
    grace_s: float = 0.0
    """So long it is let come in at least, however soon its deadline is."""
    hold_s: float = 0.0
    """And so much longer one of whose parts nothing can be made: whoever wants a late answer has it sooner than by
    sending another image."""


STRICT: Final = ReceiveTimeouts()


@dataclass(frozen=True, slots=True)
class Image:
    """What came of an image."""

    number: int
    template: bytes
    meta: bytes
    arrived: Arrived
    started: float
    """When its first fragment came."""
    deadline: Deadline | None
    """When the answer must leave to arrive in time."""
    final: bool
    """False while missing fragments have been asked for: another event follows, unless it is answered before."""


@dataclass(slots=True)
class _Assembly:
    format: ImageFormat
    template: int
    meta: bytes
    started: float
    deadline: Deadline | None
    interims: Interims
    symbols: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    check_at: float = math.inf
    nacks: int = 0
    last_at: float = 0.0
    done: bool = False
    """The final event went out; what comes now is of no use."""


class Receiver:
    """Assembles the images of one session, and passes their answers on."""

    def __init__(self, channel: Channel[Part], budget: Budget) -> None:
        self.channel = channel
        self.events: deque[Image] = deque()
        self.cancelled: deque[int] = deque(maxlen=MAX_ASSEMBLING)
        self.timeouts = STRICT
        self._responses = ResponseDelivery(channel)
        self.unconfirmed = self._responses.unconfirmed
        self._budget = budget
        self._templates: dict[int, bytes] = {}
        self._tables: dict[int, bytes] = {}
        self._assembling: OrderedDict[int, _Assembly] = OrderedDict()
        self._bytes = 0
        self._registered_bytes = 0

    def register_template(self, number: int, request: bytes) -> None:
        """What images with this template ask; a number is given once.

        Raises:
            WireError: if the number was given before, or there are too many bytes; the connection must end.
        """
        self._register(self._templates, number, request)
        self._release_waiting(template=number)

    def register_tables(self, number: int, header: bytes) -> None:
        """A JPEG header that images refer to.

        Raises:
            WireError: as `register_template`.
        """
        self._register(self._tables, number, header)
        self._release_waiting(tables=number)

    def _register(self, known: dict[int, bytes], number: int, content: bytes) -> None:
        if number in known or not 0 <= number < MAX_TEMPLATES:
            raise WireError(f"registered number {number}; expected one below {MAX_TEMPLATES} that was not given before")
        if self._registered_bytes + len(content) > MAX_REGISTERED_BYTES or not self._budget.take(len(content)):
            raise WireError(f"more than {MAX_REGISTERED_BYTES} bytes of templates and headers")
        self._registered_bytes += len(content)
        known[number] = content

    def receive(self, header: Header, datagram: bytes, now: float, address: Address = None) -> bool:
        """Take a datagram in that came from there; whether it was authentic."""
        frames = self.channel.receive(header, datagram, now, address)
        if frames is None:
            return False
        for frame in frames:
            self._take(frame, now)
        self._responses.on_reports()
        return True

    def answer(self, number: int, status: Status, body: bytes, now: float) -> None:
        """Answer an image, once; what is still missing of it is not wanted any more."""
        if self._responses.knows(number):
            return
        self._forget(number)
        if len(body) > MAX_ANSWER_BYTES:
            status, body = Status.BROKEN, _error_body("the answer is too long for this transport", "too_large")
        self._responses.answer(number, status, body, now)

    def interim(self, number: int, body: bytes, now: float) -> None:
        """Say what is known of an image that was handed over, before its answer; a later one takes its place.

        Nothing is said that does not fit into one datagram, nor after the answer: whoever listens must do without.
        """
        assembly = self._assembling.get(number)
        if assembly is not None:
            self._responses.send_interim(assembly.interims, body, now)

    def poll(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Datagrams to send now, each with its path."""
        self.channel.expire(now)
        self._responses.on_reports()
        for number, assembly in list(self._assembling.items()):
            if assembly.check_at <= now:
                yield from self._check(number, assembly, now)
            yield from self._responses.poll_interims(assembly.interims, now)
        yield from self._responses.poll(now)
        yield from self.channel.due(now)

    def next_timer(self, now: float) -> float:
        """When `poll` has something to do again; +∞ for never."""
        times = [self._responses.next_timer(), *self.channel.timers(now)]
        times.extend(min(a.check_at, *a.interims.copies, math.inf) for a in self._assembling.values())
        return min(times)

    @property
    def decided(self) -> bool:
        """Whether no image is under way, and the peer has every answer."""
        return not self._assembling and self._responses.decided

    def close(self) -> None:
        """Give back what the session holds."""
        for number in list(self._assembling):
            self._forget(number)
        self._budget.used -= self._registered_bytes
        self._registered_bytes = 0

    # ----------------------------------------------------------------------------------------- fragments

    def _take(self, frame: Frame, now: float) -> None:
        match frame:
            case Fragment():
                self._take_fragment(frame, now)
            case Cancel(number):
                if number in self._assembling:
                    self.cancelled.append(number)
                    self._forget(number)
                self._responses.finish(number)  # or what is still on its way would start it anew
            case _:
                pass  # authentic, but of no use at this end

    def _take_fragment(self, fragment: Fragment, now: float) -> None:
        number = fragment.image
        if self._responses.knows(number):
            self._responses.on_repeated_fragment(number, now)
            return
        assembly = self._assembling.get(number)
        if assembly is None:
            if len(self._assembling) >= MAX_ASSEMBLING:
                self._refuse(number, Status.OVERLOADED, "too many unfinished images on this connection", now)
                return
            deadline = None
            if fragment.left_ms:
                # The sender counts from when it sent: half a round trip ago, and the answer needs the other half.
                deadline = Deadline.after_ms(fragment.left_ms, now - (self.channel.best(now).rate.newest_rtt_s or 0.0))
            interims = Interims(number)
            assembly = _Assembly(fragment.format, fragment.template, fragment.meta, now, deadline, interims)
            self._assembling[number] = assembly
        if assembly.done or fragment.index in assembly.symbols:
            return
        if (assembly.format, assembly.template) != (fragment.format, fragment.template):
            self.channel.drops[Drop.MALFORMED] += 1  # contradicts the first one, which counts
            return
        size = len(fragment.symbol)
        if self._bytes + size > MAX_SESSION_BYTES or not self._budget.take(size):
            self._refuse(number, Status.OVERLOADED, "this end holds as many unfinished images as it may", now)
            return
        self._bytes += size
        assembly.size += size
        assembly.symbols[fragment.index] = fragment.symbol
        assembly.last_at = now
        if len(assembly.symbols) >= assembly.format.k:
            assembly.check_at = now
        else:
            assembly.check_at = self._overdue_at(assembly, fragment.rest_ms * 1e-3, now)

    def _overdue_at(self, assembly: _Assembly, rest_s: float, now: float) -> float:
        """When what has not come by then will not come by itself."""
        overdue = now + rest_s + self._guard_s(now)
        if assembly.nacks:
            overdue = max(overdue, min(assembly.check_at, now + self._repair_s(now)))
        return min(overdue, self._latest(assembly))

    def _latest(self, assembly: _Assembly) -> float:
        """When an image with a deadline is handed over, however little there is of it."""
        if assembly.deadline is None:
            return math.inf
        timeouts = self.timeouts
        latest = max(assembly.deadline.at - timeouts.reserve_s, assembly.started + timeouts.grace_s)
        return latest + timeouts.hold_s if assembly.format.kind is Kind.OPAQUE else latest

    def _check(self, number: int, assembly: _Assembly, now: float) -> Iterator[tuple[int, bytes]]:
        """The last fragment is there or overdue: hand the image over, or ask for what is missing."""
        assembly.check_at = math.inf
        if assembly.template not in self._templates or (
            assembly.format.tables and assembly.format.tables not in self._tables
        ):
            give_up = assembly.started + ABANDONED_S
            if assembly.deadline is not None:
                give_up = max(assembly.deadline.at, assembly.started + UNTOLD_S)
            if now >= give_up:
                self._refuse(number, Status.NO_TEMPLATE, "the request these fragments name never arrived", now)
            else:
                assembly.check_at = give_up  # the control stream is on its way; its arrival sets this to now
            return
        format_ = assembly.format
        if len(assembly.symbols) >= format_.k:
            self._hand_over(number, assembly, final=True, now=now)
            return
        repair_s = self._repair_s(now)
        # However long the timeouts of a silent path have grown, the last fragment's age decides.
        until = assembly.last_at + ABANDONED_S if assembly.deadline is None else self._latest(assembly)
        in_time = now + (0.0 if assembly.deadline is None else repair_s) < until
        if in_time and assembly.nacks < MAX_NACKS:
            assembly.nacks += 1
            assembly.check_at = min(until, now + repair_s * REPAIR_GROWTH ** (assembly.nacks - 1))
            nack = encode(Nack(number, missing(format_, assembly.symbols)))
            paths = self.channel.two_best(now)
            if len(paths) == 1 and self._responses.copies_needed(now) > 1:
                paths *= 2  # a lost one costs a whole timeout
            for path in paths:
                yield from self.channel.send_with_report(path, nack, now)
            if assembly.nacks == 1:
                self._hand_over(number, assembly, final=False, now=now)
        elif assembly.deadline is None and now < until:
            assembly.check_at = until  # the sender repairs by itself, too
        elif in_time and format_.kind is Kind.OPAQUE:
            assembly.check_at = until - repair_s  # as above; and of its parts nothing can be made
        else:
            self._hand_over(number, assembly, final=True, now=now)

    def _hand_over(self, number: int, assembly: _Assembly, *, final: bool, now: float) -> None:
        if not _is_worth_decoding(assembly, LEAST_SHARE if final else EARLY_SHARE):
            if final:
                self._refuse(number, Status.EXPIRED, TOO_LITTLE, now)
            return
        try:
            arrived = decode(assembly.format, assembly.symbols, self._tables.get(assembly.format.tables, b""))
        except WireError as error:
            if final:
                self._refuse(number, Status.BROKEN, str(error), now)
            return
        if not final and isinstance(arrived, Expired):
            return
        final = final or isinstance(arrived, Complete)
        if final:
            if isinstance(arrived, Expired):
                self._refuse(number, Status.EXPIRED, TOO_LITTLE, now)
                return
            assembly.done = True
            self._release_bytes(assembly)
        self.events.append(
            Image(
                number, self._templates[assembly.template], assembly.meta, arrived, assembly.started,
                assembly.deadline, final,
            )
        )  # fmt: skip

    def _release_waiting(self, template: int | None = None, tables: int | None = None) -> None:
        for assembly in self._assembling.values():
            named = template == assembly.template or (tables is not None and tables == assembly.format.tables)
            if named and assembly.check_at < math.inf:  # else nothing is waited for: it was handed over
                assembly.check_at = -math.inf

    def _refuse(self, number: int, status: Status, why: str, now: float) -> None:
        self._budget.refused[status] += 1
        if number in self._assembling:
            self.cancelled.append(number)  # a handler that waits for the rest of it would wait for ever
        code = {Status.OVERLOADED: "overloaded", Status.EXPIRED: "expired"}.get(status, "wire_error")
        self.answer(number, status, _error_body(why, code), now)

    def _forget(self, number: int) -> None:
        assembly = self._assembling.pop(number, None)
        if assembly is not None:
            self._release_bytes(assembly)

    def _release_bytes(self, assembly: _Assembly) -> None:
        self._bytes -= assembly.size
        self._budget.used -= assembly.size
        assembly.size = 0
        assembly.symbols = {}

    # ------------------------------------------------------------------------------------------- times

    def _guard_s(self, now: float) -> float:
        rtt_s = self.channel.best(now).rate.rtt_s or 0.0
        return min(GUARD_MOST_S, max(GUARD_LEAST_S, rtt_s / 8))

    def _repair_s(self, now: float) -> float:
        """How long a NACK and what it brings take."""
        return max(GUARD_LEAST_S, self.channel.best(now).rate.repair_s())


def _is_worth_decoding(assembly: _Assembly, share: float) -> bool:
    format_, came = assembly.format, len(assembly.symbols)
    return came >= share * format_.k or came >= format_.base_k > 0


def _error_body(error: str, code: str) -> bytes:
    return msgspec.json.encode({"error": error, "code": code})
