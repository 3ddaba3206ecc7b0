"""Frames: each comes back as it was, and any bytes give frames or a `WireError`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client import request
from hawkvision.transport.protocol.frames import (
    ANSWER_ROOM,
    ARRIVAL_UNIT_S,
    INTERIM_ROOM,
    LONGEST_OFFSET,
    MAX_ANSWER_PARTS,
    MAX_META,
    MAX_REPORTED,
    REPORT_BYTES,
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
    fragment_room,
)
from hawkvision.transport.protocol.image_format import Kind, WireImageFormat
from hawkvision.transport.protocol.wire import HEADER_BYTES, MAX_DATAGRAM, TAG_BYTES, WireError

u8, u16, u32 = st.integers(0, 255), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
ROOM = MAX_DATAGRAM - HEADER_BYTES - TAG_BYTES


@st.composite
def formats(draw: st.DrawFn) -> WireImageFormat:
    n = draw(st.integers(1, 255))
    k = draw(st.integers(1, n))
    if draw(st.booleans()):
        body = draw(st.integers(k, k * MAX_DATAGRAM))
        return WireImageFormat(Kind.OPAQUE, *divmod(body, 65536), quality=0, interval=1, k=k, n=n)
    tables = draw(u8)
    return WireImageFormat(
        Kind.SEGMENTS, draw(st.integers(1, 1024)), draw(st.integers(1, 1024)), quality=draw(st.integers(1, 100)),
        interval=draw(st.integers(1, 255)), k=k, n=n, base_k=0 if tables else draw(st.integers(0, n)), tables=tables,
    )  # fmt: skip


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    format_, meta = draw(formats()), draw(st.binary(max_size=MAX_META))
    return Fragment(
        draw(u32), draw(u8), format_, draw(st.integers(0, format_.n - 1)), draw(u16), draw(u16), meta,
        draw(st.binary(min_size=1, max_size=fragment_room(meta))),
    )  # fmt: skip


@st.composite
def answer_parts(draw: st.DrawFn) -> AnswerPart:
    parts = draw(st.integers(1, MAX_ANSWER_PARTS))
    return AnswerPart(
        draw(u32), draw(u8), draw(st.integers(0, parts - 1)), parts, draw(st.binary(max_size=ANSWER_ROOM))
    )


units = st.none() | st.integers(0, LONGEST_OFFSET).map(lambda unit: unit * ARRIVAL_UNIT_S)
reports = st.builds(
    Report, st.integers(0, 3), st.integers(0, 2**48 - 1), u32, u32,
    st.lists(units, min_size=1, max_size=MAX_REPORTED).map(tuple),
)  # fmt: skip
small = st.one_of(
    reports,
    st.builds(Nack, u32, st.lists(u8, min_size=1, max_size=255).map(tuple)),
    st.builds(Interim, u32, u8, st.binary(max_size=INTERIM_ROOM)),
    st.builds(Ping),
    st.builds(Cancel, u32),
    st.builds(Challenge, st.binary(min_size=8, max_size=8)),
    st.builds(Response, st.binary(min_size=8, max_size=8)),
)


@given(st.one_of(small, fragments(), answer_parts()))
def test_a_frame_comes_back_as_it_was_and_fits_a_datagram(frame: Frame) -> None:
    data = encode(frame)
    assert list(decode(data)) == [frame]
    assert len(data) <= ROOM


@given(st.lists(st.one_of(small, answer_parts()), max_size=5), fragments())
def test_frames_follow_one_another_and_a_fragment_ends_them(before: list[Frame], last: Fragment) -> None:
    assert list(decode(b"".join(map(encode, before)) + encode(last))) == [*before, last]


@given(st.one_of(small, fragments(), answer_parts()), st.data())
def test_a_flipped_bit_gives_frames_or_a_wire_error(frame: Frame, data: st.DataObject) -> None:
    encoded = bytearray(encode(frame))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        frames = list(decode(bytes(encoded)))
    except WireError:
        return
    assert b"".join(map(encode, frames)) == bytes(encoded)


def test_a_report_is_never_longer_than_is_said() -> None:
    longest = Report(3, 2**48 - 1, 2**32 - 1, 2**32 - 1, (None,) * MAX_REPORTED)
    assert len(encode(longest)) == REPORT_BYTES


def test_times_beyond_a_reports_range_are_reported_as_the_longest() -> None:
    (report,) = decode(encode(Report(0, 0, 0, 2**40, (9.9, 0.0))))
    assert isinstance(report, Report)
    assert report.offsets_s == (LONGEST_OFFSET * ARRIVAL_UNIT_S, 0.0)
    assert report.delay_us == 2**32 - 1


def test_frames_before_a_broken_one_stand() -> None:
    frames = decode(encode(Ping()) + encode(Cancel(7)) + b"\xff")
    assert [next(frames), next(frames)] == [Ping(), Cancel(7)]
    with pytest.raises(WireError, match="255 at byte 6"):
        next(frames)


def test_constants_of_client_requests_equal_those_of_the_frames() -> None:
    assert request.MAX_META == MAX_META
    assert request.LONGEST_LINK_DEADLINE_MS <= 0xFFFF, "the milliseconds that a fragment can say"
