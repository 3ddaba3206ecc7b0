"""A kind of task whose losses are fractions, through calibration and certification as users run them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.profile_files import load_profile, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ConfigError
from hawkvision.core.types import AccuracyStatus, Basis, MaxAccuracyDrop, Quality
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.certificate import least_drop
from hawkvision.model_zoo.calibration.calibrate import calibrate
from hawkvision.model_zoo.calibration.certify import certify_site
from hawkvision.model_zoo.calibration.evidence import LabelReading, TrainedImages
from tests.hawkvision.command import invoke
from tests.hawkvision.model_zoo.quarters_task import QuartersTask, write_quarters_task

FIT = LabelReading(trained=TrainedImages.FIT)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> QuartersTask:
    return write_quarters_task(tmp_path_factory.mktemp("quarters"))


@pytest.fixture(scope="module")
def profile(task: QuartersTask) -> Profile:
    out = task.models / "quarters" / "profile.json"
    return calibrate("quarters", task.clean, out, seed=1, models=task.models, cache=task.cache)


def test_accuracies_are_mean_f1_with_an_interval(profile: Profile) -> None:
    dim, sharp = (profile.stage(name).accuracy for name in ("dim", "sharp"))
    assert 0.5 < dim.value < sharp.value - 0.02 < 1.0
    for each in (dim, sharp):
        assert each.low < each.value < each.high
        assert each.high - each.low < 0.2
        assert not math.isclose(each.value * each.n, round(each.value * each.n)), "a mean of fractions"


def test_no_certificate_claims_less_than_so_few_images_can_show(profile: Profile) -> None:
    condition = profile.pairs[0].conditions[0]
    least = least_drop(profile.data.certify, 0.05, binary=False)
    assert profile.data.certify == 200
    assert 1.0 - 0.05 ** (1 / 200) < least < 0.03
    drops = [each.max_drop for each in condition.certificates]
    assert drops
    assert min(drops) >= least
    assert all(each.observed_drop < each.max_drop for each in (*condition.certificates, condition.fast))
    assert any(each.to_best < 1.0 for each in condition.certificates)


def test_a_site_certifies_by_its_labels_on_images_that_trained_no_model(
    task: QuartersTask, profile: Profile, tmp_path: Path
) -> None:
    site = certify_site(
        "quarters", task.data, tmp_path / "site.json", reading=LabelReading(trained=TrainedImages.LEAVE_OUT),
        models=task.models, cache=task.cache,
    ).certificates  # fmt: skip
    assert site.data.n == 300, "a quarter of the images trained a model"
    condition = site.pairs[0].conditions[0]
    assert condition.fast.observed_drop < condition.fast.max_drop
    assert {each.n for each in condition.certificates} == {300}
    stated = Policy(profile, "dim", "sharp", site=site).route(Quality.FAST).guarantee.max_drop
    assert stated == stated_drop(condition.fast.max_drop)


def test_without_labels_the_agreement_is_certified_and_never_called_an_accuracy_drop(
    task: QuartersTask, profile: Profile, tmp_path: Path
) -> None:
    out = tmp_path / "site.json"
    certify_site("quarters", task.folder, out, labelled=False, models=task.models, cache=task.cache)
    policy = Policy(profile, "dim", "sharp", site=load_site(out))
    fast = policy.route(Quality.FAST).guarantee
    assert (fast.status, fast.basis, fast.max_drop) == (AccuracyStatus.CERTIFIED, Basis.AGREEMENT, None)
    assert fast.max_disagreement is not None
    assert policy.route(Quality.FAST).claims is not None, "the agreement is monitored"
    asked = policy.route(MaxAccuracyDrop(0.5)).guarantee
    assert (asked.status, asked.basis, asked.max_drop) == (AccuracyStatus.BEST_EFFORT, Basis.AGREEMENT, None)
    assert asked.max_disagreement is not None
    assert asked.max_disagreement <= 0.5
    assert "max_disagreement" in asked.to_json()


def test_images_that_a_model_was_trained_on_are_no_evidence(task: QuartersTask, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match=r"trained on 100 of these 400 images.*leave-out.*other 300.*fit"):
        calibrate("quarters", task.data, out, seed=1, models=task.models, cache=task.cache)
    fitted = calibrate("quarters", task.data, out, seed=1, reading=FIT, models=task.models, cache=task.cache)
    assert (fitted.data.profile, fitted.data.certify, fitted.data.held_out) == (100, 300, 0)
    left = LabelReading(trained=TrainedImages.LEAVE_OUT)
    without = calibrate("quarters", task.data, out, seed=1, reading=left, models=task.models, cache=task.cache)
    assert without.data.profile + without.data.certify + without.data.held_out == 300


def test_the_command_prints_what_it_found_and_what_to_type_next(task: QuartersTask, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    words = ["--task", "quarters", "--data", str(task.clean), "--out", str(out)]
    folders = ["--models-dir", str(task.models), "--cache-dir", str(task.cache)]
    ran = invoke("calibrate", *words, *folders)
    assert ran.exit_code == 0, ran.output
    profile = load_profile(out)
    for stage in profile.stages:
        accuracy = stage.accuracy
        assert f"{stage.name}  " in ran.output
        assert f"{accuracy.value:.2%}" in ran.output
        assert f"{accuracy.low:.2%} to {accuracy.high:.2%}" in ran.output
    least = least_drop(profile.data.certify, 0.05, binary=False)
    assert f"200 images certify no drop below {least:.2%}" in ran.output
    for each in profile.pairs[0].conditions[0].certificates:
        if each.to_best < 1.0 and each.max_drop < profile.pairs[0].conditions[0].fast.max_drop:
            assert f"\n{stated_drop(each.max_drop):g} " in ran.output
    assert f"hawkvision up --task quarters --profile {out}" in ran.output


@pytest.mark.slow
def test_images_that_crossed_a_link_are_measured_by_the_same_losses(task: QuartersTask, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    found = calibrate("quarters", task.clean, out, seed=1, datagram=True, models=task.models, cache=task.cache)
    received = found.pairs[0].received
    assert received
    for condition in received:
        assert 0.0 < condition.edge_accuracy < 1.0
        assert 0.0 < condition.thresholds[0].max_drop < 1.0
