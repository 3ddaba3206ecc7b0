"""`hawkvision certify`: a site's own certificates, from images of that site. The profile is unchanged.

A profile's certificates hold for traffic like its images. A site has other cameras, light and subjects; some hundred of
its own images give certificates that hold there. Scores, temperatures and the order of thresholds stay the profile's,
so all of the site's images serve for certification only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import (
    Scored,
    StagePredictions,
    accuracies,
    in_random_order,
    make_evidence,
    measure_accuracy,
    select,
)
from hawkvision.cascade.certification.profile import (
    TESTED_DROPS,
    Intermediate,
    Pair,
    Profile,
    RightAnswers,
    design_sha256,
)
from hawkvision.cascade.certification.profile_files import dump, load_profile_of, load_site
from hawkvision.cascade.certification.profiling import certify_condition, costs_of, paths_of
from hawkvision.cascade.certification.site_certificates import SiteCertificates, SiteData, SitePair, SiteStage
from hawkvision.cascade.certification.threshold_order import expected_cost
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.guarantee.evidence import Evidence, Flags, Thresholds
from hawkvision.guarantee.labels import LabelNeed, harder, label_needs, neither_oftener
from hawkvision.model_zoo.calibration.certification import (
    DELTA,
    FEWEST_IMAGES,
    check_unseen,
    edge_predictions,
    share_of_delta,
    stages_by_tier,
    to_replace,
)
from hawkvision.model_zoo.calibration.evidence import LabelReading, check_enough, clean_images, read_evidence
from hawkvision.model_zoo.calibration.label_check import Wish, check_labels, checkable, random_images, write_list
from hawkvision.model_zoo.calibration.model_runner import AnyImages, run_stages
from hawkvision.models.datasets import Annotation, image_times, read_unlabelled
from hawkvision.models.fingerprints import EXACT
from hawkvision.models.image_sets.folder_classes import class_numbers, directory_classes
from hawkvision.models.image_sets.labels_file import read_labels
from hawkvision.models.manifest import Manifest, MeasuredAccuracy, load_manifest
from hawkvision.system.files import write_atomic
from hawkvision.tasks.class_scores import Floats
from hawkvision.tasks.kind import Prediction, TaskKind, Truth
from hawkvision.tasks.registry import load_kind


class SiteRun(NamedTuple):
    """What certifying a site found."""

    certificates: SiteCertificates
    accuracies: dict[str, MeasuredAccuracy]
    """Of each stage, on the images that labels were checked on; empty without labels."""
    needs: dict[str, dict[float, LabelNeed]]
    """By edge stage and `max_drop`, what labels do; empty for kinds that take no labels file."""
    listed: int
    """Images that were written to `to_label`."""


def certify_site(
    task: str,
    data: Path,
    out: Path,
    *,
    labelled: bool = True,
    labels: Path | None = None,
    to_label: Path | None = None,
    labels_checked: bool = False,
    edges: Sequence[str] = (),
    delta: float = 0.05,
    compared: int = 1,
    profile: Path | None = None,
    reading: LabelReading = LabelReading(),  # noqa: B008 - immutable
    comparing: Comparing | None = None,
    models: Path,
    cache: Path,
    now: datetime | None = None,
) -> SiteRun:
    """Certify a profile's pairs on a site's images and write the certificates to `out`.

    Args:
        task: the task, by the name of its manifest.
        data: labelled images (`hawkvision.models.datasets`), or with `labels` or `labelled` False a folder of images.
        out: where `hawkvision edge up --certificates` will read them.
        labelled: whether there are labels; without them every disagreement with the reference stage counts as lost.
        labels: a file with the labels of some of the images (`labels_file`).
        to_label: where to write the images whose labels would help, with the answers of the stages.
        labels_checked: whether somebody looked again at the labels of the images drawn at random, so that the
            reference stage may be less often right there than in its profile.
        edges: edge stages to certify; none means all pairs of the profile.
        delta: probability that a certificate is wrong. If `out` has certificates from these images for another
            design, it is halved once more than theirs.
        compared: configurations that were ever compared on these images; delta is divided by it.
        profile: None means the task's own.
        reading: how to read the labels, and what to do with images that a model was trained on.
        comparing: lets a node answer the images, which certifies what runs there, for one edge stage: by default the
            cascade's. None runs the stages here.
        models: the folder of manifests.
        cache: the folder of built models.
        now: the time; None means the clock's.

    Raises:
        HawkVisionError: for bad data, too few images, missing models, or a profile made for other models.
    """
    cascade = load_cascade(task, edges, profile, models)
    if comparing is not None and not edges:
        cascade = cascade.of_default_edge()
    kind = cascade.kind
    if to_label is not None and not kind.one_class:
        raise ConfigError(no_list(kind, "--to-label"))
    images, truths = _site_images(data, cascade, models, reading, labels, labelled=labelled)
    site = run_site(cascade, data, images, out, delta=delta, compared=compared, comparing=comparing, cache=cache)
    certification = site.certification(truths)
    made, checked = site.write(certification, str(labels or data), labels_checked=labels_checked, now=now)
    wishes = [certification.wish(pair) for pair in site.profile.pairs] if kind.one_class else []
    listed = 0
    if to_label is not None:
        listed = write_list(
            to_label, site.answers.kind, images, truths, random_images(images, site.answers.chosen), wishes
        )
    return SiteRun(made, checked, {wish.below[0].name: wish.needs for wish in wishes}, listed)


class Cascade(NamedTuple):
    """A task with the profile whose pairs are certified."""

    manifest: Manifest
    kind: TaskKind[Any]
    profile: Profile

    def of_default_edge(self) -> Cascade:
        """With the pair of the edge stage that nodes run by default.

        Raises:
            ManifestError: if the profile lacks it.
        """
        pairs = _pairs_of(self.profile, (self.manifest.cascade.default_edge,))
        return self._replace(profile=msgspec.structs.replace(self.profile, pairs=tuple(pairs)))


def load_cascade(task: str, edges: Sequence[str], profile: Path | None, models: Path) -> Cascade:
    """The pairs of these edge stages; all pairs of the profile if none is given. `profile` None means the task's own.

    Raises:
        HawkVisionError: if something is missing or malformed.
    """
    manifest = load_manifest(task, models)
    kind = load_kind(manifest, models)
    known = load_profile_of(manifest, models, profile)
    known = msgspec.structs.replace(known, pairs=tuple(_pairs_of(known, edges)))
    known.check_labels(kind.labels)
    return Cascade(manifest, kind, known)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the stages of a cascade answer to a site's images."""

    kind: TaskKind[Any]
    chosen: NDArray[np.intp]
    """The images, rising; those that are evidence."""
    edge: Mapping[str, StagePredictions]
    """By each stage that edge nodes run, as they do."""
    datacenter: Mapping[str, StagePredictions]
    executions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What ran each stage, where others than `EXACT` did."""

    def below(self, pair: Pair) -> list[StagePredictions]:
        """By the stages below a pair's reference stage, as far as they were asked."""
        between = None if pair.intermediate is None else self.datacenter.get(pair.intermediate.name)
        return [self.edge[pair.edge], *(() if between is None else (between,))]


