"""Making a profile: from calibrated probabilities of every stage to temperatures, accuracies and certificates.

Apart from `profile` because it needs SciPy, whose import would cost a starting edge node more than a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.bounds import clopper_pearson, drop_upper_bound
from hawkvision.cascade.certification.certificate import (
    Flags,
    Method,
    Sample,
    StageOutcomes,
    Thresholds,
    ThresholdStep,
    certify,
    sweep,
    threshold_grid,
    two_levels,
)
from hawkvision.cascade.certification.profile import (
    CERTIFIED_DROPS,
    Certificate,
    Condition,
    EscalationThreshold,
    Intermediate,
    Pair,
    PathStep,
    Profile,
    ScoreCurve,
    StageProfile,
    Watch,
    threshold_value,
)
from hawkvision.cascade.certification.threshold_search import (
    Costs,
    Curve,
    Path,
    expected_cost,
    measure_curve,
    plan_paths,
)
from hawkvision.cascade.confidence import calibration
from hawkvision.cascade.confidence.scores import Floats, Probabilities, Score, score, softmax
from hawkvision.core.types import Logits
from hawkvision.models.manifest import MeasuredAccuracy

BALANCED_GAP_SHARE = 0.25
"""`balanced` may give up a quarter of the gap between edge and best: closing the last quarter costs as many
escalations as the first three."""

BALANCED_LARGEST_SHARE = 0.5
"""What it may give up where a quarter is less than the certification images can show at all, whatever is on them:
with 680 that is 0.46 points, and a stage within 1.8 points of the best would always escalate for want of images."""

ESCALATION_MS = 5.0
"""What an escalation weighs besides the datacenter's own work when thresholds are weighed against each other: an
escalation on a good network. On a machine that is both edge and datacenter nothing would be too far away."""

SMALLEST_GROUP = 10
"""Images of a source that is split by itself: the fewest of which the three parts get some each, and roughly their
shares. Sources with fewer, such as one file name per image, are thrown together."""


class Split(msgspec.Struct, frozen=True):
    """Disjoint index sets of a data set."""

    profile: NDArray[np.intp]
    certify: NDArray[np.intp]
    held_out: NDArray[np.intp]

    def used(self) -> NDArray[np.intp]:
        """The numbers of all of them, rising."""
        return np.sort(np.concatenate([self.profile, self.certify, self.held_out]))


def split_indices(groups: NDArray[np.str_], seed: int, shares: tuple[float, float] = (0.2, 0.5)) -> Split:
    """Divide images into profile, certification and held-out sets, with equal shares of every group.

    Groups of fewer than `SMALLEST_GROUP` are pooled into one. From that many images on, no part is empty.

    Args:
        groups: (n,) the source of each image, so that each part has the same mixture.
        seed: of the shuffle.
        shares: of the profile and the certification part; the rest is held out.
    """
    rng = np.random.default_rng(seed)
    parts: tuple[list[NDArray[np.intp]], ...] = ([], [], [])
    names, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    pool = len(names)
    place = np.where(counts[inverse] < SMALLEST_GROUP, pool, inverse)
    for group in np.unique(place):
        members = rng.permutation(np.flatnonzero(place == group))
        first, second = (round(len(members) * share) for share in (shares[0], shares[0] + shares[1]))
        for part, chosen in zip(parts, np.split(members, [first, second]), strict=True):
            part.append(chosen)
    profile, certify, held_out = (np.sort(np.concatenate(part)) for part in parts)
    return Split(profile, certify, held_out)


def measure_accuracy(correct: NDArray[np.bool_], data_sha256: str, delta: float = 0.05) -> MeasuredAccuracy:
    """Top-1 accuracy with its exact interval at confidence 1 − delta."""
    low, high = clopper_pearson(int(correct.sum()), len(correct), delta)
    return MeasuredAccuracy(
        value=round(float(correct.mean()), 6), n=len(correct), low=round(low, 6), high=round(high, 6),
        data_sha256=data_sha256,
    )  # fmt: skip


class StagePredictions(msgspec.Struct, frozen=True):
    """What a stage said of all images: calibrated probabilities (n, classes) exactly as it serves them."""

    name: str
    probabilities: Probabilities
    cost_ms: float

    def labels(self) -> NDArray[np.intp]:
        """The most probable class of each image (n,)."""
        found: NDArray[np.intp] = self.probabilities.argmax(axis=1)
        return found

    def scores(self, kind: Score) -> Floats:
        """How sure it is of each image (n,)."""
        return score(self.probabilities, kind).astype(np.float64)


def profile_stage(
    name: str,
    models: dict[str, str],
    fingerprint: str,
    logits: Logits,
    labels: NDArray[np.integer],
    split: Split,
    data_sha256: str,
    cost_ms: float,
    delta: float = 0.05,
) -> tuple[StageProfile, StagePredictions]:
    """Fit one stage's temperature on the profile split and measure it on the certification split."""
    # Rounded before use, so that the scores certified here are, bit for bit, those of a node that reads the profile.
    temperature = round(calibration.fit_temperature(logits[split.profile], labels[split.profile]), 6)
    looked = StagePredictions(name, softmax(logits, temperature), round(cost_ms, 3))
    right = looked.labels() == labels
    confidence = looked.scores(Score.TOP1)[split.certify]
    return StageProfile(
        name=name,
        models=models,
        fingerprint=fingerprint,
        temperature=temperature,
        accuracy=measure_accuracy(right[split.certify], data_sha256, delta),
        calibration_error=round(calibration.expected_calibration_error(confidence, right[split.certify]), 6),
        cost_ms=looked.cost_ms,
    ), looked  # fmt: skip


