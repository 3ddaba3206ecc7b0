"""The receiving end: fragments in, images and requests for missing fragments out. Sans-I/O.

    first fragment ─► assembling ─┬─ k fragments ──────────────────────────────────────► final event (Complete)
                                  ├─ last one is overdue ─► NACK, if a repair fits ─► provisional event (Partial), then
                                  └─ no repair fits, or the deadline nears ────────────► final event (Partial, Expired)

A response ends an image, whatever still arrives of it; `response_delivery` brings it to the peer.

Bounds: `MAX_ASSEMBLING` images and `MAX_SESSION_BYTES` per session, and a `Budget` of bytes for all sessions together.
An image beyond them gets the response `Status.OVERLOADED`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

import msgspec

from hawkvision.core.clock import Deadline
from hawkvision.transport.coding.image_coding import Complete, Expired, decode, missing
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.protocol.addresses import Address
from hawkvision.transport.protocol.control import MAX_REGISTERED_BYTES
from hawkvision.transport.protocol.frames import Cancel, Fragment, Frame, Nack, encode
from hawkvision.transport.protocol.image_format import Kind
from hawkvision.transport.protocol.packet_protection import Header
from hawkvision.transport.protocol.wire import MAX_NACKS, REPAIR_GROWTH, Drop, Status, WireError
from hawkvision.transport.server.assembly import STRICT, Assembly, Budget, ReceivedImage
from hawkvision.transport.server.response_delivery import MAX_ANSWER_BYTES, Interims, ResponseDelivery, ResponsePart

MAX_ASSEMBLING: Final = 32
MAX_SESSION_BYTES: Final = 4 * 1024 * 1024
"""Of fragments; 32 images of 128 KB."""
MAX_TEMPLATES: Final = 256
MIN_SHARE: Final = 0.1
EARLY_SHARE: Final = 0.5
"""The share of an image's k fragments that is decoded at the end, and while others are on their way, unless they hold a
whole coarse image. With fewer, an answer is a guess, and a peer must not cause a decoding with a single datagram."""
TOO_LITTLE: Final = "too little of the image arrived before its deadline"
TEMPLATE_WAIT_S: Final = 0.5
"""The least wait for the request that fragments name: QUIC repeats a lost message after its probe timeout."""
ABANDONED_S: Final = 10.0
"""An image without a deadline is given up after this long without a fragment."""
MIN_GUARD_S: Final = 0.004
MAX_GUARD_S: Final = 0.03
"""The bounds of the wait for reordered fragments after the expected last one."""


class Receiver:
    """Assembles the images of one session, and delivers their responses."""

    def __init__(self, channel: Channel[ResponsePart], budget: Budget) -> None:
        self.channel = channel
        self.events: deque[ReceivedImage] = deque()
        self.cancelled: deque[int] = deque(maxlen=MAX_ASSEMBLING)
        self.timeouts = STRICT
        self._responses = ResponseDelivery(channel)
        self.unconfirmed = self._responses.unconfirmed
        self._budget = budget
        self._templates: dict[int, bytes] = {}
        self._tables: dict[int, bytes] = {}
        self._assembling: OrderedDict[int, Assembly] = OrderedDict()
        self._bytes = 0
        self._registered_bytes = 0

    def register_template(self, number: int, request: bytes) -> None:
        """Learn the request of images with this template; each number is used once.

        Raises:
            WireError: if the number is in use, or there are too many bytes; the connection must end.
        """
        self._register(self._templates, number, request)
        self._release_waiting(template=number)

    def register_tables(self, number: int, header: bytes) -> None:
        """Learn a JPEG header that images refer to.

        Raises:
            WireError: as `register_template`.
        """
        self._register(self._tables, number, header)
        self._release_waiting(tables=number)

    def _register(self, known: dict[int, bytes], number: int, content: bytes) -> None:
        if number in known or not 0 <= number < MAX_TEMPLATES:
            raise WireError(f"registered number {number}; expected an unused one below {MAX_TEMPLATES}")
        if self._registered_bytes + len(content) > MAX_REGISTERED_BYTES or not self._budget.take(len(content)):
            raise WireError(f"more than {MAX_REGISTERED_BYTES} bytes of templates and headers")
        self._registered_bytes += len(content)
        known[number] = content

    def receive(self, header: Header, datagram: bytes, now: float, address: Address = None) -> bool:
        """Take in a datagram from `address`; whether it was authentic."""
        frames = self.channel.receive(header, datagram, now, address)
        if frames is None:
            return False
        for frame in frames:
            self._take(frame, now)
        self._responses.on_reports()
        return True

    def answer(self, number: int, status: Status, body: bytes, now: float) -> None:
        """Respond to an image, once; its missing fragments are no longer wanted."""
        if self._responses.knows(number):
            return
        self._forget(number)
        if len(body) > MAX_ANSWER_BYTES:
            status, body = Status.BROKEN, _error_body("the answer is too long for this transport", "too_large")
        self._responses.answer(number, status, body, now)

    def interim(self, number: int, body: bytes, now: float) -> None:
        """Send an interim response to an image that was handed over; a later one replaces it.

        Does nothing if it does not fit one datagram, or after the response.
        """
        assembly = self._assembling.get(number)
        if assembly is not None:
            self._responses.send_interim(assembly.interims, body, now)

    def poll(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The datagrams to send now, each with its path."""
        self.channel.expire(now)
        self._responses.on_reports()
        for number, assembly in list(self._assembling.items()):
            if assembly.check_at <= now:
                yield from self._check(number, assembly, now)
            yield from self._responses.poll_interims(assembly.interims, now)
        yield from self._responses.poll(now)
        yield from self.channel.due(now)

    def next_timer(self, now: float) -> float:
        """When `poll` is due again; +∞ for never."""
        times = [self._responses.next_timer(), *self.channel.timers(now)]
        times.extend(min(a.check_at, *a.interims.copies, math.inf) for a in self._assembling.values())
        return min(times)

    @property
    def idle(self) -> bool:
        """Whether no image is in progress and the peer has each response."""
        return not self._assembling and self._responses.idle

    def close(self) -> None:
        """Return the session's bytes to the budget."""
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
                self._responses.finish(number)  # or a late fragment would start it again
            case _:
                pass  # authentic, but meant for the other end

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
                # Counted from the sending, half a round trip ago; the response needs the other half.
                deadline = Deadline.after_ms(fragment.left_ms, now - (self.channel.best(now).rate.newest_rtt_s or 0.0))
            interims = Interims(number)
            assembly = Assembly(fragment.format, fragment.template, fragment.meta, now, deadline, interims)
            self._assembling[number] = assembly
        if assembly.done or fragment.index in assembly.symbols:
            return
        if (assembly.format, assembly.template) != (fragment.format, fragment.template):
            self.channel.drops[Drop.MALFORMED] += 1  # the first fragment counts
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

    def _overdue_at(self, assembly: Assembly, rest_s: float, now: float) -> float:
        """When a missing fragment counts as lost."""
        overdue = now + rest_s + self._guard_s(now)
        if assembly.nacks:
            overdue = max(overdue, min(assembly.check_at, now + self._repair_s(now)))
        return min(overdue, self.timeouts.latest(assembly))

    def _check(self, number: int, assembly: Assembly, now: float) -> Iterator[tuple[int, bytes]]:
        """After the last fragment, or when it is overdue: hand the image over, or request what is missing."""
        assembly.check_at = math.inf
        if assembly.template not in self._templates or (
            assembly.format.tables and assembly.format.tables not in self._tables
        ):
            give_up = assembly.started + ABANDONED_S
            if assembly.deadline is not None:
                give_up = max(assembly.deadline.at, assembly.started + TEMPLATE_WAIT_S)
            if now >= give_up:
                self._refuse(number, Status.NO_TEMPLATE, "the request these fragments name never arrived", now)
            else:
                assembly.check_at = give_up  # the control stream's message sets this to now
            return
        format_ = assembly.format
        if len(assembly.symbols) >= format_.k:
            self._hand_over(number, assembly, final=True, now=now)
            return
        repair_s = self._repair_s(now)
        # The last fragment's age decides, because the timeouts of a silent path grow.
        until = assembly.last_at + ABANDONED_S if assembly.deadline is None else self.timeouts.latest(assembly)
        in_time = now + (0.0 if assembly.deadline is None else repair_s) < until
        if in_time and assembly.nacks < MAX_NACKS:
            assembly.nacks += 1
            assembly.check_at = min(until, now + repair_s * REPAIR_GROWTH ** (assembly.nacks - 1))
            nack = encode(Nack(number, missing(format_, assembly.symbols)))
            paths = self.channel.two_best(now)
            if len(paths) == 1 and self._responses.copies_needed(now) > 1:
                paths *= 2  # a lost NACK costs a whole timeout
            for path in paths:
                yield from self.channel.send_with_report(path, nack, now)
            if assembly.nacks == 1:
                self._hand_over(number, assembly, final=False, now=now)
        elif assembly.deadline is None and now < until:
            assembly.check_at = until  # the sender also repairs by itself
        elif in_time and format_.kind is Kind.OPAQUE:
            assembly.check_at = until - repair_s  # as above; and its parts cannot be decoded
        else:
            self._hand_over(number, assembly, final=True, now=now)

    def _hand_over(self, number: int, assembly: Assembly, *, final: bool, now: float) -> None:
        if not assembly.worth_decoding(MIN_SHARE if final else EARLY_SHARE):
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
            ReceivedImage(
                number, self._templates[assembly.template], assembly.meta, arrived, assembly.started,
                assembly.deadline, final,
            )
        )  # fmt: skip

    def _release_waiting(self, template: int | None = None, tables: int | None = None) -> None:
        for assembly in self._assembling.values():
            named = template == assembly.template or (tables is not None and tables == assembly.format.tables)
            if named and assembly.check_at < math.inf:  # else it was handed over already
                assembly.check_at = -math.inf

    def _refuse(self, number: int, status: Status, why: str, now: float) -> None:
        self._budget.refused[status] += 1
        if number in self._assembling:
            self.cancelled.append(number)  # or a handler would wait for the rest for ever
        code = {Status.OVERLOADED: "overloaded", Status.EXPIRED: "expired"}.get(status, "wire_error")
        self.answer(number, status, _error_body(why, code), now)

    def _forget(self, number: int) -> None:
        assembly = self._assembling.pop(number, None)
        if assembly is not None:
            self._release_bytes(assembly)

    def _release_bytes(self, assembly: Assembly) -> None:
        self._bytes -= assembly.size
        self._budget.used -= assembly.size
        assembly.size = 0
        assembly.symbols = {}

    # ------------------------------------------------------------------------------------------- times

    def _guard_s(self, now: float) -> float:
        rtt_s = self.channel.best(now).rate.rtt_s or 0.0
        return min(MAX_GUARD_S, max(MIN_GUARD_S, rtt_s / 8))

    def _repair_s(self, now: float) -> float:
        """The time of a NACK and its repair."""
        return max(MIN_GUARD_S, self.channel.best(now).rate.repair_s())


def _error_body(error: str, code: str) -> bytes:
    return msgspec.json.encode({"error": error, "code": code})
