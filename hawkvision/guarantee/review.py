"""Certificates from audits of live traffic: blocks, and what each of them may spend of δ.

Audits arrive in an order that nobody chooses, and are cut into blocks of `BLOCK` by their number alone, before anybody
labels one. A block is tested by betting (`bounds`), image by image in that order, with stakes that know scores and
disagreements of earlier images only. So it may be tested after every image and after every label. Who looks at a block
opens it, and numbers of opened blocks rise. For each target, the j-th block that was opened since one certified it has
δ / 2^j: all of them together err with probability δ at most, and nobody can look or label until chance certifies.

The share of images that are drawn is the same for all of a block.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Final

from hawkvision.guarantee.labels import RANDOM_IMAGES

BLOCK: Final = 2048
"""Audits. At one request a second, of which 2 % are audited, they take 28 hours."""
STRATUM: Final = BLOCK // RANDOM_IMAGES
"""Consecutive audits of which one is drawn for the check of labels."""


def block_of(number: int) -> int:
    """The block of an audit, by its number, which counts from 1."""
    return (number - 1) // BLOCK


def for_label_check(number: int) -> bool:
    """Whether an audit is one of the `RANDOM_IMAGES` of its block whose labels are compared with the answers."""
    stratum, place = divmod((number - 1) % BLOCK, STRATUM)
    return stratum < RANDOM_IMAGES and place == _drawn(block_of(number), stratum)


@functools.lru_cache(maxsize=1024)
def _drawn(block: int, stratum: int) -> int:
    return random.Random(f"{block} {stratum}").randrange(STRATUM)  # noqa: S311 - nobody gains by knowing it


def share_of_delta(delta: float, earlier: Sequence[bool]) -> float:
    """The part of δ that a block may spend on a target.

    Args:
        delta: of all blocks since the last that certified the target.
        earlier: of each block that was opened before, in this order, whether it certified the target.
    """
    place = 1 + next((since for since, certified in enumerate(reversed(earlier)) if certified), len(earlier))
    return math.ldexp(delta, -place)
