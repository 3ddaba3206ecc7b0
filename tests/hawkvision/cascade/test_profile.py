"""Profiles as files, and how data is split to make them."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.cascade.certificate import paired_exact_p
from hawkvision.cascade.profile import dump, load_profile, threshold_value
from hawkvision.cascade.profiling import balanced_drop, profile_rung, split_indices
from hawkvision.cascade.scores import softmax
from hawkvision.errors import ManifestError
from tests.hawkvision.cascade.synthetic import SHA, make_logits, make_profile


def test_profile_survives_the_file(tmp_path: Path) -> None:
    profile = make_profile()
    path = tmp_path / "profile.json"
    path.write_bytes(dump(profile))
    assert load_profile(path) == profile


def test_same_seed_gives_the_same_bytes() -> None:
    again = make_profile.__wrapped__(seed=3, n=600)
    assert dump(make_profile.__wrapped__(seed=3, n=600)) == dump(again)


def test_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="hawkvision calibrate"):
        load_profile(tmp_path / "none.json")


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    path = Path("/tmp") / f"hawkvision-profile-{abs(hash(data))}.json"
    path.write_bytes(data)
    try:
        with pytest.raises(ManifestError, match=path.name):
            load_profile(path)
    finally:
        path.unlink()


def test_unknown_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(dump(make_profile()).replace(b'"format": 2,', b'"format": 1, "fromat": 2,', 1))
    with pytest.raises(ManifestError, match="fromat"):
        load_profile(path)


def test_words_stand_for_infinite_thresholds() -> None:
    assert threshold_value("always") == math.inf
    assert threshold_value("never") == -math.inf
    assert threshold_value(0.25) == 0.25


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=3, max_size=300), st.integers(0, 2**32 - 1))
def test_splits_are_disjoint_and_cover_everything(groups: list[str], seed: int) -> None:
    split = split_indices(np.array(groups), seed)
    together = np.concatenate([split.profile, split.certify, split.held_out])
    assert sorted(together.tolist()) == list(range(len(groups)))


@given(st.lists(st.integers(0, 40), min_size=10, max_size=300), st.integers(0, 2**32 - 1))
def test_no_part_is_empty_however_small_the_groups(groups: list[int], seed: int) -> None:
    split = split_indices(np.array(groups, np.str_), seed)
    assert min(len(split.profile), len(split.certify), len(split.held_out)) > 0


def test_pictures_with_a_source_each_are_split_as_one_group() -> None:
    split = split_indices(np.array([f"{i}.jpg" for i in range(1_000)]), seed=1)
    assert (len(split.profile), len(split.certify), len(split.held_out)) == (200, 500, 300)


def test_splits_keep_the_mixture_of_sources() -> None:
    groups = np.array(["a"] * 600 + ["b"] * 400)
    split = split_indices(groups, seed=1)
    assert (groups[split.certify] == "a").mean() == pytest.approx(0.6)
    assert len(split.profile) == 200


@pytest.mark.parametrize("seed", range(5))
def test_scores_that_are_certified_are_those_of_the_written_temperature(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, 500)
    logits = make_logits(rng, labels, 3.0)
    split = split_indices(labels.astype(str), seed=1)
    rung, probabilities = profile_rung("small", {"small": SHA}, SHA, logits, labels, split, SHA)
    np.testing.assert_array_equal(probabilities, softmax(logits, rung.temperature))


@pytest.mark.parametrize(("gap", "drop"), [(0.2, 0.05), (0.04, 0.01), (0.005, 0.0025), (0.0, 0.0), (-0.1, 0.0)])
def test_balanced_gives_up_a_quarter_of_the_gap_and_never_more_than_half(gap: float, drop: float) -> None:
    assert balanced_drop(gap, n=680, delta=0.05) == pytest.approx(drop)


def test_balanced_asks_for_no_less_than_the_pictures_can_show() -> None:
    assert paired_exact_p(0, 0, n=680, max_drop=0.25 * 0.0257) > 0.05
    assert paired_exact_p(0, 0, n=680, max_drop=balanced_drop(0.0257, n=680, delta=0.05)) <= 0.05
