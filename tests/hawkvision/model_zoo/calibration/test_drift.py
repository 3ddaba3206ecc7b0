"""Corruptions, and the replay's accounting on a synthetic cascade."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.cascade.certification.certificate import Sample, StageOutcomes
from hawkvision.cascade.certification.predictions import Scored, make_sample, split_indices
from hawkvision.cascade.certification.profiling import profile_stage
from hawkvision.cascade.policy import Policy
from hawkvision.cascade.route import Route
from hawkvision.core.types import MaxAccuracyDrop, Pixels, Quality
from hawkvision.model_zoo.calibration.corruption import SEVERITIES, CorruptionKind, corrupt, mixed
from hawkvision.model_zoo.calibration.drift_replay import (
    SETTLING,
    AnsweringStage,
    Phase,
    alarm_delays,
    replay,
    subset,
    summarise,
)
from hawkvision.models.datasets import LabelledImages
from tests.fuzz.examples import examples
from tests.hawkvision.cascade.synthetic import KIND, SHA, make_logits, make_profile

PHASES = (Phase("clean", 3_000, False), Phase("shifted", 5_000, True), Phase("clean again", 1_000, False))
TIERS = list(AnsweringStage)


def shapes(side: int, n: int) -> list[Pixels]:
    """Images of a bright disc or a bright square on a dark ground, in turn."""
    images = []
    for i in range(n):
        image = np.full((side, side, 3), 60, np.uint8)
        low, high = side // 4, side - side // 4
        if i % 2:
            cv2.rectangle(image, (low, low), (high, high), (170, 150, 160), -1)
        else:
            cv2.circle(image, (side // 2, side // 2), side // 4, (170, 150, 160), -1)
        images.append(image)
    return images


@functools.cache
def pools(intermediate: bool = False) -> tuple[Route, Sample, Sample]:
    """A certified route, and its stages on 6,000 clean and on 6,000 harder images."""
    profile = make_profile(intermediate=intermediate)
    pair = profile.pairs[0]
    rng = np.random.default_rng(31)
    labels = rng.integers(0, 10, 6_000)
    everything = np.arange(len(labels))
    split = split_indices(np.full(len(labels), "a"), 0)

    def seen(strengths: tuple[float, float, float]) -> Sample:
        small, large, medium = (
            profile_stage(
                KIND, "r", {}, SHA, list(make_logits(rng, labels, strength)), labels.tolist(), split, SHA, 1.0
            )[1]
            for strength in strengths
        )
        between = Scored(medium, pair.intermediate.score) if pair.intermediate else None
        return make_sample(KIND, Scored(small, pair.score), large, labels.tolist(), everything, between)

    route = Policy(profile, "small", "large").route(MaxAccuracyDrop(0.05))
    assert not route.direct
    return route, seen((3.0, 8.0, 6.0)), seen((1.5, 6.0, 3.0))


@settings(max_examples=examples(200), deadline=None)
@given(
    kind=st.sampled_from(list(CorruptionKind)),
    severity=st.sampled_from(list(SEVERITIES)),
    height=st.integers(8, 48),
    width=st.integers(8, 48),
    number=st.integers(0, 10**6),
)
def test_corruption_keeps_shape_and_type_and_leaves_its_input_alone(
    kind: CorruptionKind, severity: int, height: int, width: int, number: int
) -> None:
    image = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    before = image.copy()
    worse = corrupt(kind, severity)(image, number)
    assert worse.shape == image.shape
    assert worse.dtype == np.uint8
    np.testing.assert_array_equal(image, before)
    np.testing.assert_array_equal(worse, corrupt(kind, severity)(image, number))


def test_noise_differs_from_image_to_image() -> None:
    image = shapes(32, 1)[0]
    noisy = corrupt(CorruptionKind.NOISE, 2)
    assert np.any(noisy(image, 1) != noisy(image, 2))


@pytest.mark.parametrize("kind", list(CorruptionKind))
@pytest.mark.parametrize("side", [32, 224])
def test_each_severity_moves_images_further_from_what_they_were(kind: CorruptionKind, side: int) -> None:
    images = shapes(side, 6)
    distance = [
        np.mean([np.abs(corrupt(kind, s)(p, i).astype(int) - p).mean() for i, p in enumerate(images)])
        for s in SEVERITIES
    ]
    assert all(after > before > 0.0 for before, after in itertools.pairwise(distance))


@pytest.mark.parametrize("kind", list(CorruptionKind))
def test_accuracy_falls_with_severity(kind: CorruptionKind) -> None:
    """Of a classifier that names the grating nearest to an 5x5 window; half of them have twice the others' contrast."""
    x = np.arange(32)
    gratings = [
        128.0 + amplitude * np.sin(2 * np.pi * (x[:, None] * np.sin(angle) + x * np.cos(angle)) / 5.0)
        for amplitude in (12.0, 24.0)
        for angle in np.linspace(0.0, np.pi, 6, endpoint=False)
    ]
    templates = np.stack([np.repeat(grating[..., None], 3, 2) for grating in gratings])
    labels = np.arange(600) % len(templates)
    noise = np.random.default_rng(5).normal(0.0, 10.0, (len(labels), 32, 32, 3))
    images = (templates[labels] + noise).round().clip(0, 255).astype(np.uint8)
    window = templates[:, 13:18, 13:18]

    def accuracy(severity: int) -> float:
        seen = np.stack([corrupt(kind, severity)(image, i) for i, image in enumerate(images)])[:, 13:18, 13:18]
        alike = np.tensordot(seen.astype(float), window, axes=([1, 2, 3], [1, 2, 3]))
        return float((((window**2).sum(axis=(1, 2, 3)) - 2 * alike).argmin(axis=1) == labels).mean())

    found = [accuracy(severity) for severity in SEVERITIES]
    assert all(after <= before + 0.02 for before, after in itertools.pairwise(found))
    assert found[-1] < found[0] - 0.05


