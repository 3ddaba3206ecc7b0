"""Images as a lossy link delivers them, and a calibration that measures them."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certification.profile import threshold_value
from hawkvision.cascade.policy import Policy
from hawkvision.core.types import MaxAccuracyDrop, Received
from hawkvision.imaging.preprocessing import probe
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.model_zoo.calibration.loss_simulation import (
    BANDS,
    Band,
    ReceivedImages,
    loss_order,
    measured_condition,
    received_images,
    transcoded,
)
from hawkvision.models.datasets import LabelledImages
from hawkvision.transport.client.encoding_plan import prepare
from hawkvision.transport.coding.image_coding import Plan
from hawkvision.transport.coding.rate_fec_control import QUALITIES
from hawkvision.transport.protocol.wire import FRAGMENT_ROOM
from tests.hawkvision.model_zoo.band_task import write_band_task

COUNT, SIDE = 6, 256


@functools.cache
def images() -> LabelledImages:
    """Photographs would be as busy as these, of a dozen fragments each."""
    bodies = []
    for seed in range(COUNT):
        rng = np.random.default_rng(seed)
        done, data = cv2.imencode(".png", cv2.resize(rng.integers(0, 256, (80, 80, 3), np.uint8), (256, 256)))
        assert done
        bodies.append(data.tobytes())
    marks = np.zeros(COUNT, np.int64)
    return LabelledImages("busy", "b" * 64, bodies, marks, marks.astype(np.str_), marks.astype(np.bool_))


@functools.cache
def arrived(seed: int = 4) -> tuple[ReceivedImages, ...]:
    return tuple(received_images(images(), np.arange(COUNT - 1), seed, SIDE))


@given(st.integers(1, 60), st.floats(1.0, 9.0), st.integers(0, 2**32))
def test_every_fragment_is_lost_once(k: int, burst: float, seed: int) -> None:
    assert sorted(loss_order(k, burst, np.random.default_rng(seed))) == list(range(k))


def test_bursts_take_neighbours() -> None:
    rng = np.random.default_rng(2)

    def steps(burst: float) -> int:
        orders = [loss_order(40, burst, rng)[:10] for _ in range(50)]
        return sum(after - before == 1 for order in orders for before, after in itertools.pairwise(order))

    assert steps(4.0) > 5 * steps(1.0)


def test_conditions_come_finest_first_and_complete_first() -> None:
    places = [(found.quality, found.band.low) for found in arrived()]
    assert places == sorted(places, reverse=True)
    assert [place for place in places if place[1] == 1.0] == [(quality, 1.0) for quality in QUALITIES]
    assert {found.band for found in arrived() if found.quality == QUALITIES[0]} == set(BANDS)


def test_what_was_received_lies_within_the_band() -> None:
    for found in arrived():
        low, high, _ = found.band
        assert np.all(found.fractions >= low)
        assert np.all((found.fractions < high) | (found.fractions == low))


def test_what_arrives_is_an_ordinary_image_of_the_same_size() -> None:
    for found in arrived():
        for number in found.reached:
            header = probe(found.images.bodies[number])
            assert (header.width, header.height) == (256, 256)


def test_a_large_image_is_measured_as_a_sender_sends_it() -> None:
    """It is made smaller first, so that a fragment holds a larger part of it."""
    rng = np.random.default_rng(1)
    done, data = cv2.imencode(".png", cv2.resize(rng.integers(0, 256, (80, 120, 3), np.uint8), (1500, 1000)))
    assert done
    plan = Plan(QUALITIES[0], 0.0)
    measured, sent = transcoded(data.tobytes(), plan, SIDE), prepare(data.tobytes(), plan, SIDE, FRAGMENT_ROOM)[0]
    assert measured == sent
    assert (measured.format.width, measured.format.height) == (384, 256)


def test_images_that_were_not_chosen_are_left_alone() -> None:
    for found in arrived():
        assert COUNT - 1 not in found.reached
        assert found.images.bodies[COUNT - 1] == images().bodies[COUNT - 1]


def test_the_same_seed_loses_the_same_and_another_does_not() -> None:
    again, other = tuple(received_images(images(), np.arange(COUNT - 1), 4, SIDE)), arrived(5)
    assert [found.images.sha256 for found in again] == [found.images.sha256 for found in arrived()]
    for mine, theirs in zip(arrived(), other, strict=False):
        if mine.band.low < 1.0:
            assert mine.images.sha256 != theirs.images.sha256


def test_a_coarser_image_is_fewer_fragments() -> None:
    counts = [transcoded(images().bodies[0], Plan(quality, 0.0), SIDE).format.k for quality in QUALITIES]
    assert counts == sorted(counts, reverse=True)


@given(st.integers(0, 2**32 - 1), st.integers(20, 400), st.floats(0.0, 0.4))
def test_thresholds_of_received_images_lose_no_more_than_they_say(seed: int, n: int, harm: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 50, n) / 50.0  # many are equal
    edge, best, reference = (rng.random((3, n)) < np.stack([1.0 - scores, np.full(n, harm), np.zeros(n)])).astype(float)
    found = measured_condition(80, Band(0.75, 0.9), 1.0, scores, edge, best, reference, (0.02, 0.1, 0.3, 0.9))
    assert (found.thresholds[0].threshold, found.thresholds[0].escalation) == ("always", 1.0)
    assert found.thresholds[0].max_drop >= (best - reference).mean() + 1 / (n + 1) - 1e-3
    for thresholds, escalated in ((found.thresholds[1:], best - reference), (found.beyond_link, np.zeros(n))):
        assert list(thresholds) == sorted(thresholds, key=lambda each: each.max_drop)
        for each in thresholds:
            accepted = scores >= threshold_value(each.threshold)
            assert np.where(accepted, edge - best + escalated, escalated).mean() <= each.max_drop
            assert each.escalation == pytest.approx(1.0 - accepted.mean(), abs=1e-6)
    unbelieved = measured_condition(80, Band(0.0, 0.6, believed=False), 1.0, scores, edge, best, reference, (0.9,))
    assert (len(unbelieved.thresholds), unbelieved.beyond_link) == (1, ())


@pytest.mark.slow
def test_a_cascade_of_small_images_has_thresholds_for_the_qualities_that_reach_it(tmp_path: Path) -> None:
    """Eight pixels make one fragment: it arrives or does not, so there are no bands."""
    task = write_band_task(tmp_path)
    profile = calibrate(
        "bands", task.data, tmp_path / "datagram.json", seed=3, datagram=True, models=task.models, cache=task.cache
    )
    pair = profile.pairs[0]
    assert [(c.min_quality, c.min_received_fraction) for c in pair.received] == [(q, 1.0) for q in QUALITIES]
    route = Policy(profile, pair.edge, pair.best).route(MaxAccuracyDrop(0.3), Received(1.0, QUALITIES[0]))
    assert route.threshold < math.inf
    assert route.temperature == pair.received[0].edge_temperature
