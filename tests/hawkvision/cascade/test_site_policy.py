"""A site's certificates in the place of a profile's."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import ManifestError, TargetUnreachable
from hawkvision.core.types import AccuracyStatus, Basis, MaxAccuracyDrop, MinAccuracy
from hawkvision.guarantee.answered import stated_drop
from hawkvision.tasks.class_scores import Score
from tests.hawkvision.cascade.synthetic import make_profile, site_of

PROFILE = make_profile()
THREE = make_profile(intermediate=True)


@pytest.mark.parametrize("profile", [PROFILE, THREE])
def test_a_sites_certificates_take_the_place_of_the_profiles(profile: Profile) -> None:
    site = site_of(profile)
    policy = Policy(profile, "small", "large", site=site)
    for certificate in site.pairs[0].conditions[0].certificates:
        if isinstance(certificate.threshold, float):
            route = policy.route(MaxAccuracyDrop(stated_drop(certificate.max_drop)))
            assert (route.threshold, route.guarantee.n) == (certificate.threshold, 900)
            assert (
                route.threshold
                > Policy(profile, "small", "large").route(MaxAccuracyDrop(stated_drop(certificate.max_drop))).threshold
            )
    assert (policy.edge_accuracy.value, policy.best_accuracy.value) == (0.6, 0.8)


def test_absolute_targets_are_counted_from_what_was_measured_at_the_site() -> None:
    policy = Policy(PROFILE, "small", "large", site=site_of(PROFILE))
    assert policy.accuracy_known
    with pytest.raises(TargetUnreachable) as caught:
        policy.route(MinAccuracy(0.85))
    assert caught.value.maximum == 0.8


def test_agreement_at_a_site_holds_relative_targets() -> None:
    policy = Policy(PROFILE, "small", "large", site=site_of(PROFILE, labelled=False))
    assert not policy.accuracy_known
    relative = policy.route(MaxAccuracyDrop(0.1)).guarantee
    assert (relative.status, relative.basis, relative.labels) == (AccuracyStatus.CERTIFIED, Basis.SITE, 0)


def with_stage(site: SiteCertificates, name: str, **changes: Any) -> SiteCertificates:
    stages = tuple(replace(each, **changes) if each.name == name else each for each in site.stages)
    return replace(site, stages=stages)


SITE, OF_THREE = site_of(PROFILE), site_of(THREE)
OTHER_SCORE = next(kind for kind in Score if kind != PROFILE.pairs[0].score)


@pytest.mark.parametrize(
    ("profile", "site", "says"),
    [
        *(
            (
                THREE,
                with_stage(OF_THREE, name, fingerprint="b" * 64),
                f"made for {name} with .*bbbb.*`hawkvision",
            )
            for name in ("small", "large", "medium")
        ),
        *(
            (THREE, replace(OF_THREE, stages=tuple(s for s in OF_THREE.stages if s.name != name)), f"for which {name}")
            for name in ("small", "large", "medium")
        ),
        (PROFILE, with_stage(SITE, "small", temperature=9.5), "temperature"),
        (PROFILE, replace(SITE, task="letters"), "'letters'"),
        (PROFILE, replace(SITE, pairs=(replace(SITE.pairs[0], score=OTHER_SCORE),)), "hawkvision certify"),
        (PROFILE, replace(SITE, pairs=(replace(SITE.pairs[0], intermediate="medium"),)), "medium"),
        (PROFILE, replace(SITE, pairs=(replace(SITE.pairs[0], edge="tiny"),)), r"certify --task \w+ --edge small"),
    ],
)
def test_site_certificates_that_do_not_fit_the_profile_are_refused_by_what_differs(
    profile: Profile, site: SiteCertificates, says: str
) -> None:
    with pytest.raises(ManifestError, match=says):
        Policy(profile, "small", "large", site=site)
