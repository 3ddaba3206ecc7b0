"""Both ends of the talk between a host and an FPGA (`fpga/device/FRAMING.md`): frames and the time in, frames and
events out.

The host numbers its pictures, sends each as runs of pixels, and sends all of them again when no answer has come in
time, a bounded number of times. The device computes each picture once: it drops what it has seen, and answers again
what it has answered. That takes little memory, for no picture is begun that is `SPAN` or more ahead of the oldest
unanswered one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fpga.device.framing import (
    MAX_CLASSES,
    Frame,
    Hello,
    Logits,
    Reason,
    Refuse,
    Run,
    Trouble,
    Welcome,
    encode,
    pixels_of_a_run,
)
from hawkvision.errors import BackendError
from hawkvision.integer.ir import Graph

SPAN: Final = 64
"""Sequence numbers between the oldest unanswered picture and the newest: the answers that a device keeps."""
MAX_WINDOW: Final = SPAN - 1
FIRST_TIMEOUT_S: Final = 0.25
"""Before the first repetition; doubled for each that follows."""
WINDOWS: Final = 2
"""Nor is a picture sent again before the device had the time to compute so many full windows: a repetition of what is
still in its queue tells it nothing, and takes the line from others."""
MAX_ATTEMPTS: Final = 6
"""Of a greeting or a picture: 0.25 + 0.5 + … + 8 s, after which the line is taken for dead, unless it gave others; of a
device that says it is slow, at most 96 s (`MAX_PAUSE_S` each)."""
MAX_PAUSE_S: Final = 16.0
"""Between two pieces of a picture: as long as a device may be silent. It holds a place of the window meanwhile, and no
picture is begun that is `SPAN` ahead of it."""

Rows: TypeAlias = NDArray[np.uint8]
"""(count, channels): pixels in the order of rows."""


def model_of(graph: Graph) -> bytes:
    """What the two ends compare: the graph's SHA-256."""
    return bytes.fromhex(graph.sha256)


@dataclass(frozen=True, slots=True)
class Opened:
    """The device is there and holds the right graph."""

    device: Welcome


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no session: the device will not have us, or there is none."""

    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A picture's logits and, if the device counts them, its cycles."""

    sequence: int
    cycles: int
    logits: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Failed:
    """A picture will have no answer."""

    sequence: int
    why: str
    for_now: bool = True
    """Whether there was nobody to answer; else the device, or the caller, has spoilt this very picture."""


Event = Opened | Refused | Answered | Failed


@dataclass(slots=True)
class _Sending:
    """A picture that has no answer yet."""

    runs: list[Run] = field(default_factory=list)
    pixels: int = 0
    due: float | None = None
    """When to send it again, or to give it up if it is not whole; None while there is no session."""
    attempts: int = 0
    """How often it was sent, as far as there was any of it."""


