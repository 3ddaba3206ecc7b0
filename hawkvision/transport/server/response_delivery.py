"""Delivers responses: in copies, and again until the peer reports them; interim responses precede them. Sans-I/O.

    response ─► copies ─► waiting ─┬─ each part is reported ─────────────────────────────────────────────► finished
                 ▲                 └─ no report in time, or a repeated fragment ─┬─ after `GIVE_UP_S` ───► finished
                 └───────────────── and the first time also over the stream ─────┘

The measured loss decides how many copies there are; if more than one, another follows after a burst of loss. The waits
grow. Interim responses go out in as many copies, once.

Bounds: `MAX_ANSWERS` responses, beyond which the stream sends the oldest, and `REMEMBERED` numbers of images.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.endpoint.path import UNKNOWN_RTT_S
from hawkvision.transport.protocol.frames import (
    ANSWER_ROOM,
    INTERIM_ROOM,
    MAX_ANSWER_PARTS,
    AnswerPart,
    Interim,
    encode,
)

MAX_ANSWER_BYTES: Final = ANSWER_ROOM * MAX_ANSWER_PARTS
"""74 KB."""
MAX_ANSWERS: Final = 128
"""Responses kept until the peer has them."""
REMEMBERED: Final = 4096
"""Finished images, so that their late fragments start nothing: over a minute at 50/s."""
MAX_INTERIMS: Final = 256
"""Of one image; their numbers are one byte."""
MAX_COPIES: Final = 4
"""Beside the last one; enough up to a loss of 27 %."""
MISSED_ANSWERS: Final = 0.005
"""There are as many copies as let fewer than this share of responses miss at the measured loss."""
COPY_SPACING_S: Final = 0.003
"""Between copies; a burst of loss is often shorter."""
LAST_COPY_S: Final = 0.02
"""When the last copy leaves if one is not enough; outages of radio links take 10 to 20 ms."""
LEAST_RETRY_S: Final = 0.02
RETRY_GROWTH: Final = 1.5
"""The growth of the wait for a report from round to round, up to `LONGEST_RETRY_S`."""
LONGEST_RETRY_S: Final = 2.0
GIVE_UP_S: Final = 10.0
"""How long a response is repeated; after that the stream has it, or the peer is gone."""
CROSSED_S: Final = 0.03
"""A fragment that arrives a round trip and this long after a response did not cross it."""


ResponsePart: TypeAlias = tuple[int, int]
"""The part of a response that a datagram carries: the image's number and the part's."""


@dataclass(slots=True)
class Interims:
    """The interim responses to one image; the image's assembly holds them."""

    image: int
    count: int = 0
    latest: bytes = b""
    copies: list[float] = field(default_factory=list)
    """When copies of the latest leave."""
    sent: int = 0
    """The copies of the latest that have left."""


@dataclass(slots=True)
class _Answer:
    parts: list[bytes]
    status: int
    body: bytes
    made_at: float
    reported: set[int] = field(default_factory=set)
    copies: list[float] = field(default_factory=list)
    tries: int = 0
    rounds: int = 0
    """Repetitions for want of a report."""
    sent_at: float = math.inf
    again_at: float = math.inf
    by_stream: bool = False