class Compared(NamedTuple):
    """What a node's edge stage and its reference stage answer to an image."""

    score: float
    answer: Prediction
    reference: Prediction


class ComparedImages(NamedTuple):
    """The same of several images."""

    images: Sequence[Compared]
    executions: Mapping[str, Sequence[str]]
    """What ran each stage."""


Comparing: TypeAlias = Callable[[Cascade, AnyImages, NDArray[np.intp]], ComparedImages]
"""Lets a node compare the chosen images; the profile has one pair, the node's."""


def run_site(
    cascade: Cascade,
    data: Path,
    images: AnyImages,
    out: Path,
    *,
    delta: float = DELTA,
    compared: int = 1,
    comparing: Comparing | None = None,
    cache: Path,
) -> Site:
    """Run the cascade's stages on a site's images, here or by `comparing`, for certificates at `out`.

    Raises:
        HawkVisionError: if there are too few images, or they served the design; for missing models, or a profile made
            for other models.
    """
    manifest, _, profile = cascade
    check_enough(data, images, FEWEST_IMAGES)
    if manifest.training is not None and manifest.training.data_sha256 == images.sha256:
        raise ConfigError(f"{data}: the cascade was trained on these very images; certify with images of the site")
    check_unseen(profile, images, compared, str(data))
    chosen = clean_images(images)
    openings = _openings_of(out, design_sha256(profile, profile.pairs), images.sha256)
    if comparing is not None:
        answers = _told(cascade, chosen, comparing(cascade, images, chosen))
    else:
        answers = _run(cascade, images, chosen, cache)
    return Site(profile, answers, data, images, out, openings, delta, compared)


