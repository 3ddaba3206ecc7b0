"""The host's end of the protocol with a device: frames and the time in, frames and events out.

The host numbers its images and sends each as runs of pixels. It sends an image again when no reply arrives in time, a
bounded number of times.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fpga.device.framing import (
    MAX_CLASSES,
    MAX_WINDOW,
    SPAN,
    DeviceFrame,
    DeviceRefusal,
    DeviceWelcome,
    HostHello,
    ImageTrouble,
    LogitsReply,
    PixelRun,
    RefusalReason,
    encode,
    pixels_of_a_run,
)
from hawkvision.core.errors import BackendError
from hawkvision.integer.ir import IntegerGraph

FIRST_TIMEOUT_S: Final = 0.25
"""Before the first repetition; doubled for each that follows."""
WINDOWS: Final = 2
"""An image is not sent again before the device had time to compute this many full windows."""
MAX_ATTEMPTS: Final = 6
"""For a greeting or an image: 0.25 + 0.5 + … + 8 s; for a slow device at most 96 s (`MAX_PAUSE_S` each)."""
MAX_PAUSE_S: Final = 16.0
"""Between two attempts, for a slow device."""

Rows: TypeAlias = NDArray[np.uint8]
"""(count, channels): pixels in row order."""


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """There is no session: no device answers, or it refuses."""

    why: str


@dataclass(frozen=True, slots=True)
class ImageFailed:
    """An image will get no answer."""

    sequence: int
    why: str
    for_now: bool = True
    """Whether another attempt may succeed; False if the device cannot compute this image."""


HostEvent = DeviceWelcome | SessionRefused | DeviceFrame | ImageFailed
"""`DeviceWelcome`: the session is open, because the device is there and holds the right graph. `DeviceFrame`: the
`LogitsReply` to an image."""


class _OutgoingImage:
    """An image without an answer yet."""

    def __init__(self, pixels: Rows) -> None:
        self.pixels = pixels
        self.due: float | None = None
        """When to send it again; None while there is no session."""
        self.attempts = 0
        """Number of times it was sent."""


class HostSession:
    """The host's end. It opens with the first image, and again when the device has lost the session.

    Args:
        graph: what the device must hold.
        session: a number that no recent session had, for instance a random one.
        attempts: how often an image is sent at most.
    """

    def __init__(self, graph: IntegerGraph, session: int, attempts: int = MAX_ATTEMPTS) -> None:
        if graph.classes > MAX_CLASSES:
            raise BackendError(f"{graph.name}: {graph.classes} classes; a device answers at most {MAX_CLASSES}")
        self._no_answer = f"no answer after {attempts} attempts"
        self._input, self._classes = graph.input, graph.classes
        self._model, self._session, self._attempts = bytes.fromhex(graph.sha256), session, attempts
        self._out: deque[bytes] = deque()
        self._images: dict[int, _OutgoingImage] = {}
        self._next = 1
        self._hello_due: float | None = None
        self._hellos = 0
        self._answered_at = -math.inf
        self.device: DeviceWelcome | None = None
        """The device, while the session is open."""
        self.repeated = 0
        """Number of images sent again."""

    @property
    def room(self) -> bool:
        """Whether another image may be sent. One may be sent before the device has announced its window."""
        window = 1 if self.device is None else self.device.window
        return len(self._images) < window and self._next - self._oldest < SPAN

    @property
    def wake_at(self) -> float | None:
        """When to call `advance` next if nothing arrives."""
        times = [image.due for image in self._images.values() if image.due is not None]
        if self._hello_due is not None:
            times.append(self._hello_due)
        return min(times, default=None)

    def take(self) -> list[bytes]:
        """Take the frames that are to be sent now."""
        taken = list(self._out)
        self._out.clear()
        return taken

    def open(self, now: float) -> None:
        """Greet the device, unless a greeting is under way."""
        if self.device is None and self._hello_due is None:
            self._hellos = 0
            self._hello(now)

    def begin(self, pixels: Rows, now: float) -> int:
        """Send an image (height × width, channels); return its sequence number.

        Raises:
            BackendError: if there is no `room`.
        """
        if not self.room:
            raise BackendError("fpga-device: no room for another image")
        sequence = self._next
        self._next += 1
        self._images[sequence] = image = _OutgoingImage(pixels)
        if self.device is not None:
            self._send(sequence, image, now)
        self.open(now)
        return sequence

    def drop(self, sequence: int) -> None:
        """Forget an image."""
        self._images.pop(sequence, None)

    def receive(self, frame: DeviceFrame, now: float) -> list[HostEvent]:
        """Handle a frame from the device; frames of other sessions and unexpected replies give no events."""
        if frame.session != self._session:
            return []
        match frame.message:
            case DeviceWelcome() as device:
                return self._welcomed(device, now)
            case DeviceRefusal(reason, model, text):
                return self._refused(reason, model, text)
            case LogitsReply(_, logits):
                image = self._images.get(frame.sequence)
                if self.device is None or image is None or len(logits) != self._classes:
                    return []
                del self._images[frame.sequence]
                self._answered_at = now
                return [frame]
            case ImageTrouble(reason, text):
                return self._troubled(frame.sequence, reason, text, now)
        return []

    def advance(self, now: float) -> list[HostEvent]:
        """Send overdue images again; fail those that were sent often enough."""
        events: list[HostEvent] = []
        if self._hello_due is not None and self._hello_due <= now:
            if self._hellos >= MAX_ATTEMPTS:
                self._hello_due = None
                why = f"no device answers {MAX_ATTEMPTS} greetings"
                events += [SessionRefused(why), *self._fail_all(why)]
            else:
                self._hello(now)
        for sequence, image in list(self._images.items()):
            if image.due is None or image.due > now:
                continue
            if image.attempts < self._attempts:
                self.repeated += 1
                self._send(sequence, image, now)
                continue
            if self._answered_at < image.due - self._wait_s(self._attempts):
                # No other image was answered since, so the others would only wait as long again.
                self.device = None
                return [*events, SessionRefused(self._no_answer), *self._fail_all(self._no_answer)]
            del self._images[sequence]
            events.append(ImageFailed(sequence, self._no_answer))
        return events

    @property
    def _oldest(self) -> int:
        return min(self._images, default=self._next)

    def _hello(self, now: float) -> None:
        self._out.append(encode(DeviceFrame(self._session, 0, HostHello(self._model))))
        self._hellos += 1
        self._hello_due = now + self._wait_s(self._hellos)

    def _wait_s(self, attempt: int) -> float:
        """Seconds to wait for a reply to the first, second, … attempt."""
        slowest_s, device = 0.0, self.device
        if device is not None and device.clock_hz:
            slowest_s = min(MAX_PAUSE_S, WINDOWS * device.window * device.cycles / device.clock_hz)
        return max(slowest_s, FIRST_TIMEOUT_S * float(1 << (attempt - 1)))

    def _send(self, sequence: int, image: _OutgoingImage, now: float) -> None:
        image.attempts += 1
        most = pixels_of_a_run(self._input.channels)
        for start in range(0, len(image.pixels), most):
            run = PixelRun(start, image.pixels[start : start + most], sequence - self._oldest)
            self._out.append(encode(DeviceFrame(self._session, sequence, run)))
        image.due = now + self._wait_s(image.attempts)

    def _welcomed(self, device: DeviceWelcome, now: float) -> list[HostEvent]:
        if self.device is not None:
            return []
        self._hello_due = None
        expected = (self._input.height, self._input.width, self._input.channels, self._classes)
        found = (device.height, device.width, device.channels, device.classes)
        if found != expected or not 1 <= device.window <= MAX_WINDOW:
            why = f"the device says {found} and a window of {device.window}; expected {expected} and 1..{MAX_WINDOW}"
            return [SessionRefused(why), *self._fail_all(why)]
        self.device = device
        events: list[HostEvent] = [device]
        for sequence, image in list(self._images.items()):
            # Counted here too, because a device that keeps losing its session lets no timer run out.
            if image.attempts < self._attempts:
                self._send(sequence, image, now)
            else:
                del self._images[sequence]
                events.append(ImageFailed(sequence, self._no_answer))
        return events

    def _refused(self, reason: int, model: bytes, text: str) -> list[HostEvent]:
        self._hello_due = self.device = None
        text = repr(text)  # escaped, because the text comes from outside and goes to the log
        if reason == RefusalReason.MODEL:
            text = f"it holds the model {model.hex()[:16]}…, expected {self._model.hex()[:16]}…"
        why = f"the device refuses: {text}"
        return [SessionRefused(why), *self._fail_all(why)]

    def _troubled(self, sequence: int, reason: int, text: str, now: float) -> list[HostEvent]:
        if reason == RefusalReason.SESSION:
            # The device was restarted. Images are sent again when it has greeted us.
            if self.device is not None:
                self.device = None
                for image in self._images.values():
                    image.due = None
                self.open(now)
            return []
        if reason == RefusalReason.BUSY or sequence not in self._images:
            return []  # its timer sends the image again
        del self._images[sequence]
        return [ImageFailed(sequence, f"the device says: {text!r}", False)]

    def _fail_all(self, why: str) -> list[HostEvent]:
        events: list[HostEvent] = [ImageFailed(sequence, why) for sequence in self._images]
        self._images.clear()
        return events
