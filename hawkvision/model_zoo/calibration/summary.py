"""What calibration found, in lines for people: accuracies, attainable targets, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hawkvision.cascade.certification.profile import (
    CERTIFIED_DROPS,
    TESTED_DROPS,
    Certificate,
    Pair,
    Profile,
    RightAnswers,
    Shrinking,
)
from hawkvision.core.advice import advise
from hawkvision.guarantee.answered import stated_drop
from hawkvision.guarantee.certificate import least_drop
from hawkvision.model_zoo.calibration.certification import DELTA
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.tasks.kind import TaskKind

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title."""

    title: str
    columns: Row
    rows: tuple[Row, ...]


ACCURACY_COLUMNS: Final = ("stage", "accuracy", "95 % interval", "images", "ms per image")
TARGET_COLUMNS: Final = ("max_accuracy_drop", "min_accuracy", "quality", "escalated", "by the reference stage")


def accuracies_table(profile: Profile) -> Table:
    """The accuracy of each stage as it is served."""
    rows = []
    for stage in profile.stages:
        rows.append((stage.name, *_measured(stage.accuracy), f"{stage.cost_ms:.1f}"))
        if stage.datacenter_accuracy != stage.accuracy:
            rows.append((f"{stage.name}, on images as sent", *_measured(stage.datacenter_accuracy), ""))
    return Table("Accuracy of each stage, as it is served", ACCURACY_COLUMNS, tuple(rows))


def targets_table(profile: Profile, pair: Pair) -> Table:
    """The targets of a pair that are certified, and what each costs; those beyond never escalating are left out."""
    condition, best = pair.conditions[0], profile.stage(pair.best).datacenter_accuracy
    named = [(each, "") for each in condition.certificates if each.max_drop < condition.fast.max_drop]
    named += [(condition.balanced, "balanced"), (condition.fast, "fast")]
    rows = [
        (
            f"{stated_drop(each.max_drop):g}",
            f"{_rounded_down(best.low - stated_drop(each.max_drop)):.4f}",
            quality,
            *_costs(each),
        )
        for each, quality in sorted(named, key=lambda pair: pair[0].max_drop)
        if each.basis != "profile" and each.to_best < 1.0
    ]
    return Table(f"Certified targets of {pair.edge}, compared with {pair.best}", TARGET_COLUMNS, tuple(rows))


def notes(profile: Profile, kind: TaskKind[Any]) -> Iterator[str]:
    """What the figures do not show by themselves."""
    certificate = profile.pairs[0].conditions[0].fast
    paths = 1 if profile.pairs[0].intermediate is None else 2
    least = least_drop(certificate.n, certificate.delta / paths, binary=kind.binary)
    smallest, enough = CERTIFIED_DROPS[0], _images_for(TESTED_DROPS[0], certificate.delta / paths, kind)
    yield f"{certificate.n} images certify no drop below {least:.2%}, even if not one of them loses anything."
    if least > TESTED_DROPS[0]:
        yield f"The smallest drop that can be asked for, {smallest:.2%}, takes at least {enough} images."
    opened = next((use for use in reversed(profile.uses) if use.purpose == "certify"), None)
    if opened is not None and (opened.openings or 1) > 1:
        yield (
            f"These images have certified {opened.openings} designs. Each after the first halves the probability of a "
            f"wrong certificate, now {certificate.delta:g}; other images begin with {DELTA:g} again."
        )
    for pair in profile.pairs:
        if not targets_table(profile, pair).rows:
            yield f"Nothing is certified for {pair.edge}: the reference stage answers whatever asks for an accuracy."
        if isinstance(pair.right, RightAnswers) and pair.right.differing:
            right, differing = pair.right, pair.right.differing
            yield (
                f"{pair.edge} and {pair.best} differ on {differing / right.n:.1%} of the images; of these {pair.best} "
                f"is right on {right.reference / differing:.0%}, {pair.edge} on {right.edge / differing:.0%}. Neither "
                f"is right on {right.neither / right.n:.1%} of all."
            )
    shrinking = profile.shrinking
    if isinstance(shrinking, Shrinking):
        found = f"accuracy {shrinking.accuracy:.1%} if they are, {shrinking.accuracy_whole:.1%} if not"
        what = "Large images are made smaller" if shrinking.allowed else "Images are not made smaller"
        yield f"{what} before they are sent to the datacenter ({found}, on {shrinking.n} images)."


def next_command(profile: Profile, out: Path, *, own: bool) -> str:
    """The command that serves both tiers with this profile; `own` if it is not the task's own file.

    Both, because a node without a datacenter certifies nothing.
    """
    words = ["--task", profile.task, *(("--profile", str(out)) if own else ())]
    return advise("up", *words)


def _measured(accuracy: MeasuredAccuracy) -> Row:
    return f"{accuracy.value:.2%}", f"{accuracy.low:.2%} to {accuracy.high:.2%}", str(accuracy.n)


def _rounded_down(accuracy: float) -> float:
    return max(0.0, math.floor(accuracy * 1e4) / 1e4)


def _costs(certificate: Certificate) -> Row:
    return f"{certificate.escalation:.1%}", f"{certificate.to_best:.1%}"


def _images_for(drop: float, delta: float, kind: TaskKind[Any]) -> int:
    """The number of images that could certify this drop, to two digits."""
    n: int = 10
    while least_drop(n, delta, binary=kind.binary) > drop:
        n = round(n * 1.2)
    digits = 10 ** (len(str(n)) - 2)
    return int(-(-n // digits) * digits)
