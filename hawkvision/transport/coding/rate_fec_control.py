"""Chooses the quality and the parity of an image from the loss of the link.

An image whose bytes are given can be sent in many fragments of good quality without parity, or in few of low quality
with much. Both lose accuracy: one by holes, the other by coarse steps. How much each loses was measured; how many of n
fragments a link loses follows from its loss ratio and the length of its lost runs (Gilbert's model of two states, of
which one loses everything). So the choice is an expectation, and the least one wins:

    drop(quality) + Σ over m lost of n, m > n − k:  P(m) · holes(m / n)      + a little if that is not seldom

With a base image in each fragment's share, holes cost a fraction of what they cost otherwise, but all fragments are
fuller. That pays where losses come in runs or nothing is known of them.

Images count as typical ones; quality and parity ratio are used for all. That errs on the safe side for larger
images, which have more fragments and so less chance in what is lost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.transport.coding.image_coding import BASE_PORTION, Plan
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.protocol.image_format import MAX_SYMBOLS

QUALITIES: Final = (90, 80, 70, 50, 30, 14)
"""The qualities that are sent, best first; certificates exist for each."""
FINE: Final = 80
"""From this quality on, a caller's own JPEG is not made smaller."""

PLAIN_FRAGMENTS: Final = 18
"""Of an image of 227 to 256 pixels coded at quality 85, the median of 1,360."""

SIZES: Final = (1.31, 0.80, 0.66, 0.47, 0.345, 0.21)
"""Bytes of an image of each quality over those at quality 85; same images."""
FINE_SIZE: Final = SIZES[QUALITIES.index(FINE)]
_DROPS: Final = (0.002, 0.013, 0.02, 0.038, 0.05, 0.14)
"""Top-1 that each quality costs efficientnet_lite0_int8, ± 0.4 to 1.1 points; paired with the images as they came."""
UNKNOWN_SPARE: Final = 1.25
"""The spare bandwidth if it is unknown: five more fragments, 2 ms at 20 Mbit/s, against a round trip of repair for some
images in a hundred."""

MAX_SPARE: Final = 5.0
"""The most parity, in multiples of the image's bytes; more helps no usable link."""

_HOLES: Final = ((0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0), (0.0, 0.03, 0.08, 0.155, 0.31, 0.53, 0.74, 0.85))
"""Lost shares of the data, and the top-1 accuracy that they cost."""
_BASED_HOLES: Final = ((0.0, 0.1, 0.25, 0.5, 0.75, 1.0), (0.0, 0.01, 0.025, 0.09, 0.145, 0.24))
"""The same if holes are filled from a base image."""
_BASE: Final = 1.6
"""A base image's size in fragments."""
SELDOM: Final = 0.01
_OFTEN: Final = 0.015
"""What it costs if more than `SELDOM` images are incomplete: those wait for repair, and one in a hundred is what a
99th percentile sees. So much top-1 is given to keep to it, but not more."""
_FRAGMENT: Final = 2e-4
"""The least gain per fragment, which keeps parity from growing uselessly with spare bandwidth."""
_LEAST_LOSS: Final = 0.01
"""The least loss assumed, because losses precede their reports."""
_PRIOR: Final = ((0.5, 0.01, 1.0), (0.2, 0.1, 1.5), (0.15, 0.2, 4.0), (0.1, 0.35, 4.0), (0.05, 0.5, 4.0))
"""Weight, loss and burst of the links that stand for an unknown one."""


def choose(state: LossEstimate, spare_ratio: float | None, plain_fragments: int = PLAIN_FRAGMENTS) -> Plan:
    """How to send the next image over this link.

    Args:
        state: of the link; one that is not known counts as any of a few.
        spare_ratio: how many times the bytes of the image at quality 85 fit in the time that the sender may spend;
            None if that is unknown, which counts as `UNKNOWN_SPARE`. Where not even one fits, quality gives way: a
            coarse image in time is worth more than a part of a fine one. What does not fit at all is sent at the
            lowest quality, without parity.
        plain_fragments: of an image at quality 85, where the caller knows its images.
    """
    links = ((1.0, state.ratio, state.burst),) if state.known else _PRIOR
    ratio = UNKNOWN_SPARE if spare_ratio is None else max(spare_ratio, 0.0)
    most = min(int(plain_fragments * min(ratio, MAX_SPARE)), MAX_SYMBOLS)
    # Rounded to a few hundred states, so that small changes of the estimates hit the cache.
    rounded = tuple((weight, *_rounded(loss, burst)) for weight, loss, burst in links)
    return _chosen(rounded, max(most, 1), plain_fragments)


