"""The bytes of the datagram transport: those of another machine must read them, so a change needs a new version."""

from __future__ import annotations

import hashlib

import pytest

from hawkvision.transport.coding.image_coding import opaque
from hawkvision.transport.coding.interleaving import interleave
from hawkvision.transport.coding.jpeg import standard_layout
from hawkvision.transport.protocol.control import (
    Hello,
    Message,
    MessageReader,
    StreamAnswer,
    Tables,
    Template,
    Welcome,
    encode_message,
)
from hawkvision.transport.protocol.frames import (
    AnswerPart,
    Cancel,
    Challenge,
    Fragment,
    Frame,
    Interim,
    Nack,
    Ping,
    Report,
    Response,
    decode,
    encode,
)
from hawkvision.transport.protocol.image_format import Kind, WireImageFormat
from hawkvision.transport.protocol.packet_protection import Opener, Sealer, Secret, peek

SEGMENTS = WireImageFormat(Kind.SEGMENTS, 320, 240, 80, 4, 3, 5, 2)
OPAQUE = WireImageFormat(Kind.OPAQUE, 0, 2000, 0, 1, 2, 3)
FRAMES: dict[str, tuple[Frame, str]] = {
    "fragment": (
        Fragment(7, 2, SEGMENTS, 1, 150, 12, b"", b"symbol"),
        "010200000007010305005004014000f002000096000c73796d626f6c",
    ),
    "fragment_meta": (
        Fragment(7, 2, SEGMENTS, 1, 150, 12, b"meta", b"symbol"),
        "010200000007010305805004014000f002000096000c046d65746173796d626f6c",
    ),
    "fragment_opaque": (
        Fragment(8, 0, OPAQUE, 0, 0, 0, b"", b"bytes"),
        "010000000008000203010001000007d00000000000006279746573",
    ),
    "report": (Report(1, 5, 123456, 789, (0.128, None, 0.0)), "02010000000000050001e240000003150307d0ffff0000"),
    "nack": (Nack(7, (0, 4)), "0300000007020004"),
    "answer": (AnswerPart(7, 0, 1, 2, b"body"), "04000000070001020004626f6479"),
    "interim": (Interim(7, 3, b"so far"), "0900000007030006736f20666172"),
    "ping": (Ping(), "05"),
    "cancel": (Cancel(7), "0600000007"),
    "challenge": (Challenge(b"8 bytes!"), "073820627974657321"),
    "response": (Response(b"8 bytes!"), "083820627974657321"),
}
MESSAGES: dict[str, tuple[Message, str]] = {
    "hello": (Hello(2, b"proof"), "0000002283a474797065a568656c6c6fa776657273696f6e02a570726f6f66c40570726f6f66"),
    "welcome": (
        Welcome(9, b"c" * 28, b"s" * 28, 256),
        (
            "0000007e85a474797065a777656c636f6d65a773657373696f6e09ad636c69656e745f736563726574c41c63636363636363"
            "636363636363636363636363636363636363636363ad7365727665725f736563726574c41c73737373737373737373737373"
            "737373737373737373737373737373ab75736566756c5f73696465cd0100"
        ),
    ),
    "template": (
        Template(1, b"request"),
        "0000002883a474797065a874656d706c617465a66e756d62657201a772657175657374c40772657175657374",
    ),
    "tables": (
        Tables(1, b"header"),
        "0000002483a474797065a67461626c6573a66e756d62657201a6686561646572c406686561646572",
    ),
    "answer": (
        StreamAnswer(7, 0, b"body"),
        "0000002984a474797065a6616e73776572a77069637475726507a673746174757300a4626f6479c404626f6479",
    ),
}
PROTECTED = "1100000009010002000000052002e42f2c696ee3d20520d8936f910267"


@pytest.mark.parametrize(("frame", "hexadecimal"), FRAMES.values(), ids=FRAMES)
def test_frames_keep_their_bytes(frame: Frame, hexadecimal: str) -> None:
    assert encode(frame).hex() == hexadecimal
    assert list(decode(bytes.fromhex(hexadecimal))) == [frame]


@pytest.mark.parametrize(("message", "hexadecimal"), MESSAGES.values(), ids=MESSAGES)
def test_control_messages_keep_their_bytes(message: Message, hexadecimal: str) -> None:
    assert encode_message(message).hex() == hexadecimal
    assert list(MessageReader().feed(bytes.fromhex(hexadecimal))) == [message]


def test_protected_datagrams_keep_their_bytes() -> None:
    secret, datagram = Secret.from_bytes(bytes(range(28))), bytes.fromhex(PROTECTED)
    assert Sealer(9, secret).seal(1, 2**33 + 5, encode(Ping())) == datagram
    assert Opener(secret).open(peek(datagram), datagram) == encode(Ping())


def test_symbols_of_a_body_keep_their_bytes() -> None:
    coded = opaque(bytes(i * i % 251 for i in range(2000)), 0.5, 600)
    assert coded is not None
    assert (
        hashlib.sha256(b"".join(coded.symbols)).hexdigest()
        == "8bae461b42c61a0ca8df98d57dd0edd7795c022f9f5c8b93250628e69115e746"
    )


def test_interleaved_segments_keep_their_bytes() -> None:
    layout = standard_layout(256, 256, 4)
    symbols = interleave([bytes([i + 1]) * (i * 7 % 40 + 3) for i in range(layout.segments)], layout, 300)
    assert symbols is not None
    assert (
        hashlib.sha256(b"".join(symbols)).hexdigest()
        == "2a1ec9dde49b3e24e58a3f564a63f81e9490ca80654fdefde2b0f8f7be685944"
    )
