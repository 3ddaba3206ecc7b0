"""Reed–Solomon over whole symbols: any k of n bring all k data symbols back.

The field is GF(2⁸) with x⁸ + x⁴ + x³ + x² + 1 (0x11d) and generator 2. The code is zfec's (Rizzo's of 1997, also in
RFC 5510 §8): from the Vandermonde matrix V with V[0] = (1, 0, …, 0) and V[i][j] = 2^((i−1)·j), the generator is
V · (V[0:k])⁻¹, so that its first k rows are the identity and data symbols travel as they are. Symbols of unequal
length count as padded with zeros to the longest; parity symbols have that length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import zfec

from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.wire import WireError


def parity_count(k: int, parity: float) -> int:
    """The parity symbols for a ratio, rounded up, and limited so that n stays within `MAX_SYMBOLS`."""
    # 0.2 · 5 is 1.0000000000000002 in other spellings of 0.2; one symbol too many would cost a whole datagram.
    return min(math.ceil(k * parity - 1e-9), MAX_SYMBOLS - k)


def protect(data: Sequence[bytes], parity: int) -> list[bytes]:
    """The parity symbols of some data symbols."""
    if not parity:
        return []
    length = max(map(len, data))
    k, n = len(data), len(data) + parity
    made: list[bytes] = _encoder(k, n).encode(tuple(s.ljust(length, b"\0") for s in data), tuple(range(k, n)))
    return made


def recover(symbols: Mapping[int, bytes], k: int, n: int) -> dict[int, bytes]:
    """The data symbols: all k if at least k of n have arrived, else the received ones.

    Symbols that had to be computed come back padded with zeros to the longest symbol's length.

    Raises:
        WireError: if parity symbols differ in length, or are shorter than a data symbol.
    """
    data = {index: symbols[index] for index in sorted(symbols) if index < k}
    if len(symbols) < k or len(data) == k:
        return data
    spare = sorted(index for index in symbols if index >= k)
    length = len(symbols[spare[0]])
    for index, symbol in symbols.items():
        if len(symbol) > length or (index >= k and len(symbol) != length):
            raise WireError(
                f"fragment {index} of {n} has a symbol of {len(symbol)} bytes, fragment {spare[0]} (parity) one of "
                f"{length}; parity symbols must be of one length, and none longer"
            )
    # The decoder wants data symbols in their own places, and any others in the gaps.
    gaps = iter(spare)
    numbers = tuple(index if index in data else next(gaps) for index in range(k))
    blocks = tuple(symbols[number].ljust(length, b"\0") for number in numbers)
    found: list[bytes] = _decoder(k, n).decode(blocks, numbers)
    return {index: bytes(block) for index, block in enumerate(found)} | data


# Making the matrix takes 11 µs for 10 symbols of 20 and 1.2 ms for 128 of 255; images of one stream share it.
@functools.lru_cache(maxsize=64)
def _encoder(k: int, n: int) -> zfec.Encoder:
    return zfec.Encoder(k, n)


@functools.lru_cache(maxsize=64)
def _decoder(k: int, n: int) -> zfec.Decoder:
    return zfec.Decoder(k, n)