def profile_pair(
    edge: StagePredictions,
    best: StagePredictions,
    labels: NDArray[np.integer],
    split: Split,
    intermediate: StagePredictions | None = None,
    delta: float = 0.05,
    escalation_ms: float = ESCALATION_MS,
    reused_ms: float = 0.0,
) -> Pair:
    """Certify a pair: scores, curves and path from the profile split, certificates from the certification split.

    `reused_ms` of the reference stage's cost are the intermediate stage's work
    (`model_zoo.calibration.model_runner.CascadePredictions.reused_ms`).
    """
    planned = split.profile
    kind = _choose_score(edge, best, labels, planned)
    intermediate_kind = _choose_score(intermediate, best, labels, planned) if intermediate else None
    chosen = make_sample(edge, kind, best, labels, planned, intermediate, intermediate_kind)
    costs = Costs(edge.cost_ms, best.cost_ms, escalation_ms, intermediate.cost_ms if intermediate else None, reused_ms)
    paths = tuple(rounded_path(path) for path in plan_paths(chosen, costs))
    sample = make_sample(edge, kind, best, labels, split.certify, intermediate, intermediate_kind)
    gap = float((chosen.best_right.astype(np.float64) - chosen.edge.right).mean())
    balanced = balanced_drop(gap, len(sample), delta / len(paths))
    whole = certify_condition(sample, paths, costs, balanced, delta, Method.EXACT)
    between = None
    if (
        intermediate is not None
        and intermediate_kind is not None
        and chosen.intermediate is not None
        and len(paths) > 1
    ):
        between = Intermediate(
            name=intermediate.name,
            score=intermediate_kind,
            curve=written_curve(measure_curve(chosen.intermediate, chosen.best_right)),
            path=tuple(_path_step(step) for step in sweep(sample, paths[1])),
            reused_ms=reused_ms,
        )
    return Pair(
        edge=edge.name,
        best=best.name,
        score=kind,
        escalation_ms=escalation_ms,
        intermediate=between,
        curve=written_curve(measure_curve(chosen.edge, chosen.best_right)),
        path=tuple(_path_step(step) for step in sweep(sample, paths[0])),
        conditions=(whole,),
    )


