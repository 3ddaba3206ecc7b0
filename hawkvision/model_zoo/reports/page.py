"""The page of `hawkvision report calibration`. Titles state findings, so the numbers choose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.profile import Certificate, EscalationThreshold, Pair, Profile
from hawkvision.report import html
from hawkvision.report.charts import Axis, Chart
from hawkvision.report.html import Html, cell, percent, tag
from hawkvision.tasks.class_scores import Floats

WELL_CALIBRATED: Final = 0.03
"""Expected calibration error up to which a stage's probabilities are called about right."""
ALL_IMAGES: Final = np.array([0.0, 1.0])


class Outcome(NamedTuple):
    """What thresholds do on the held-out images."""

    escalation: float
    to_best: float
    drop: float
    margin: float
    """Half the 95 % interval of the drop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFindings:
    """An edge stage backed by the reference stage, on `n` held-out images."""

    pair: Pair
    n: int
    edge_accuracy: float
    best_accuracy: float
    curve: tuple[Outcome, ...]
    """Along the path of two levels."""
    targets: tuple[tuple[Certificate, Outcome], ...]
    """Rising in the drop; `balanced` and `fast` among them."""

    def certified(self) -> list[tuple[Certificate, Outcome]]:
        """The targets that a test certified and that leave any image to a stage below the reference."""
        return [(each, found) for each, found in self.targets if each.basis != "profile" and each.to_best < 1.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Confidence of a stage against accuracy, in bins; empty bins are left out. All arrays are (bins,)."""

    stage: str
    error_before: float
    """Expected calibration error without the temperature, 0..1."""
    error: float
    counts: NDArray[np.intp]
    confidence: Floats
    accuracy: Floats
    low: Floats
    """Lower ends of exact 95 % intervals of the accuracy."""
    high: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The content of the page."""

    profile: Profile
    as_of: date
    data_name: str
    data_sha256: str
    images: int
    reliabilities: tuple[Reliability, ...]
    measures: Mapping[str, Mapping[str, float]]
    """The kind's own figures of each stage."""
    pairs: tuple[PairFindings, ...]
    """The default edge stage's pair comes first."""


def render(findings: Findings) -> str:
    """The page."""
    first, *others = findings.pairs
    task, profile = findings.profile.task, findings.profile
    return html.page(
        f"Calibration report: {task}",
        tag(
            "p",
            f"HawkVision calibration report · task {task} · {first.pair.edge} backed by {first.pair.best} · "
            f"{findings.as_of.isoformat()}",
            kind="kicker",
        ),
        tag("h1", headline(first)),
        html.facts(
            [
                ("edge stage alone", percent(first.edge_accuracy)),
                ("reference stage alone", percent(first.best_accuracy)),
                ("certified targets exceeded on held-out images", _exceeded(first)),
            ],
            "cards",
        ),
        tag(
            "p",
            f"Results on {first.n:,} held-out images of {findings.data_name}, which {_held_out(findings)}. A target is "
            "“exceeded” when the measured drop is larger than guaranteed, if only by chance; “broken” when it is so "
            "beyond its 95 % interval.",
            kind="note",
        ),
        tag("h2", "What a caller can ask for, and what it costs"),
        _targets(first),
        *(html.details(f"Targets of {each.pair.edge} backed by {each.pair.best}", _targets(each)) for each in others),
        tag("h2", "Accuracy against escalation"),
        html.columns(*map(_curve, findings.pairs)),
        tag("h2", _reliability_title(findings.reliabilities)),
        tag(
            "p",
            "Points on the dashed line are as sure as they are right; above it a stage is too modest, below it too "
            "sure. “Points off” is the expected calibration error. Bars are exact 95 % intervals.",
        ),
        html.columns(*map(_reliability, findings.reliabilities)),
        *_measures(findings.measures),
        tag("h2", "What was measured"),
        tag(
            "p",
            f"Images: {findings.data_name}, {findings.images:,}, SHA-256 ",
            tag("code", findings.data_sha256),
            f". The profile was made from {profile.data.name}, SHA-256 ",
            tag("code", profile.data.sha256),
            f", split with seed {profile.data.seed}: {_uses(profile)}.",
        ),
        _stages(profile),
    )


