"""A site's own certificates, which replace the profile's there. `hawkvision certify` makes them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hawkvision.cascade.certification.profile import Certificate, Condition, Pair, Profile, ScoreName
from hawkvision.core.advice import advise
from hawkvision.core.errors import ManifestError
from hawkvision.models.manifest import MeasuredAccuracy, Name, Sha256


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SiteData(_Strict, frozen=True):
    """The images behind a site's certificates."""

    name: str
    sha256: Sha256
    n: Annotated[int, Meta(ge=1)]
    labels: Annotated[int, Meta(ge=0)]
    """How many of them have labels."""
    shrinks_images: bool
    """`Profile.shrinks_images` when they were made."""
    labels_checked: bool = False
    """Whether somebody looked again at the labels of images drawn at random, and confirmed them."""
    openings: Annotated[int, Meta(ge=1)] = 1
    """The number of designs that these images were opened for, as far as the replaced file tells."""
    compared: Annotated[int, Meta(ge=1)] = 1
    """The number of configurations compared on these images; δ was divided by it."""
    design: Sha256 | None = None
    """The `design_sha256` of the design, fixed before the images were opened."""
    stream: Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){1,16}\Z")] | None = None
    """Of audits: the key of the stream or caller, in hexadecimal, that all of them are of; None if of several."""


class SiteStage(_Strict, frozen=True, kw_only=True):
    """A stage as certified at a site. Its accuracy there is known only with labels."""

    name: Name
    fingerprint: Sha256
    temperature: Annotated[float, Meta(gt=0.0)]
    """The profile's. Scores depend on it, and fingerprints do not cover it."""
    executions: tuple[str, ...] = ()
    """What ran it, and is certified; empty for the executions that give exactly the answers of the profile's."""
    accuracy: MeasuredAccuracy | None = None
    sent_accuracy: MeasuredAccuracy | UnsetType = UNSET
    """As in `StageProfile`."""

    @property
    def datacenter_accuracy(self) -> MeasuredAccuracy | None:
        """Its accuracy as a stage of the datacenter; None if it is not known."""
        return self.accuracy if isinstance(self.sent_accuracy, UnsetType) else self.sent_accuracy


class SitePair(_Strict, frozen=True, kw_only=True):
    """A site's certificates for one pair of the profile."""

    edge: Name
    best: Name
    intermediate: Name | None = None
    score: ScoreName
    intermediate_score: ScoreName | None = None
    conditions: Annotated[tuple[Condition, ...], Meta(min_length=1)]


class SiteCertificates(_Strict, frozen=True, kw_only=True):
    """Certificates made from a site's own images. They replace the profile's there."""

    format: Literal[4]
    task: Name
    basis: Literal["site", "review"]
    """What the images are."""
    since: Annotated[datetime, Meta(tz=True)] | None = msgspec.field(name="from")
    """Time of the oldest image; None where it is not known."""
    until: Annotated[datetime, Meta(tz=True)] = msgspec.field(name="to")
    """Time of the newest image, or a later one where it is not known."""
    data: SiteData
    stages: tuple[SiteStage, ...]
    pairs: Annotated[tuple[SitePair, ...], Meta(min_length=1)]

    @property
    def executions(self) -> dict[str, frozenset[str]]:
        """What may execute each stage, where that is not `EXACT`."""
        return {stage.name: frozenset(stage.executions) for stage in self.stages if stage.executions}

    def stage(self, name: str) -> SiteStage | None:
        """The stage of that name; None if it was not certified."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def without(self, drops: Collection[float]) -> SiteCertificates:
        """Without the certificates of these drops. Never escalating loses its own with any of them."""
        replace = msgspec.structs.replace
        pairs = (
            replace(pair, conditions=tuple(_without(each, drops) for each in pair.conditions)) for pair in self.pairs
        )
        return replace(self, pairs=tuple(pairs))

    def pair(self, edge: str, best: str) -> SitePair:
        """The pair of those stages.

        Raises:
            ManifestError: if the site has none.
        """
        for pair in self.pairs:
            if (pair.edge, pair.best) == (edge, best):
                return pair
        known = [f"{p.edge} → {p.best}" for p in self.pairs]
        raise ManifestError(
            f"the site's certificates have none for {edge} → {best}, only for {known}; "
            f"run `{advise('certify', '--task', self.task, '--edge', edge, '--data', 'IMAGES')}`"
        )


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
    if site.data.shrinks_images != profile.shrinks_images:
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


def _without(condition: Condition, failed: Collection[float]) -> Condition:
    """The certificates without those of the drops that failed. Never escalating loses its own with any of them."""

    def fails(certificate: Certificate) -> bool:
        return certificate.max_drop in failed and certificate.to_best < 1.0 and certificate.basis != "profile"

    replace, balanced = msgspec.structs.replace, condition.balanced
    if not any(map(fails, (balanced, *condition.certificates))):
        return condition
    return replace(
        condition,
        balanced=replace(balanced, basis="profile") if fails(balanced) else balanced,
        fast=replace(condition.fast, basis="profile"),
        certificates=tuple(each for each in condition.certificates if not fails(each)),
    )