def make_sample(
    edge: StagePredictions,
    kind: Score,
    best: StagePredictions,
    labels: NDArray[np.integer] | None,
    chosen: NDArray[np.intp],
    intermediate: StagePredictions | None = None,
    intermediate_kind: Score | None = None,
) -> Sample:
    """The images `chosen` as a sample; without labels nothing counts as right, and only agreement can certify."""
    truth = None if labels is None else labels[chosen]
    best_labels = best.labels()[chosen]

    def stage(looked: StagePredictions, kind: Score) -> StageOutcomes:
        said = looked.labels()[chosen]
        return StageOutcomes(looked.scores(kind)[chosen], _right(said, truth), said != best_labels)

    between = None if intermediate is None or intermediate_kind is None else stage(intermediate, intermediate_kind)
    return Sample(stage(edge, kind), _right(best_labels, truth), between)


def certify_condition(
    sample: Sample,
    paths: Sequence[Path],
    costs: Costs,
    balanced: float,
    delta: float,
    method: Method,
    planned: Certificate | None = None,
) -> Condition:
    """Certificates of whole images for all `CERTIFIED_DROPS`, for `balanced` and for never escalating.

    Of several paths each gets its share of δ, so that the cheapest of their results may be chosen. Where nothing below
    the reference stage can be certified to keep `balanced`, the thresholds `planned` for it stand, without a guarantee.
    """
    n = len(sample)

    def cost(step: ThresholdStep) -> float:
        return expected_cost(costs, step)

    def certified(max_drop: float) -> Certificate:
        found = [certify(sample, path, max_drop, delta / len(paths), method, cost) for path in paths]
        step = min(found, key=cost)
        return write_certificate(step, max_drop, n, delta, method)

    never = next(sweep(sample, (Thresholds(-math.inf),)))
    if method is Method.AGREEMENT:
        bound = clopper_pearson(never.differing, n, 2 * delta)[1]
    else:
        bound = drop_upper_bound(never.lost, never.gained, n, delta)
    kept = certified(balanced)
    if planned is not None and (kept.threshold, kept.intermediate_threshold) == ("always", "always"):
        kept = msgspec.structs.replace(planned, basis="profile")
    return Condition(
        min_received_fraction=1.0,
        balanced=kept,
        fast=write_certificate(never, math.ceil(bound * 1e4) / 1e4, n, delta, method),
        certificates=tuple(certified(drop) for drop in CERTIFIED_DROPS),
    )


def rounded_path(path: Path) -> Path:
    """The path as a profile holds it, so that what is certified is, bit for bit, what a node compares with."""
    return tuple(
        dict.fromkeys(
            Thresholds(threshold_value(written(step.edge)), threshold_value(written(step.intermediate)))
            for step in path
        )
    )


def paths_of(pair: Pair) -> tuple[Path, ...]:
    """The paths that a profile was certified along."""
    written_paths = (pair.path,) if pair.intermediate is None else (pair.path, pair.intermediate.path)
    return tuple(
        tuple(
            Thresholds(threshold_value(step.threshold), threshold_value(step.intermediate_threshold)) for step in steps
        )
        for steps in written_paths
    )


def costs_of(profile: Profile, pair: Pair) -> Costs:
    """What the pair's stages cost, as they were weighed when it was certified."""
    edge, best = (profile.stage(name).cost_ms for name in (pair.edge, pair.best))
    if pair.intermediate is None:
        return Costs(edge, best, pair.escalation_ms)
    return Costs(
        edge, best, pair.escalation_ms, profile.stage(pair.intermediate.name).cost_ms, pair.intermediate.reused_ms
    )


def balanced_drop(gap: float, n: int, delta: float) -> float:
    """The ε of `balanced`, from the gap on the profile split and the number of certification images alone."""
    least = drop_upper_bound(0, 0, n, delta)
    return max(0.0, min(max(BALANCED_GAP_SHARE * gap, least), BALANCED_LARGEST_SHARE * gap))


