"""Sealed datagrams: what was sealed opens once, and nothing else opens at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.protocol.packet_protection import (
    MAX_PATHS,
    MAX_SEALED,
    REPLAY_WINDOW,
    SECRET_BYTES,
    Header,
    Opener,
    ReplayWindow,
    Sealer,
    Secret,
    is_sealed,
    peek,
)
from hawkvision.transport.protocol.wire import HEADER_BYTES, MAX_DATAGRAM, TAG_BYTES, Drop, WireError

SECRET = Secret(b"k" * 16, b"i" * 12)
paths = st.integers(0, MAX_PATHS - 1)
sequences = st.integers(0, 2**48 - 1)
payloads = st.binary(min_size=1, max_size=MAX_DATAGRAM - HEADER_BYTES - TAG_BYTES)


@given(st.integers(0, 2**32 - 1), paths, sequences, payloads)
def test_what_was_sealed_opens_to_the_same_bytes(session: int, path: int, sequence: int, payload: bytes) -> None:
    datagram = Sealer(session, SECRET).seal(path, sequence, payload)
    assert is_sealed(datagram)
    assert len(datagram) == HEADER_BYTES + len(payload) + TAG_BYTES
    assert peek(datagram) == Header(session, path, sequence)
    assert Opener(SECRET).open(peek(datagram), datagram) == payload


@given(payloads, st.data())
def test_a_flipped_bit_anywhere_opens_nothing(payload: bytes, data: st.DataObject) -> None:
    datagram = bytearray(Sealer(7, SECRET).seal(1, 5, payload))
    datagram[data.draw(st.integers(0, len(datagram) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        header = peek(bytes(datagram))
    except WireError:
        return
    assert Opener(SECRET).open(header, bytes(datagram)) is Drop.BAD_SEAL


@given(st.binary(max_size=MAX_DATAGRAM + 50))
def test_any_bytes_give_a_header_or_an_error_and_never_open(data: bytes) -> None:
    try:
        header = peek(data)
    except WireError:
        return
    assert is_sealed(data)
    assert header.path < MAX_PATHS
    assert Opener(SECRET).open(header, data) is Drop.BAD_SEAL


def test_another_key_opens_nothing() -> None:
    datagram = Sealer(7, SECRET).seal(0, 0, b"frames")
    assert Opener(Secret(b"x" * 16, SECRET.iv)).open(peek(datagram), datagram) is Drop.BAD_SEAL


@given(st.lists(st.integers(0, 3 * REPLAY_WINDOW), max_size=200))
def test_a_window_takes_each_recent_sequence_once(offered: list[int]) -> None:
    window, taken, largest = ReplayWindow(), set[int](), -1
    for sequence in offered:
        expected = sequence not in taken and sequence > largest - REPLAY_WINDOW
        assert window.fresh(sequence) == expected
        if expected:
            window.add(sequence)
            taken.add(sequence)
            largest = max(largest, sequence)


def test_a_replayed_datagram_opens_once_and_paths_count_by_themselves() -> None:
    sealer, opener = Sealer(7, SECRET), Opener(SECRET)
    first, other = sealer.seal(0, 3, b"a"), sealer.seal(1, 3, b"b")
    opened = [opener.open(peek(datagram), datagram) for datagram in (first, first, other, other)]
    assert opened == [b"a", Drop.REPLAYED, b"b", Drop.REPLAYED]


def test_a_forged_far_sequence_does_not_move_the_window() -> None:
    sealer, opener = Sealer(7, SECRET), Opener(SECRET)
    genuine = sealer.seal(0, 1, b"frames")
    forged = bytes(genuine[:6]) + b"\xff" * 6 + genuine[12:]
    assert opener.open(peek(forged), forged) is Drop.BAD_SEAL
    assert opener.open(peek(genuine), genuine) == b"frames"


def test_an_exhausted_key_seals_nothing_more() -> None:
    sealer = Sealer(7, SECRET)
    sealer.sealed = MAX_SEALED
    assert sealer.key_exhausted
    with pytest.raises(AssertionError):
        sealer.seal(0, 0, b"frames")


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_secret_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"got {size}"):
        Secret.from_bytes(bytes(size))
