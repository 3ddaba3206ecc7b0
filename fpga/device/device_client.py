"""A connection to a device: one thread that owns the link and the protocol session.

Callers hand it images and wait. `fpga.device.host_session` decides what is sent and when.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
from collections import deque
from concurrent.futures import Future
from typing import TypeAlias

from fpga.device.frame_transport import UdpLink
from fpga.device.framing import DeviceFrame, DeviceWelcome, LogitsReply
from fpga.device.host_session import (
    HostEvent,
    HostSession,
    ImageFailed,
    Rows,
    SessionRefused,
)
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import BackendError, BackendUnavailable

log = logging.getLogger("hawkvision.fpga")

DeviceReply: TypeAlias = tuple[LogitsReply, float, DeviceWelcome]
"""A device's answer to an image, the round trip in seconds, and the device, which may have been replaced meanwhile."""


class PendingImage:
    """An image that waits for its answer."""

    def __init__(self, pixels: Rows) -> None:
        self.pixels = pixels
        self.answer: Future[DeviceReply] = Future()
        self.sequence: int | None = None
        self.since = 0.0
        """When it was sent first."""
        self.dropped = False


class DeviceConnection:
    """The thread that owns a link and a session until it is closed or the link breaks.

    Args:
        link: the way to the device; closed with the connection.
        session: the host's end of the protocol.
        max_waiting: images that may wait for the device, beside those that it holds.
    """

    def __init__(self, link: UdpLink, session: HostSession, max_waiting: int) -> None:
        self._link, self._session, self._max_waiting, self._clock = link, session, max_waiting, MonotonicClock()
        self._lock = threading.Lock()
        self._updates: deque[PendingImage] = deque()
        self._waiting: deque[PendingImage] = deque()
        self._sent: dict[int, PendingImage] = {}
        self._opened: Future[DeviceWelcome] = Future()
        self._stop = False
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # poll, not select: select takes descriptors below 1,024 only.
        self._poll = select.poll()
        for descriptor in (link.fileno(), self._woken):
            self._poll.register(descriptor, select.POLLIN)
        self.broken: str | None = None
        """Why the connection is no longer usable."""
        self._thread = threading.Thread(target=self._run, name="hawkvision-fpga-device", daemon=True)
        self._thread.start()

    def device(self) -> DeviceWelcome:
        """Wait for the greeting. Returns the device's description of itself.

        Raises:
            BackendError: if no device answers, or it refuses.
        """
        return self._opened.result()  # the session bounds the number of greetings

    def submit(self, image: PendingImage) -> None:
        """Send an image.

        Raises:
            BackendUnavailable: if the connection is broken, or too many images wait.
        """
        with self._lock:
            if self.broken is not None:
                raise BackendUnavailable(self.broken)
            if len(self._waiting) + len(self._updates) >= self._max_waiting:
                raise BackendUnavailable(f"fpga-device: {self._max_waiting} images are waiting for the device")
            self._updates.append(image)
            self._wake_thread()

    def drop(self, image: PendingImage) -> None:
        """Give up an image. Never refused, because the image would keep its place in the window."""
        image.dropped = True
        with self._lock:
            if self.broken is None:
                self._updates.append(image)
                self._wake_thread()

    def close(self) -> None:
        """End the connection. Waiting images fail."""
        with self._lock:
            self._stop = True
            if self.broken is None:
                self._wake_thread()
        self._thread.join()

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        why = "fpga-device: the backend is closed"
        try:
            self._session.open(self._clock.now())
            while not self._stop:
                self._step()
        except Exception as error:  # noqa: BLE001 - whatever ends this thread must fail the images that wait
            log.warning("fpga-device: the connection broke: %s", error)
            why = f"fpga-device: the connection broke: {error}"
        with self._lock:
            self.broken = why
            left = [*self._updates, *self._waiting, *self._sent.values()]
            os.close(self._woken)
            os.close(self._wake)
            self._link.close()
        for image in left:
            _fail(image.answer, BackendUnavailable(why))
        _fail(self._opened, BackendUnavailable(why))

    def _step(self) -> None:
        session, now = self._session, self._clock.now()
        self._take_updates()
        while self._waiting and session.room:
            image = self._waiting.popleft()
            image.sequence, image.since = session.begin(image.pixels, now), now
            self._sent[image.sequence] = image
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

    def _take_updates(self) -> None:
        for _ in range(len(self._updates)):
            image = self._updates.popleft()
            if image.dropped:
                self._forget(image)
            else:
                self._waiting.append(image)

    def _forget(self, image: PendingImage) -> None:
        if image.sequence is not None:
            self._session.drop(image.sequence)
            self._sent.pop(image.sequence, None)
        elif image in self._waiting:
            self._waiting.remove(image)

    def _handle(self, event: HostEvent, now: float) -> None:
        match event:
            case DeviceWelcome():
                kind = "an emulator, not hardware" if event.emulated else "a device"
                log.info("fpga-device: %s answers, window %d", kind, event.window)
                if not self._opened.done():
                    self._opened.set_result(event)
            case SessionRefused(why):
                if self._opened.done():
                    log.warning("fpga-device: %s", why)
                _fail(self._opened, BackendUnavailable(f"fpga-device: {why}"))
                while self._waiting:
                    _fail(self._waiting.popleft().answer, BackendUnavailable(f"fpga-device: {why}"))
            case DeviceFrame(_, sequence, LogitsReply() as reply):
                image = self._sent.pop(sequence, None)
                if image is not None:
                    answering = self._session.device
                    assert answering is not None, "a session answers while it is open"
                    image.answer.set_result((reply, now - image.since, answering))
            case ImageFailed(sequence, why, transient):
                image = self._sent.pop(sequence, None)
                if image is not None:
                    text = f"fpga-device: {why}"
                    _fail(image.answer, BackendUnavailable(text) if transient else BackendError(text))


def _fail(waiting: Future[DeviceReply] | Future[DeviceWelcome], error: BackendError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
