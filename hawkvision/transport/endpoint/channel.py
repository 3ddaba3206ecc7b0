"""A sealed channel: numbered datagrams over one or several paths, and reports of which arrived when.

No sockets and no clock: bytes and `now` come in, bytes come out. Nothing is retransmitted here. Every datagram that
asks for a report carries a token, the owner's word for what was in it; the channel says which tokens were delivered and
which are lost, and the owner decides what is worth sending again.

A datagram counts as lost when one sent `REORDERING` later on its path was reported, or when nothing was reported of it
for the path's timeout (RFC 9002 §6.1). Silence about all datagrams alike is no loss yet (§6.2): the path is pinged, and
they are given `SILENT_TIMEOUTS`; what is sent again into a link that has only become slow makes it slower. If a report
names a lost one after all, the path's loss is put right: a host that stands still for a moment looks like a link that
loses. A path that is silent for three round trips is dead: it is only probed until something authentic is heard on it.
Reports repeat what earlier ones said, so that a lost one costs little.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.packet_trains import Arrival
from hawkvision.transport.congestion.rate_control import RateController
from hawkvision.transport.protocol.addresses import Address, Place, Whereabouts
from hawkvision.transport.protocol.frames import (
    MAX_REPORTED,
    REPORT_BYTES,
    Challenge,
    Frame,
    Interim,
    Ping,
    Report,
    Response,
    decode,
    encode,
)
from hawkvision.transport.protocol.packet_protection import Header, Opener, Sealer, Secret
from hawkvision.transport.protocol.wire import HEADER_BYTES, MAX_DATAGRAM, TAG_BYTES, Drop, WireError

REORDERING: Final = 8
"""Datagrams that may overtake one before it counts as lost. QUIC takes 3; jitter on radio links reorders more, and a
loss found too early costs a repair that nobody needed."""
REPORT_AFTER: Final = 16
"""Datagrams after which a report is sent at once: one per picture or so."""
REPORT_DELAY_S: Final = 0.008
"""How long a report waits for more to report of. It delays loss detection by as much."""
REPORT_REACH: Final = 64
"""Sequences that a report goes back at least, so that each is told some four times."""
MAX_SENT: Final = 2048
"""Datagrams remembered per path until they are reported or time out: 2.4 MB in flight."""
MAX_MISSED: Final = 256
"""Datagrams remembered per path after they counted as lost: four times as many as a report goes back."""
DEAD_AFTER_RTTS: Final = 3.0
DEAD_AFTER_LEAST_S: Final = 0.05
"""Of silence; the least covers the report delay and a busy peer."""
SILENT_TIMEOUTS: Final = 2.5
"""After which datagrams count as lost though nothing has been heard since they left. A crowded radio's round trip grows
from 10 to 90 ms within one; resent after a single timeout of 46 ms, a picture would take its 4 Mbit/s twice."""
BEHIND_RTTS: Final = 2.0
"""And two reports' delays, after which a link may have become slow. Its variation does not count: that grows first, and
would hide it."""
LATE_FOR_S: Final = 0.5
"""After a report of what had been given up, unless one of something later follows. After a spell in which the link was
held, the first tells nothing of what it is like now."""
UNKNOWN_RTT_S: Final = 0.2
MAX_FRAMES: Final = MAX_DATAGRAM - HEADER_BYTES - TAG_BYTES
"""Bytes of frames in one datagram."""
PROBE_S: Final = 0.1
"""Between probes of a silent path, doubling up to `LONGEST_PROBE_S`."""
LONGEST_PROBE_S: Final = 1.0
SMALL: Final = 64
"""Bytes of a datagram with a ping, challenge or response, and some to spare."""

Token = TypeVar("Token")


@dataclass(slots=True)
class _Sent(Generic[Token]):
    size: int
    at: float
    token: Token | None


@dataclass(slots=True)
class _Run:
    """Datagrams, one after the other, that count as lost."""

    length: int


@dataclass(slots=True)
class Path(Generic[Token]):
    """One pair of addresses, as one end sees it."""

    number: int
    rate: RateController
    where: Whereabouts
    sent: dict[int, _Sent[Token]] = field(default_factory=dict)
    missed: dict[int, _Run] = field(default_factory=dict)
    """The latest that count as lost."""
    next_sequence: int = 0
    waiting_since: float | None = None
    """When the first datagram left that asks for a report, after the last report came."""
    heard_at: float = -math.inf
    received: dict[int, float] = field(default_factory=dict)
    """Arrival times of the latest sequences."""
    largest: int = -1
    lowest_untold: int | None = None
    """The smallest sequence that no report has spoken of."""
    untold: int = 0
    report_at: float | None = None
    clock_s: float | None = None
    """The peer's clock at its last report, unwrapped."""
    probes: int = 0
    probe_at: float | None = None
    silent_at: float = -math.inf
    newest_told: int = -1
    """The latest sequence that the peer has reported."""
    late_at: float = -math.inf
    """When it was reported, if it had been given up by then: what follows may take as long."""

    def dead(self, now: float) -> bool:
        """Whether nothing came back for too long."""
        return self.waiting_since is not None and now > self.dies_at

    def suspect(self, now: float) -> bool:
        """Whether a report is overdue: no reason to give the path up, but to prefer another."""
        return now > self.suspect_at

    @property
    def suspect_at(self) -> float:
        """When the report that is waited for becomes overdue."""
        return math.inf if self.waiting_since is None else self.waiting_since + self.rate.timeout_s()

    def behind(self, now: float) -> bool:
        """Whether reports are later than they usually are: no reason to give anything up, but to send little.

        Either nothing is heard; or the latest that was, was of what had been given up; or so many datagrams are
        unreported that those behind them cannot have been, either.
        """
        latest = now - BEHIND_RTTS * (self.rate.rtt_s or UNKNOWN_RTT_S) - 2 * REPORT_DELAY_S
        if now < self.late_at + LATE_FOR_S or (self.waiting_since is not None and self.waiting_since < latest):
            return True
        last = next(itertools.islice(self.sent.values(), REORDERING, None), None)
        return last is not None and last.at < latest

    def told(self, sequence: int, now: float, *, given_up: bool) -> None:
        """The peer reports a datagram for the first time, which may have been given up before."""
        if sequence > self.newest_told:
            self.newest_told, self.late_at = sequence, now if given_up else -math.inf

    @property
    def dies_at(self) -> float:
        """When silence makes the path dead."""
        if self.waiting_since is None:
            return math.inf
        rtt = self.rate.rtt_s or UNKNOWN_RTT_S
        return self.waiting_since + max(DEAD_AFTER_LEAST_S, DEAD_AFTER_RTTS * rtt)

    def may_send(self, size: int) -> bool:
        """Whether the peer's address may be sent so much."""
        return self.where.used.may_send(size)

    @property
    def proven(self) -> bool:
        """Whether the peer's address has proven that it receives."""
        return self.where.used.proven


