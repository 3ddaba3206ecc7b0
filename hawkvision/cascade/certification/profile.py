"""A cascade's profile: what was measured of its stages, and the certificates that targets are mapped to.

A profile is made by `hawkvision calibrate`, committed beside the manifest, and names by sha256 both the images it
came from and the models it holds for. A site's own certificates, made by `hawkvision certify` from images of that
site, take the place of the profile's without touching it. Thresholds of ±∞ are written "always" (escalate) and "never".
A pair has one condition for whole images, and one per class of quality and received fraction for those that crossed
a lossy link. Format 3 added the latter, format 4 which images were used for what; older files say nothing of that.
Format 5, and 2 of a site's certificates, only renamed
keys: older files are read.

What a file guarantees must be what was measured. So the manifest pins the SHA-256 of the profile that comes with it,
and every file carries a digest of its own content, made when it was written. That finds out a slip of the hand and a
failing disk; it is no signature.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from hawkvision.core.advice import advise
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Received, Score
from hawkvision.models.manifest import Fraction, MeasuredAccuracy, Name, Sha256
from hawkvision.system.files import sha256_of

CERTIFIED_DROPS = (
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.06,
    0.08,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
)
"""The ε that are certified ahead; a target between two of them uses the smaller."""

EscalationThreshold: TypeAlias = Fraction | Literal["always", "never"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ProfileData(_Strict, frozen=True):
    """The images behind a profile, and how they were split. Splits are disjoint and drawn with `seed`."""

    name: str
    sha256: Sha256
    seed: int
    profile: Annotated[int, Meta(ge=1)]
    """Images used for temperatures, the threshold grid and the gap that defines `balanced`."""
    certify: Annotated[int, Meta(ge=1)]
    """Images used for accuracies and certificates, unless `Profile.uses` names others for that."""
    held_out: Annotated[int, Meta(ge=0)]
    """Images kept out of all of it, for testing what was guaranteed."""


class ImageUse(_Strict, frozen=True, kw_only=True):
    """What some images were used for.

    `fit`: temperatures, scores and the order of thresholds. `design`: choosing models, bars and which targets to test.
    `certify`: accuracies and certificates. `test`: neither fitted nor certified on; whether they served the design is
    what an entry of its own says.
    """

    purpose: Literal["fit", "design", "certify", "test"]
    name: str
    sha256: Sha256
    n: Annotated[int, Meta(ge=0)]
    looks: Annotated[int, Meta(ge=1)] | None = None
    """Of `certify`: how many designs have had the labels opened for them, this one included; each look after the first
    halves δ. None for the other purposes, which may look as often as they like."""
    compared: Annotated[int, Meta(ge=1)] = 1
    """Of `certify`: how many configurations were compared on these very images; δ was divided by it."""
    design: Sha256 | None = None
    """Of `certify`: `design_sha256` of what had been fixed before the labels were opened."""


class StageProfile(_Strict, frozen=True):
    """One stage as measured: hashes of its variants, its temperature and its accuracy on certification images."""

    name: Name
    models: dict[str, Sha256]
    fingerprint: Sha256
    """`Manifest.fingerprint` of the stage that was measured."""
    temperature: Annotated[float, Meta(gt=0.0)]
    accuracy: MeasuredAccuracy
    calibration_error: Fraction
    cost_ms: Annotated[float, Meta(ge=0.0)]
    """Inference of one image on one core of the calibrating machine, in batches of eight; weighs stages against each
    other, and is no latency."""


class Watch(_Strict, frozen=True, kw_only=True):
    """What traffic as certified looks like at one stage, as shares of the images that reach it.

    The bounds are upper ends of exact one-sided intervals at half the certificate's δ each.
    """

    max_drop: Fraction
    """The part of the certificate's ε that this stage may give up, in proportion to its disagreement."""
    disagreement: Fraction
    """Bound on the share answered here with another label than the reference stage's."""
    difficulty: Fraction
    """Bound on the share that this stage passes on."""


class Certificate(_Strict, frozen=True, kw_only=True):
    """Thresholds with their guarantee: the drop is below `max_drop`, wrong with probability at most `delta`.

    With the basis `profile` there is no guarantee: images that served the design suggest these thresholds, and the
    certification images were too few to confirm them. Answers by them are `best_effort`.
    """

    max_drop: Fraction
    threshold: EscalationThreshold
    """The edge's answer is accepted from this score on."""
    intermediate_threshold: EscalationThreshold = "always"
    """Of what is escalated, the intermediate stage's answer is accepted from this score on; "always" does not ask it.
    """
    delta: Fraction
    n: Annotated[int, Meta(ge=1)]
    basis: Literal["labelled", "agreement", "profile"]
    escalation: Fraction
    """Share that leaves the edge."""
    to_best: Fraction
    """Share that the reference stage answers."""
    observed_drop: float
    """Mean drop on the certification images; without labels, the disagreement, which bounds it."""
    edge_watch: Watch
    intermediate_watch: Watch | None = None
    """None where the intermediate stage is not asked."""


