"""Which labels would help to certify more, and whether labels may be believed.

Wrong labels make everything look harmless: shifted by one class, neither stage is right where they differ, so that
nothing is lost. So labels are compared with the answers on images drawn at random from all. Disagreements alone would
tell nothing, because the reference stage is often wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.guarantee.binomial import at_least, at_most, best_assignment
from hawkvision.guarantee.bounds import log_wealth
from hawkvision.guarantee.certificate import certified_steps
from hawkvision.guarantee.evidence import Evidence, Flags, StageEvidence, Thresholds, ThresholdStep, disagreements
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.class_scores import Floats

RANDOM_IMAGES: Final = 30
"""Images drawn at random from all, whose labels are compared with the answers."""
FEWEST_CHECKED: Final = 24
"""So many of them must have a label; some images show nothing that a label could name."""
LEVEL: Final = 0.01
"""Probability, for right labels, that one of the tests against chance findings refuses them."""

_CONFIRM: Final = "either these images are harder, or labels are wrong; look at those labels again, and confirm them"

Classes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LabelNeed:
    """What labels do for one target."""

    now: ThresholdStep
    """What is certified with the labels that there are."""
    used: int
    """Labels that the certificate rests on: of disagreements that are answered below the reference stage."""
    helps: Flags
    """Which images (n,) would help if they had one: disagreements that the thresholds pass if none of them loses
    anything."""
    to_best: float
    """The share that the reference stage would then answer."""


def label_needs(
    evidence: Evidence,
    paths: Sequence[Sequence[Thresholds]],
    drops: Sequence[float],
    delta: float,
    cost: Callable[[ThresholdStep], float],
) -> dict[float, LabelNeed]:
    """What labels do for each of `drops`. Several paths share `delta` equally."""
    hopeful = replace(
        evidence,
        edge=_harmless(evidence.edge, evidence.labelled),
        intermediate=None if evidence.intermediate is None else _harmless(evidence.intermediate, evidence.labelled),
        reference_losses=np.nan_to_num(evidence.reference_losses),
    )
    found = {}
    for drop in drops:
        now, _ = _cheapest(evidence, paths, drop, delta, cost)
        then, steps = _cheapest(hopeful, paths, drop, delta, cost)
        helps = np.zeros(len(evidence), np.bool_)
        if cost(then) < cost(now):
            for step in steps:
                helps |= _differing(evidence, step.thresholds) & ~evidence.labelled
        used = _differing(evidence, now.thresholds) & evidence.labelled
        found[drop] = LabelNeed(now, int(used.sum()), helps, then.to_best)
    return found


def _cheapest(
    evidence: Evidence,
    paths: Sequence[Sequence[Thresholds]],
    drop: float,
    delta: float,
    cost: Callable[[ThresholdStep], float],
) -> tuple[ThresholdStep, list[ThresholdStep]]:
    """The cheapest certified step of all paths, and the steps of its path up to it."""
    certified = [certified_steps(evidence, path, drop, delta / len(paths)) for path in paths]
    steps = min(certified, key=lambda each: min(map(cost, each)))
    best = min(steps, key=cost)
    return best, steps[: steps.index(best) + 1]


def _harmless(stage: StageEvidence, labelled: Flags) -> StageEvidence:
    """The stage as if no disagreement without a label lost anything."""
    return replace(
        stage, losses=np.nan_to_num(stage.losses), disagreements=np.where(labelled, stage.disagreements, 0.0)
    )


def _differing(evidence: Evidence, thresholds: Thresholds) -> Flags:
    """Which images (n,) are answered below the reference stage, and otherwise than by it."""
    differing: Flags = np.add(*disagreements(evidence, thresholds)) > 0.0
    return differing


def worse(losses: Floats, reference_losses: Floats, *, binary: bool) -> bool:
    """Whether the reference stage is measurably worse than the stage below, on images (n,) in a random order."""
    more = losses - reference_losses
    if not binary:
        return bool(log_wealth(more, 0.0, LEVEL, more**2) >= math.log(1.0 / LEVEL))
    better, differing = int((more > 0).sum()), int((more != 0).sum())
    return differing > 0 and at_most(better, differing, 0.5) <= LEVEL


def doubt(
    reference: str,
    reference_losses: Floats,
    below: Mapping[str, Floats],
    classes: tuple[Classes, Classes, int] | None,
    *,
    binary: bool,
    allow_worse: bool = False,
) -> str | None:
    """Why the labels of images (n,) drawn at random cannot be believed; None if they can.

    Args:
        reference: name of the reference stage.
        reference_losses: of its answers (n,), by the labels.
        below: the same of each stage below it, by name.
        classes: labels, the reference stage's answers, and the number of classes, where a label is one class. A label
            that says only that the answer is wrong is that number.
        binary: whether losses are 0 or 1.
        allow_worse: whether the reference stage may be worse than a stage below it.
    """
    n, right = len(reference_losses), 1.0 - reference_losses.mean()
    found = f"on {n} images drawn at random {reference} is right on {right:.1%}"
    expected = "expected the labels of the images"
    if classes is not None:
        labels, answers, number = classes
        known = labels < number
        explained = better_explanation(labels[known], answers[known], number) if known.any() else None
        if explained is not None:
            how, share = explained
            return f"{found}, and would be on {share:.1%} if the labels were not {how}; {expected}"
        chance = chance_rate(labels, answers)
        if chance is not None:
            return f"{found}, no oftener than by chance ({chance:.1%}); {expected}"
    for name, losses in below.items():
        if not allow_worse and worse(losses, reference_losses, binary=binary):
            return (
                f"{found}, and {name}, which is below it, on {1.0 - losses.mean():.1%}; {expected}, and a reference "
                "stage that is no worse than those below it"
            )
    return None


def harder(reference: str, found: MeasuredAccuracy, known: MeasuredAccuracy) -> str | None:
    """What to confirm, if the reference stage is right measurably less often than its profile says; else None."""
    if found.high >= known.low:
        return None
    return (
        f"on {found.n} images drawn at random {reference} is right on {found.value:.1%}, and in its profile on "
        f"{known.value:.1%}: {_CONFIRM}"
    )


def neither_oftener(edge: str, reference: str, losses: Floats, before: int, n_before: int) -> str | None:
    """What to confirm, if neither stage is right measurably oftener than on `before` of n_before images of the profile;
    else None.

    `losses` (n, 2) are those of both stages, 0 or 1, on images drawn at random.
    """
    n, neither = len(losses), int((losses > 0.0).all(1).sum())
    if not measurably_oftener(neither, n, before, n_before):
        return None
    return (
        f"on {n} images drawn at random neither {edge} nor {reference} is right on {neither / n:.1%}, and in the "
        f"profile on {before / n_before:.1%}: {_CONFIRM}"
    )


def chance_rate(labels: Classes, answers: Classes) -> float | None:
    """How often labels would agree with answers by chance, if they agree no oftener than that; else None.

    Where nearly all images are of one class, as many right answers as that class has labels are not taken for chance.
    """
    n, right = len(labels), int((labels == answers).sum())
    classes = max(labels.max(), answers.max()) + 1
    shares = [np.bincount(each, minlength=classes) / n for each in (labels, answers)]
    chance = float(shares[0] @ shares[1])
    largest = (n * float(shares[0].max()) + 1) / (n + 2)
    doubtful = at_least(right, n, chance) > LEVEL and (right < n / 2 or at_most(right, n, largest) <= LEVEL)
    return chance if doubtful else None


def better_explanation(labels: Classes, answers: Classes, classes: int) -> tuple[str, float] | None:
    """A shift or a permutation of the classes after which labels (n,) agree with answers measurably oftener; None if
    there is none. With the share that would then agree.
    """
    distances = np.bincount((labels - answers) % classes, minlength=classes)
    shift = int(distances[1:].argmax()) + 1 if classes > 1 else 0
    if shift and _oftener(int(distances[shift]), int(distances[0]), tried=classes - 1):
        signed = shift if shift <= classes / 2 else shift - classes
        return f"shifted by {signed:+d}", float(distances[shift]) / len(labels)
    _, found = np.unique(np.concatenate([labels, answers]), return_inverse=True)
    label, answer = found[: len(labels)], found[len(labels) :]
    size = int(found.max()) + 1
    # Fitted on every other image, and tested on those between.
    confusion = np.diag(np.full(size, 0.5))
    np.add.at(confusion, (answer[::2], label[::2]), 1.0)
    named = best_assignment(confusion)[answer]
    won, lost = (named == label) & (answer != label), (named != label) & (answer == label)
    if _oftener(int(won[1::2].sum()), int(lost[1::2].sum()), tried=1):
        return "exchanged between some classes", float((named == label).mean())
    return None


def measurably_oftener(found: int, n: int, before: int, n_before: int) -> bool:
    """Whether `found` of n images is measurably more than `before` of n_before others (Fisher's exact test)."""
    both, all_images = found + before, n + n_before
    ways = sum(math.comb(n, i) * math.comb(n_before, both - i) for i in range(found, min(n, both) + 1))
    return ways / math.comb(all_images, both) <= LEVEL


def _oftener(won: int, lost: int, tried: int) -> bool:
    return won > lost and at_least(won, won + lost, 0.5) * tried <= LEVEL
