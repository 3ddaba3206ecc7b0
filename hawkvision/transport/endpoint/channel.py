"""A sealed channel: numbered datagrams over one or more paths, and reports of their arrival times. Sans-I/O.

The channel retransmits nothing. A datagram that asks for a report carries a token of the owner's. The channel says
which tokens were delivered and which are lost, and the owner decides what to send again.

A path that is silent for three round trips is dead: it is only probed until an authentic datagram arrives on it.
Reports repeat earlier ones, so that a lost one costs little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from hawkvision.transport.congestion.controller import CongestionFactory
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.packet_trains import Arrival
from hawkvision.transport.congestion.rate_control import RateController
from hawkvision.transport.endpoint.path import (
    REORDERING,
    UNKNOWN_RTT_S,
    Path,
    SentDatagram,
)
from hawkvision.transport.protocol.addresses import Address, PathAddresses, PeerAddress
from hawkvision.transport.protocol.frames import (
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

MAX_SENT: Final = 2048
"""Datagrams per path that wait for a report or a timeout; 2.4 MB in flight."""
MAX_FRAMES: Final = MAX_DATAGRAM - HEADER_BYTES - TAG_BYTES
"""The most bytes of frames in one datagram."""
PROBE_S: Final = 0.1
"""Between probes of a silent path, doubling up to `LONGEST_PROBE_S`."""
LONGEST_PROBE_S: Final = 1.0
SMALL: Final = 64
"""The most bytes of a datagram with a ping, challenge or response."""

Token = TypeVar("Token")


class Channel(Generic[Token]):
    """One end of a session's sealed datagrams."""

    def __init__(
        self, session: int, sending: Secret, receiving: Secret, congestion: CongestionFactory = LossTolerant
    ) -> None:
        self.session = session
        self._congestion = congestion
        self._sealer = Sealer(session, sending)
        self._opener = Opener(receiving)
        self.paths: dict[int, Path[Token]] = {}
        self.delivered: list[Token] = []
        """Tokens of reported datagrams; the owner clears the list."""
        self.lost: list[Token] = []
        self.replies: list[tuple[int, bytes]] = []
        """Immediate replies to the peer: (path, datagram)."""
        self.asides: list[tuple[Address, bytes]] = []
        """Datagrams to claimed addresses; the owner sends them before all others."""
        self.drops = Counter[Drop]()
        """Forged, damaged, replayed and malformed datagrams."""

    @property
    def key_exhausted(self) -> bool:
        """Whether the session must end, because its key has protected as many datagrams as it may."""
        return self._sealer.key_exhausted

    def path(self, number: int, now: float, *, proven: bool) -> Path[Token]:
        """The path of that number; creates a new one."""
        path = self.paths.get(number)
        if path is None:
            path = self.paths[number] = Path(
                number, RateController(now, self._congestion), PathAddresses(proven=proven)
            )
        return path

    def receive(self, header: Header, datagram: bytes, now: float, address: Address = None) -> list[Frame] | None:
        """The frames of an authentic datagram that the owner must handle; None if it is not authentic.

        `address` is the sender's; None if the socket has one peer only.
        """
        payload = self._opener.open(header, datagram)
        if isinstance(payload, Drop):
            self.drops[payload] += 1
            return None
        path = self.path(header.path, now, proven=False)
        used = path.where.used
        place: PeerAddress | None = used
        if used.address == address:  # the usual case, without a call
            used.bytes_in += len(datagram)
        else:
            place = path.where.on_datagram(address, len(datagram), now, newest=header.sequence > path.largest)
        path.received_at, path.waiting_since = now, None
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
        path.record_arrival(header.sequence, now, eliciting=eliciting)
        if place is not None:
            if challenged is not None and place.may_send(SMALL):  # one per datagram: 130 fit, and would amplify
                self._reply(path, place, Response(challenged), now)
            if not place.proven and (due := place.challenge_due(now, SMALL)) is not None:
                self._reply(path, place, Challenge(due), now)
        return frames

    def _reply(self, path: Path[Token], place: PeerAddress, frame: Frame, now: float) -> None:
        """Reply to the address of a datagram."""
        if place is path.where.used:
            self.replies.append((path.number, self.send(path, encode(frame), now)))
            return
        datagram = self.send_unreported(path, encode(frame))  # a report on another route tells nothing of this path
        place.bytes_out += len(datagram)
        self.asides.append((place.address, datagram))

    def _answered(self, path: Path[Token], token: bytes, place: PeerAddress | None, now: float) -> None:
        before = path.where.used.address
        if not path.where.on_response(token, place):
            return
        if before is not None and before[0] != path.where.used.address[0]:
            # Another host may have another link; another port is a NAT's doing (RFC 9000 §9.4).
            self._lose(path, list(path.sent), now)
            path.missed.clear()
            path.rate = RateController(now, self._congestion)

    def send(self, path: Path[Token], frames: bytes, now: float, token: Token | None = None) -> bytes:
        """Seal a datagram that asks for a report."""
        sequence = path.next_sequence
        datagram = self._seal(path, frames)
        path.sent[sequence] = SentDatagram(len(datagram), now, token)
        if len(path.sent) > MAX_SENT:
            self._lose(path, [next(iter(path.sent))], now)
        if path.waiting_since is None:
            path.waiting_since = now
        path.rate.on_packet_sent(len(datagram), now)
        return datagram

    def send_unreported(self, path: Path[Token], frames: bytes) -> bytes:
        """Seal a datagram that asks for no report: reports and interim responses."""
        return self._seal(path, frames)

    def with_report(self, path: Path[Token], frames: bytes, now: float) -> bytes:
        """The frames, after a report if both fit.

        Reports in many datagrams matter because a lost report makes its datagrams look lost.
        """
        if len(frames) + REPORT_BYTES > MAX_FRAMES:
            return frames
        report = path.report(now, again=True)
        return frames if report is None else report + frames

    def send_with_report(
        self, path: Path[Token], frame: bytes, now: float, token: Token | None = None, *, unreported: bool = False
    ) -> Iterator[tuple[int, bytes]]:
        """A datagram with the frame, and a report if the path may carry both; none if it may not carry the frame.

        `unreported` asks for no report.
        """
        if path.may_send(MAX_DATAGRAM):
            frame = self.with_report(path, frame, now)
        elif not path.may_send(HEADER_BYTES + len(frame) + TAG_BYTES):
            return
        yield path.number, self.send_unreported(path, frame) if unreported else self.send(path, frame, now, token)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Datagrams that are due: replies, reports, and probes of dead paths."""
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
        """Report now, on a living path."""
        over = self.best(now) if path.dead(now) else path
        if not over.may_send(HEADER_BYTES + REPORT_BYTES + TAG_BYTES):
            path.report_at = None  # the next arrival allows more
            return
        frame = path.report(now)
        if frame is not None:
            yield over.number, self.send_unreported(over, frame)

    def best(self, now: float) -> Path[Token]:
        """The path for something small: living before dead, then by round trip."""
        return min(
            self.paths.values(),
            key=lambda p: (p.dead(now), p.suspect(now), p.rate.rtt_s or UNKNOWN_RTT_S, p.number),
        )

    def two_best(self, now: float) -> list[Path[Token]]:
        """Two different paths if two live, else one, for frames that must not be lost."""
        return sorted(self.usable(now), key=lambda path: path.rate.rtt_s or math.inf)[:2]

    def usable(self, now: float) -> list[Path[Token]]:
        """The living paths, those not suspected if there are any; all paths if none lives."""
        if len(self.paths) == 1:
            return list(self.paths.values())
        living = [path for path in self.paths.values() if not path.dead(now)]
        return [path for path in living if not path.suspect(now)] or living or list(self.paths.values())

    def timers(self, now: float) -> Iterator[float]:
        """When `expire` or `due` is due."""
        for path in self.paths.values():
            if path.report_at is not None:
                yield path.report_at
            if path.sent:
                yield path.gives_up_at(next(iter(path.sent.values())))
            if path.dead(now) or path.suspect(now):
                yield path.probe_at if path.probe_at is not None else now
                timeout_s = path.rate.timeout_s()
                yield max(now, path.suspect_at, path.silent_at + timeout_s, path.received_at + timeout_s)
            elif path.waiting_since is not None:
                yield min(path.dies_at, path.suspect_at)

    def expire(self, now: float) -> None:
        """Count as lost what was not reported in time, and what a dead path holds while another lives."""
        for path in self.paths.values():
            if path.sent and path.dead(now) and any(not other.dead(now) for other in self.paths.values()):
                self._lose(path, list(path.sent), now)
            timeout_s = path.rate.timeout_s()
            late = []
            for sequence, sent in path.sent.items():
                if path.gives_up_at(sent) > now:
                    break  # sent in order
                late.append(sequence)
            if late:
                self._lose(path, late, now)
            if path.suspect(now) and path.received_at < now - timeout_s and path.silent_at < now - timeout_s:
                path.silent_at = now
                path.rate.on_silence(now)

    def _seal(self, path: Path[Token], frames: bytes) -> bytes:
        datagram = self._sealer.seal(path.number, path.next_sequence, frames)
        path.next_sequence += 1
        path.where.used.bytes_out += len(datagram)
        return datagram

    def _reported(self, report: Report, now: float) -> None:
        path = self.paths.get(report.path)
        if path is None or report.first + len(report.offsets_s) > path.next_sequence:
            raise WireError(f"a report of path {report.path} names datagrams that were never sent")
        path.waiting_since = None
        clock = path.unwrap_clock(report.clock_us)
        arrivals: list[tuple[float, Arrival]] = []
        newest: float | None = None
        for number, offset in enumerate(report.offsets_s):
            if offset is None:
                continue
            sequence = report.first + number
            sent = path.sent.pop(sequence, None)
            if sent is None:
                path.on_late_arrival(sequence, now)
                continue
            path.record_report(sequence, now, given_up=False)
            arrivals.append((clock - offset, Arrival(sent.size, sent.at, clock - offset)))
            if offset == 0.0:
                newest = sent.at  # the report's delay counts from it
            if sent.token is not None:
                self.delivered.append(sent.token)
        arrivals.sort(key=lambda pair: pair[0])
        largest = (
            report.first + max(n for n, offset in enumerate(report.offsets_s) if offset is not None)
            if any(offset is not None for offset in report.offsets_s)
            else -1
        )
        overtaken = path.sent_before(largest - REORDERING + 1)
        rtt = None if newest is None else max(1e-6, now - newest - report.delay_us * 1e-6)
        runs, times = path.lose(overtaken, self.lost)
        if arrivals or times or rtt is not None:
            path.rate.on_report([a for _, a in arrivals], times, rtt, now, runs)

    def _lose(self, path: Path[Token], sequences: list[int], now: float) -> None:
        runs, times = path.lose(sequences, self.lost)
        path.rate.on_report([], times, None, now, runs)