@pytest.mark.parametrize("severity", [0, 6])
def test_unknown_severity_is_refused(severity: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 5"):
        corrupt(CorruptionKind.BLUR, severity)


def test_mixture_takes_the_kinds_in_turn() -> None:
    image = shapes(32, 1)[0]
    for number, kind in enumerate([*CorruptionKind, *CorruptionKind]):
        np.testing.assert_array_equal(mixed(2)(image, number), corrupt(kind, 2)(image, number))


def test_subset_has_the_chosen_images_and_a_hash_of_its_own() -> None:
    images = LabelledImages(
        "four", SHA, [b"a", b"b", b"c", b"d"], np.arange(4), np.array(list("wxyz")), np.zeros(4, np.bool_)
    )
    one, other = (subset(images, np.array(chosen, np.intp)) for chosen in ([1, 3], [1, 2]))
    assert one.bodies == [b"b", b"d"]
    assert one.labels.tolist() == [1, 3]
    assert len({one.sha256, other.sha256, images.sha256}) == 3


@pytest.mark.parametrize("intermediate", [False, True])
def test_same_seed_replays_the_same_and_another_does_not(intermediate: bool) -> None:
    route, clean, shifted = pools(intermediate)
    first, again, other = (replay(clean, shifted, route, seed=seed, phases=PHASES) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.threshold, again.threshold)
    np.testing.assert_array_equal(first.loss, again.loss)
    np.testing.assert_array_equal(first.audited, again.audited)
    assert np.any(first.loss != other.loss)


def test_without_control_escalation_and_drop_are_those_of_the_threshold() -> None:
    route, clean, shifted = pools()
    run = replay(clean, shifted, route, seed=1, phases=PHASES, control=None)
    assert not run.audited.any()
    assert run.alarm is None
    for part, sample in ((~run.shifted, clean), (run.shifted, shifted)):
        accepted = sample.edge.scores >= route.threshold
        drop = np.where(accepted, sample.edge.losses - sample.reference_losses, 0.0)
        sigma = np.sqrt(0.25 / part.sum())
        assert run.escalated[part].mean() == pytest.approx(1 - accepted.mean(), abs=4 * sigma)
        assert run.loss[part].mean() == pytest.approx(drop.mean(), abs=4 * drop.std() / np.sqrt(part.sum()))


@pytest.mark.parametrize("intermediate", [False, True])
def test_losses_are_those_of_the_stages_that_answered(intermediate: bool) -> None:
    """With one image in the pool every request's loss follows from who answered it."""
    route, _, _ = pools(intermediate)
    sure = StageOutcomes(np.array([0.99]), np.ones(1), np.ones(1))
    unsure = StageOutcomes(np.array([0.0]), np.ones(1), np.ones(1))
    clean, shifted = (Sample(edge, np.zeros(1), sure if intermediate else None) for edge in (sure, unsure))
    run = replay(clean, shifted, route, seed=2, phases=(Phase("a", 50, False), Phase("b", 50, True)), control=None)
    assert run.loss[:50].tolist() == [1] * 50
    assert run.tier[:50].tolist() == [TIERS.index(AnsweringStage.EDGE)] * 50
    believed = route.intermediate is not None
    assert (
        run.tier[50:].tolist() == [TIERS.index(AnsweringStage.INTERMEDIATE if believed else AnsweringStage.BEST)] * 50
    )
    assert run.loss[50:].tolist() == [int(believed)] * 50


def test_in_harder_traffic_control_gives_up_less_than_the_fixed_threshold() -> None:
    route, clean, shifted = pools()
    watched = [replay(clean, shifted, route, seed=s, phases=PHASES) for s in range(3)]
    blind = [replay(clean, shifted, route, seed=s, phases=PHASES, control=None) for s in range(3)]
    assert all(delay is None or delay >= 0 for delay in alarm_delays(watched)), "none is false"
    after, before = (summarise(runs, PHASES)[2] for runs in (watched, blind))
    assert after.name == "shifted, rest"
    assert after.drop < before.drop
    assert after.escalation > before.escalation


def test_a_best_stage_that_contradicts_every_answer_raises_the_alarm() -> None:
    route, clean, _ = pools()
    wrong = replace(clean, edge=replace(clean.edge, disagreements=np.ones(len(clean), np.bool_)))
    runs = [replay(clean, wrong, route, seed=s, phases=PHASES) for s in range(3)]
    assert all(delay is not None and 0 <= delay < 3_000 for delay in alarm_delays(runs))


def test_summary_is_what_a_direct_count_gives() -> None:
    route, clean, shifted = pools()
    runs = [replay(clean, shifted, route, seed=s, phases=PHASES) for s in range(2)]
    names = [summary.name for summary in summarise(runs, PHASES)]
    assert names == ["clean", "shifted, first 2,000", "shifted, rest", "clean again, first 1,000", "all"]
    rest = summarise(runs, PHASES)[2]
    part = slice(3_000 + SETTLING, 8_000)
    assert rest.drop == pytest.approx(np.mean([run.loss[part].sum() / 3_000 for run in runs]))
    assert rest.traffic == pytest.approx(np.mean([(run.escalated | run.audited)[part].mean() for run in runs]))


def test_a_direct_route_gives_nothing_up() -> None:
    _, clean, shifted = pools()
    route = Policy(make_profile(), "small", "large").route(Quality.BEST)
    run = replay(clean, shifted, route, seed=0, phases=PHASES)
    assert run.escalated.all()
    assert not run.loss.any()