class PathStep(_Strict, frozen=True, kw_only=True):
    """What a pair of thresholds did on the certification split; for planning, not a guarantee."""

    threshold: EscalationThreshold
    intermediate_threshold: EscalationThreshold = "always"
    escalation: Fraction
    to_best: Fraction
    drop: float


class Condition(_Strict, frozen=True, kw_only=True):
    """Certificates of whole images, the caller's own bytes."""

    min_received_fraction: Fraction
    balanced: Certificate
    fast: Certificate
    certificates: tuple[Certificate, ...]


class ScoreCurve(_Strict, frozen=True, kw_only=True):
    """What a score is worth: knots that divide the profile split into equal shares, from least to most sure."""

    scores: Annotated[tuple[Fraction, ...], Meta(min_length=2)]
    disagreement: Annotated[tuple[Fraction, ...], Meta(min_length=2)]
    """P(another label than the reference stage's | score)."""
    drop: Annotated[tuple[Fraction, ...], Meta(min_length=2)]
    """Expected drop given the score, at least 0."""

    def __post_init__(self) -> None:
        if not len(self.scores) == len(self.disagreement) == len(self.drop):
            raise ValueError("a curve needs as many disagreements and drops as scores")
        for name, values, sign in (
            ("scores", self.scores, 1), ("disagreement", self.disagreement, -1), ("drop", self.drop, -1),
        ):  # fmt: skip
            if any(sign * (after - before) < 0 for before, after in itertools.pairwise(values)):
                raise ValueError(f"the {name} of a curve must be sorted")


class ReceivedCondition(_Strict, frozen=True, kw_only=True):
    """What was measured of images that crossed a lossy link: encoded anew at `min_quality`, with holes filled up.

    All drops are below the reference stage *on the whole original image*. What an escalation serves is the reference
    stage on the image as received, so even escalating everything gives something up, and small ε have no certificate
    here.
    """

    min_quality: Annotated[int, Meta(ge=1, le=100)]
    """The JPEG quality that was measured; finer images are taken to be no worse."""
    min_received_fraction: Fraction
    """From this share on, up to that of the condition before, or all of the image where it is 1."""
    edge_temperature: Annotated[float, Meta(gt=0.0)]
    edge_accuracy: MeasuredAccuracy
    best_accuracy: MeasuredAccuracy
    """Of the reference stage on these images as received."""
    curve: ScoreCurve
    """Of the edge against the reference stage on the same received image, which is what escalations and audits
    compare."""
    best: Certificate
    """What escalating everything gives up."""
    fast: Certificate | None = None
    """What never escalating gives up; None where the edge is not to be believed at all."""
    certificates: tuple[Certificate, ...] = ()
    """Thresholds below "always" that keep ε, for `CERTIFIED_DROPS` and the ε of `balanced`; of those with one threshold
    that of the smallest ε."""
    accept_certificates: tuple[Certificate, ...] = ()
    """The same against the reference stage on the image as received: what accepting gives up beyond what the link
    lost."""
    order: tuple[Fraction, ...] = ()
    """The thresholds that are tested, falling, where they were fixed before the certification images were looked at."""

    def thresholds(self) -> tuple[float, ...]:
        """The finite thresholds of `order`, or of all its certificates where there is none, falling."""
        if self.order:
            return self.order
        found = {c.threshold for c in (*self.certificates, *self.accept_certificates)}
        return tuple(sorted((t for t in found if isinstance(t, float)), reverse=True))


class Intermediate(_Strict, frozen=True, kw_only=True):
    """A datacenter stage between the edge and the best: asked first, and believed when it is sure."""

    name: Name
    score: Score
    curve: ScoreCurve
    path: Annotated[tuple[PathStep, ...], Meta(min_length=1)]
    """All pairs of thresholds that were tried with this stage in between, in testing order."""
    reused_ms: Annotated[float, Meta(ge=0.0)] = 0.0
    """What the reference stage need not do again of an image that this one has looked at."""


