"""A cascade's profile: measurements of its stages, and the certificates that targets are mapped to.

`hawkvision calibrate` makes a profile. It is committed beside the manifest and names, by SHA-256, the images it was
made from and the models it holds for. The thresholds +∞ and −∞ are written "always" (escalate) and "never". A pair has
one condition for whole images, and thresholds for each class of quality and received fraction of images that crossed a
lossy link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hawkvision.core.advice import advise
from hawkvision.core.errors import ManifestError
from hawkvision.core.types import Received
from hawkvision.guarantee.answered import USED_SHARE
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
"""The ε that are certified in advance; a target between two of them uses the smaller."""
TESTED_DROPS = tuple(round(USED_SHARE * drop, 6) for drop in CERTIFIED_DROPS)
"""What is tested for each of them: a target uses certificates for this share of its ε."""
BALANCED_RULE = "least drop / drop of fast + share escalated, of drops that 9 in 10 draws from design images certify"
"""How the ε of `balanced` is chosen among `TESTED_DROPS` (`balanced`); part of a design's digest."""

EscalationThreshold: TypeAlias = Fraction | Literal["always", "never"]
ScoreName: TypeAlias = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_]*$", max_length=32)]
"""One of `TaskKind.scores`."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ProfileData(_Strict, frozen=True):
    """The images behind a profile, and how they were split. Splits are disjoint and drawn with `seed`."""

    name: str
    sha256: Sha256
    seed: int
    profile: Annotated[int, Meta(ge=1)]
    """Images used for temperatures, scores, the threshold grid and the choice of `balanced`."""
    certify: Annotated[int, Meta(ge=1)]
    """Images used for accuracies and certificates, unless `Profile.uses` names others for that."""
    held_out: Annotated[int, Meta(ge=0)]
    """Images used for neither, to test the guarantees."""
    images: str | UnsetType = UNSET
    """Digests of all of the images (`labelled_images.digests_of`). They may have served the design, so that none of
    them is further evidence. Left out in older files."""


class ImageUse(_Strict, frozen=True, kw_only=True):
    """What some images were used for.

    `fit`: temperatures, scores and the order of thresholds. `design`: choosing models, thresholds and targets.
    `certify`: accuracies and certificates. `test`: neither fitting nor certifying; if the images also served the
    design, a second entry says so.
    """

    purpose: Literal["fit", "design", "certify", "test"]
    name: str
    sha256: Sha256
    n: Annotated[int, Meta(ge=0)]
    openings: Annotated[int, Meta(ge=1)] | None = None
    """Of `certify`: the number of designs that the labels were opened for, this one included. Each after the first
    halves δ. None for the other purposes."""
    compared: Annotated[int, Meta(ge=1)] = 1
    """Of `certify`: the number of configurations compared on these images; δ was divided by it."""
    design: Sha256 | None = None
    """Of `certify`: the `design_sha256` of the design, fixed before the labels were opened."""


class StageProfile(_Strict, frozen=True):
    """One stage as measured: hashes of its variants, its temperature and its accuracy on certification images."""

    name: Name
    models: dict[str, Sha256]
    fingerprint: Sha256
    """`Manifest.fingerprint` of the stage that was measured."""
    temperature: Annotated[float, Meta(gt=0.0)]
    accuracy: MeasuredAccuracy
    """Of a stage that edge nodes run: on whole images. Of others: on images as edge nodes send them."""
    calibration_error: Fraction
    cost_ms: Annotated[float, Meta(ge=0.0)]
    """Processor time of one image in batches of eight on the calibrating machine. It compares stages with one another
    and is not a latency."""
    sent_accuracy: MeasuredAccuracy | UnsetType = UNSET
    """Of a stage that both tiers run, on images as edge nodes send them; left out where those are the same."""

    @property
    def datacenter_accuracy(self) -> MeasuredAccuracy:
        """Its accuracy as a stage of the datacenter."""
        return self.accuracy if isinstance(self.sent_accuracy, UnsetType) else self.sent_accuracy


class Certificate(_Strict, frozen=True, kw_only=True):
    """Thresholds with their guarantee: the drop is below `max_drop`, except with probability `delta`.

    The basis `disagreement` says less: the mean disagreement with the reference stage is below `max_drop`, which for
    this kind of task bounds no accuracy drop. The basis `profile` means no guarantee: the design's images suggest these
    thresholds, but the certification images were too few to confirm them. Answers by them are `best_effort`.
    """

    max_drop: Fraction
    threshold: EscalationThreshold
    """The edge's answer is accepted if its score is at least this."""
    intermediate_threshold: EscalationThreshold = "always"
    """The intermediate stage's answer to an escalated image is accepted from this score on; "always" skips the stage.
    """
    delta: Fraction
    n: Annotated[int, Meta(ge=1)]
    basis: Literal["labelled", "agreement", "disagreement", "profile"]
    escalation: Fraction
    """Share that leaves the edge."""
    to_best: Fraction
    """Share that the reference stage answers."""
    observed_drop: float
    """Mean drop on the certification images; without labels, the disagreement, which bounds it."""
    edge_disagreement: Fraction
    """Bound on the mean disagreement with the reference stage of what the edge stage answers, 0 for what it does not.

    The upper end of a one-sided interval at half of δ, for this threshold. It was chosen on the same images, so the
    bound may be too low somewhat more often. Then alarms are false; nothing more is certified.
    """
    intermediate_disagreement: Fraction | None = None
    """The same of the intermediate stage, over the images that reach it; None where it is not asked."""


