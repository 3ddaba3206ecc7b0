"""The study of loss-augmented fine-tuning: its partial images are as asked, and its table counts what it says."""

from __future__ import annotations

import functools
import subprocess
import sys

import cv2
import numpy as np
import pytest

from hawkvision.core.types import Pixels
from hawkvision.models.manifest import InputSpec
from hawkvision.transport.coding.image_coding import Coded, encode
from tests.bench.inference.lossy_accuracy import DatagramLink
from tests.bench.inference.lossy_finetune import (
    PLAN,
    ROOM,
    VIEWS,
    Arrivals,
    Judge,
    arrivals,
    gain,
    holed,
    holed_views,
    on_air,
    row_of,
    whole_views,
)

SPEC = InputSpec(height=32, width=32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
COUNT = 300


@functools.cache
def originals() -> Pixels:
    """Coloured blots of 32×32 pixels, in which every block differs from the others."""
    rng = np.random.default_rng(4)
    drawn = [cv2.resize(rng.integers(0, 256, (7, 7, 3), np.uint8), (32, 32)) for _ in range(COUNT)]
    return np.stack(drawn)


@functools.cache
def coded() -> tuple[Coded, ...]:
    return tuple(encode(pixels, PLAN, ROOM) for pixels in originals())


def came(link: DatagramLink) -> Arrivals:
    return arrivals(link, coded(), np.arange(COUNT), SPEC)


def says(*classes: int) -> Judge:
    return lambda pixels: np.array(classes)


def test_images_take_up_to_four_datagrams_of_which_none_is_longer_than_the_room() -> None:
    assert {one.format.k for one in coded()} >= {2, 4}
    assert max(len(symbol) for one in coded() for symbol in one.symbols) <= ROOM
    assert all(one.format.k == one.format.n <= 4 for one in coded())
    assert all(on_air(one) == sum(len(symbol) + 50 for symbol in one.symbols) for one in coded())


def test_partial_images_are_the_same_every_time_and_one_images_views_are_not() -> None:
    first, again = (holed_views(coded()[:20], SPEC) for _ in range(2))
    assert first.shape == (VIEWS, 20, 32, 32, 3)
    assert np.array_equal(first, again)
    assert len(np.unique(first.reshape(VIEWS, -1), axis=0)) == VIEWS


def test_partial_image_of_several_fragments_is_never_whole() -> None:
    whole = whole_views(coded(), SPEC)[0]
    views = holed_views(coded(), SPEC)
    several = np.array([one.format.k > 1 for one in coded()])
    differs = (views != whole).any(axis=(2, 3, 4))
    assert differs[:, several].all()


def test_every_loss_that_leaves_a_part_of_an_image_is_drawn() -> None:
    image = next(one for one in coded() if one.format.k == 4)
    bodies = {holed(image, np.random.default_rng(seed)) for seed in range(500)}
    # 4 ways to lose one fragment, 6 to lose two, 4 to lose three.
    assert len(bodies) == 14


@pytest.mark.parametrize(
    "link", [DatagramLink(0.1, False), DatagramLink(0.3, False), DatagramLink(0.7, False), DatagramLink(0.3, True)]
)
def test_share_that_comes_is_as_the_link_says(link: DatagramLink) -> None:
    fractions = came(link).fractions
    # Four standard errors; they are larger where a burst takes whole images.
    assert abs(fractions.mean() - (1 - link.loss)) < 4 * fractions.std() / np.sqrt(COUNT)
    assert np.array_equal(fractions, came(link).fractions)


def test_image_that_lost_nothing_is_close_to_the_original() -> None:
    arrived = came(DatagramLink(0.0, bursty=False))
    assert (arrived.fractions == 1).all()
    assert np.abs(arrived.pixels.astype(int) - originals()).mean() < 12
    assert np.array_equal(whole_views(coded(), SPEC)[0], arrived.pixels)


def test_image_of_which_nothing_came_is_wrong_for_every_contender() -> None:
    arrived = Arrivals(DatagramLink(0.5, False), np.zeros((4, 32, 32, 3), np.uint8), np.array([0.0, 0.0, 1.0, 1.0]))
    row = row_of(arrived, np.array([0, 1, 0, 1]), [says(0, 1, 0, 1)] * 3)
    assert row.top1 == (0.5, 0.5, 0.5)
    assert (row.nothing, row.partial, row.among_partial) == (0.5, 0.0, None)


def test_gains_are_paired_and_partial_images_are_counted_apart() -> None:
    arrived = Arrivals(DatagramLink(0.5, False), np.zeros((4, 32, 32, 3), np.uint8), np.array([0.5, 0.25, 1.0, 1.0]))
    row = row_of(arrived, np.zeros(4, np.int64), [says(1, 1, 0, 1), says(0, 1, 0, 1), says(0, 0, 0, 1)])
    assert row.top1 == (0.25, 0.5, 0.75)
    assert row.over_committed == gain(np.array([1.0, 1.0, 0.0, 0.0]))
    assert row.over_committed.error == pytest.approx(0.25)
    assert row.over_control.mean == 0.25
    assert row.among_partial is not None
    assert (row.among_partial.before, row.among_partial.after) == (0.0, 1.0)


def test_without_torch_the_extra_to_install_is_named() -> None:
    program = "import sys; from tests.bench.inference.lossy_finetune import main;"
    program += " sys.modules['torch'] = None; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "--data", "none.npz"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'hawkvision[models]'" in done.stderr
