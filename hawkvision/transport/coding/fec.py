"""Reed–Solomon over whole symbols: any k of n bring all k data symbols back.

The field is GF(2⁸) with x⁸ + x⁴ + x³ + x² + 1 (0x11d) and generator 2. The code is zfec's (Rizzo's of 1997, also in
RFC 5510 §8): from the Vandermonde matrix V with V[0] = (1, 0, …, 0) and V[i][j] = 2^((i−1)·j), the generator is
V · (V[0:k])⁻¹, so that its first k rows are the identity and data symbols travel as they are. Symbols of unequal
length count as padded with zeros to the longest; parity symbols have that length.

Row i of V takes a polynomial's coefficients to its value at point i, where the points are 0, 1, 2, 4, …. So any symbol
is the value at its point of the polynomial through any k others. The weights are Lagrange's; no matrix is inverted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.transport.protocol.image_format import MAX_SYMBOLS
from hawkvision.transport.protocol.wire import WireError

_Weights = NDArray[np.uint8]


def _powers() -> _Weights:
    found = [1]
    for _ in range(254):
        found.append(found[-1] << 1 ^ (0x11D if found[-1] & 0x80 else 0))
    return np.array(found, np.uint8)


_POWERS: Final = _powers()
_LOGARITHMS: Final = np.zeros(256, np.int64)
_LOGARITHMS[_POWERS] = np.arange(255)  # that of 0 stays 0, so that it adds nothing
_POINTS: Final = np.concatenate([np.zeros(1, np.uint8), _POWERS])


def parity_count(k: int, parity: float) -> int:
    """The parity symbols for a ratio, rounded up, and limited so that n stays within `MAX_SYMBOLS`."""
    # 0.2 · 5 is 1.0000000000000002 in other spellings of 0.2; one symbol too many would cost a whole datagram.
    return min(math.ceil(k * parity - 1e-9), MAX_SYMBOLS - k)


def protect(data: Sequence[bytes], parity: int) -> list[bytes]:
    """The parity symbols of some data symbols."""
    if not parity:
        return []
    k = len(data)
    return _weighted(_weights(tuple(range(k)), tuple(range(k, k + parity))), data)


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
    known = (*data, *spare[: k - len(data)])
    missing = tuple(index for index in range(k) if index not in data)
    found = dict(zip(missing, _weighted(_weights(known, missing), [symbols[index] for index in known]), strict=True))
    return {index: data[index] if index in data else found[index] for index in range(k)}


# Images of one stream share it.
@functools.lru_cache(maxsize=64)
def _weights(known: tuple[int, ...], wanted: tuple[int, ...]) -> _Weights:
    """The weight of each known symbol (columns) in each wanted one (rows); no symbol is in both."""
    at, to = _POINTS[list(known)], _POINTS[list(wanted)]
    above = _LOGARITHMS[to[:, None] ^ at]
    below = _LOGARITHMS[at[:, None] ^ at].sum(axis=0)
    found: _Weights = _POWERS[(above.sum(axis=1, keepdims=True) - above - below) % 255]
    return found


def _weighted(weights: _Weights, symbols: Sequence[bytes]) -> list[bytes]:
    """The weighted sums of symbols, as long as the longest.

    A product is the sum of the symbol times 2^b for the bits b of the weight, so eight doublings of all symbols and
    exclusive ors of whole rows do.
    """
    length = max(map(len, symbols))
    wide = max(8, -(-length // 8) * 8)
    doubled = np.empty((8, len(symbols), wide), np.uint8)
    doubled[0] = np.frombuffer(b"".join(each.ljust(wide, b"\0") for each in symbols), np.uint8).reshape(-1, wide)
    for bit in range(7):
        doubled[bit + 1] = doubled[bit] << 1 ^ (doubled[bit] >> 7) * np.uint8(0x1D)
    words = doubled.reshape(-1, wide).view(np.uint64)
    bits = (weights[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).astype(bool).reshape(len(weights), -1)
    return [np.bitwise_xor.reduce(words[row], axis=0).tobytes()[:length] for row in bits]