class PathStep(_Strict, frozen=True, kw_only=True):
    """A pair of thresholds, and what it would escalate of the certification split: for planning, not a guarantee."""

    threshold: EscalationThreshold
    intermediate_threshold: EscalationThreshold = "always"
    escalation: Fraction


class Condition(_Strict, frozen=True, kw_only=True):
    """Certificates of whole images, the caller's own bytes."""

    balanced: Certificate
    fast: Certificate
    certificates: tuple[Certificate, ...]


class ReceivedThreshold(_Strict, frozen=True, kw_only=True):
    """A threshold of the edge stage for received images, and the drop that it was measured to stay below."""

    max_drop: Fraction
    threshold: EscalationThreshold
    escalation: Fraction
    """Share that is escalated."""


class ReceivedCondition(_Strict, frozen=True, kw_only=True):
    """Routing of images that crossed a lossy link: re-encoded at `min_quality`, with missing parts concealed.

    Measured, not certified. An escalation runs the reference stage on the image as received, so escalating everything
    has a drop too, compared with the reference stage on the whole original image.
    """

    min_quality: Annotated[int, Meta(ge=1, le=100)]
    """The JPEG quality that was measured; a higher quality is taken to be no worse."""
    min_received_fraction: Fraction
    """Lower end of the received fraction; the upper end is that of the condition before, or 1."""
    edge_temperature: Annotated[float, Meta(gt=0.0)]
    edge_accuracy: Fraction
    accepts_edge: bool
    """Whether the edge's answers are ever accepted."""
    scores: Annotated[tuple[Fraction, ...], Meta(min_length=2)]
    """Of the edge stage, at knots of equal shares of the images, rising."""
    thresholds: tuple[ReceivedThreshold, ...]
    """By rising drop against the reference stage on the whole original; the first is that of escalating everything."""
    beyond_link: tuple[ReceivedThreshold, ...] = ()
    """The same against the reference stage on the image as received: the drop beyond what the link lost."""


class Intermediate(_Strict, frozen=True, kw_only=True):
    """A datacenter stage between edge and reference. It runs first; its answer is accepted from a score on."""

    name: Name
    score: ScoreName
    path: Annotated[tuple[PathStep, ...], Meta(min_length=1)]
    """All pairs of thresholds that were tried with this stage, in testing order."""
    reused_ms: Annotated[float, Meta(ge=0.0)] = 0.0
    """The part of the reference stage's cost that this stage has already paid for an image."""


class RightAnswers(_Strict, frozen=True, kw_only=True):
    """How often the stages of a pair are right, as numbers of certification images.

    Of `differing`, those on which the answers differ, `reference` and `edge` count on how many that stage is right.
    """

    n: Annotated[int, Meta(ge=1)]
    differing: Annotated[int, Meta(ge=0)]
    reference: Annotated[int, Meta(ge=0)]
    edge: Annotated[int, Meta(ge=0)]
    neither: Annotated[int, Meta(ge=0)]
    """Of all n, those on which neither is right."""


