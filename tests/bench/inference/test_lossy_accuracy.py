"""The benchmark's own arithmetic: fair budgets, honest losses, goals that can be missed."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import simplejpeg

from hawkvision.core.types import Pixels
from hawkvision.transport.coding.image_coding import Plan
from hawkvision.transport.protocol.wire import OVERHEAD
from tests.bench.inference.lossy_accuracy import (
    BURST,
    DatagramLink,
    LossCell,
    Sender,
    cost,
    cut_at_first_loss,
    missed,
    pixels_of,
)

NOTHING_LOST = np.zeros(1024, np.bool_)


def scene() -> Pixels:
    rng = np.random.default_rng(0)
    smooth = cv2.resize(rng.integers(0, 256, (8, 8, 3), np.uint8), (227, 227), interpolation=cv2.INTER_CUBIC)
    pixels: Pixels = np.clip(smooth + rng.normal(0, 25, smooth.shape), 0, 255).astype(np.uint8)
    return pixels


@pytest.mark.parametrize("plan", [Plan(0, 0.2), Plan(0, 2.0), Plan(0, 0.25, base=True)])
def test_fitted_images_take_no_more_than_the_budget_and_nearly_all_of_it(plan: Plan) -> None:
    sent = Sender(scene(), 20_000).fitted(plan, NOTHING_LOST)
    assert 0.9 < sent.bytes_ratio <= 1.0
    assert sent.fraction == 1.0


def test_cost_counts_every_header() -> None:
    sender = Sender(scene(), 20_000)
    coded = sender._fit(Plan(0, 1.0))
    assert cost(coded) == sum(len(symbol) + OVERHEAD for symbol in coded.symbols)


@pytest.mark.parametrize("loss", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("bursty", [False, True])
def test_losses_are_as_frequent_and_as_long_as_they_claim(loss: float, bursty: bool) -> None:
    link = DatagramLink(loss, bursty)
    lost = link.pattern(3, 200_000)
    runs = np.count_nonzero(np.diff(lost.astype(int)) == 1)
    assert lost.mean() == pytest.approx(loss, abs=0.02)
    assert lost.sum() / runs == pytest.approx(BURST if bursty else 1 / (1 - loss), rel=0.05)


def test_plain_images_end_at_the_first_loss() -> None:
    body = simplejpeg.encode_jpeg(scene(), 85, "RGB", "420")
    slices = [body[start : start + 1180] for start in range(0, len(body), 1180)]
    assert cut_at_first_loss(slices, NOTHING_LOST).body == body
    fourth = cut_at_first_loss(slices, np.arange(1024) == 3)
    assert fourth.body is not None
    pixels, whole = pixels_of(fourth.body), pixels_of(body)
    assert np.array_equal(pixels[:8], whole[:8])
    assert pixels[-16:].std() == 0
    assert cut_at_first_loss(slices, np.arange(1024) == 0).body is None


def test_a_missed_goal_is_said() -> None:
    good = LossCell("m", "adaptive", 0.1, False, 0.8, 0.009, 0.005, 1.0, 1.0, 80.0, 1.0)
    bad = LossCell("m", "adaptive", 0.1, True, 0.7, 0.061, 0.005, 1.0, 1.0, 80.0, 1.0)
    assert missed([good], "m") == []
    assert missed([good, bad], "m") == ["m loses 0.061 at 10% in bursts; allowed are 0.06"]
    assert missed([bad], "other") == []
