"""Images as received over a lossy link, and the thresholds for such images that are measured on them.

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

from hawkvision.cascade.certification.predictions import StagePredictions, select
from hawkvision.cascade.certification.profile import CERTIFIED_DROPS, Pair, ReceivedCondition, ReceivedThreshold
from hawkvision.cascade.confidence.calibration import fit_temperature
from hawkvision.core.types import Tier
from hawkvision.model_zoo.calibration.model_runner import CascadePredictions
from hawkvision.models.datasets import LabelledImages
from hawkvision.tasks.class_scores import Floats
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
SCORE_KNOTS: Final = 17
HARDLY: Final = 1.645
"""Standard errors above the mean of a bound: one in twenty means is larger."""
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
    images: LabelledImages,
    chosen: NDArray[np.intp],
    seed: int,
    useful_side: int,
    qualities: Sequence[int] = QUALITIES,
) -> Iterator[ReceivedImages]:
    """The images `chosen` in every condition that enough of them reach, by falling quality, then falling fraction.

    Senders make their shorter side at most `useful_side` (`imaging.downscale.useful_side`), as edge nodes ask for it.

    Raises:
        BadImage, TooLarge, UnsupportedMedia: for an image that cannot be sent, with its number.
    """
    for quality in qualities:
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
    pair: Pair,
) -> ReceivedCondition:
    """Measure one pair in one condition.

    Args:
        arrived: the images as received.
        predictions: for these.
        originals: the reference stage's predictions for the original images.
        truths: of all images.
        pair: whose condition it is.
    """
    kind, chosen = predictions.kind, arrived.reached
    raw, labels = select(predictions.raw(pair.edge, Tier.EDGE), chosen), select(truths, chosen)
    temperature = round(fit_temperature(kind, raw, labels, predictions.temperature(pair.edge)), 6)
    outputs = kind.calibrated(raw, temperature)
    edge, best, reference = (
        kind.losses(each, labels) for each in (outputs, predictions.served(pair.best).of(chosen), originals.of(chosen))
    )
    scores = kind.score_all(outputs, pair.score)
    return measured_condition(
        arrived.quality, arrived.band, temperature, scores, edge, best, reference, CERTIFIED_DROPS
    )


def measured_condition(
    quality: int,
    band: Band,
    temperature: float,
    scores: Floats,
    edge: Floats,
    best: Floats,
    reference: Floats,
    drops: Sequence[float],
) -> ReceivedCondition:
    """The condition by scores and losses of n images: of the edge and the reference stage as received, and of the
    reference stage on the originals.
    """
    rising = np.sort(scores)[np.linspace(0, len(scores) - 1, SCORE_KNOTS).round().astype(np.intp)]
    lost, nothing = best - reference, np.zeros(len(scores))
    everything = ReceivedThreshold(
        max_drop=round(float(min(1.0, _bounds(np.array([lost.sum()]), np.array([(lost**2).sum()]), len(lost))[0])), 4),
        threshold="always",
        escalation=1.0,
    )
    return ReceivedCondition(
        min_quality=quality,
        min_received_fraction=band.low,
        edge_temperature=temperature,
        edge_accuracy=round(float(1.0 - edge.mean()), 6),
        accepts_edge=band.believed,
        scores=tuple(round(min(max(float(score), 0.0), 1.0), 6) for score in rising),
        thresholds=(everything, *(_thresholds(scores, edge - best, lost, drops) if band.believed else ())),
        beyond_link=_thresholds(scores, edge - best, nothing, drops) if band.believed else (),
    )


def _thresholds(scores: Floats, more: Floats, lost: Floats, drops: Sequence[float]) -> tuple[ReceivedThreshold, ...]:
    """For each ε the lowest threshold from which on all stay below it; of several ε with one threshold the smallest.

    `lost` (n,) is lost by escalating an image, `more` (n,) in addition by accepting the edge's answer.
    """
    order = np.argsort(-scores, kind="stable")
    falling, total = scores[order], lost.sum() + np.cumsum(more[order])
    squares = (lost**2).sum() + np.cumsum((lost + more)[order] ** 2 - lost[order] ** 2)
    ends = np.append(np.flatnonzero(falling[1:] < falling[:-1]), len(falling) - 1)  # equal scores are accepted together
    bounds = np.maximum.accumulate(_bounds(total, squares, len(scores))[ends])
    found: dict[int, float] = {}
    for drop in drops:
        within = int(np.searchsorted(bounds, drop, side="right"))
        if within:
            found.setdefault(int(ends[within - 1]), drop)
    return tuple(
        ReceivedThreshold(
            max_drop=round(drop, 6),
            threshold="never" if end == len(falling) - 1 else round(min(max(float(falling[end]), 0.0), 1.0), 8),
            escalation=round(1.0 - (end + 1) / len(falling), 6),
        )
        for end, drop in found.items()
    )


def _bounds(total: Floats, squares: Floats, n: int) -> Floats:
    """What a mean hardly exceeds, from sums over n images and of their squares, had one more image been lost."""
    mean = (total + 1.0) / (n + 1)
    return mean + HARDLY * np.sqrt(np.maximum((squares + 1.0) / (n + 1) - mean**2, 0.0) / (n + 1))


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