class Pair(_Strict, frozen=True, kw_only=True):
    """An edge stage and the reference stage, with or without an intermediate stage."""

    edge: Name
    best: Name
    score: ScoreName
    escalation_ms: Annotated[float, Meta(ge=0.0)]
    """The assumed cost of an escalation besides the datacenter's own work."""
    intermediate: Intermediate | None = None
    path: Annotated[tuple[PathStep, ...], Meta(min_length=1)]
    """All thresholds that were tried without an intermediate stage, in testing order."""
    conditions: Annotated[tuple[Condition, ...], Meta(min_length=1)]
    """Of whole images, the caller's own bytes."""
    received: tuple[ReceivedCondition, ...] = ()
    """Of received images: by falling quality, then by falling fraction. Empty where no links were measured."""
    right: RightAnswers | UnsetType = UNSET
    """Left out where losses may be fractions, and in files that were made before."""

    def condition(self, received: Received) -> ReceivedCondition | None:
        """The measured condition at or next below: quality rounded down to a class, then the fraction to a band.

        None if there is none. The caller's own bytes with missing parts count as the highest quality.
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


class Shrinking(_Strict, frozen=True, kw_only=True):
    """What it costs the datacenter's stages that edge nodes make images smaller before they send them.

    Of the stage that it costs most, measured on the profile split.
    """

    allowed: bool
    """Whether edge nodes may do it. All certificates were made as this says."""
    n: Annotated[int, Meta(ge=1)]
    accuracy: Fraction
    """With smaller images."""
    accuracy_whole: Fraction
    """With the images as they are."""


class Profile(_Strict, frozen=True):
    """All measurements of a cascade."""

    format: Literal[6]
    task: Name
    data: ProfileData
    stages: tuple[StageProfile, ...]
    pairs: tuple[Pair, ...]
    uses: tuple[ImageUse, ...] = ()
    """Which images were used for what. Empty in files of older formats."""
    shrinking: Shrinking | UnsetType = UNSET
    """Left out where no image was so large that edge nodes would make it smaller."""
    labels_sha256: Sha256 | UnsetType = UNSET
    """Of the labels that the images were read with, in index order (`labels_digest`). Fingerprints do not cover their
    names. Left out in older files."""

    @property
    def shrinks_images(self) -> bool:
        """Whether edge nodes may make images smaller before they send them."""
        return not isinstance(self.shrinking, Shrinking) or self.shrinking.allowed

    def check_labels(self, labels: Sequence[str]) -> None:
        """Check that these are the labels that the profile was made with, as far as it says.

        Raises:
            ManifestError: if they are others, or in another order.
        """
        if self.labels_sha256 not in (UNSET, labels_digest(labels)):
            raise ManifestError(
                f"the profile of {self.task!r} was made with other labels than {', '.join(labels[:5])}, …; restore the "
                f"label file, or run `{advise('calibrate', '--task', self.task, '--data', 'IMAGES')}`"
            )

    def check_reference(self, reference: str, below: Iterable[str]) -> None:
        """Check that none of these stages is measurably better than the reference stage that they are below.

        Raises:
            ManifestError: if one is.
        """
        best = self.stage(reference).datacenter_accuracy
        for name in below:
            found = self.stage(name).accuracy
            if found.low > best.high:
                raise ManifestError(
                    f"the reference stage {reference} is right on {best.value:.1%} of the profile's images "
                    f"({best.low:.1%} to {best.high:.1%}), and {name}, which is below it, on {found.value:.1%} "
                    f"({found.low:.1%} to {found.high:.1%}); expected a reference stage that is no worse than those "
                    "below it, or allow_worse_reference"
                )

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
        """The recorded use of those images for that purpose; None if there is none."""
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


def labels_digest(labels: Iterable[str]) -> str:
    """SHA-256 of labels in index order."""
    return sha256_of(msgspec.json.encode(list(labels)))


def design_sha256(profile: Profile, pairs: Iterable[Pair]) -> str:
    """A digest of all that certification takes as given: models, temperatures, scores, and thresholds in their order.

    Of the certificates it covers the plan (the ε that are tested, that of `balanced` and the rule that chose it), not
    the measurements. Certifying a design that was recorded by another definition of this digest counts as another
    opening.
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
            ]
        )
    whole = [] if profile.shrinks_images else ["whole images are sent"]
    facts = [TESTED_DROPS, BALANCED_RULE, stages, planned, *whole]
    return sha256_of(msgspec.json.encode(facts))


def threshold_value(written: float | str) -> float:
    """A written threshold as a number to compare scores with: +∞ for "always", −∞ for "never"."""
    if isinstance(written, str):
        return math.inf if written == "always" else -math.inf
    return written