def _run(cascade: Cascade, images: AnyImages, chosen: NDArray[np.intp], cache: Path) -> Answers:
    """What the stages answer here."""
    manifest, kind, profile = cascade
    edge, datacenter = _stages_of(profile)
    for name in (*edge, *datacenter):
        _check_fingerprint(profile, manifest, name)
    found = run_stages(
        kind, manifest, images, edge=edge, datacenter=datacenter, shrink=profile.shrinks_images, cache=cache,
        chosen=chosen,
    )  # fmt: skip
    return Answers(
        kind,
        chosen,
        {name: edge_predictions(profile, name, found) for name in edge},
        {name: found.served(name) for name in datacenter},
    )


def _told(cascade: Cascade, chosen: NDArray[np.intp], compared: ComparedImages) -> Answers:
    """What a node has told of both stages of its pair.

    Raises:
        ConfigError: if the models of a stage ran in several ways that do not give exactly the same answers.
    """
    (pair,) = cascade.profile.pairs
    kind, found = cast("TaskKind[Any]", _ToldKind(cascade.kind)), compared.images
    others = {name: each for name, each in compared.executions.items() if not EXACT.issuperset(each)}
    for name, each in others.items():
        if len(each) > 1:  # which member ran where is not known, and may be otherwise tomorrow
            raise ConfigError(f"{name}: its models ran in {len(each)} ways: {', '.join(each)}; expected one for all")

    def stage(name: str, predictions: Iterable[Prediction]) -> StagePredictions:
        told = [_Told(prediction, each.score) for prediction, each in zip(predictions, found, strict=True)]
        outputs = dict(zip(chosen.tolist(), told, strict=True))
        return StagePredictions(name, cast("Any", outputs), cascade.profile.stage(name).cost_ms)

    edge, best = (each.answer for each in found), (each.reference for each in found)
    return Answers(kind, chosen, {pair.edge: stage(pair.edge, edge)}, {pair.best: stage(pair.best, best)}, others)


class _Told(NamedTuple):
    prediction: Prediction
    score: float


class _ToldKind:
    """A kind whose outputs are predictions with their scores, as a node tells them."""

    def __init__(self, kind: TaskKind[Any]) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def predict(self, output: _Told, _: int) -> Prediction:
        return output.prediction

    def score_all(self, outputs: Sequence[_Told], _: str) -> Floats:
        return np.array([output.score for output in outputs], np.float64)

    def losses(self, outputs: Sequence[_Told], truths: Iterable[Truth]) -> Floats:
        pairs = zip(outputs, truths, strict=True)
        return np.array([self._kind.loss(output.prediction, truth) for output, truth in pairs], np.float64)

    def disagreements(self, outputs: Sequence[_Told], references: Sequence[_Told]) -> Floats:
        pairs = zip(outputs, references, strict=True)
        return np.array([self._kind.disagreement(a.prediction, b.prediction) for a, b in pairs], np.float64)


@dataclass(frozen=True, slots=True)
class Site:
    """A site's images, and what stages answer to them: all that its certificates rest on but labels."""

    profile: Profile
    answers: Answers
    data: Path
    images: AnyImages
    out: Path
    openings: int
    """How often these images were opened for a design, with this time."""
    delta: float
    compared: int

    @property
    def share(self) -> float:
        """The part of δ that may be spent."""
        return share_of_delta(self.delta, self.openings, self.compared)

    def certification(self, truths: Sequence[Truth | None]) -> SiteCertification:
        """With these labels; None where there is none."""
        interval = share_of_delta(DELTA, self.openings, self.compared)
        return SiteCertification(self.profile, self.answers, self.images, truths, self.share, interval)

    def write(
        self, certification: SiteCertification, where: str, *, labels_checked: bool, now: datetime | None = None
    ) -> tuple[SiteCertificates, dict[str, MeasuredAccuracy]]:
        """Write the certificates, if labels from `where` may be believed; with the accuracies of `check`.

        Raises:
            ConfigError: as `SiteCertification.check`.
        """
        checked = certification.check(where, confirmed=labels_checked)
        described = SiteData(
            name=self.images.name, sha256=self.images.sha256, n=len(self.answers.chosen), labels=certification.labels,
            labels_checked=labels_checked, openings=self.openings, compared=self.compared,
            design=design_sha256(self.profile, self.profile.pairs), shrinks_images=self.profile.shrinks_images,
        )  # fmt: skip
        made = certification.certificates(described, *image_times(self.data, now or datetime.now(UTC)))
        write_atomic(self.out, dump(made))
        return made, checked


