"""How images are prepared for the datagram transport, and plans for them chosen."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import BadField, BadImage, UnsupportedMedia
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import decode as decode_image
from hawkvision.imaging.preprocessing import probe
from hawkvision.transport.client.encoding_plan import (
    ANSWER_S,
    GOOD_S,
    MAX_SPARE,
    MIN_SEND_S,
    SMALL_FRAGMENTS,
    Planner,
    plain_bytes,
    prepare,
    repairs,
    spare_ratio,
)
from hawkvision.transport.coding.image_coding import Complete, Plan, decode
from hawkvision.transport.coding.rate_fec_control import FINE_SIZE, QUALITIES, choose
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.protocol.image_format import Kind
from hawkvision.transport.protocol.wire import MAX_NACKS
from tests.images import encoded, with_restarts
from tests.odd_images import odd_jpegs

ROOM = 1150
FINE, COARSE = Plan(80, 0.5), Plan(27, 2.0)
LARGE = encoded(height=300, width=400)
QUIET = LossEstimate(0.0, 1.0, known=True)
LOUD = LossEstimate(0.3, 1.0, known=True)
STATES = st.builds(LossEstimate, st.floats(0.0, 0.9), st.floats(1.0, 10.0), known=st.booleans())


def received(body: bytes | Pixels, plan: Plan = FINE, useful_side: int = 256, **options: bool) -> Complete:
    """What arrives of an image if nothing is lost."""
    coded, header = prepare(body, plan, useful_side, ROOM, **options)
    arrived = decode(coded.format, dict(enumerate(coded.symbols)), header)
    assert isinstance(arrived, Complete)
    return arrived


# ------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg"])
def test_small_images_go_as_they_are(suffix: str) -> None:
    body = encoded(suffix, 32, 32)
    assert len(body) <= SMALL_FRAGMENTS * ROOM
    assert received(body, COARSE) == Complete(body, None)


@pytest.mark.parametrize("suffix", [".bmp", ".tiff"])
def test_formats_that_not_every_node_reads_are_encoded_anew_unless_lossless(suffix: str) -> None:
    body = encoded(suffix, height=20, width=20)
    assert received(body).body.startswith(b"\xff\xd8\xff")
    assert received(body, lossless=True).body == body


def test_large_images_are_scaled_to_the_useful_side_and_encoded_at_the_plans_quality() -> None:
    arrived = received(LARGE, useful_side=128)
    header = probe(arrived.body)
    assert (header.width, header.height, arrived.quality) == (171, 128, 80)


def test_images_no_larger_than_useful_keep_their_size() -> None:
    header = probe(received(encoded(".png", 100, 140), useful_side=256).body)
    assert (header.width, header.height) == (140, 100)


def test_a_jpeg_with_restarts_keeps_its_coefficients() -> None:
    body = with_restarts()
    arrived = received(body)
    for each in (body, arrived.body):
        assert probe(each).pixels == 256 * 256
    before, after = (decode_image(each, probe(each), max_pixels=1 << 20, min_side=256) for each in (body, arrived.body))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("plan", "useful_side", "options"), [(COARSE, 256, {}), (FINE, 128, {}), (FINE, 256, {"may_reframe": False})]
)
def test_a_jpeg_with_restarts_is_encoded_anew_if_its_own_form_does_not_fit(
    plan: Plan, useful_side: int, options: dict[str, bool]
) -> None:
    arrived = received(with_restarts(quality=60), plan, useful_side, **options)
    assert arrived.quality == plan.quality
    assert min(probe(arrived.body).width, probe(arrived.body).height) == useful_side


def test_a_jpeg_turned_by_exif_arrives_upright() -> None:
    tag = b"\xff\xe1\x00\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    turned = LARGE[:2] + tag + LARGE[2:]
    assert probe(turned).orientation == 6
    header = probe(received(turned, useful_side=300).body)
    assert (header.width, header.height) == (300, 400)


ODD = odd_jpegs(cv2.resize(decode_image(LARGE, probe(LARGE), max_pixels=1 << 20, min_side=300), (208, 152)))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("plan", [FINE, COARSE])
def test_an_odd_jpeg_arrives_with_the_pixels_of_its_valid_twin(kind: str, plan: Plan) -> None:
    odd = ODD[kind]
    twin = decode_image(odd.twin, probe(odd.twin), max_pixels=1 << 20, min_side=300).astype(int)
    for lossless in (False, True):
        arrived = received(odd.body, plan, lossless=lossless).body
        seen = decode_image(arrived, probe(arrived), max_pixels=1 << 20, min_side=300)
        assert seen.shape == twin.shape
        assert np.abs(seen - twin).mean() < (1 if lossless else 12)


def test_pixels_are_coded_as_they_are_seen() -> None:
    pixels = np.zeros((64, 80, 3), np.uint8)
    pixels[..., 0] = 250
    arrived = received(pixels)
    seen = decode_image(arrived.body, probe(arrived.body), max_pixels=1 << 20, min_side=64)
    assert seen[..., 0].min() > 200
    assert seen[..., 2].max() < 50


@pytest.mark.parametrize(
    "pixels", [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.float32), np.zeros((0, 8, 3), np.uint8)]
)
def test_what_are_no_pixels_is_refused(pixels: Any) -> None:
    with pytest.raises(BadField, match="uint8 RGB"):
        prepare(pixels, FINE, 256, ROOM)


@given(
    STATES, st.sampled_from([".jpg", ".png", ".webp"]), st.integers(1, 120), st.integers(1, 120), st.integers(1, 256)
)
def test_every_image_fits_its_room_and_survives_as_many_losses_as_it_has_parity(
    state: LossEstimate, suffix: str, height: int, width: int, useful_side: int
) -> None:
    coded = prepare(encoded(suffix, height, width), choose(state, None), useful_side, ROOM)[0]
    assert max(map(len, coded.symbols)) <= ROOM
    last = dict(list(enumerate(coded.symbols))[coded.format.n - coded.format.k :])
    assert isinstance(decode(coded.format, last), Complete)


@given(st.binary(max_size=5_000))
def test_bytes_that_are_no_image_are_refused(body: bytes) -> None:
    with pytest.raises((BadImage, UnsupportedMedia)):
        prepare(body, FINE, 256, ROOM)


def test_a_cut_off_image_is_refused_before_it_is_sent() -> None:
    with pytest.raises(BadImage):
        prepare(LARGE[: len(LARGE) // 2], FINE, 128, ROOM)


def test_the_plain_size_is_what_coding_would_take_or_the_image_itself() -> None:
    assert plain_bytes(np.zeros((512, 512, 3), np.uint8), 256) == plain_bytes(np.zeros((256, 256, 3), np.uint8), 512)
    assert plain_bytes(encoded(".webp", 32, 32), 256) <= len(encoded(".webp", 32, 32))


# ------------------------------------------------------------------------------------------------- plans


@given(st.floats(0.0, 100.0), st.none() | st.floats(1e-3, 60.0), st.floats(0.0, 1.0))
def test_spare_room_never_takes_more_than_its_share_of_the_deadline(
    plain_s: float, deadline_s: float | None, rtt_s: float
) -> None:
    ratio = spare_ratio(plain_s, deadline_s, rtt_s)
    assert 0.0 <= ratio <= MAX_SPARE
    assert ratio <= 1.0 or ratio * plain_s <= (0.01 if deadline_s is None else min(0.01, deadline_s / 10)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("left_s", "rounds"), [(-1.0, 0), (0.029, 0), (0.031, 1), (0.074, 1), (0.076, 2), (0.143, 3), (10.0, MAX_NACKS)]
)
def test_the_time_left_bounds_the_rounds_of_repair(left_s: float, rounds: int) -> None:
    assert repairs(left_s, 0.03) == rounds


@given(st.floats(1e-3, 1.0), st.floats(0.02, 1.0), st.floats(0.0, 0.5))
def test_plans_leave_time_for_the_response_if_the_link_allows(plain_s: float, deadline_s: float, rtt_s: float) -> None:
    ratio = spare_ratio(plain_s, deadline_s, rtt_s)
    assert ratio / FINE_SIZE * plain_s <= max(MIN_SEND_S, deadline_s - rtt_s - ANSWER_S) + 1e-9


def test_a_slow_link_gets_a_coarse_image_rather_than_a_part_of_a_fine_one() -> None:
    chosen = [choose(QUIET, ratio).quality for ratio in (2.0, 1.0, 0.7, 0.5, 0.4, 0.3, 0.0)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] == QUALITIES[0]
    assert chosen[-2:] == [QUALITIES[-1]] * 2


def test_an_unknown_link_gets_the_plan_for_unknown_links() -> None:
    assert Planner().plan(LossEstimate(0.0, 1.0, known=False), 1.0, 0.0) == choose(
        LossEstimate(0.0, 1.0, known=False), 1.0
    )


def test_protection_rises_at_once_and_falls_only_after_a_calm() -> None:
    planner = Planner()
    assert planner.plan(QUIET, 1.0, 0.0) == choose(QUIET, 1.0)
    assert planner.plan(LOUD, 1.0, 1.0) == choose(LOUD, 1.0)
    assert planner.plan(QUIET, 1.0, 2.0) == choose(LOUD, 1.0)
    assert planner.plan(QUIET, 1.0, 1.9 + GOOD_S) == choose(LOUD, 1.0)
    assert planner.plan(QUIET, 1.0, 2.0 + GOOD_S) == choose(QUIET, 1.0)


def test_another_spell_of_loss_restarts_the_wait_for_less_parity() -> None:
    planner = Planner()
    for seen, now in ((LOUD, 0.0), (QUIET, 1.0), (LOUD, GOOD_S), (QUIET, GOOD_S + 1.0)):
        planner.plan(seen, 1.0, now)
    assert planner.plan(QUIET, 1.0, 2 * GOOD_S) == choose(LOUD, 1.0)


def test_after_a_calm_the_plan_is_for_the_worst_that_it_saw() -> None:
    planner, middling = Planner(), LossEstimate(0.12, 1.0, known=True)
    for seen, now in ((LOUD, 0.0), (QUIET, 1.0), (middling, 2.0)):
        planner.plan(seen, 1.0, now)
    assert planner.plan(QUIET, 1.0, 1.0 + GOOD_S) == choose(middling, 1.0)


@given(st.lists(STATES, min_size=1, max_size=20))
def test_a_link_is_never_taken_to_lose_less_than_is_seen_now(states: list[LossEstimate]) -> None:
    planner = Planner()
    for number, seen in enumerate(states):
        held = planner.held(seen, number * 1.5)
        assert not seen.known or (held.known and held.ratio >= seen.ratio and held.burst >= seen.burst)


def test_kinds_of_coding_are_what_the_images_ask_for() -> None:
    (small, _), (cut, _) = prepare(encoded(".png", 16, 16), FINE, 256, ROOM), prepare(with_restarts(), FINE, 256, ROOM)
    assert (small.format.kind, cut.format.kind) == (Kind.OPAQUE, Kind.SEGMENTS)
