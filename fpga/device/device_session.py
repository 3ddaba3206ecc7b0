"""A device's end of the protocol with a host: frames in, frames and images out.

The device computes each image once. It drops pixels that it has, and repeats the reply to an image that it has
answered.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from fpga.device.framing import (
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
)
from hawkvision.integer.ir import IntegerGraph


class IncomingImage:
    """An image of a session. Its pixels arrive in any order; it is to be computed when all are there."""

    def __init__(self, session: int, sequence: int, shape: tuple[int, int, int]) -> None:
        self.session, self.sequence = session, sequence
        self.pixels = np.zeros(shape, np.uint8)
        """(height, width, channels)"""
        self._seen = np.zeros(shape[0] * shape[1], np.bool_)

    @property
    def complete(self) -> bool:
        """Whether every pixel has arrived."""
        return bool(self._seen.all())

    def fill(self, run: PixelRun) -> None:
        """Take a run. The first copy of a pixel counts; repetitions are equal."""
        part = slice(run.start, run.start + len(run.pixels))
        new = ~self._seen[part]
        self.pixels.reshape(len(self._seen), -1)[part][new] = run.pixels[new]
        self._seen[part] = True


class DeviceSession:
    """The device's end, with one session at a time: that of the newest greeting with the right graph.

    Args:
        graph: what the device was built from.
        device: its description of itself.
    """

    def __init__(self, graph: IntegerGraph, device: DeviceWelcome) -> None:
        assert 1 <= device.window <= MAX_WINDOW
        self._model, self._device = bytes.fromhex(graph.sha256), device
        self.session: int | None = None
        """The session in use."""
        self._oldest = 0
        self._images: dict[int, IncomingImage] = {}
        self._answers: OrderedDict[int, bytes] = OrderedDict()

    def receive(self, frame: DeviceFrame) -> tuple[list[bytes], IncomingImage | None]:
        """Handle a frame; return the frames to send back, and the image that it completed."""
        match frame.message:
            case HostHello(model):
                return [self._greet(frame.session, model)], None
            case PixelRun() as run if frame.session == self.session:
                return self._fill(frame, run)
            case PixelRun():
                return [self._trouble(frame, RefusalReason.SESSION, "no such session")], None
        return [], None

    def finish(self, work: IncomingImage, cycles: int, logits: NDArray[np.int32]) -> bytes | None:
        """The reply to an image; None if the host no longer waits for it."""
        if work.session != self.session or self._images.pop(work.sequence, None) is None:
            return None
        answer = encode(DeviceFrame(work.session, work.sequence, LogitsReply(cycles, logits)))
        self._answers[work.sequence] = answer
        if len(self._answers) > SPAN:
            self._answers.popitem(last=False)
        return answer

    def _greet(self, session: int, model: bytes) -> bytes:
        if model != self._model:
            return encode(DeviceFrame(session, 0, DeviceRefusal(RefusalReason.MODEL, self._model, "another model")))
        if session != self.session:
            self.session, self._oldest = session, 0
            self._images.clear()
            self._answers.clear()
        return encode(DeviceFrame(session, 0, self._device))

    def _fill(self, frame: DeviceFrame, run: PixelRun) -> tuple[list[bytes], IncomingImage | None]:
        sequence, device = frame.sequence, self._device
        if (answer := self._answers.get(sequence)) is not None:
            return [answer], None
        self._forget(sequence - run.behind)
        if sequence < self._oldest:
            return [], None
        area = device.height * device.width
        if run.pixels.shape[1] != device.channels or run.start + len(run.pixels) > area:
            return [self._trouble(frame, RefusalReason.MALFORMED, "pixels that are none of the image")], None
        image = self._images.get(sequence)
        if image is None:
            if len(self._images) >= device.window:
                return [self._trouble(frame, RefusalReason.BUSY, f"the queue holds {device.window}")], None
            shape = (device.height, device.width, device.channels)
            image = self._images[sequence] = IncomingImage(frame.session, sequence, shape)
        if image.complete:
            return [], None
        image.fill(run)
        return [], image if image.complete else None

    def _forget(self, oldest: int) -> None:
        """Forget images below that number, which the host no longer waits for."""
        self._oldest = max(self._oldest, oldest)
        for sequence in [each for each in self._images if each < self._oldest and not self._images[each].complete]:
            del self._images[sequence]

    def _trouble(self, frame: DeviceFrame, reason: RefusalReason, text: str) -> bytes:
        return encode(DeviceFrame(frame.session, frame.sequence, ImageTrouble(reason, text)))
