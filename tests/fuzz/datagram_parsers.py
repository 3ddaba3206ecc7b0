"""Coverage-guided fuzzing of everything that reads a stranger's bytes in the datagram transport.

    python -m tests.fuzz.datagram_parsers [-max_total_time=60] [CORPUS]

libFuzzer by way of atheris; its options are passed on. Without a corpus it begins with what our own ends send. A parser
may give what it read or raise the error that its contract names. Anything else ends the run with the input that did it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import atheris
import cv2
import numpy as np

with atheris.instrument_imports(include=["hawkvision.transport", "hawkvision.core.escalation_api"]):
    from hawkvision.core.errors import HawkVisionError
    from hawkvision.core.escalation_api import EscalationRequest, parse_escalation_datagram
    from hawkvision.transport.coding.image_coding import Plan, decode, encode, reframe
    from hawkvision.transport.coding.jpeg_splitting import cut, parse_header
    from hawkvision.transport.protocol import frames
    from hawkvision.transport.protocol.control import Hello, MessageReader, encode_message
    from hawkvision.transport.protocol.frames import Fragment, fragment_room
    from hawkvision.transport.protocol.packet_protection import peek
    from hawkvision.transport.protocol.wire import WireError

from hawkvision.core.trace_context import start_trace


def _frames(data: bytes) -> None:
    """Frames, and the images that their fragments make."""
    symbols: dict[int, bytes] = {}
    for frame in frames.decode(data):
        if isinstance(frame, Fragment):
            symbols[frame.index] = frame.symbol
            decode(frame.format, symbols)


def _messages(data: bytes) -> None:
    list(MessageReader().feed(data))


def _reframed(data: bytes) -> None:
    reframe(data, 0.5, fragment_room(b""))


def _escalation(data: bytes) -> None:
    at = data[0] if data else 0
    parse_escalation_datagram(data[1 : 1 + at], data[1 + at :])


PARSERS: Final[tuple[Callable[[bytes], object], ...]] = (
    peek,
    _frames,
    _messages,
    cut,
    parse_header,
    _reframed,
    _escalation,
)


def one(data: bytes) -> None:
    """The first byte chooses the parser, the others are its input."""
    if not data:
        return
    with contextlib.suppress(WireError, HawkVisionError):
        PARSERS[data[0] % len(PARSERS)](data[1:])


def seeds() -> list[bytes]:
    """An input for each parser that it takes."""
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    coded = encode(pixels, Plan(50, 0.5), fragment_room(b""))
    fragment = frames.encode(Fragment(1, 0, coded.format, 0, 100, 0, b"", coded.symbols[0]))
    body = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_RST_INTERVAL, 4])[1].tobytes()
    escalation = EscalationRequest()
    template = escalation.template()
    found = (
        b"\x11" + bytes(40),
        fragment,
        encode_message(Hello(2, bytes(96))),
        body,
        body[: body.index(b"\xff\xda") + 14],
        body,
        bytes([len(template)]) + template + escalation.meta(start_trace()),
    )
    return [bytes([number]) + each for number, each in enumerate(found)]


def main(argv: list[str]) -> None:
    """Fuzz until libFuzzer ends."""
    with tempfile.TemporaryDirectory() as folder:
        if all(each.startswith("-") for each in argv[1:]):
            for number, seed in enumerate(seeds()):
                (Path(folder) / str(number)).write_bytes(seed)
            argv = [*argv, folder]
        atheris.Setup([*argv, f"-artifact_prefix={tempfile.gettempdir()}/"], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
