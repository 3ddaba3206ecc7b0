"""Emulates a device on a link: `python -m fpga.device.emulator --model FILE --port N`.

It computes with the integer kernel and answers when the performance model says that a device would: one image at a
time, each for the folding's interval at the given clock. Its greeting says that it is an emulator, and its times are
not measurements of a device.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from fpga.device.device_session import DeviceSession, IncomingImage
from fpga.device.frame_transport import UdpLink
from fpga.device.framing import MAX_WINDOW, DeviceFrame, DeviceWelcome, encode
from fpga.reports.build_report import read_design
from fpga.simulation.integer_kernel import IntegerKernel
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import HawkVisionError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph

DEFAULT_CLOCK_MHZ: Final = 100.0
MIN_CLOCK_MHZ: Final = 1e-6
MAX_CLOCK_MHZ: Final = 4000.0
"""A greeting carries the clock in whole Hz, in 32 bits."""
DEFAULT_WINDOW: Final = 4


class Emulator:
    """The device's side without a link: frames and the time in, frames out.

    Args:
        graph: what it holds.
        kernel: computes it.
        cycles: per image.
        clock_hz: the modelled clock.
        window: images that it holds, the one in work included.

    Raises:
        BackendError: if a greeting cannot carry these values.
    """

    def __init__(
        self, graph: IntegerGraph, kernel: IntegerKernel, cycles: int, clock_hz: int, window: int = DEFAULT_WINDOW
    ) -> None:
        at = graph.input
        welcome = DeviceWelcome(at.height, at.width, at.channels, graph.classes, window, True, clock_hz, cycles)
        encode(DeviceFrame(0, 0, welcome))  # fails now, not at the first greeting
        self._session = DeviceSession(graph, welcome)
        self._kernel, self._cycles, self._service_s = kernel, cycles, cycles / clock_hz
        self._queue: deque[IncomingImage] = deque()
        """At most `window`, bounded by the session, and one that an earlier session left in work."""
        self._done_at = 0.0

    @property
    def wake_at(self) -> float | None:
        """The time at which the current image is done; None if there is none."""
        return self._done_at if self._queue else None

    def receive(self, frame: DeviceFrame, now: float) -> list[bytes]:
        """Handle a frame. Returns the frames to send back immediately."""
        before = self._session.session
        replies, work = self._session.receive(frame)
        if self._session.session != before:
            self._queue = deque(islice(self._queue, 1))
        if work is not None:
            if not self._queue:
                self._done_at = now + self._service_s
            self._queue.append(work)
        return replies

    def advance(self, now: float) -> list[bytes]:
        """The replies to images that are done by now."""
        answers = []
        while self._queue and self._done_at <= now:
            work = self._queue.popleft()
            (logits,) = self._kernel.logits(work.pixels[None])
            answer = self._session.finish(work, self._cycles, logits)
            if answer is not None:
                answers.append(answer)
            self._done_at += self._service_s
        return answers


def serve(emulator: Emulator, link: UdpLink, stop: int) -> None:
    """Serve until `stop` becomes readable.

    Raises:
        BackendError: if the link is broken.
    """
    clock = MonotonicClock()
    while True:
        wake_at = emulator.wake_at
        timeout = None if wake_at is None else max(0.0, wake_at - clock.now())
        ready, _, _ = select.select((link.fileno(), stop), (), (), timeout)
        if stop in ready:
            return
        if link.fileno() in ready:
            for frame in link.receive():
                for reply in emulator.receive(frame, clock.now()):
                    link.send(reply)
        for answer in emulator.advance(clock.now()):
            link.send(answer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from a command line; return 0 after SIGTERM or SIGINT, 1 after an error."""
    arguments = _parser().parse_args(argv)
    stopped, stop = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        graph = graph_of(arguments.model)
        design = read_design(graph, arguments.report, arguments.folding, arguments.clock_mhz)
        cycles = design.interval(graph) or graph.multiplications
        clock_hz = round(design.clock_hz or DEFAULT_CLOCK_MHZ * 1e6)
        emulator = Emulator(graph, IntegerKernel(graph), cycles, clock_hz, arguments.window)
        link = UdpLink.at(arguments.host, arguments.port)
        print(f"an emulator, not hardware: {graph.name}, {cycles} modelled cycles at {clock_hz / 1e6:g} MHz")  # noqa: T201
        print(f"ready: udp://{arguments.host}:{link.port}", flush=True)  # noqa: T201
        try:
            serve(emulator, link, stopped)
        finally:
            link.close()
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _window(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_WINDOW:
        raise argparse.ArgumentTypeError(f"expected 1..{MAX_WINDOW}, got {value}")
    return value


def _clock_mhz(text: str) -> float:
    value = float(text)
    if not MIN_CLOCK_MHZ <= value <= MAX_CLOCK_MHZ:
        raise argparse.ArgumentTypeError(f"expected {MIN_CLOCK_MHZ:g}..{MAX_CLOCK_MHZ:g}, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fpga.device.emulator", description="Stand in for an FPGA. This is no hardware."
    )
    parser.add_argument("--model", type=Path, required=True, help="a built variant that carries its integer graph")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="UDP port; 0 takes a free one (default)")
    parser.add_argument("--report", type=Path, help="a build's report: its folding and clock")
    parser.add_argument("--folding", type=Path, help="in place of the report's; else one multiplication a cycle")
    parser.add_argument("--clock-mhz", type=_clock_mhz, help=f"in place of the report's; else {DEFAULT_CLOCK_MHZ:g}")
    parser.add_argument("--window", type=_window, default=DEFAULT_WINDOW, help="images that it holds at once")
    return parser


if __name__ == "__main__":
    sys.exit(main())