class ResponseDelivery:
    """The responses of one session."""

    def __init__(self, channel: Channel[ResponsePart]) -> None:
        self.unconfirmed: deque[tuple[int, int, bytes]] = deque(maxlen=MAX_ANSWERS)
        """Responses (image, status, body) without a report in time, for the reliable stream."""
        self._channel = channel
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        self._finished: OrderedDict[int, None] = OrderedDict()

    def knows(self, number: int) -> bool:
        """Whether an image has its response or needs none."""
        return number in self._answers or number in self._finished

    def answer(self, number: int, status: int, body: bytes, now: float) -> None:
        """Respond to an image that `knows` does not know, with at most `MAX_ANSWER_BYTES`."""
        assert not self.knows(number), "an image gets one response"
        pieces = [body[at : at + ANSWER_ROOM] for at in range(0, len(body), ANSWER_ROOM)] or [b""]
        parts = [encode(AnswerPart(number, status, part, len(pieces), piece)) for part, piece in enumerate(pieces)]
        self._answers[number] = _Answer(parts, status, body, now, copies=self._spaced(now))
        if len(self._answers) > MAX_ANSWERS:
            oldest, unconfirmed = next(iter(self._answers.items()))
            if not unconfirmed.by_stream:
                self.unconfirmed.append((oldest, unconfirmed.status, unconfirmed.body))
            self.finish(oldest)

    def send_interim(self, interims: Interims, body: bytes, now: float) -> None:
        """Send an interim response in place of the last, unless it is too long or no number is left."""
        if len(body) > INTERIM_ROOM or interims.count >= MAX_INTERIMS:
            return
        interims.latest = encode(Interim(interims.image, interims.count, body))
        interims.count += 1
        interims.sent = 0
        interims.copies = self._spaced(now)

    def on_repeated_fragment(self, number: int, now: float) -> None:
        """Take note of a fragment of a known image: its sender missed the response, unless the two crossed."""
        answer = self._answers.get(number)
        if answer is None:
            return
        rtt_s = self._channel.best(now).rate.rtt_s or 0.0
        if now > answer.sent_at + rtt_s + CROSSED_S:
            answer.again_at = now

    def finish(self, number: int) -> None:
        """Drop a response: the peer has it, never will, or does not want it."""
        self._answers.pop(number, None)
        self._finished[number] = None
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)

    def on_reports(self) -> None:
        """Finish the responses that the channel's reports confirm."""
        for number, part in self._channel.delivered:
            answer = self._answers.get(number)
            if answer is not None:
                answer.reported.add(part)
                if len(answer.reported) == len(answer.parts):
                    self.finish(number)
        self._channel.delivered.clear()
        self._channel.lost.clear()  # responses are repeated by their own timer

    def poll(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The datagrams to send now, each with its path."""
        for number, answer in list(self._answers.items()):
            yield from self._send(number, answer, now)

    def poll_interims(self, interims: Interims, now: float) -> Iterator[tuple[int, bytes]]:
        """The datagrams of interim responses to send now, each with its path."""
        while interims.copies and interims.copies[0] <= now:
            interims.copies.pop(0)
            paths = self._channel.two_best(now)
            path = paths[interims.sent % len(paths)]
            interims.sent += 1
            yield from self._channel.send_with_report(path, interims.latest, now, unreported=True)

    def next_timer(self) -> float:
        """When `poll` is due again; +∞ for never."""
        return min((min(answer.copies, default=answer.again_at) for answer in self._answers.values()), default=math.inf)

    @property
    def idle(self) -> bool:
        """Whether the peer has each response."""
        return not self._answers

    def copies_needed(self, now: float) -> int:
        """The number of copies that makes the arrival of one probable enough at the measured loss."""
        loss = self._channel.best(now).rate.loss
        if not loss.known:
            return 2
        copies = min(2, len(self._channel.usable(now)))  # one on each path, because either may just have died
        while loss.ratio**copies > MISSED_ANSWERS and copies < MAX_COPIES:
            copies += 1
        return copies

    def _spaced(self, now: float) -> list[float]:
        """When the copies of a response leave."""
        copies = self.copies_needed(now)
        spaced = [now + copy * COPY_SPACING_S for copy in range(copies)]
        return spaced if copies == 1 else [*spaced, now + LAST_COPY_S]

    def _send(self, number: int, answer: _Answer, now: float) -> Iterator[tuple[int, bytes]]:
        paths = self._channel.two_best(now)
        while answer.copies and answer.copies[0] <= now:
            answer.copies.pop(0)
            for part, frame in enumerate(answer.parts):
                if part in answer.reported:
                    continue
                path = paths[(part + answer.tries) % len(paths)]
                yield from self._channel.send_with_report(path, frame, now, (number, part))
            answer.tries += 1
            answer.sent_at = now
            if not answer.copies:
                answer.again_at = now + min(LONGEST_RETRY_S, self._retry_s(now) * RETRY_GROWTH**answer.rounds)
        if answer.again_at <= now:
            answer.again_at = math.inf
            if not answer.by_stream:
                answer.by_stream = True
                self.unconfirmed.append((number, answer.status, answer.body))
            if now < answer.made_at + GIVE_UP_S:
                answer.rounds += 1
                answer.copies = self._spaced(now)
                yield from self._send(number, answer, now)
            else:
                self.finish(number)

    def _retry_s(self, now: float) -> float:
        rate = self._channel.best(now).rate
        return max(LEAST_RETRY_S, min(UNKNOWN_RTT_S, rate.timeout_s()) if rate.rtt_s is None else rate.timeout_s())
