"""Frames: what is encoded comes back; what is broken is nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga.device.framing import (
    MAX_CLASSES,
    MAX_FRAME,
    MAX_TEXT,
    DeviceFrame,
    DeviceRefusal,
    DeviceWelcome,
    FrameMessage,
    HostHello,
    ImageTrouble,
    LogitsReply,
    PixelRun,
    decode,
    encode,
    pixels_of_a_run,
)
from hawkvision.core.errors import BackendError

U8, U16, U32 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32))
MODELS = st.binary(min_size=32, max_size=32)
TEXTS = st.text("abc é", max_size=MAX_TEXT // 2)


@st.composite
def runs(draw: st.DrawFn) -> PixelRun:
    channels = draw(st.sampled_from([1, 3]))
    count = draw(st.integers(1, pixels_of_a_run(channels)))
    bits = np.random.default_rng(draw(U32))
    return PixelRun(draw(U32), bits.integers(0, 256, (count, channels), dtype=np.uint8), draw(U8))


LOGITS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=MAX_CLASSES)
MESSAGES = st.one_of(
    st.builds(HostHello, MODELS),
    runs(),
    st.builds(DeviceWelcome, U16, U16, U8, U16, U8, st.booleans(), U32, U32),
    st.builds(DeviceRefusal, U8, MODELS, TEXTS),
    st.builds(LogitsReply, U32, LOGITS.map(lambda values: np.array(values, np.int32))),
    st.builds(ImageTrouble, U8, TEXTS),
)
FRAMES = st.builds(DeviceFrame, U32, st.integers(0, (1 << 64) - 1), MESSAGES)


def fields(message: FrameMessage) -> list[object]:
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    return [type(message), *(value.tolist() if isinstance(value, np.ndarray) else value for value in values)]


def same(found: DeviceFrame, expected: DeviceFrame) -> bool:
    head = (found.session, found.sequence) == (expected.session, expected.sequence)
    return head and fields(found.message) == fields(expected.message)


@given(FRAMES)
def test_a_datagram_gives_back_its_frame(frame: DeviceFrame) -> None:
    content = encode(frame)
    assert len(content) <= MAX_FRAME
    found = decode(content)
    assert found is not None
    assert same(found, frame)


@given(FRAMES, st.data())
def test_a_changed_byte_makes_no_frame(frame: DeviceFrame, data: st.DataObject) -> None:
    content = bytearray(encode(frame))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(content)) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_taken(data: bytes) -> None:
    assert decode(data) is None
    assert decode(b"HV\x01" + data) is None


@pytest.mark.parametrize(
    "message", [LogitsReply(0, np.zeros(MAX_CLASSES + 1, np.int32)), DeviceWelcome(1, 1, 1, 1 << 16, 1, False, 1, 1)]
)
def test_what_does_not_fit_is_refused(message: FrameMessage) -> None:
    with pytest.raises(BackendError, match="frame: "):
        encode(DeviceFrame(0, 0, message))


def test_a_frame_is_laid_out_as_documented() -> None:
    run = PixelRun(5, np.array([[1, 2, 3], [4, 5, 6]], np.uint8), 7)
    head = b"HV\x01\x02" + bytes.fromhex("000f 00000009 000000000000000a")
    body = bytes.fromhex("00000005 0002 03 00 07 010203040506")
    assert encode(DeviceFrame(9, 10, run))[:-4] == head + body