def _rounded(loss: float, burst: float) -> tuple[float, float]:
    return round(min(max(loss, _LEAST_LOSS), 0.95), 2), round(2 * burst) / 2


@functools.lru_cache(maxsize=256)
def _chosen(links: tuple[tuple[float, float, float], ...], most: int, plain_fragments: int) -> Plan:
    lost = np.sum([weight * loss_distributions(most, loss, burst) for weight, loss, burst in links], 0)
    best, least = Plan(QUALITIES[-1], 0.0), math.inf
    for plan, drop, k, n, base_k in _candidates(most, plain_fragments):
        fewer = np.arange(n - k + 1, n + 1)
        holes = _cost(fewer / n, _HOLES)
        if base_k:
            holes = np.where(n - fewer >= base_k, _cost(fewer / n, _BASED_HOLES), holes)
        chances = lost[n, fewer]
        expected = drop + float(chances @ holes) * (1 - drop) + n * _FRAGMENT
        expected += _OFTEN * (float(chances.sum()) > SELDOM)
        if expected < least:
            best, least = plan, expected
    return best


def _candidates(most: int, plain_fragments: int) -> Iterator[tuple[Plan, float, int, int, int]]:
    """The possible plans of a typical image within `most` fragments: drop, k, n and the base image's k of each."""
    for quality, size, drop in zip(QUALITIES, SIZES, _DROPS, strict=True):
        k = max(1, round(plain_fragments * size))
        for n in range(k, most + 1):
            parity = (n - k) / k
            yield Plan(quality, parity), drop, k, n, 0
            base_k = math.ceil(n * BASE_PORTION)
            if base_k > _BASE:
                based_k = math.ceil(k / (1 - _BASE / base_k))
                based_n = based_k + math.ceil(based_k * parity - 1e-9)
                if based_n <= most:
                    yield Plan(quality, parity, base=True), drop, based_k, based_n, base_k


def _cost(shares: NDArray[np.float64], table: tuple[tuple[float, ...], tuple[float, ...]]) -> NDArray[np.float64]:
    return np.asarray(np.interp(shares, *table))


def incomplete_probability(k: int, n: int, state: LossEstimate) -> float:
    """Probability that fewer than k of n datagrams arrive, n ≤ `MAX_SYMBOLS`; no link counts as better than 1 %."""
    lost = loss_distributions(MAX_SYMBOLS, *_rounded(state.ratio, state.burst))
    return float(lost[n, n - k + 1 : n + 1].sum())


@functools.lru_cache(maxsize=64)
def loss_distributions(most: int, loss: float, burst: float) -> NDArray[np.float64]:
    """Probabilities (most + 1, most + 1): in row n, that 0, 1, … n of n datagrams in a row are lost, then zeros.

    Gilbert's chain, from its stationary state. Runs cannot be shorter than those of independent losses, 1 / (1 − loss).
    """
    recover = 1 / max(burst, 1 / (1 - loss))
    fail = loss * recover / (1 - loss)
    found = np.zeros((most + 1, most + 1))
    good, bad = np.zeros(most + 1), np.zeros(most + 1)
    # The losses before the next datagram, by whether that one passes or is lost.
    good[0], bad[0] = 1 - loss, loss
    found[0] = good + bad
    for n in range(1, most + 1):
        shifted = np.concatenate(([0.0], bad[:-1]))
        good, bad = good * (1 - fail) + shifted * recover, good * fail + shifted * (1 - recover)
        found[n] = good + bad
    return found
