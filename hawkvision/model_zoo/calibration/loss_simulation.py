"""Images as received over a lossy link, and the conditions of a profile that are measured on them.

Every image is made as small as a sender makes it, and encoded by the product's own coder at each quality that is ever
sent. Then fragments are lost, seeded by
the image's index, until the received fraction lies in a band. Half of the images lose fragments independently, half in
bursts. Images with too few fragments for a band are left out, because a real link does not produce them there either.
Parity is not simulated: it decides how often fragments are missing, not what an image without them looks like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import Split, StagePredictions, select
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS, Pair, ReceivedCondition
from hawkvision.cascade.certification.profiling_received import DELTA, ReceivedPredictions, profile_received
from hawkvision.core.types import Tier
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions
from hawkvision.models.datasets import LabelledImages
from hawkvision.tasks.kind import Truth
from hawkvision.transport.client.encoding_plan import encode_anew
from hawkvision.transport.coding.image_coding import Coded, Complete, Expired, Partial, Plan, decode
from hawkvision.transport.coding.rate_fec_control import QUALITIES
from hawkvision.transport.protocol.wire import FRAGMENT_ROOM


class Band(NamedTuple):
    """Received fractions from `low` on, below `high`; both 1 is the complete image."""

    low: float
    high: float
    believed: bool = True
    """Whether the edge's answers may be accepted there."""


BANDS: Final = (Band(1.0, 1.0), Band(0.9, 1.0), Band(0.75, 0.9), Band(0.6, 0.75), Band(0.0, 0.6, believed=False))
"""In the last band small networks are confidently wrong too often for any threshold. It provides the temperature of
answers that a deadline forces."""

LEAST_SHARE: Final = 0.5
"""Share of the images that must reach a band for it to be measured. Images in other bands count as of the band below.
"""

DRAWS: Final = 8
"""Attempts to bring an image into a band."""
BURST: Final = 4.0
"""Mean length of a burst, in fragments."""


@dataclass(frozen=True, slots=True)
class ReceivedImages:
    """Images as received in one condition."""

    quality: int
    band: Band
    images: LabelledImages
    """All images; those that did not reach the band are the originals."""
    reached: NDArray[np.intp]
    """The indices of those that did, rising."""
    fractions: NDArray[np.float64]
    """The received fraction of each of those."""


def received_images(
    images: LabelledImages, chosen: NDArray[np.intp], seed: int, useful_side: int
) -> Iterator[ReceivedImages]:
    """The images `chosen` in every condition that enough of them reach, by falling quality, then falling fraction.

    Senders make their shorter side at most `useful_side` (`imaging.downscale.useful_side`), as edge nodes ask for it.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: for an image that cannot be sent, with its number.
    """
    for quality in QUALITIES:
        coded = {int(number): transcoded(images.bodies[number], Plan(quality, 0.0), useful_side) for number in chosen}
        for band in BANDS:
            bodies = list(images.bodies)
            fractions: dict[int, float] = {}
            digest = hashlib.sha256(images.sha256.encode())
            for number, sent in coded.items():
                found = _received(sent, band, np.random.default_rng((seed, quality, round(band.low * 100), number)))
                if found is not None:
                    bodies[number], fractions[number] = found
                    digest.update(hashlib.sha256(bodies[number]).digest())
            if len(fractions) >= LEAST_SHARE * len(chosen):
                # Hashed as received, so that cached logits of another coder's output are not used.
                there = replace(images, bodies=bodies, sha256=digest.hexdigest())
                yield ReceivedImages(quality, band, there, np.array([*fractions]), np.array([*fractions.values()]))


def transcoded(body: bytes, plan: Plan, useful_side: int) -> Coded:
    """A caller's image as a sender encodes it.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: naming what is wrong with the image.
    """
    return encode_anew(body, plan, useful_side, FRAGMENT_ROOM)


def condition_of(
    arrived: ReceivedImages,
    predictions: CascadePredictions,
    originals: StagePredictions,
    truths: Sequence[Truth],
    *,
    pair: Pair,
    split: Split,
    delta: float = DELTA,
) -> ReceivedCondition:
    """Measure one pair in one condition.

    Args:
        arrived: the images as received.
        predictions: for these.
        originals: the reference stage's predictions for the original images.
        truths: of all images.
        pair: whose condition it is.
        split: of the images.
        delta: probability that a certificate is wrong.
    """
    planned, certifying = (
        received_predictions(arrived, predictions, originals, truths, pair, part)
        for part in (split.profile, split.certify)
    )
    return profile_received(
        planned,
        certifying,
        score=pair.score,
        min_quality=arrived.quality,
        min_received_fraction=arrived.band.low,
        drops=(*CERTIFIED_DROPS, pair.conditions[0].balanced.max_drop),
        believed=arrived.band.believed,
        data_sha256=arrived.images.sha256,
        delta=delta,
    )


def received_predictions(
    arrived: ReceivedImages,
    predictions: CascadePredictions,
    originals: StagePredictions,
    truths: Sequence[Truth],
    pair: Pair,
    part: NDArray[np.intp],
) -> ReceivedPredictions:
    """The predictions of a pair for those images of a part that reached the condition."""
    chosen = np.intersect1d(part, arrived.reached)
    return ReceivedPredictions(
        predictions.kind,
        select(predictions.raw(pair.edge, Tier.EDGE), chosen),
        predictions.served(pair.best).of(chosen),
        originals.of(chosen),
        select(truths, chosen),
        predictions.temperature(pair.edge),
    )


def _received(coded: Coded, band: Band, rng: np.random.Generator) -> tuple[bytes, float] | None:
    """The image with a received fraction in the band, near a uniformly drawn one; None if none was found."""
    k = coded.format.k
    if band.low == 1.0:
        return decoded(coded, range(k))
    wanted = rng.uniform(band.low, band.high)
    bursty = bool(rng.integers(2))
    for _ in range(DRAWS):
        order = loss_order(k, BURST if bursty else 1.0, rng)
        best: tuple[bytes, float] | None = None
        for lost in range(1, k):
            found = decoded(coded, order[lost:])
            if found is None or found[1] < band.low:
                break
            if found[1] < band.high and (best is None or abs(found[1] - wanted) < abs(best[1] - wanted)):
                best = found
        if best is not None:
            return best
    return None


def decoded(coded: Coded, kept: Iterable[int]) -> tuple[bytes, float] | None:
    """An image and its received fraction, from the kept fragments; None if they cannot be decoded."""
    match decode(coded.format, {int(index): coded.symbols[index] for index in kept}):
        case Complete(body):
            return body, 1.0
        case Partial(body, _, fraction):
            return body, fraction
        case Expired():
            return None


def loss_order(k: int, burst: float, rng: np.random.Generator) -> list[int]:
    """The order in which k fragments are lost: independently, or in runs of mean length `burst` at random places."""
    if burst <= 1.0:
        return [int(index) for index in rng.permutation(k)]
    order: dict[int, None] = {}
    while len(order) < k:
        start, length = int(rng.integers(k)), int(rng.geometric(1.0 / burst))
        order.update(dict.fromkeys(index % k for index in range(start, start + length)))
    return list(order)
