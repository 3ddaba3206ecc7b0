"""Messages of the control stream, however the stream is cut, and whatever it holds."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.protocol.control import (
    MAX_HELLO,
    MAX_MESSAGE,
    MAX_PROOF,
    Hello,
    Message,
    MessageReader,
    StreamAnswer,
    Tables,
    Template,
    Welcome,
    encode_message,
)
from hawkvision.transport.protocol.wire import WireError

u32 = st.integers(0, 2**32 - 1)
messages = st.one_of(
    st.builds(Hello, st.integers(0, 9), st.none() | st.binary(max_size=MAX_PROOF)),
    st.builds(Welcome, u32, st.binary(max_size=28), st.binary(max_size=28), st.integers(1, 65535)),
    st.builds(Template, st.integers(0, 255), st.binary(max_size=4096)),
    st.builds(Tables, st.integers(1, 255), st.binary(max_size=700)),
    st.builds(StreamAnswer, u32, st.integers(0, 255), st.binary(max_size=2000)),
)


@given(st.lists(messages, max_size=5), st.data())
def test_messages_come_out_in_order_however_the_stream_is_cut(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode_message, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = MessageReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [message for piece in pieces for message in reader.feed(piece)] == sent


def read_all(pieces: Iterable[bytes]) -> tuple[list[Message], bool]:
    """Messages, and whether a wire error ended them."""
    reader, found = MessageReader(), list[Message]()
    try:
        for piece in pieces:
            for message in reader.feed(piece):
                found.append(message)
    except WireError:
        return found, True
    return found, False


@given(st.lists(messages, max_size=2), st.binary(max_size=300), st.data())
def test_any_bytes_give_messages_or_a_wire_error_however_they_are_cut(
    sent: list[Message], rest: bytes, data: st.DataObject
) -> None:
    stream = b"".join(map(encode_message, sent)) + rest
    cut = data.draw(st.integers(0, len(stream)))
    whole = read_all([stream])
    assert whole[0][: len(sent)] == sent
    assert read_all([stream[:cut], stream[cut:]]) == whole


@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1a"])
def test_a_message_nested_deeply_is_a_wire_error(opens: bytes) -> None:
    body = b"\x82\xa4type\xa5hello\xa1x" + opens * 5000
    with pytest.raises(WireError, match="recursion"):
        list(MessageReader().feed(struct.pack("!I", len(body)) + body))


@pytest.mark.parametrize("most", [MAX_HELLO, MAX_MESSAGE])
def test_a_message_too_long_is_refused_before_it_is_held(most: int) -> None:
    with pytest.raises(WireError, match=str(most + 1)):
        list(MessageReader(most).feed(struct.pack("!I", most + 1)))


def test_a_hello_carries_a_proof_and_no_key() -> None:
    hello = encode_message(Hello(2, b"proof"))
    assert msgspec.msgpack.decode(hello[4:]) == {"type": "hello", "version": 2, "proof": b"proof"}


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "template", "number": 256, "request": b""},
        {"type": "template", "number": 1, "request": bytes(4097)},
        {"type": "tables", "number": 0, "header": b""},
        {"type": "tables", "number": 1, "header": bytes(65537)},
        {"type": "hello", "version": 2, "proof": bytes(MAX_PROOF + 1)},
        {"type": "nonsense"},
        {"number": 1},
    ],
)
def test_values_out_of_bounds_are_refused(broken: dict[str, object]) -> None:
    body = msgspec.msgpack.encode(broken)
    with pytest.raises(WireError, match="control message"):
        list(MessageReader().feed(struct.pack("!I", len(body)) + body))


def test_text_that_is_no_utf8_is_a_broken_message() -> None:
    body = encode_message(Hello(2, b"proof")).replace(b"hello", b"hel\xff\xff")
    with pytest.raises(WireError, match="control message"):
        list(MessageReader().feed(body))