class HostSession:
    """The host's end. It opens by itself with the first picture, and again if the device has forgotten it.

    Args:
        graph: what the device must hold.
        session: a number that no recent session has had; a random one will do.
        attempts: how often a picture is sent at most.
    """

    def __init__(self, graph: Graph, session: int, attempts: int = MAX_ATTEMPTS) -> None:
        if graph.classes > MAX_CLASSES:
            raise BackendError(f"{graph.name}: {graph.classes} classes; a device answers at most {MAX_CLASSES}")
        self._no_answer = f"no answer after {attempts} attempts"
        self._input, self._classes = graph.input, graph.classes
        self._area = graph.input.height * graph.input.width
        self._model, self._session, self._attempts = model_of(graph), session, attempts
        self._out: deque[bytes] = deque()
        self._pictures: dict[int, _Sending] = {}
        self._next = 1
        self._hello_due: float | None = None
        self._hellos = 0
        self._answered_at = -math.inf
        self.device: Welcome | None = None
        """What greeted us, while the session is open."""
        self.repeated = 0
        """Pictures sent again."""

    @property
    def room(self) -> bool:
        """Whether another picture may begin. Before the device has said how many it holds, one may."""
        window = 1 if self.device is None else self.device.window
        return len(self._pictures) < window and self._next - self._oldest < SPAN

    @property
    def wake_at(self) -> float | None:
        """When `advance` has something to do, if nothing comes."""
        times = [picture.due for picture in self._pictures.values() if picture.due is not None]
        if self._hello_due is not None:
            times.append(self._hello_due)
        return min(times, default=None)

    def take(self) -> list[bytes]:
        """What is to be sent now."""
        taken = list(self._out)
        self._out.clear()
        return taken

    def open(self, now: float) -> None:
        """Greet the device, unless that is being done."""
        if self.device is None and self._hello_due is None:
            self._hellos = 0
            self._hello(now)

    def begin(self, now: float) -> int:
        """A new picture's sequence number. Its pixels follow with `add`.

        Raises:
            BackendError: if there is no `room`.
        """
        if not self.room:
            raise BackendError("fpga-device: no room for another picture")
        sequence = self._next
        self._next += 1
        self._pictures[sequence] = picture = _Sending()
        if self.device is not None:
            picture.attempts = 1
            self._arm(picture, now)
        self.open(now)
        return sequence

    def add(self, sequence: int, pixels: Rows, mask: NDArray[np.bool_] | None, now: float) -> None:
        """The picture's next pixels (count, channels), of which `mask` (count,) says which arrived; None: all.

        A picture that has failed meanwhile takes them and does nothing.

        Raises:
            BackendError: if they are more than are left of the picture, or of another kind.
        """
        picture = self._pictures.get(sequence)
        if picture is None:
            return
        fits = pixels.ndim == 2 and pixels.shape[1] == self._input.channels and pixels.dtype == np.uint8
        if not fits or picture.pixels + len(pixels) > self._area:
            raise BackendError(
                f"fpga-device: {pixels.dtype} pixels of shape {pixels.shape} after {picture.pixels} of {self._area} "
                f"with {self._input.channels} channels"
            )
        if mask is not None and (mask.shape != pixels.shape[:1] or mask.dtype != np.bool_):
            raise BackendError(
                f"fpga-device: the mask is {mask.dtype} of shape {mask.shape}; expected bool of {pixels.shape[:1]}"
            )
        most = pixels_of_a_run(self._input.channels, mask is not None)
        for start in range(0, len(pixels), most):
            part = slice(start, start + most)
            run = Run(picture.pixels + start, pixels[part], None if mask is None else mask[part])
            picture.runs.append(run)
            if self.device is not None:
                self._send(sequence, run)
        picture.pixels += len(pixels)
        if self.device is not None:
            self._arm(picture, now)

    def drop(self, sequence: int) -> None:
        """Nobody waits for that picture any more."""
        self._pictures.pop(sequence, None)

    def receive(self, frame: Frame, now: float) -> list[Event]:
        """What a frame from the device means: nothing if it is of another session, or answers what was not asked."""
        if frame.session != self._session:
            return []
        match frame.message:
            case Welcome() as device:
                return self._welcomed(device, now)
            case Refuse(reason, model, text):
                return self._refused(reason, model, text)
            case Logits(cycles, logits):
                picture = self._pictures.get(frame.sequence)
                asked = self.device is not None and picture is not None and picture.pixels == self._area
                if not asked or len(logits) != self._classes:
                    return []
                del self._pictures[frame.sequence]
                self._answered_at = now
                return [Answered(frame.sequence, cycles, logits)]
            case Trouble(reason, text):
                return self._troubled(frame.sequence, reason, text, now)
        return []

    def advance(self, now: float) -> list[Event]:
        """Send again what is overdue, and give up what was sent often enough."""
        events: list[Event] = []
        if self._hello_due is not None and self._hello_due <= now:
            if self._hellos >= MAX_ATTEMPTS:
                self._hello_due = None
                why = f"no device answers {MAX_ATTEMPTS} greetings"
                events += [Refused(why), *self._fail_all(why)]
            else:
                self._hello(now)
        for sequence, picture in list(self._pictures.items()):
            if picture.due is None or picture.due > now:
                continue
            if picture.pixels < self._area:
                del self._pictures[sequence]
                events.append(Failed(sequence, f"no more of its pixels came within {MAX_PAUSE_S:g} s", False))
                continue
            if picture.attempts < self._attempts:
                self.repeated += 1
                self._resend(sequence, picture, now)
                continue
            if self._answered_at < picture.due - self._wait_s(self._attempts):
                # Nor did others since: those that wait would only do so for as long again, one window after another.
                self.device = None
                return [*events, Refused(self._no_answer), *self._fail_all(self._no_answer)]
            del self._pictures[sequence]
            events.append(Failed(sequence, self._no_answer))
        return events

    @property
    def _oldest(self) -> int:
        return min(self._pictures, default=self._next)

    def _hello(self, now: float) -> None:
        self._out.append(encode(Frame(self._session, 0, Hello(self._model))))
        self._hellos += 1
        self._hello_due = now + self._wait_s(self._hellos)

    def _wait_s(self, attempt: int) -> float:
        """For an answer to the first, second, … attempt."""
        slowest_s, device = 0.0, self.device
        if device is not None and device.clock_hz:
            slowest_s = min(MAX_PAUSE_S, WINDOWS * device.window * device.cycles / device.clock_hz)
        return max(slowest_s, FIRST_TIMEOUT_S * float(1 << (attempt - 1)))

    def _send(self, sequence: int, run: Run) -> None:
        message = Run(run.start, run.pixels, run.mask, sequence - self._oldest)
        self._out.append(encode(Frame(self._session, sequence, message)))

    def _resend(self, sequence: int, picture: _Sending, now: float) -> None:
        picture.attempts += 1
        for run in picture.runs:
            self._send(sequence, run)
        self._arm(picture, now)

    def _arm(self, picture: _Sending, now: float) -> None:
        """Expect an answer if the whole picture has been sent, else its next pixels."""
        whole = picture.pixels == self._area
        picture.due = now + (self._wait_s(picture.attempts) if whole else MAX_PAUSE_S)

    def _welcomed(self, device: Welcome, now: float) -> list[Event]:
        if self.device is not None:
            return []
        self._hello_due = None
        expected = (self._input.height, self._input.width, self._input.channels, self._classes)
        found = (device.height, device.width, device.channels, device.classes)
        if found != expected or not 1 <= device.window <= MAX_WINDOW:
            why = f"the device says {found} and a window of {device.window}; expected {expected} and 1..{MAX_WINDOW}"
            return [Refused(why), *self._fail_all(why)]
        self.device = device
        events: list[Event] = [Opened(device)]
        for sequence, picture in list(self._pictures.items()):
            # A device that forgets its session again and again makes no timer run out.
            if picture.attempts < self._attempts:
                self._resend(sequence, picture, now)
            else:
                del self._pictures[sequence]
                events.append(Failed(sequence, self._no_answer))
        return events

    def _refused(self, reason: int, model: bytes, text: str) -> list[Event]:
        self._hello_due = self.device = None
        text = repr(text)  # a stranger's: no line breaks into the log
        if reason == Reason.MODEL:
            text = f"it holds the model {model.hex()[:16]}…, expected {self._model.hex()[:16]}…"
        why = f"the device refuses: {text}"
        return [Refused(why), *self._fail_all(why)]

    def _troubled(self, sequence: int, reason: int, text: str, now: float) -> list[Event]:
        if reason == Reason.SESSION:
            # It was switched off and on. Pictures stay, and are sent again when it has greeted us.
            if self.device is not None:
                self.device = None
                for picture in self._pictures.values():
                    picture.due = None
                self.open(now)
            return []
        if reason == Reason.BUSY or sequence not in self._pictures:
            return []  # its timer sends the picture again
        del self._pictures[sequence]
        return [Failed(sequence, f"the device says: {text!r}", False)]

    def _fail_all(self, why: str) -> list[Event]:
        events: list[Event] = [Failed(sequence, why) for sequence in self._pictures]
        self._pictures.clear()
        return events


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A whole picture to classify."""

    session: int
    sequence: int
    pixels: NDArray[np.uint8]
    """(height, width, channels)"""
    mask: NDArray[np.bool_]
    """(height, width)"""


@dataclass(slots=True)
class _Receiving:
    pixels: NDArray[np.uint8]
    mask: NDArray[np.bool_]
    seen: NDArray[np.bool_]
    working: bool = False


class DeviceSession:
    """The device's end, one session at a time: the newest greeting with the right model is the one that counts.

    Args:
        graph: what it was built from.
        device: what it says of itself.
    """

    def __init__(self, graph: Graph, device: Welcome) -> None:
        assert 1 <= device.window <= MAX_WINDOW
        self._model, self._device = model_of(graph), device
        self.session: int | None = None
        """Of the host that is served."""
        self._oldest = 0
        self._pictures: dict[int, _Receiving] = {}
        self._answers: OrderedDict[int, bytes] = OrderedDict()

    def receive(self, frame: Frame) -> tuple[list[bytes], Work | None]:
        """What to send back, and the picture that has become whole."""
        match frame.message:
            case Hello(model):
                return [self._greet(frame.session, model)], None
            case Run() as run if frame.session == self.session:
                return self._fill(frame, run)
            case Run():
                return [self._trouble(frame, Reason.SESSION, "no such session")], None
        return [], None

    def finish(self, work: Work, cycles: int, logits: NDArray[np.int32]) -> bytes | None:
        """The frame with a picture's answer; None if nobody waits for it any more."""
        if work.session != self.session or self._pictures.pop(work.sequence, None) is None:
            return None
        answer = encode(Frame(work.session, work.sequence, Logits(cycles, logits)))
        self._answers[work.sequence] = answer
        if len(self._answers) > SPAN:
            self._answers.popitem(last=False)
        return answer

    def _greet(self, session: int, model: bytes) -> bytes:
        if model != self._model:
            return encode(Frame(session, 0, Refuse(Reason.MODEL, self._model, "another model")))
        if session != self.session:
            self.session, self._oldest = session, 0
            self._pictures.clear()
            self._answers.clear()
        return encode(Frame(session, 0, self._device))

    def _fill(self, frame: Frame, run: Run) -> tuple[list[bytes], Work | None]:
        sequence, device = frame.sequence, self._device
        if (answer := self._answers.get(sequence)) is not None:
            return [answer], None
        self._forget(sequence - run.behind)
        if sequence < self._oldest:
            return [], None
        end = run.start + len(run.pixels)
        if run.pixels.shape[1] != device.channels or end > device.height * device.width:
            return [self._trouble(frame, Reason.MALFORMED, "pixels that are none of the picture")], None
        picture = self._pictures.get(sequence)
        if picture is None:
            if len(self._pictures) >= device.window:
                return [self._trouble(frame, Reason.BUSY, f"the queue holds {device.window}")], None
            picture = self._pictures[sequence] = self._blank()
        if picture.working:
            return [], None
        # The first to come counts: a repetition says the same.
        new = ~picture.seen[run.start : end]
        picture.pixels[run.start : end][new] = run.pixels[new]
        picture.mask[run.start : end][new] = True if run.mask is None else run.mask[new]
        picture.seen[run.start : end] = True
        if not picture.seen.all():
            return [], None
        picture.working = True
        pixels = picture.pixels.reshape(device.height, device.width, device.channels)
        return [], Work(frame.session, sequence, pixels, picture.mask.reshape(device.height, device.width))

    def _forget(self, oldest: int) -> None:
        """The host waits for nothing below that number."""
        self._oldest = max(self._oldest, oldest)
        for sequence in [each for each in self._pictures if each < self._oldest and not self._pictures[each].working]:
            del self._pictures[sequence]

    def _blank(self) -> _Receiving:
        area = self._device.height * self._device.width
        return _Receiving(
            np.zeros((area, self._device.channels), np.uint8), np.zeros(area, np.bool_), np.zeros(area, np.bool_)
        )

    def _trouble(self, frame: Frame, reason: Reason, text: str) -> bytes:
        return encode(Frame(frame.session, frame.sequence, Trouble(reason, text)))
