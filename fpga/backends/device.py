"""`fpga-device`: a device at the other end of a line (`fpga/device/FRAMING.md`).

One thread owns the line; callers hand it pictures, whole or in pieces, and wait. It decides nothing: what is sent when
is `fpga.device.device_protocol`' matter. A line that breaks fails the pictures on it, and the next picture opens it
anew.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import select
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fpga.backends.base import UNKNOWN, Build, FpgaBackend
from fpga.device.device_link import Link, open_link
from fpga.device.device_protocol import MAX_ATTEMPTS, Answered, Event, Failed, HostSession, Opened, Refused, Rows
from fpga.device.framing import Welcome
from hawkvision.clock import MonotonicClock
from hawkvision.errors import BackendError, BackendUnavailable
from hawkvision.integer import reference
from hawkvision.integer.ir import Graph
from hawkvision.integer.reference import Mask
from hawkvision.metrics import Cycles, Seconds
from hawkvision.types import Logits, Pixels
from hawkvision.vision.backend import check_open

log = logging.getLogger("hawkvision.fpga")

MAX_WAITING: Final = 1024
"""Pictures in line for the device: four for each of 256 workers, more than a node has."""

Piece: TypeAlias = tuple[Rows, NDArray[np.bool_] | None]
"""Pixels (count, channels) in the order of rows, and which of them arrived (count,); None: all."""


@dataclass(frozen=True, slots=True)
class _Answer:
    answered: Answered
    round_trip_s: float
    device: Welcome
    """What answered: not always what answered at the start."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A picture on its way."""

    pieces: deque[Piece] = field(default_factory=deque)
    answer: Future[_Answer] = field(default_factory=Future)
    sequence: int | None = None
    since: float = 0.0
    """When it got that number: its first pixels are sent then."""
    queued: bool = False
    dropped: bool = False