def headline(pair: PairFindings) -> str:
    """The finding; it claims no more than the table."""
    certified = pair.certified()
    if not certified:
        some = any(certificate.to_best < 1.0 for certificate, _ in pair.targets)
        left = "every target is best effort" if some else "every image goes to the reference stage"
        return f"Too few images to certify anything: {left}"
    broken = sum(_status(*each) == "broken here" for each in certified)
    if broken:
        return f"{broken} of {len(certified)} certified targets broken on held-out images"
    if any(found.drop > certificate.max_drop for certificate, found in certified):
        return f"{_exceeded(pair)} certified targets exceeded on held-out images, none by more than chance explains"
    gap = pair.best_accuracy - pair.edge_accuracy
    half, found = min(certified, key=lambda each: abs(each[0].max_drop - gap / 2))
    return (
        f"Giving up less than {_points(half.max_drop)} points of accuracy takes {percent(found.escalation, 0)} of the "
        f"images off the edge, and all {len(certified)} certified targets are kept"
    )


def _exceeded(pair: PairFindings) -> str:
    certified = pair.certified()
    return f"{sum(found.drop > each.max_drop for each, found in certified)} of {len(certified)}"


def _held_out(findings: Findings) -> str:
    """The part that the held-out images had in the profile."""
    if findings.data_sha256 != findings.profile.data.sha256:
        return "are not those that the profile was made of, so that guarantees need not hold on them"
    if findings.profile.use("design", findings.data_sha256):
        return "no temperature or threshold was fitted on, but which served the choice of the design"
    return "no network, temperature or threshold has seen"


def _targets(pair: PairFindings) -> Html:
    condition, rows = pair.pair.conditions[0], []
    for certificate, found in pair.targets:
        named = " (balanced)" if certificate == condition.balanced else " (fast)" * (certificate == condition.fast)
        status = _status(certificate, found)
        certified = (certificate, found) in pair.certified()
        rows.append(
            [
                f"{_points(certificate.max_drop)} points{named}",
                _threshold(certificate.threshold, "none"),
                _threshold(certificate.intermediate_threshold, "not asked"),
                percent(found.escalation),
                percent(found.to_best),
                f"{_points(found.drop)} ± {_points(found.margin)}",
                cell(certificate.basis, f"n {certificate.n:,}" + f", δ {certificate.delta:g}" * certified, "words"),
                cell(status, kind="bad" if status == "broken here" else "words"),
            ]
        )
    head = (
        "give up at most", "accept from score", "intermediate from", "leave the edge", "reach the reference stage",
        "given up, held-out (points)", "basis", "status",
    )  # fmt: skip
    return html.table(head, rows)


def _status(certificate: Certificate, found: Outcome) -> str:
    if certificate.to_best == 1.0:
        return "reference stage only"
    if certificate.basis == "profile":
        return "not certified"
    if found.drop - found.margin > certificate.max_drop:
        return "broken here"
    return "exceeded by chance" if found.drop > certificate.max_drop else "kept"


def _curve(pair: PairFindings) -> Html:
    """Accuracy of every threshold against the share that is escalated, and the certified targets."""
    best, certified = pair.best_accuracy, pair.certified()
    share = [found.escalation for found in pair.curve]
    accuracy, margin = (np.array([getattr(found, name) for found in pair.curve]) for name in ("drop", "margin"))
    accuracy = best - accuracy
    y = Axis(
        "accuracy, held-out images", [*(accuracy - margin), *(accuracy + margin), pair.edge_accuracy, best], unit="%"
    )
    x = Axis("share of images escalated", ALL_IMAGES, unit="%", margin=0.02)
    chart = Chart("Accuracy against escalation", x, y, series=("every threshold", "certified targets"))
    chart.band(share, accuracy - margin, accuracy + margin)
    chart.line(0, share, accuracy)
    for certificate, found in certified:
        name = f"{_points(certificate.max_drop)} points: {_points(found.drop)} given up"
        chart.point(1, found.escalation, best - found.drop, name)
    chart.point(0, 0.0, pair.edge_accuracy, label="all edge")
    chart.point(0, 1.0, best, label="all reference")
    between = "" if pair.pair.intermediate is None else ", off the line where an intermediate stage is asked as well"
    return html.figure(
        f"{pair.pair.edge} → {pair.pair.best}",
        chart.svg(),
        f"Measured on {pair.n:,} held-out images with 95 % intervals relative to the reference stage{between}.",
    )