def _pairs_of(profile: Profile, edges: Sequence[str]) -> list[Pair]:
    """The pairs of the given edge stages; all pairs if none is given.

    Raises:
        ManifestError: if the profile lacks one, or has none.
    """
    pairs = [pair for pair in profile.pairs if not edges or pair.edge in edges]
    missing = set(edges) - {pair.edge for pair in pairs}
    if missing or not pairs:
        raise ManifestError(f"the profile has no pair for {sorted(missing)}; it has {[p.edge for p in profile.pairs]}")
    return pairs


def _site_images(
    data: Path,
    cascade: Cascade,
    models: Path,
    reading: LabelReading,
    labels: Path | None,
    *,
    labelled: bool,
) -> tuple[AnyImages, Sequence[Truth | None]]:
    """The site's images, and the label of each; None where there is none.

    Raises:
        ConfigError: if they cannot be read.
    """
    manifest, kind, _ = cascade
    images: AnyImages
    truths: Sequence[Truth | None]
    if labels is not None:
        if not labelled:
            raise ConfigError("--labels and --unlabelled contradict each other; expected one of them")
        if not kind.one_class:
            raise ConfigError(no_list(kind, "--labels"))
        images = read_unlabelled(data)
        numbers = class_numbers(kind.labels) | directory_classes(kind.labels, models / manifest.task, reading.class_map)
        truths = truths_of(kind, read_labels(labels, images, numbers))
    elif labelled:
        evidence = read_evidence(data, kind, manifest, models, reading)
        images, truths = evidence.images, evidence.truths
    else:
        images = read_unlabelled(data)
        truths = [None] * len(images)
    return images, truths


def truths_of(kind: TaskKind[Any], classes: Iterable[int | None]) -> list[Truth | None]:
    """Labels as the kind's losses take them, of the class of each image."""
    return [None if each is None else kind.truth(Annotation(np.array([each]))) for each in classes]


def _openings_of(out: Path, design: str, sha256: str) -> int:
    """The number of this opening of those images, by the certificates that are replaced."""
    replaced = to_replace(out, load_site)
    if replaced is None:
        return 1
    before = replaced.data
    return before.openings + (before.design != design) if before.sha256 == sha256 else 1


def _names_of(pair: Pair) -> tuple[str, ...]:
    return (pair.edge, pair.best) if pair.intermediate is None else (pair.edge, pair.intermediate.name, pair.best)


