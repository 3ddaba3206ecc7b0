"""The receiving end: fragments in, pictures and what is missing of them out, answers back. Sans-I/O.

    first fragment ─► assembling ─┬─ k fragments ──────────────────────────────────────► final event (Complete)
                                  ├─ last one is overdue ─► NACK, if a repair fits ─► provisional event (Partial), then
                                  └─ no repair fits, or the deadline nears ────────────► final event (Partial, Expired)

An answer ends a picture, whatever still arrives of it. It goes out in as many copies as the measured loss asks for (if
more than one, another after a burst of loss), then again at growing intervals until the peer reports one of them or
`GIVE_UP_S` is over. Interims, before it, go out in as many copies and never again.

Bounds: `MAX_ASSEMBLING` pictures and `MAX_SESSION_BYTES` per session, a `Budget` of bytes for all sessions together.
A picture beyond them is answered with `Status.OVERLOADED`, never dropped in silence.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from hawkvision.transport.channel import UNKNOWN_RTT_S, Channel, Path
from hawkvision.transport.coding import Arrived, Complete, Expired, Kind, PictureFormat, decode, missing
from hawkvision.transport.frames import (
    ANSWER_ROOM,
    INTERIM_ROOM,
    MAX_ANSWER_PARTS,
    AnswerPart,
    Cancel,
    Fragment,
    Frame,
    Interim,
    Nack,
    encode,
)
from hawkvision.transport.seal import Header
from hawkvision.transport.wire import HEADER_BYTES, MAX_DATAGRAM, TAG_BYTES, WireError

MAX_ASSEMBLING: Final = 32
MAX_SESSION_BYTES: Final = 4 * 1024 * 1024
"""Of fragments: 32 pictures of 128 KB."""
MAX_ANSWERS: Final = 128
"""Answers kept until the peer has them."""
REMEMBERED: Final = 4096
"""Pictures that are known to be over, so that what comes late of them starts nothing anew: over a minute at 50/s."""
MAX_TEMPLATES: Final = 256
MAX_REGISTERED_BYTES: Final = 256 * 1024
"""Of a session's templates and JPEG headers: 255 headers of 0.6 KB, as cameras that optimise their tables send, fit."""
LEAST_SHARE: Final = 0.1
EARLY_SHARE: Final = 0.5
"""Of a picture's k fragments, so many are looked at in the end, or while others are on their way, if they do not hold
a whole picture in coarse. Of fewer an answer is a guess, and decoding takes up to 20 ms, for which a peer should have
to send more than one datagram."""
TOO_LITTLE: Final = "too little of the picture arrived before its deadline"
MAX_NACKS: Final = 4
"""Rounds of asking for what is missing, each only if its repair would still come in time."""
REPAIR_GROWTH: Final = 1.5
"""Of the wait for what was asked for, from round to round."""
UNTOLD_S: Final = 0.5
"""How long a picture waits for what is asked of it, if that is later than its deadline: a lost message of the control
stream is told again after QUIC's probe timeout."""
ABANDONED_S: Final = 10.0
"""Without a deadline and without news a picture is given up."""
GIVE_UP_S: Final = 10.0
MAX_COPIES: Final = 4
MISSED_ANSWERS: Final = 0.005
"""Copies are sent until fewer than this share of answers would miss at the measured loss."""
RETRY_GROWTH: Final = 1.5
LONGEST_RETRY_S: Final = 2.0
MAX_INTERIMS: Final = 256
"""Of one picture: as many as have numbers."""
COPY_SPACING_S: Final = 0.003
"""Between copies: a burst of loss is often shorter."""
LAST_COPY_S: Final = 0.02
"""When one copy more goes out where one is not enough: outages of radio links take 10 to 20 ms."""
GUARD_LEAST_S: Final = 0.004
GUARD_MOST_S: Final = 0.03
"""How long after the expected last fragment the receiver waits for those that were overtaken."""


class Status(IntEnum):
    """What an answer is; numbers are never given twice (`WIRE.md` §6)."""

    OK = 0
    REFUSED = 1
    """The application's own error, in the body."""
    OVERLOADED = 2
    EXPIRED = 3
    """Too little arrived before the deadline."""
    BROKEN = 4
    """The fragments cannot be put together."""
    NO_TEMPLATE = 5
    """The request that the fragments name was never registered."""