class _Line:
    """The thread that owns a link and a session, from greeting to hanging up; at most `most` pictures wait for it."""

    def __init__(self, link: Link, session: HostSession, most: int) -> None:
        self._link, self._session, self._most, self._clock = link, session, most, MonotonicClock()
        self._lock = threading.Lock()
        self._news: deque[_Asked] = deque()
        self._waiting: deque[_Asked] = deque()
        self._sent: dict[int, _Asked] = {}
        self._opened: Future[Welcome] = Future()
        self._stop = False
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Not select: a node with 1,024 open connections has no smaller number left for a line that it opens anew.
        self._poll = select.poll()
        for descriptor in (link.fileno(), self._woken):
            self._poll.register(descriptor, select.POLLIN)
        self.broken: str | None = None
        """Why nothing goes over this line any more."""
        self._thread = threading.Thread(target=self._run, name="hawkvision-fpga-device", daemon=True)
        self._thread.start()

    def device(self) -> Welcome:
        """What answers at the other end.

        Raises:
            BackendError: if nothing does, or it refuses.
        """
        return self._opened.result()  # the greeting has its own bound

    def tell(self, asked: _Asked) -> None:
        """There are new pieces of it.

        Raises:
            BackendUnavailable: if the line is broken, or too many wait.
        """
        with self._lock:
            if self.broken is not None:
                raise BackendUnavailable(self.broken)
            if len(self._waiting) + len(self._news) >= self._most:
                raise BackendUnavailable(f"fpga-device: {self._most} pictures are waiting for the device")
            self._news.append(asked)
            self._ring()

    def drop(self, asked: _Asked) -> None:
        """Nobody waits for it any more. Heard however many wait, for it would keep its place in the window for ever."""
        asked.dropped = True
        with self._lock:
            if self.broken is None:
                self._news.append(asked)
                self._ring()

    def close(self) -> None:
        """Hang up. What waits fails."""
        with self._lock:
            self._stop = True
            if self.broken is None:
                self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        why = "fpga-device: the backend is closed"
        try:
            self._session.open(self._clock.now())
            while not self._stop:
                self._step()
        except Exception as error:  # noqa: BLE001 - whatever ends this thread must end the waiting as well
            log.warning("fpga-device: the line broke: %s", error)
            why = f"fpga-device: the line broke: {error}"
        with self._lock:
            self.broken = why
            left = [*self._news, *self._waiting, *self._sent.values()]
            os.close(self._woken)
            os.close(self._wake)
            self._link.close()
        for asked in left:
            _fail(asked.answer, BackendUnavailable(why))
        _fail(self._opened, BackendUnavailable(why))

    def _step(self) -> None:
        session, now = self._session, self._clock.now()
        self._hear()
        while self._waiting and session.room:
            asked = self._waiting.popleft()
            asked.sequence, asked.since = session.begin(now), now
            self._sent[asked.sequence] = asked
            self._pass_on(asked, now)
        for frame in session.take():
            self._link.send(frame)
        wake_at = session.wake_at
        timeout_ms = None if wake_at is None else math.ceil(max(0.0, wake_at - self._clock.now()) * 1e3)
        ready = {descriptor for descriptor, _ in self._poll.poll(timeout_ms)}
        if self._woken in ready:
            os.read(self._woken, 65536)
        now = self._clock.now()
        if self._link.fileno() in ready:
            for received in self._link.receive():
                for event in session.receive(received, now):
                    self._handle(event, now)
        for event in session.advance(now):
            self._handle(event, now)

    def _hear(self) -> None:
        now = self._clock.now()
        for _ in range(len(self._news)):
            asked = self._news.popleft()
            if asked.dropped:
                self._forget(asked)
            elif asked.sequence is not None:
                self._pass_on(asked, now)
            elif not asked.queued:
                asked.queued = True
                self._waiting.append(asked)

    def _pass_on(self, asked: _Asked, now: float) -> None:
        assert asked.sequence is not None
        while asked.pieces:
            pixels, mask = asked.pieces.popleft()
            try:
                self._session.add(asked.sequence, pixels, mask, now)
            except BackendError as error:
                self._forget(asked)
                _fail(asked.answer, error)
                return

    def _forget(self, asked: _Asked) -> None:
        if asked.sequence is not None:
            self._session.drop(asked.sequence)
            self._sent.pop(asked.sequence, None)
        elif asked in self._waiting:
            self._waiting.remove(asked)

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case Opened(device):
                kind = "an emulator, not hardware" if device.emulated else "a device"
                log.info("fpga-device: %s answers, window %d", kind, device.window)
                if not self._opened.done():
                    self._opened.set_result(device)
            case Refused(why):
                if self._opened.done():
                    log.warning("fpga-device: %s", why)
                _fail(self._opened, BackendUnavailable(f"fpga-device: {why}"))
                while self._waiting:
                    _fail(self._waiting.popleft().answer, BackendUnavailable(f"fpga-device: {why}"))
            case Answered(sequence):
                asked = self._sent.pop(sequence, None)
                if asked is not None:
                    answering = self._session.device
                    assert answering is not None, "a session answers while it is open"
                    asked.answer.set_result(_Answer(event, now - asked.since, answering))
            case Failed(sequence, why, for_now):
                asked = self._sent.pop(sequence, None)
                if asked is not None:
                    said = f"fpga-device: {why}"
                    _fail(asked.answer, BackendUnavailable(said) if for_now else BackendError(said))


def _fail(waiting: Future[_Answer] | Future[Welcome], error: BackendError) -> None:
    if not waiting.done():
        waiting.set_exception(error)


