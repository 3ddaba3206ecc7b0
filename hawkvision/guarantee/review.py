"""Certificates from audits of live traffic: blocks, and what each of them may spend of δ.

Audits arrive in an order that nobody chooses, and are cut into blocks of `BLOCK` by their number alone, before anybody
labels one. Who looks at a block opens it, and numbers of opened blocks rise. For each target, the j-th block that was
opened since one certified it has δ / 2^j: all of them together err with probability δ at most, and nobody can look or
label until chance certifies. The share of images that are drawn is the same for all of a block.

*A block that fills* is tested by betting (`bounds`), image by image in the order in which they were drawn, with stakes
that know scores and disagreements of earlier images only. So it may be tested after every image and after every label.

*A whole block* of losses of 0 or 1 gets the exact test: its size was fixed beforehand. Nobody can stop it at a good
moment, because the exact test is not asked before. Neither by labels: no p-value falls when an ℓ rises, and a missing
label counts as the largest ℓ; so the test errs, at any look and in any order of labels, only where it errs with all
labels. Whole means that every audit of the block is there, has an outcome or is missing for good, and is of the stages
that run now. Otherwise their number might depend on what they showed, and betting counts.

Both tests share the block's part of δ, so that together they err as seldom as it says.

Of blocks that have ended only the newest opens, so that nobody chooses among them.

*Assumed*: the images of a block are drawn like those that the certificate is for; and the time to open one is not
chosen by how often the stages differed before, which metrics show.

Some images are labelled twice, without saying so. Labels that contradict each other say nothing: then the worst case
counts, so a second label can only undo what a first one did, and never certifies more.
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
REPEATED: Final = 20
"""Of so many labelled images one is labelled a second time."""


WHOLE_PART: Final = 0.75
"""Of a block's δ, for the exact test. Before most of a block is there, too few labels are checked to count anyway."""


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


def how_tested(audits: int, *, binary: bool, block: int = BLOCK) -> tuple[int | None, float]:
    """How a block of which there are so many audits is tested: `Evidence.planned`, and the part of the block's δ.

    `binary`: whether losses are 0 or 1.
    """
    if not binary:
        return block, 1.0
    return (None, WHOLE_PART) if audits == block else (block, 1.0 - WHOLE_PART)


def share_of_delta(delta: float, earlier: Sequence[bool]) -> float:
    """The part of δ that a block may spend on a target.

    Args:
        delta: of all blocks since the last that certified the target.
        earlier: of each block that was opened before, in this order, whether it certified the target.
    """
    place = 1 + next((since for since, certified in enumerate(reversed(earlier)) if certified), len(earlier))
    return math.ldexp(delta, -place)


def labelled_twice(digest: str) -> bool:
    """Whether an image, by its SHA-256 in hexadecimal, is one of those that get a second label."""
    return int(digest[2:10], 16) % REPEATED == 0