@dataclass(slots=True)
class Budget:
    """Bytes that all sessions may hold together."""

    limit: int
    used: int = 0
    refused: Counter[Status] = field(default_factory=Counter)
    """Pictures of all sessions that were never handed over, by why."""

    def take(self, size: int) -> bool:
        """Take so much, if it is there."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True


@dataclass(frozen=True, slots=True)
class Patience:
    """How long pictures with a deadline are let come in."""

    reserve_s: float = 0.01
    """A picture must be handed over so long before its deadline to be answered in time."""
    grace_s: float = 0.0
    """So long it is let come in at least, however soon its deadline is."""
    hold_s: float = 0.0
    """And so much longer one of whose parts nothing can be made: whoever wants a late answer has it sooner than by
    sending another picture."""


STRICT: Final = Patience()


@dataclass(frozen=True, slots=True)
class Picture:
    """What came of a picture."""

    number: int
    template: bytes
    meta: bytes
    arrived: Arrived
    started: float
    """When its first fragment came."""
    deadline: float | None
    """When the answer must leave to arrive in time."""
    final: bool
    """False while missing fragments have been asked for: another event follows, unless it is answered before."""


@dataclass(slots=True)
class _Assembly:
    format: PictureFormat
    template: int
    meta: bytes
    started: float
    deadline: float | None
    symbols: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    check_at: float = math.inf
    nacks: int = 0
    last_at: float = 0.0
    done: bool = False
    """The final event went out; what comes now is of no use."""
    interims: int = 0
    """That were said of it."""
    interim: bytes = b""
    """The latest."""
    interim_copies: list[float] = field(default_factory=list)
    """When it is to leave again."""
    interim_sent: int = 0


@dataclass(slots=True)
class _Answer:
    parts: list[bytes]
    status: Status
    body: bytes
    made_at: float
    reported: set[int] = field(default_factory=set)
    copies: list[float] = field(default_factory=list)
    tries: int = 0
    rounds: int = 0
    """Times that it was repeated because no report came."""
    sent_at: float = math.inf
    again_at: float = math.inf
    by_stream: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    picture: int
    part: int


class Receiver:
    """Assembles the pictures of one session, and answers them."""

    def __init__(self, channel: Channel[_Part], budget: Budget) -> None:
        self.channel = channel
        self.events: deque[Picture] = deque()
        self.cancelled: deque[int] = deque(maxlen=MAX_ASSEMBLING)
        self.unheard: deque[tuple[int, int, bytes]] = deque(maxlen=MAX_ANSWERS)
        """Answers (picture, status, body) that no report confirmed: for the stream, which is reliable."""
        self.patience = STRICT
        self._budget = budget
        self._templates: dict[int, bytes] = {}
        self._tables: dict[int, bytes] = {}
        self._assembling: OrderedDict[int, _Assembly] = OrderedDict()
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        self._over: OrderedDict[int, None] = OrderedDict()
        self._bytes = 0
        self._registered_bytes = 0

    def register_template(self, number: int, request: bytes) -> None:
        """What pictures with this template ask; a number is given once.

        Raises:
            WireError: if the number was given before, or there are too many bytes; the connection must end.
        """
        self._register(self._templates, number, request)
        self._release_waiting(template=number)

    def register_tables(self, number: int, header: bytes) -> None:
        """A JPEG header that pictures refer to.

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

    def receive(self, header: Header, datagram: bytes, now: float) -> bool:
        """Take a datagram in; whether it was authentic."""
        frames = self.channel.receive(header, datagram, now)
        if frames is None:
            return False
        for frame in frames:
            self._take(frame, now)
        self._settle()
        return True

    def answer(self, number: int, status: Status, body: bytes, now: float) -> None:
        """Answer a picture, once; what is still missing of it is not wanted any more."""
        if number in self._answers or number in self._over:
            return
        self._forget(number)
        if len(body) > ANSWER_ROOM * MAX_ANSWER_PARTS:
            status, body = Status.BROKEN, _error_body("the answer is too long for this transport", "too_large")
        pieces = [body[at : at + ANSWER_ROOM] for at in range(0, len(body), ANSWER_ROOM)] or [b""]
        parts = [encode(AnswerPart(number, status, part, len(pieces), piece)) for part, piece in enumerate(pieces)]
        self._answers[number] = _Answer(parts, status, body, now, copies=self._spaced(now))
        if len(self._answers) > MAX_ANSWERS:
            oldest, unheard = next(iter(self._answers.items()))
            if not unheard.by_stream:
                self.unheard.append((oldest, unheard.status, unheard.body))
            self._end(oldest)

    def interim(self, number: int, body: bytes, now: float) -> None:
        """Say what is known of a picture that was handed over, before its answer; a later one takes its place.

        Nothing is said that does not fit into one datagram, nor after the answer: whoever listens must do without.
        """
        assembly = self._assembling.get(number)
        if assembly is None or len(body) > INTERIM_ROOM or assembly.interims >= MAX_INTERIMS:
            return
        assembly.interim = encode(Interim(number, assembly.interims, body))
        assembly.interims += 1
        assembly.interim_sent = 0
        assembly.interim_copies = self._spaced(now)

    def poll(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Datagrams to send now, each with its path."""
        self.channel.expire(now)
        self._settle()
        for number, assembly in list(self._assembling.items()):
            if assembly.check_at <= now:
                yield from self._check(number, assembly, now)
            yield from self._send_interim(assembly, now)
        for number, answer in list(self._answers.items()):
            yield from self._send_answer(number, answer, now)
        yield from self.channel.due(now)

    def next_timer(self, now: float) -> float:
        """When `poll` has something to do again; +∞ for never."""
        times = list(self.channel.timers(now))
        times.extend(min(a.check_at, *a.interim_copies, math.inf) for a in self._assembling.values())
        times.extend(min(answer.copies, default=answer.again_at) for answer in self._answers.values())
        return min(times, default=math.inf)

    @property
    def settled(self) -> bool:
        """Whether no picture is under way, and the peer has every answer."""
        return not self._assembling and not self._answers

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
                self._end(number)  # or what is still on its way would start it anew
            case _:
                pass  # authentic, but of no use at this end

    def _take_fragment(self, fragment: Fragment, now: float) -> None:
        number = fragment.picture
        answer = self._answers.get(number)
        if answer is not None:
            # Sent by who had waited for an answer in vain, unless it can have crossed the answer on its way.
            if now > answer.sent_at + self._rtt_s(now) + GUARD_MOST_S:
                answer.again_at = now
            return
        if number in self._over:
            return
        assembly = self._assembling.get(number)
        if assembly is None:
            if len(self._assembling) >= MAX_ASSEMBLING:
                self._refuse(number, Status.OVERLOADED, "too many unfinished pictures on this connection", now)
                return
            deadline = None
            if fragment.left_ms:
                # The sender counts from when it sent: half a round trip ago, and the answer needs the other half.
                deadline = now + fragment.left_ms * 1e-3 - (self.channel.best(now).rate.newest_rtt_s or 0.0)
            assembly = _Assembly(fragment.format, fragment.template, fragment.meta, now, deadline)
            self._assembling[number] = assembly
        if assembly.done or fragment.index in assembly.symbols:
            return
        if (assembly.format, assembly.template) != (fragment.format, fragment.template):
            self.channel.dropped += 1  # contradicts the first one, which counts
            return
        size = len(fragment.symbol)
        if self._bytes + size > MAX_SESSION_BYTES or not self._budget.take(size):
            self._refuse(number, Status.OVERLOADED, "this end holds as many unfinished pictures as it may", now)
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
        """When a picture with a deadline is handed over, however little there is of it."""
        if assembly.deadline is None:
            return math.inf
        patience = self.patience
        latest = max(assembly.deadline - patience.reserve_s, assembly.started + patience.grace_s)
        return latest + patience.hold_s if assembly.format.kind is Kind.OPAQUE else latest

    def _check(self, number: int, assembly: _Assembly, now: float) -> Iterator[tuple[int, bytes]]:
        """The last fragment is there or overdue: hand the picture over, or ask for what is missing."""
        assembly.check_at = math.inf
        if assembly.template not in self._templates or (
            assembly.format.tables and assembly.format.tables not in self._tables
        ):
            give_up = assembly.started + ABANDONED_S
            if assembly.deadline is not None:
                give_up = max(assembly.deadline, assembly.started + UNTOLD_S)
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
            paths = self._two_best(now)
            if len(paths) == 1 and self._copies(now) > 1:
                paths *= 2  # a lost one costs a whole timeout
            for path in paths:
                yield from self._send(path, nack, now)
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
            Picture(
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

    # ------------------------------------------------------------------------------------------- answers

    def _spaced(self, now: float) -> list[float]:
        """When the copies of what is said now leave."""
        copies = self._copies(now)
        spaced = [now + copy * COPY_SPACING_S for copy in range(copies)]
        return spaced if copies == 1 else [*spaced, now + LAST_COPY_S]

    def _copies(self, now: float) -> int:
        loss = self.channel.best(now).rate.loss
        if not loss.known:
            return 2
        copies = min(2, len(self.channel.usable(now)))  # one on each path: either may have died just now
        while loss.ratio**copies > MISSED_ANSWERS and copies < MAX_COPIES:
            copies += 1
        return copies

    def _send_answer(self, number: int, answer: _Answer, now: float) -> Iterator[tuple[int, bytes]]:
        paths = self._two_best(now)
        while answer.copies and answer.copies[0] <= now:
            answer.copies.pop(0)
            for part, frame in enumerate(answer.parts):
                if part in answer.reported:
                    continue
                path = paths[(part + answer.tries) % len(paths)]
                yield from self._send(path, frame, now, _Part(number, part))
            answer.tries += 1
            answer.sent_at = now
            if not answer.copies:
                answer.again_at = now + min(LONGEST_RETRY_S, self._retry_s(now) * RETRY_GROWTH**answer.rounds)
        if answer.again_at <= now:
            answer.again_at = math.inf
            if not answer.by_stream:
                answer.by_stream = True
                self.unheard.append((number, answer.status, answer.body))
            if now < answer.made_at + GIVE_UP_S:
                answer.rounds += 1
                answer.copies = self._spaced(now)
                yield from self._send_answer(number, answer, now)
            else:
                self._end(number)

    def _send_interim(self, assembly: _Assembly, now: float) -> Iterator[tuple[int, bytes]]:
        copies = assembly.interim_copies
        while copies and copies[0] <= now:
            copies.pop(0)
            paths = self._two_best(now)
            path = paths[assembly.interim_sent % len(paths)]
            assembly.interim_sent += 1
            yield from self._send(path, assembly.interim, now, told=True)

    def _send(
        self, path: Path[_Part], frame: bytes, now: float, token: _Part | None = None, *, told: bool = False
    ) -> Iterator[tuple[int, bytes]]:
        """A frame, with a report if the path may carry both, if it may carry it at all; `told` asks for no report."""
        if path.may_send(MAX_DATAGRAM):
            frame = self.channel.with_report(path, frame, now)
        elif not path.may_send(HEADER_BYTES + len(frame) + TAG_BYTES):
            return
        yield path.number, self.channel.tell(path, frame) if told else self.channel.send(path, frame, now, token)

    def _settle(self) -> None:
        for place in self.channel.delivered:
            answer = self._answers.get(place.picture)
            if answer is not None:
                answer.reported.add(place.part)
                if len(answer.reported) == len(answer.parts):
                    self._end(place.picture)
        self.channel.delivered.clear()
        self.channel.lost.clear()  # answers are repeated by their own timer

    def _end(self, number: int) -> None:
        """The peer has the answer, or never will."""
        self._answers.pop(number, None)
        self._over[number] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)

    # ------------------------------------------------------------------------------------------- times

    def _rtt_s(self, now: float) -> float:
        return self.channel.best(now).rate.rtt_s or 0.0

    def _guard_s(self, now: float) -> float:
        return min(GUARD_MOST_S, max(GUARD_LEAST_S, self._rtt_s(now) / 8))

    def _repair_s(self, now: float) -> float:
        """How long a NACK and what it brings take."""
        return max(GUARD_LEAST_S, self.channel.best(now).rate.repair_s())

    def _retry_s(self, now: float) -> float:
        rate = self.channel.best(now).rate
        return max(0.02, min(UNKNOWN_RTT_S, rate.timeout_s()) if rate.rtt_s is None else rate.timeout_s())

    def _two_best(self, now: float) -> list[Path[_Part]]:
        """Two different paths if two live, for what must not be lost; else the one there is."""
        living = sorted(self.channel.usable(now), key=lambda path: path.rate.rtt_s or math.inf)
        return living[:2] or list(self.channel.paths.values())[:1]


def _is_worth_decoding(assembly: _Assembly, share: float) -> bool:
    format_, came = assembly.format, len(assembly.symbols)
    return came >= share * format_.k or came >= format_.base_k > 0


def _error_body(error: str, code: str) -> bytes:
    return msgspec.json.encode({"error": error, "code": code})
