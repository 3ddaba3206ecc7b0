"""No image that trained a network is ever used to calibrate, certify or test it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import split_indices
from hawkvision.cascade.certification.profile import ProfileData
from hawkvision.core.errors import ManifestError
from hawkvision.model_zoo.calibration.splits import split_again, split_images, training_mask
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.manifest import Cascade, FileSource, InputSpec, Manifest, Training, Variant
from hawkvision.system.files import sha256_of

DATA = "d" * 64


def manifest(training: Training | None) -> Manifest:
    spec = InputSpec(height=8, width=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    variant = Variant(
        name="only", architecture="convnet_tiny", precision="fp32", license="MIT",
        source=FileSource(file="weights/only.safetensors", sha256="0" * 64), input=spec,
    )  # fmt: skip
    cascade = Cascade(edge=("only",), dc=("only",), default_edge="only")
    return Manifest(
        format=1, task="t", labels="labels.txt", classes=3, cascade=cascade, variants=(variant,), training=training
    )


def images(is_test: NDArray[np.bool_], sha256: str = DATA) -> LabelledImages:
    n = len(is_test)
    return LabelledImages("set", sha256, [b"%d" % i for i in range(n)], np.arange(n) % 3, np.full(n, "x"), is_test)


@given(n=st.integers(20, 300), test=st.integers(0, 10), train_seed=st.integers(0, 99), seed=st.integers(0, 99))
@settings(deadline=None)
def test_no_training_image_is_in_any_part(n: int, test: int, train_seed: int, seed: int) -> None:
    given_images = images(np.arange(n) >= n - test)
    training = Training(data_sha256=DATA, images=n // 3, seed=train_seed)
    trained = training_mask(given_images.is_test, n // 3, train_seed)
    split = split_images(manifest(training), given_images, seed)
    used = np.concatenate([split.profile, split.certify, split.held_out])
    assert not trained[used].any()
    assert sorted(used) == np.flatnonzero(~trained).tolist()


def test_test_images_are_held_out_and_the_rest_divided_by_label() -> None:
    given_images = images(np.arange(1_300) >= 1_000)
    split = split_images(manifest(Training(data_sha256=DATA, images=400, seed=1)), given_images, seed=5)
    assert split.held_out.tolist() == list(range(1_000, 1_300))
    assert len(split.profile) + len(split.certify) == 600
    assert abs(len(split.profile) - 150) <= 3  # rounded once a label
    shares = np.bincount(given_images.labels[split.profile]) / np.bincount(
        given_images.labels[np.concatenate([split.profile, split.certify])]
    )
    np.testing.assert_allclose(shares, 0.25, atol=0.005)


def test_the_seed_moves_the_parts_but_not_the_training_images() -> None:
    given_images = images(np.arange(600) >= 500)
    training = Training(data_sha256=DATA, images=200, seed=1)
    first, second = (split_images(manifest(training), given_images, seed) for seed in (1, 2))
    assert set(first.profile) != set(second.profile)
    assert {*first.profile, *first.certify} == {*second.profile, *second.certify}


def test_without_test_images_a_part_is_still_held_out() -> None:
    split = split_images(
        manifest(Training(data_sha256=DATA, images=400, seed=1)), images(np.zeros(1_000, np.bool_)), seed=5
    )
    assert (len(split.profile), len(split.certify), len(split.held_out)) == (120, 300, 180)


@pytest.mark.parametrize("training", [None, Training(data_sha256="e" * 64, images=400, seed=1)])
def test_other_images_are_divided_as_ever(training: Training | None) -> None:
    given_images = images(np.arange(600) >= 500)
    split, expected = split_images(manifest(training), given_images, 5), split_indices(given_images.sources, 5)
    np.testing.assert_array_equal(split.certify, expected.certify)
    np.testing.assert_array_equal(split.held_out, expected.held_out)


def test_a_manifest_that_claims_too_many_training_images_is_refused() -> None:
    with pytest.raises(ManifestError, match="700 images are to train"):
        split_images(manifest(Training(data_sha256=DATA, images=700, seed=1)), images(np.zeros(600, np.bool_)), 1)


@given(n=st.integers(2, 200), seed=st.integers(0, 2**32), share=st.floats(0, 0.9))
def test_training_images_are_as_many_as_asked_and_never_test_images(n: int, seed: int, share: float) -> None:
    is_test = np.arange(n) % 5 == 1
    train = max(1, int(share * int((~is_test).sum())))
    if train == int((~is_test).sum()):
        return
    mask = training_mask(is_test, train, seed)
    assert mask.sum() == train
    assert not (mask & is_test).any()


def test_the_choice_of_training_images_never_changes() -> None:
    """The committed networks were trained on these; another choice would let training images certify them."""
    mask = training_mask(np.arange(55_000) >= 50_000, 42_000, 2405)
    assert sha256_of(np.packbits(mask).tobytes())[:16] == "213fc6184f23564f"


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ManifestError, match="10 images are to train and some to certify, but only 10 exist"):
        training_mask(np.arange(12) >= 10, 10, 1)


def test_a_profile_fitted_on_images_that_trained_a_model_is_certified_anew_on_the_others_only() -> None:
    trained = np.arange(40) % 3 == 0
    some = replace(images(np.zeros(40, np.bool_)), trained=trained)
    data = ProfileData(name="set", sha256=DATA, seed=5, profile=int(trained.sum()), certify=26, held_out=0)
    split = split_again(manifest(None), some, data)
    assert split.profile.tolist() == np.flatnonzero(trained).tolist()
    assert split.certify.tolist() == np.flatnonzero(~trained).tolist()
    left_out = split_images(manifest(None), some, 5)
    assert not trained[left_out.used()].any()


def test_a_copy_of_an_image_is_in_no_part() -> None:
    given_images = images(np.arange(200) >= 160)
    bodies = list(given_images.bodies)
    trained = np.flatnonzero(training_mask(given_images.is_test, 60, 1))
    free = np.flatnonzero(~training_mask(given_images.is_test, 60, 1) & ~given_images.is_test)
    bodies[free[0]], bodies[free[1]], bodies[free[3]] = bodies[trained[0]], bodies[170], bodies[free[2]]
    with_copies = replace(given_images, bodies=bodies)
    own = split_images(manifest(Training(data_sha256=DATA, images=60, seed=1)), with_copies, seed=5)
    assert set(own.used()) == set(range(200)) - set(trained) - {free[0], free[1], max(free[2], free[3])}
    other = split_images(manifest(None), with_copies, seed=5)
    assert len({bodies[i] for i in other.used()}) == len(other.used()) == len(set(bodies))


def test_a_copy_of_an_image_that_trained_a_model_is_no_evidence() -> None:
    given_images = images(np.zeros(200, np.bool_))
    bodies = list(given_images.bodies)
    bodies[150] = bodies[3]
    marked = replace(given_images, bodies=bodies, trained=np.arange(200) < 20)
    assert 150 not in split_images(manifest(None), marked, seed=5).used()
    assert 150 not in split_images(manifest(None), marked, seed=5, fit_on_trained=True).certify