def _stages_of(profile: Profile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages of the profile's pairs at the edge, and in the datacenter."""
    named = {name for pair in profile.pairs for name in _names_of(pair)}
    edge, datacenter = stages_by_tier(profile)
    return edge, tuple(name for name in datacenter if name in named)


def _check_fingerprint(profile: Profile, manifest: Manifest, name: str) -> None:
    measured, present = profile.stage(name).fingerprint, manifest.fingerprint(name)
    if measured != present:
        raise ManifestError(
            f"the profile of {profile.task!r} was made for {name} with fingerprint {measured}, but the manifest has "
            f"{present}; make a new profile first: `{advise('calibrate', '--task', profile.task, '--data', 'IMAGES')}`"
        )


class SiteCertification:
    """The certificates of a site's images with some labels."""

    def __init__(
        self,
        profile: Profile,
        answers: Answers,
        images: AnyImages,
        truths: Sequence[Truth | None],
        delta: float,
        interval_delta: float,
    ) -> None:
        """Take what was answered; accuracies get intervals at confidence 1 − `interval_delta`."""
        self._profile = profile
        self._answers = answers
        self._kind = answers.kind
        self._images = images
        self._truths = truths
        self._delta = delta
        self._interval_delta = interval_delta
        self._chosen = in_random_order(answers.chosen)
        self._evidence = {pair.edge: self._evidence_on(pair) for pair in profile.pairs}

    def _evidence_on(self, pair: Pair) -> Evidence:
        edge, between = self._answers.edge[pair.edge], self._between(pair)
        return make_evidence(
            self._kind, Scored(edge, pair.score), self._answers.datacenter[pair.best], self._truths, self._chosen,
            None if between is None else Scored(self._answers.datacenter[between.name], between.score),
        )  # fmt: skip

    def _between(self, pair: Pair) -> Intermediate | None:
        """The intermediate stage, if it was asked."""
        between = pair.intermediate
        return between if between is not None and between.name in self._answers.datacenter else None

    def _paths(self, pair: Pair) -> Sequence[tuple[Thresholds, ...]]:
        """The paths through the stages that were asked."""
        return paths_of(pair) if self._between(pair) is not None else paths_of(pair)[:1]

    def check(self, where: str, *, confirmed: bool) -> dict[str, MeasuredAccuracy]:
        """Check the labels; the accuracy of each stage on the images that they were checked on.

        Raises:
            ConfigError: if they cannot be believed, or must be confirmed.
        """
        if not self._labelled.any():
            return {}
        checked = checkable(self._images, self._truths, self._answers.chosen, where)
        found: dict[str, MeasuredAccuracy] = {}
        for pair in self._profile.pairs:
            best, below = self._answers.datacenter[pair.best], self._answers.below(pair)
            check_labels(self._kind, below, best, self._truths, in_random_order(checked), where)
            for stage in (*below, best):
                found[stage.name] = self._accuracy(stage, in_random_order(checked))
            unlike = harder(pair.best, found[pair.best], self._profile.stage(pair.best).datacenter_accuracy)
            if unlike is None and isinstance(pair.right, RightAnswers):
                own = select(self._truths, checked)
                losses = [self._kind.losses(stage.of(checked), own) for stage in (below[0], best)]
                unlike = neither_oftener(pair.edge, pair.best, np.stack(losses, 1), pair.right.neither, pair.right.n)
            if unlike is not None and not confirmed:
                raise ConfigError(f"{where}: {unlike} by --labels-checked")
        return found

    @property
    def labels(self) -> int:
        """The number of images with labels."""
        return int(self._labelled.sum())

    @property
    def _labelled(self) -> Flags:
        return self._evidence[self._profile.pairs[0].edge].labelled

    def _accuracy(self, stage: StagePredictions, chosen: NDArray[np.intp]) -> MeasuredAccuracy:
        right = accuracies(self._kind, stage.of(chosen), select(self._truths, chosen))
        return measure_accuracy(right, self._images.sha256, self._interval_delta)

    def certificates(self, data: SiteData, since: datetime | None, until: datetime) -> SiteCertificates:
        """The certificates of all pairs, from images of these times."""
        names = dict.fromkeys(name for pair in self._profile.pairs for name in _names_of(pair))
        return SiteCertificates(
            format=4,
            task=self._profile.task,
            basis="site",
            since=since,
            until=until,
            data=data,
            stages=tuple(map(self._stage, names)),
            pairs=tuple(map(self._pair, self._profile.pairs)),
        )

    def _stage(self, name: str) -> SiteStage:
        """A stage with its accuracy at the site, if all labels are known."""
        stage = self._profile.stage(name)
        accuracy = sent = None
        if self._labelled.all():
            edge, served = self._answers.edge.get(name), self._answers.datacenter.get(name)
            accuracy = None if edge is None else self._accuracy(edge, self._chosen)
            sent = None if served is None else self._accuracy(served, self._chosen)
        return SiteStage(
            name=name,
            fingerprint=stage.fingerprint,
            temperature=stage.temperature,
            executions=tuple(self._answers.executions.get(name, ())),
            accuracy=accuracy or sent,
            sent_accuracy=msgspec.UNSET if accuracy is None or sent is None or sent == accuracy else sent,
        )

    def _pair(self, pair: Pair) -> SitePair:
        """The certificates of one pair."""
        between = pair.intermediate
        condition = certify_condition(
            self._evidence[pair.edge], self._paths(pair), costs_of(self._profile, pair),
            pair.conditions[0].balanced.max_drop, self._delta, bounds_drop=self._kind.agreement_bounds_drop,
        )  # fmt: skip
        return SitePair(
            edge=pair.edge,
            best=pair.best,
            intermediate=None if between is None else between.name,
            score=pair.score,
            intermediate_score=None if between is None else between.score,
            conditions=(condition,),
        )

    def wish(self, pair: Pair) -> Wish:
        """What labels do for each target of a pair."""
        evidence, costs = self._evidence[pair.edge], costs_of(self._profile, pair)
        found = label_needs(
            evidence, self._paths(pair), TESTED_DROPS, self._delta, lambda step: expected_cost(costs, step)
        )
        reference = self._answers.datacenter[pair.best]
        return Wish(self._answers.below(pair), reference, found, evidence.edge.scores, self._chosen)


def no_list(kind: TaskKind[Any], option: str) -> str:
    """Why `option` is not for tasks of this kind."""
    return (
        f"{option} is for tasks whose label is one class; a label of kind {kind.name!r} says more than a line of a CSV "
        "file can: give labelled images as --data"
    )