class Pair(_Strict, frozen=True, kw_only=True):
    """An edge stage backed by the cascade's reference stage, with or without an intermediate stage between them."""

    edge: Name
    best: Name
    score: Score
    escalation_ms: Annotated[float, Meta(ge=0.0)]
    """What an escalation was taken to weigh besides the datacenter's own work."""
    intermediate: Intermediate | None = None
    curve: ScoreCurve
    path: Annotated[tuple[PathStep, ...], Meta(min_length=1)]
    """All thresholds that were tried without an intermediate stage, in testing order."""
    conditions: Annotated[tuple[Condition, ...], Meta(min_length=1)]
    """Of whole images, the caller's own bytes."""
    received: tuple[ReceivedCondition, ...] = ()
    """Of all others: finest quality first, and of one quality the largest fraction first. Empty where no links were
    measured."""

    def condition(self, received: Received) -> ReceivedCondition | None:
        """The measured condition next below: quality rounded down to a class, then the fraction to one of its bands.

        None if there is none below. The caller's own bytes with holes count as of the finest class.
        """
        quality = 100 if received.quality is None else received.quality
        below = [c for c in self.received if c.min_quality <= quality]
        return next(
            (
                c
                for c in below
                if c.min_quality == below[0].min_quality and c.min_received_fraction <= received.fraction
            ),
            None,
        )


class Profile(_Strict, frozen=True):
    """All that was measured of a cascade."""

    format: Literal[2, 3, 4, 5]
    task: Name
    data: ProfileData
    stages: tuple[StageProfile, ...]
    pairs: tuple[Pair, ...]
    uses: tuple[ImageUse, ...] = ()
    """Which images were used for what. Empty in files of older formats."""

    def stage(self, name: str) -> StageProfile:
        """The stage of that name.

        Raises:
            ManifestError: if the profile has none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ManifestError(
            f"the profile of {self.task!r} has no stage {name!r}; it has {[r.name for r in self.stages]}"
        )

    @property
    def certified_on(self) -> tuple[str, str]:
        """Name and sha256 of the images behind the certificates."""
        last = next((use for use in reversed(self.uses) if use.purpose == "certify"), self.data)
        return last.name, last.sha256

    def use(self, purpose: str, sha256: str) -> ImageUse | None:
        """What is recorded of those images and that purpose."""
        return next((use for use in self.uses if (use.purpose, use.sha256) == (purpose, sha256)), None)

    def pair(self, edge: str, best: str) -> Pair:
        """The pair of those stages.

        Raises:
            ManifestError: if the profile has none.
        """
        for pair in self.pairs:
            if (pair.edge, pair.best) == (edge, best):
                return pair
        known = [f"{p.edge} → {p.best}" for p in self.pairs]
        raise ManifestError(
            f"the profile of {self.task!r} has no certificates for {edge} → {best}, only for {known}; "
            f"run `{advise('calibrate', '--task', self.task, '--edge', edge, '--best', best, '--data', 'IMAGES')}`"
        )


def design_sha256(profile: Profile, pairs: Iterable[Pair]) -> str:
    """A digest of all that certification takes as given: models, temperatures, scores, and thresholds in their order.

    Of the certificates themselves only what was planned counts: the ε and the thresholds of `balanced`, and the
    thresholds of received images. What was measured does not.
    """
    pairs = tuple(pairs)
    names = {
        name
        for pair in pairs
        for name in (pair.edge, pair.best, None if pair.intermediate is None else pair.intermediate.name)
    }
    stages = [[r.name, r.fingerprint, r.temperature] for r in profile.stages if r.name in names]
    planned = []
    for pair in pairs:
        intermediate, balanced = pair.intermediate, pair.conditions[0].balanced
        planned.append(
            [
                [pair.edge, pair.score, pair.best],
                [[step.threshold, step.intermediate_threshold] for step in pair.path],
                None if intermediate is None else [intermediate.name, intermediate.score],
                []
                if intermediate is None
                else [[step.threshold, step.intermediate_threshold] for step in intermediate.path],
                balanced.max_drop,
                [
                    [c.min_quality, c.min_received_fraction, c.edge_temperature, c.fast is not None, *c.thresholds()]
                    for c in pair.received
                ],
            ]
        )
    return sha256_of(msgspec.json.encode([CERTIFIED_DROPS, stages, planned]))


def threshold_value(written: float | str) -> float:
    """A written threshold as a number to compare scores with: +∞ for "always", −∞ for "never"."""
    if isinstance(written, str):
        return math.inf if written == "always" else -math.inf
    return written
