"""The erasure code against arithmetic written out from its definition."""

from __future__ import annotations

import pytest
import zfec
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.transport.coding.fec import parity_count, protect, recover
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.wire import WireError


def times(a: int, b: int) -> int:
    """Product in GF(2⁸) modulo 0x11d."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def power(exponent: int) -> int:
    product = 1
    for _ in range(exponent):
        product = times(product, 2)
    return product


def generator(k: int, n: int) -> list[list[int]]:
    """V · (V[0:k])⁻¹ by elimination of columns: V[0] = (1, 0, …), V[i][j] = 2^((i−1)·j)."""
    rows = [[1] + [0] * (k - 1)] + [[power((i - 1) * j % 255) for j in range(k)] for i in range(1, n)]
    for column in range(k):
        pivot = next(c for c in range(column, k) if rows[column][c])
        for row in rows:
            row[column], row[pivot] = row[pivot], row[column]
        inverse = next(x for x in range(1, 256) if times(x, rows[column][column]) == 1)
        for row in rows:
            row[column] = times(row[column], inverse)
        for other in range(k):
            factor = rows[column][other] if other != column else 0
            for row in rows:
                row[other] ^= times(factor, row[column])
    return rows


@pytest.mark.parametrize(("k", "parity"), [(1, 3), (2, 2), (5, 4), (12, 6)])
def test_parity_follows_the_definition(k: int, parity: int) -> None:
    data = [bytes((17 * i + 5 * j) % 256 for j in range(8 + i % 2)) for i in range(k)]
    for row, symbol in zip(generator(k, k + parity)[k:], protect(data, parity), strict=True):
        for at, value in enumerate(symbol):
            expected = 0
            for factor, block in zip(row, data, strict=True):
                expected ^= times(factor, block[at] if at < len(block) else 0)
            assert value == expected


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=30), st.integers(0, 30), st.randoms())
def test_any_k_symbols_give_all_data(data: list[bytes], parity: int, random: object) -> None:
    k, n = len(data), len(data) + parity
    symbols = dict(enumerate(data + protect(data, parity)))
    chosen = random.sample(range(n), k)  # type: ignore[attr-defined]
    found = recover({index: symbols[index] for index in chosen}, k, n)
    assert [found[i].rstrip(b"\0") for i in range(k)] == [symbol.rstrip(b"\0") for symbol in data]


@given(st.integers(1, 254), st.data())
def test_symbols_are_those_of_zfec(k: int, draw: st.DataObject) -> None:
    n = draw.draw(st.integers(k + 1, 255))
    random = draw.draw(st.randoms(use_true_random=False))
    data = [random.randbytes(21) for _ in range(k)]
    every = zfec.Encoder(k, n).encode(tuple(data), tuple(range(n)))
    assert protect(data, n - k) == list(every[k:])
    came = sorted(random.sample(range(n), k))
    assert recover({index: every[index] for index in came}, k, n) == dict(enumerate(data))


def test_with_fewer_than_k_there_is_what_came() -> None:
    data = [b"one", b"two", b"three"]
    parity = protect(data, 1)
    assert recover({0: data[0], 3: parity[0]}, 3, 4) == {0: b"one"}


def test_symbols_of_unequal_length_are_an_error() -> None:
    with pytest.raises(WireError, match="of one length"):
        recover({2: b"abc", 3: b"ab"}, 2, 4)
    with pytest.raises(WireError, match="none longer"):
        recover({0: b"abcd", 2: b"abc"}, 2, 3)


def test_parity_is_rounded_up_and_bounded() -> None:
    assert [parity_count(k, 0.2) for k in (1, 5, 6, 10)] == [1, 1, 2, 2]
    assert parity_count(10, 0.0) == 0
    assert parity_count(200, 2.0) == MAX_SYMBOLS - 200