def _reliability_title(found: tuple[Reliability, ...]) -> str:
    worst = max(found, key=lambda each: each.error)
    if worst.error <= WELL_CALIBRATED:
        return f"Probabilities mean what they say: every stage is within {100 * WELL_CALIBRATED:g} points on average"
    return f"Probabilities are off by {100 * worst.error:.1f} points at worst ({worst.stage})"


def _reliability(found: Reliability) -> Html:
    chart = Chart(
        "Accuracy against confidence",
        Axis("confidence", ALL_IMAGES, unit="%", margin=0.02),
        Axis("share right", ALL_IMAGES, unit="%", margin=0.02),
        height=260.0,
        width=420.0,
    )
    chart.line(0, ALL_IMAGES, ALL_IMAGES, dash="2 3")
    bins = (found.confidence, found.accuracy, found.low, found.high, found.counts)
    for confidence, accuracy, low, high, count in zip(*(values.tolist() for values in bins), strict=True):
        chart.point(0, confidence, accuracy, f"{count:,} images", y_interval=(low, high))
    return html.figure(
        f"{found.stage}: {100 * found.error:.1f} points off",
        chart.svg(),
        f"{found.counts.sum():,} images; {100 * found.error_before:.1f} points off without the temperature.",
    )


def _measures(figures: Mapping[str, Mapping[str, float]]) -> list[Html]:
    """The kind's own figures of each stage; nothing if it has none."""
    names = list(dict.fromkeys(name for each in figures.values() for name in each))
    if not names:
        return []
    rows = [
        [stage, *(f"{each[name]:.4f}" if name in each else "–" for name in names)] for stage, each in figures.items()
    ]
    return [
        tag("h2", "Figures of this kind of task"),
        tag("p", "Measured on the certification and held-out images, each stage as it is served."),
        html.table(("stage", *names), rows),
    ]


def _stages(profile: Profile) -> Html:
    rows = [
        [
            stage.name,
            percent(stage.accuracy.value, 2),
            f"{percent(stage.accuracy.low)} to {percent(stage.accuracy.high)}",
            f"{stage.cost_ms:.2f}",
            cell(stage.fingerprint, kind="code"),
        ]
        for stage in profile.stages
    ]
    models = {name: sha256 for stage in profile.stages for name, sha256 in stage.models.items()}
    return html.join(
        html.table(("stage", "accuracy", "95 % interval", "core-ms", "fingerprint"), rows),
        html.details(
            "Model files and their SHA-256",
            html.table(("file", "SHA-256"), [[name, cell(sha256, kind="code")] for name, sha256 in models.items()]),
        ),
    )


PURPOSES: Final = {
    "fit": "for temperatures and paths",
    "design": "for choosing the design",
    "certify": "for certificates",
    "test": "held out",
}


def _uses(profile: Profile) -> str:
    """The recorded uses of images, or else the split."""
    data = profile.data
    if not profile.uses:
        counts = {"fit": data.profile, "certify": data.certify, "test": data.held_out}
        return ", ".join(f"{n:,} images {PURPOSES[purpose]}" for purpose, n in counts.items())
    return ", ".join(
        f"{use.n:,} images {'' if use.sha256 == data.sha256 else f'of {use.name} '}"
        f"{PURPOSES[use.purpose]}{'' if use.compared == 1 else f' (δ divided by {use.compared})'}"
        for use in profile.uses
    )


def _points(share: float) -> str:
    """A share in percentage points."""
    return f"{100 * share:.2f}".replace("-", "−")


def _threshold(written: EscalationThreshold, never: str) -> str:
    """A threshold with four decimals, or in words if it is infinite."""
    if isinstance(written, str):
        return never if written == "always" else "every"
    return f"{written:.4f}"