def written(value: float) -> EscalationThreshold:
    """A threshold as profiles write it: eight decimals tell apart all float32 scores, even close to 1."""
    if math.isinf(value):
        return "always" if value > 0 else "never"
    return round(min(max(value, 0.0), 1.0), 8)


def _right(said: NDArray[np.intp], truth: NDArray[np.integer] | None) -> Flags:
    return np.zeros(len(said), np.bool_) if truth is None else np.asarray(said == truth)


def _choose_score(
    looked: StagePredictions, best: StagePredictions, labels: NDArray[np.integer], chosen: NDArray[np.intp]
) -> Score:
    """The score with the smaller area under its drop-against-escalation curve; top-1 when there is no difference."""
    area: dict[Score, float] = {}
    for kind in Score:
        sample = make_sample(looked, kind, best, labels, chosen)
        steps = list(sweep(sample, two_levels(threshold_grid(sample.edge.scores))))
        area[kind] = float(np.trapezoid([s.drop for s in steps][::-1], [s.escalation for s in steps][::-1]))
    return Score.MARGIN if area[Score.MARGIN] < area[Score.TOP1] else Score.TOP1


def write_certificate(
    step: ThresholdStep, max_drop: float, n: int, delta: float, method: Method = Method.EXACT
) -> Certificate:
    """A certified step as profiles hold it."""
    agreement = method is Method.AGREEMENT
    return Certificate(
        max_drop=round(max_drop, 6),
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        delta=delta,
        n=n,
        basis="agreement" if agreement else "labelled",
        escalation=round(step.escalation, 6),
        to_best=round(step.to_best, 6),
        observed_drop=round(step.differing / n if agreement else step.drop, 6),
        edge_watch=_edge_watch(step, max_drop, n, delta),
        intermediate_watch=_intermediate_watch(step, max_drop, n, delta),
    )


def _edge_watch(step: ThresholdStep, max_drop: float, n: int, delta: float) -> Watch:
    share = 1.0 if step.thresholds.intermediate == math.inf else _share(step.edge_differing, step.differing)
    return _watch(max_drop * share, step.edge_differing, round(step.escalation * n), n, delta)


def _intermediate_watch(step: ThresholdStep, max_drop: float, n: int, delta: float) -> Watch | None:
    escalated = round(step.escalation * n)
    if step.thresholds.intermediate == math.inf or not escalated:
        return None
    differing = step.differing - step.edge_differing
    share = _share(differing, step.differing)
    return _watch(max_drop * share * n / escalated, differing, round(step.to_best * n), escalated, delta)


def _share(part: int, whole: int) -> float:
    """A stage's part of the disagreement, by the rule of succession: one without any must still be allowed some."""
    return (part + 1) / (whole + 2)


def _watch(max_drop: float, differing: int, passed_on: int, n: int, delta: float) -> Watch:
    return Watch(
        max_drop=round(min(1.0, max_drop), 6),
        disagreement=round(clopper_pearson(differing, n, delta)[1], 6),
        difficulty=round(clopper_pearson(passed_on, n, delta)[1], 6),
    )


def _path_step(step: ThresholdStep) -> PathStep:
    return PathStep(
        threshold=written(step.thresholds.edge),
        intermediate_threshold=written(step.thresholds.intermediate),
        escalation=round(step.escalation, 6),
        to_best=round(step.to_best, 6),
        drop=round(step.drop, 6),
    )


def written_curve(curve: Curve) -> ScoreCurve:
    """A curve as profiles hold it."""

    def rounded(values: Floats) -> tuple[float, ...]:
        return tuple(round(min(max(float(v), 0.0), 1.0), 6) for v in values)

    return ScoreCurve(scores=rounded(curve.scores), disagreement=rounded(curve.disagreement), drop=rounded(curve.drop))