class BoardBackend(FpgaBackend):
    """The device at `address` (`fpga.device.device_link.open_link`), which must hold just this graph.

    Args:
        graph: what it must hold.
        address: where it is.
        build: what is known of it.
        attempts: how often a picture is sent at most: six fail after 16 s, three after 1.75 s.
        most: pictures in line for the device, beside those that it holds.
        given_up: when it is done, nobody wants this backend any more: it closes, even while the device is greeted.

    Raises:
        ConfigError: if the address is none.
        BackendUnavailable: if no device answers there, or it holds another graph, or all was given up meanwhile.
        BackendError: if the line cannot be opened.
    """

    name = "fpga-device"

    def __init__(
        self,
        graph: Graph,
        address: str,
        build: Build = UNKNOWN,
        attempts: int = MAX_ATTEMPTS,
        most: int = MAX_WAITING,
        given_up: Future[None] | None = None,
    ) -> None:
        super().__init__(graph, build)
        self._address, self._attempts, self._most = address, attempts, most
        self._line_lock = threading.Lock()
        self._line = self._open()
        if given_up is not None:
            given_up.add_done_callback(lambda _: self.close())
        try:
            self.device = self._line.device()
        except BackendError as error:
            self._line.close()
            raise type(error)(f"{address}: {error}") from None
        if self.device.emulated:
            log.warning("fpga-device: at %s is an emulator, not hardware; its times are modelled", address)

    @property
    def emulated(self) -> bool:
        """See `FpgaBackend.emulated`."""
        return self.device.emulated

    def close(self) -> None:
        """See `Backend.close`."""
        with self._line_lock:
            super().close()
            self._line.close()

    def infer_pieces(self, pieces: Iterable[Piece]) -> Logits:
        """Logits (classes,) of one picture that arrives in pieces: each goes on its way when the iterator gives it.

        What an iterator that ends early leaves out has not arrived.

        Raises:
            BackendUnavailable: if the device does not answer, or too many wait for it.
            BackendError: as `infer`, and if the pieces are more than a picture.
        """
        check_open(self.name, self._closed)
        line, asked = self._current(), _Asked()
        left = area = self._shape[0] * self._shape[1]
        try:
            for pixels, mask in pieces:
                left -= len(pixels)
                if left < 0:
                    raise BackendError(f"fpga-device: {-left} pixels more than a picture's {area}")
                # Copied: a camera's next row may come in the same memory before this one was sent, or sent again.
                asked.pieces.append((pixels.copy(), None if mask is None else mask.copy()))
                line.tell(asked)
            if left > 0:
                channels = self.graph.input.channels
                asked.pieces.append((np.zeros((left, channels), np.uint8), np.zeros(left, np.bool_)))
                line.tell(asked)
            answered = self._await(asked)
        except BaseException:  # the caller's iterator may raise anything; nobody waits then
            line.drop(asked)
            raise
        return self._floats(answered.logits)

    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        n, line = len(batch), self._current()
        rows = reference.planes(self.graph, batch).reshape(n, -1, self.graph.input.channels)
        which = None if mask is None else mask.reshape(n, -1).copy()
        # Copied: the caller may reuse its memory when one of these has failed and the others are still sent.
        rows = rows.copy() if np.shares_memory(rows, batch) else rows
        asked = []
        try:
            for index in range(n):
                each = _Asked()
                each.pieces.append((rows[index], None if which is None else which[index]))
                line.tell(each)
                asked.append(each)
            return np.stack([self._await(each).logits for each in asked])
        except BackendError:  # nobody waits for the others then
            for each in asked:
                line.drop(each)
            raise

    def _await(self, asked: _Asked) -> Answered:
        answer = asked.answer.result()  # the session's attempts are bounded
        answered, device = answer.answered, answer.device
        self.device = device
        cycles: dict[Cycles, int] = {}
        seconds: dict[Seconds, float] = {"round_trip": answer.round_trip_s}
        if answered.cycles:
            cycles["modelled" if device.emulated else "reported"] = answered.cycles
            if device.emulated and device.clock_hz:
                seconds["modelled"] = answered.cycles / device.clock_hz
        self._count(1, cycles, seconds)
        return answered

    def _open(self) -> _Line:
        link, session = open_link(self._address), HostSession(self.graph, secrets.randbits(32), self._attempts)
        try:
            return _Line(link, session, self._most)
        except OSError as error:  # no descriptor is left, for instance
            link.close()
            raise BackendError(f"{self._address}: {error.strerror}") from None

    def _current(self) -> _Line:
        """The line, opened anew if it broke.

        Raises:
            BackendUnavailable: if it cannot be.
        """
        with self._line_lock:
            check_open(self.name, self._closed)
            if self._line.broken is not None:
                self._line.close()
                try:
                    self._line = self._open()
                except BackendError as error:
                    raise BackendUnavailable(error.message) from None
            return self._line
