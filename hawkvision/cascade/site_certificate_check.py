"""Conditions of a site's certificates, checked against the profile that they were made with."""

from __future__ import annotations

from msgspec import UNSET

from hawkvision.cascade.certification.profile import Condition, Pair, Profile
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.core.advice import advise
from hawkvision.core.errors import ManifestError


def site_conditions(profile: Profile, pair: Pair, site: SiteCertificates) -> tuple[Condition, ...]:
    """The conditions of the site's pair.

    Raises:
        ManifestError: if the site has no such pair, or its certificates were made for another task, other models,
            temperatures, kinds of score or images as sent than the profile's.
    """
    found = site.pair(pair.edge, pair.best)
    if site.task != profile.task:
        raise ManifestError(f"the site's certificates are for task {site.task!r}, the profile for {profile.task!r}")
    intermediate = None if pair.intermediate is None else pair.intermediate.name
    scores = (pair.score, None if pair.intermediate is None else pair.intermediate.score)
    if (found.score, found.intermediate_score) != scores or found.intermediate != intermediate:
        raise ManifestError(
            f"the site's certificates compare scores {found.score} of {pair.edge} and {found.intermediate_score} of "
            f"the intermediate stage {found.intermediate}, but the profile {scores[0]} and {scores[1]} of "
            f"{intermediate}; run `hawkvision certify` again"
        )
    if site.data.shrinks_images not in (UNSET, profile.shrinks_images):
        raise ManifestError(
            "the site's certificates and the profile differ on whether images are made smaller before they are sent; "
            f"run `{advise('certify', '--task', profile.task, '--data', 'IMAGES')}` again"
        )
    for name in (pair.edge, pair.best, *(() if intermediate is None else (intermediate,))):
        stage, expected = site.stage(name), profile.stage(name)
        if stage is None:
            raise ManifestError(f"the site's certificates do not say for which {name} they were made")
        if (stage.fingerprint, stage.temperature) != (expected.fingerprint, expected.temperature):
            raise ManifestError(
                f"the site's certificates were made for {name} with fingerprint {stage.fingerprint} and temperature "
                f"{stage.temperature}, but the profile has {expected.fingerprint} and {expected.temperature}; run "
                f"`{advise('certify', '--task', profile.task, '--data', 'IMAGES')}` again"
            )
    return found.conditions