class Channel(Generic[Token]):
    """One end of a session's sealed datagrams."""

    def __init__(
        self, session: int, sending: Secret, receiving: Secret, now: float, congestion: CongestionFactory = LossTolerant
    ) -> None:
        self.session = session
        self._congestion = congestion
        self._sealer = Sealer(session, sending)
        self._opener = Opener(receiving)
        self.paths: dict[int, Path[Token]] = {}
        self.delivered: list[Token] = []
        """Tokens reported since the owner last looked; it clears the list."""
        self.lost: list[Token] = []
        self.replies: list[tuple[int, bytes]] = []
        """Datagrams that answer the peer at once: (path, datagram)."""
        self.asides: list[tuple[Address, bytes]] = []
        """Datagrams to addresses that claim to be a path's; the owner sends them before all others."""
        self.drops = Counter[Drop]()
        """Datagrams that were forged, damaged, replayed or malformed."""
        self._made_at = now

    @property
    def worn_out(self) -> bool:
        """Whether the session must end, because its key has sealed all it may."""
        return self._sealer.worn_out

    def path(self, number: int, now: float, *, proven: bool) -> Path[Token]:
        """The path of that number, made when it is new."""
        path = self.paths.get(number)
        if path is None:
            path = self.paths[number] = Path(number, RateController(now, self._congestion), Whereabouts(proven=proven))
        return path

    def receive(self, header: Header, datagram: bytes, now: float, address: Address = None) -> list[Frame] | None:
        """The frames of an authentic datagram that are the owner's affair; None if it is not authentic.

        `address` is where it came from; an end whose sockets hear one peer only gives none.
        """
        payload = self._opener.open(header, datagram)
        if isinstance(payload, Drop):
            self.drops[payload] += 1
            return None
        path = self.path(header.path, now, proven=False)
        used = path.where.used
        place: Place | None = used
        if used.address == address:  # as nearly always; so a call is saved
            used.bytes_in += len(datagram)
        else:
            place = path.where.came(address, len(datagram), now, newest=header.sequence > path.largest)
        path.heard_at, path.waiting_since = now, None
        path.probes, path.probe_at = 0, None
        frames: list[Frame] = []
        eliciting = False
        challenged: bytes | None = None
        try:
            for frame in decode(payload):
                match frame:
                    case Report():
                        self._reported(frame, now)
                        continue
                    case Challenge(token):
                        challenged = token
                    case Response(token):
                        self._answered(path, token, place, now)
                    case Interim():
                        frames.append(frame)
                        continue
                    case Ping():
                        pass
                    case _:
                        frames.append(frame)
                eliciting = True
        except WireError:
            self.drops[Drop.MALFORMED] += 1
        self._note_arrival(path, header.sequence, now, eliciting=eliciting)
        if place is not None:
            if challenged is not None and place.may_send(SMALL):  # one of a datagram's: 130 fit, and would amplify
                self._reply(path, place, Response(challenged), now)
            if not place.proven and (due := place.challenge_due(now, SMALL)) is not None:
                self._reply(path, place, Challenge(due), now)
        return frames

    def _reply(self, path: Path[Token], place: Place, frame: Frame, now: float) -> None:
        """Answer where a datagram came from."""
        if place is path.where.used:
            self.replies.append((path.number, self.send(path, encode(frame), now)))
            return
        datagram = self.tell(path, encode(frame))  # what it tells of another way says nothing of this path's
        place.bytes_out += len(datagram)
        self.asides.append((place.address, datagram))

    def _answered(self, path: Path[Token], token: bytes, place: Place | None, now: float) -> None:
        before = path.where.used.address
        if not path.where.answered(token, place):
            return
        if before is not None and before[0] != path.where.used.address[0]:
            # Another host's link may be another; another port is a NAT's affair (RFC 9000 §9.4).
            self._lose(path, list(path.sent), now)
            path.missed.clear()
            path.rate = RateController(now, self._congestion)

    def send(self, path: Path[Token], frames: bytes, now: float, token: Token | None = None) -> bytes:
        """Seal a datagram that asks for a report."""
        sequence = path.next_sequence
        datagram = self._seal(path, frames)
        path.sent[sequence] = _Sent(len(datagram), now, token)
        if len(path.sent) > MAX_SENT:
            self._lose(path, [next(iter(path.sent))], now)
        if path.waiting_since is None:
            path.waiting_since = now
        path.rate.on_packet_sent(len(datagram), now)
        return datagram

    def tell(self, path: Path[Token], frames: bytes) -> bytes:
        """Seal a datagram that asks for no report: of reports and interims."""
        return self._seal(path, frames)

    def report(self, path: Path[Token], now: float, *, again: bool = False) -> bytes | None:
        """The frame that says what arrived on a path lately; None if there is nothing new, unless asked `again`."""
        if not path.received or not (path.untold or again):
            return None
        last = path.largest
        lowest = last if path.lowest_untold is None else path.lowest_untold
        first = max(0, last - MAX_REPORTED + 1, min(lowest, last - REPORT_REACH + 1))
        latest = max(path.received.values())
        offsets = tuple(
            None if (at := path.received.get(sequence)) is None else latest - at for sequence in range(first, last + 1)
        )
        path.untold, path.lowest_untold, path.report_at = 0, None, None
        return encode(
            Report(path.number, first, round(latest * 1e6) & 0xFFFFFFFF, round((now - latest) * 1e6), offsets)
        )

    def with_report(self, path: Path[Token], frames: bytes, now: float) -> bytes:
        """The same frames, after a report if both fit: what is sent anyway carries it, so that losing one costs less.

        A report that is lost makes its datagrams look lost: at 20 % loss, reports on their own had 28 % reported.
        """
        if len(frames) + REPORT_BYTES > MAX_FRAMES:
            return frames
        report = self.report(path, now, again=True)
        return frames if report is None else report + frames

    def send_with_report(
        self, path: Path[Token], frame: bytes, now: float, token: Token | None = None, *, tell: bool = False
    ) -> Iterator[tuple[int, bytes]]:
        """A frame, with a report if the path may carry both, if it may carry it at all; `tell` asks for none."""
        if path.may_send(MAX_DATAGRAM):
            frame = self.with_report(path, frame, now)
        elif not path.may_send(HEADER_BYTES + len(frame) + TAG_BYTES):
            return
        yield path.number, self.tell(path, frame) if tell else self.send(path, frame, now, token)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Datagrams that are due by themselves: reports, and probes of dead paths."""
        yield from self.replies
        self.replies.clear()
        for path in self.paths.values():
            if path.report_at is not None and path.report_at <= now:
                yield from self.flush(path, now)
            silent = path.dead(now) or path.suspect(now)
            if silent and (path.probe_at is None or path.probe_at <= now):
                path.probe_at = now + min(LONGEST_PROBE_S, PROBE_S * 2**path.probes)
                path.probes = min(path.probes + 1, 8)
                if path.may_send(SMALL):
                    yield path.number, self.send(path, encode(Ping()), now)

    def flush(self, path: Path[Token], now: float) -> Iterator[tuple[int, bytes]]:
        """Report now rather than later, on a living path."""
        over = self.best(now) if path.dead(now) else path
        if not over.may_send(HEADER_BYTES + REPORT_BYTES + TAG_BYTES):
            path.report_at = None  # with the next arrival, which allows more
            return
        frame = self.report(path, now)
        if frame is not None:
            yield over.number, self.tell(over, frame)

    def best(self, now: float) -> Path[Token]:
        """The path to send something small on: living before dead, then the shortest round trip."""
        return min(
            self.paths.values(),
            key=lambda p: (p.dead(now), p.suspect(now), p.rate.rtt_s or UNKNOWN_RTT_S, p.number),
        )

    def two_best(self, now: float) -> list[Path[Token]]:
        """Two different paths if two live, for what must not be lost; else the one there is."""
        return sorted(self.usable(now), key=lambda path: path.rate.rtt_s or math.inf)[:2]

    def usable(self, now: float) -> list[Path[Token]]:
        """Living paths, those not suspected if there are any; all of them when none lives: one must be tried."""
        if len(self.paths) == 1:
            return list(self.paths.values())
        living = [path for path in self.paths.values() if not path.dead(now)]
        return [path for path in living if not path.suspect(now)] or living or list(self.paths.values())

    def timers(self, now: float) -> Iterator[float]:
        """When `expire` or `due` have something to do."""
        for path in self.paths.values():
            if path.report_at is not None:
                yield path.report_at
            if path.sent:
                yield self._gives_up_at(path, next(iter(path.sent.values())))
            if path.dead(now) or path.suspect(now):
                yield path.probe_at if path.probe_at is not None else now
                timeout_s = path.rate.timeout_s()
                yield max(now, path.suspect_at, path.silent_at + timeout_s, path.heard_at + timeout_s)
            elif path.waiting_since is not None:
                yield min(path.dies_at, path.suspect_at)

    def expire(self, now: float) -> None:
        """Give up what was not reported in time, and what a dead path holds while another lives."""
        for path in self.paths.values():
            if path.sent and path.dead(now) and any(not other.dead(now) for other in self.paths.values()):
                self._lose(path, list(path.sent), now)
            timeout_s = path.rate.timeout_s()
            late = []
            for sequence, sent in path.sent.items():
                if self._gives_up_at(path, sent) > now:
                    break  # sent in order
                late.append(sequence)
            if late:
                self._lose(path, late, now)
            if path.suspect(now) and path.heard_at < now - timeout_s and path.silent_at < now - timeout_s:
                path.silent_at = now
                path.rate.on_silence(now)

    @staticmethod
    def _gives_up_at(path: Path[Token], sent: _Sent[Token]) -> float:
        """When a datagram counts as lost for want of a report.

        Where nothing at all was heard since it left, it is likely to be late like all else (RFC 9002 §6.2): the path
        is asked first.
        """
        timeouts = 1.0 if path.heard_at > sent.at else SILENT_TIMEOUTS
        return sent.at + timeouts * path.rate.timeout_s()

    def _seal(self, path: Path[Token], frames: bytes) -> bytes:
        datagram = self._sealer.seal(path.number, path.next_sequence, frames)
        path.next_sequence += 1
        path.where.used.bytes_out += len(datagram)
        return datagram

    def _note_arrival(self, path: Path[Token], sequence: int, now: float, *, eliciting: bool) -> None:
        path.received[sequence] = now
        path.largest = max(path.largest, sequence)
        if len(path.received) > 512:
            floor = path.largest - 256
            path.received = {s: at for s, at in path.received.items() if s >= floor}
            path.received.setdefault(sequence, now)
        if not eliciting:
            return
        path.untold += 1
        path.lowest_untold = sequence if path.lowest_untold is None else min(path.lowest_untold, sequence)
        due = now if path.untold >= REPORT_AFTER else now + REPORT_DELAY_S
        path.report_at = due if path.report_at is None else min(path.report_at, due)

    def _reported(self, report: Report, now: float) -> None:
        path = self.paths.get(report.path)
        if path is None or report.first + len(report.offsets_s) > path.next_sequence:
            raise WireError(f"a report of path {report.path} speaks of what was never sent")
        path.waiting_since = None
        clock = self._unwrapped(path, report.clock_us)
        arrivals: list[tuple[float, Arrival]] = []
        newest: float | None = None
        for number, offset in enumerate(report.offsets_s):
            if offset is None:
                continue
            sequence = report.first + number
            sent = path.sent.pop(sequence, None)
            if sent is None:
                self._found(path, sequence, now)
                continue
            path.told(sequence, now, given_up=False)
            arrivals.append((clock - offset, Arrival(sent.size, sent.at, clock - offset)))
            if offset == 0.0:
                newest = sent.at  # what the delay of the report is counted from
            if sent.token is not None:
                self.delivered.append(sent.token)
        arrivals.sort(key=lambda pair: pair[0])
        largest = (
            report.first + max(n for n, offset in enumerate(report.offsets_s) if offset is not None)
            if any(offset is not None for offset in report.offsets_s)
            else -1
        )
        overtaken = list(self._before(path, largest - REORDERING + 1))
        rtt = None if newest is None else max(1e-6, now - newest - report.delay_us * 1e-6)
        runs, times = self._forget(path, overtaken)
        if arrivals or times or rtt is not None:
            path.rate.on_report([a for _, a in arrivals], times, rtt, now, runs)

    @staticmethod
    def _found(path: Path[Token], sequence: int, now: float) -> None:
        """A report names what is waited for no more: most of them repeat what was said, but it may have been missed."""
        run = path.missed.pop(sequence, None)
        if run is not None:
            path.told(sequence, now, given_up=True)
            run.length -= 1
            path.rate.on_spurious_loss(1, int(run.length == 0))

    @staticmethod
    def _before(path: Path[Token], sequence: int) -> Iterator[int]:
        for sent in path.sent:
            if sent >= sequence:
                return
            yield sent

    def _lose(self, path: Path[Token], sequences: list[int], now: float) -> None:
        runs, times = self._forget(path, sequences)
        path.rate.on_report([], times, None, now, runs)

    def _forget(self, path: Path[Token], sequences: list[int]) -> tuple[int, list[float]]:
        """Take lost datagrams off the list: how many runs begin with them, and when they were sent."""
        runs, times = 0, list[float]()
        for sequence in sequences:
            sent = path.sent.pop(sequence)
            times.append(sent.at)
            run = path.missed.get(sequence - 1)  # a run need not be found all at once
            if run is None:
                run, runs = _Run(0), runs + 1
            run.length += 1
            path.missed[sequence] = run
            if sent.token is not None:
                self.lost.append(sent.token)
        while len(path.missed) > MAX_MISSED:
            del path.missed[next(iter(path.missed))]
        return runs, times

    @staticmethod
    def _unwrapped(path: Path[Token], clock_us: int) -> float:
        """The peer's clock in seconds, continued beyond its 32 bits of microseconds (71 minutes)."""
        if path.clock_s is None:
            path.clock_s = clock_us * 1e-6
        else:
            step = (clock_us - round(path.clock_s * 1e6)) & 0xFFFFFFFF
            path.clock_s += (step - (1 << 32 if step >> 31 else 0)) * 1e-6
        return path.clock_s
