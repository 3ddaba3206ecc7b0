"""A site's certificates in the place of a profile's."""

from __future__ import annotations

import msgspec
import pytest

from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ManifestError, TargetUnreachable
from hawkvision.core.types import (
    AccuracyStatus,
    Basis,
    MaxAccuracyDrop,
    MinAccuracy,
    Score,
)
from tests.hawkvision.cascade.synthetic import make_profile, site_of

PROFILE = make_profile()
POLICY = Policy(PROFILE, "small", "large")
A_EDGE, A_BEST = POLICY.edge_accuracy.value, POLICY.best_accuracy.value
THREE = make_profile(intermediate=True)


@pytest.mark.parametrize("profile", [PROFILE, THREE])
def test_a_sites_certificates_take_the_place_of_the_profiles(profile: Profile) -> None:
    site = site_of(profile)
    policy = Policy(profile, "small", "large", site=site)
    for certificate in site.pairs[0].conditions[0].certificates:
        if isinstance(certificate.threshold, float):
            route = policy.route(MaxAccuracyDrop(certificate.max_drop))
            assert (route.threshold, route.guarantee.n) == (certificate.threshold, 900)
            assert (
                route.threshold
                > Policy(profile, "small", "large").route(MaxAccuracyDrop(certificate.max_drop)).threshold
            )
    assert (policy.edge_accuracy.value, policy.best_accuracy.value) == (0.6, 0.8)


def test_absolute_targets_are_counted_from_what_was_measured_at_the_site() -> None:
    policy = Policy(PROFILE, "small", "large", site=site_of(PROFILE))
    assert policy.accuracy_known
    with pytest.raises(TargetUnreachable) as caught:
        policy.route(MinAccuracy(0.85))
    assert caught.value.maximum == 0.8
    low = policy.best_accuracy.low
    held = policy.route(MinAccuracy(0.7)).guarantee
    assert held.status is AccuracyStatus.CERTIFIED
    assert held.max_drop is not None
    assert held.max_drop <= low - 0.7
    assert policy.route(MinAccuracy(low + 0.001)).guarantee.status is AccuracyStatus.BEST_EFFORT


def test_agreement_at_a_site_holds_relative_targets_but_no_absolute_ones() -> None:
    policy = Policy(PROFILE, "small", "large", site=site_of(PROFILE, labelled=False))
    assert not policy.accuracy_known
    relative = policy.route(MaxAccuracyDrop(0.1)).guarantee
    assert (relative.status, relative.basis) == (AccuracyStatus.CERTIFIED, Basis.AGREEMENT)
    for accuracy in (0.05, 0.3, A_EDGE - 0.001, A_EDGE + 0.01, A_BEST - 0.1, A_BEST):
        assert policy.route(MinAccuracy(accuracy)).guarantee.status is AccuracyStatus.BEST_EFFORT


@pytest.mark.parametrize("wrong", ["small", "large", "medium"])
def test_site_certificates_made_for_another_model_are_refused_by_its_name(wrong: str) -> None:
    site = site_of(THREE)
    stages = tuple(msgspec.structs.replace(r, fingerprint="b" * 64) if r.name == wrong else r for r in site.stages)
    with pytest.raises(ManifestError, match=f"made for {wrong} with fingerprint bbbb.*hawkvision certify"):
        Policy(THREE, "small", "large", site=msgspec.structs.replace(site, stages=stages))


@pytest.mark.parametrize("left_out", ["small", "large", "medium"])
def test_site_certificates_that_leave_a_stage_open_are_refused_by_its_name(left_out: str) -> None:
    site = site_of(THREE)
    stages = tuple(stage for stage in site.stages if stage.name != left_out)
    with pytest.raises(ManifestError, match=f"do not say for which {left_out}"):
        Policy(THREE, "small", "large", site=msgspec.structs.replace(site, stages=stages))


def test_site_certificates_for_another_temperature_are_refused() -> None:
    profile = msgspec.structs.replace(
        PROFILE, stages=tuple(msgspec.structs.replace(r, temperature=2 * r.temperature) for r in PROFILE.stages)
    )
    with pytest.raises(ManifestError, match="temperature"):
        Policy(profile, "small", "large", site=site_of(PROFILE))


def test_site_certificates_for_another_task_are_refused() -> None:
    site = msgspec.structs.replace(site_of(PROFILE), task="letters")
    with pytest.raises(ManifestError, match="'letters'"):
        Policy(PROFILE, "small", "large", site=site)


def test_site_certificates_for_another_score_are_refused() -> None:
    site = site_of(PROFILE)
    other = next(kind for kind in Score if kind != PROFILE.pairs[0].score)
    pairs = (msgspec.structs.replace(site.pairs[0], score=other),)
    with pytest.raises(ManifestError, match="hawkvision certify"):
        Policy(PROFILE, "small", "large", site=msgspec.structs.replace(site, pairs=pairs))


def test_site_certificates_that_ask_an_intermediate_stage_the_profile_lacks_are_refused() -> None:
    site = site_of(PROFILE)
    pairs = (msgspec.structs.replace(site.pairs[0], intermediate="medium"),)
    with pytest.raises(ManifestError, match="medium"):
        Policy(PROFILE, "small", "large", site=msgspec.structs.replace(site, pairs=pairs))


def test_a_site_without_the_pair_is_refused_and_names_the_command() -> None:
    site = site_of(PROFILE)
    pairs = (msgspec.structs.replace(site.pairs[0], edge="tiny"),)
    with pytest.raises(ManifestError, match=r"hawkvision certify --task \w+ --edge small"):
        Policy(PROFILE, "small", "large", site=msgspec.structs.replace(site, pairs=pairs))
