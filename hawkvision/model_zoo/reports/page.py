"""The calibration report as one HTML page: text and figures, without scripts or external resources.

Titles state findings, so the numbers choose them. All names from files (tasks, stages, data) are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.resources import files
from typing import Final

from hawkvision.cascade.certification.profile import Profile
from hawkvision.model_zoo.reports.metrics import PairFindings, Reliability, StageMeasures, TargetResult
from hawkvision.model_zoo.reports.number_format import count, number, percent, points, threshold
from hawkvision.model_zoo.reports.sections import (
    costs_section,
    exceeded,
    frontiers_section,
    measures_section,
    reliability_section,
    share,
)
from hawkvision.reports.pages import Markup, joined, source
from hawkvision.reports.pages import render as render_page

NARROW: Final = "\u202f"
"""Non-breaking space between a number and its unit."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The content of the page."""

    profile: Profile
    as_of: date
    data_name: str
    data_sha256: str
    images: int
    same_data: bool
    """Whether the images are the profile's own."""
    reliabilities: tuple[Reliability, ...]
    measures: tuple[StageMeasures, ...]
    pairs: tuple[PairFindings, ...]
    """The default edge stage's pair comes first."""


def render(findings: Findings) -> str:
    """The page."""
    body = "\n".join(
        [
            _head(findings),
            *(_targets(pair, first=place == 0) for place, pair in enumerate(findings.pairs)),
            frontiers_section(findings.pairs),
            costs_section(findings.pairs),
            measures_section(findings.measures),
            reliability_section(findings.reliabilities),
            _provenance(findings),
        ]
    )
    body = re.sub(r"(?<=\d) %", NARROW + "%", body)
    style = files("hawkvision.model_zoo.reports").joinpath("report.css").read_text(encoding="utf-8")
    return str(
        render_page(
            "hawkvision.reports",
            "plain.html",
            title=f"Calibration report: {findings.profile.task}",
            style=joined((Markup(style), source("hawkvision.reports", "charts.css"))),
            script="",
            body=Markup(body),
        )
    )


def _head(findings: Findings) -> str:
    pair = findings.pairs[0]
    facts = [
        ("edge stage alone", percent(pair.edge_accuracy, 1)),
        ("reference stage alone", percent(pair.best_accuracy, 1)),
        ("certified targets exceeded on held-out images", exceeded(pair)),
        ("the same with plug-in thresholds", share(sum(k.plug_in_exceeded for k in pair.certified), pair)),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f'<p class="kicker">HawkVision calibration report · task {escape(findings.profile.task)} · '
        f"{escape(pair.pair.edge)} backed by {escape(pair.pair.best)} · {findings.as_of.isoformat()}</p>\n"
        f'<h1>{escape(_claim(pair))}</h1>\n<dl class="facts">{cells}</dl>\n'
        f'<p class="note">ThresholdsResult on {number(pair.n)} held-out images of {escape(findings.data_name)}, which '
        f"{_part_of_held_out(findings)}. A target "
        "is “exceeded” when the measured drop is larger than guaranteed, if only by chance; “broken” when it is so "
        "beyond its 95 % interval.</p>"
    )


def _claim(pair: PairFindings) -> str:
    """The headline; it claims no more than the table."""
    certified, half = pair.certified, pair.half
    if half is None:
        left = "every target is best effort" if any(k.certificate.to_best < 1.0 for k in pair.kept) else NOTHING_LEFT
        return f"Too few images to certify anything: {left}"
    broken = sum(kept.broken for kept in certified)
    if broken:
        return f"{count(broken, 'certified target')} of {len(certified)} broken on held-out images"
    if any(kept.exceeded for kept in certified):
        return f"{exceeded(pair)} certified targets exceeded on held-out images, none by more than chance explains"
    return (
        f"Giving up less than {points(half.certificate.max_drop)} points of accuracy takes "
        f"{percent(half.measured.escalation)} of the images off the edge, and all {len(certified)} certified "
        "targets are kept"
    )


NOTHING_LEFT: Final = "every image goes to the reference stage"


def _part_of_held_out(findings: Findings) -> str:
    """The part that the held-out images had in the profile."""
    if not findings.same_data:
        return OTHER_DATA
    if findings.profile.use("design", findings.data_sha256):
        return "no temperature or threshold was fitted on, but which served the choice of the design"
    return "no network, temperature or threshold has seen"


OTHER_DATA: Final = "are not those that the profile was made of, so that guarantees need not hold on them"


def _targets(found: PairFindings, *, first: bool) -> str:
    rows = "\n".join(_target_row(found, kept) for kept in found.kept)
    head = "".join(
        f"<th{' class=words' if name in ('basis', 'status') else ''}>{name}</th>"
        for name in (
            "give up at most", "accept from score", "intermediate from", "leave the edge", "reach the reference stage",
            "given up, held-out", "± 95 %", "basis", "n", "δ", "status",
        )
    )  # fmt: skip
    table = f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    edge, best = escape(found.pair.edge), escape(found.pair.best)
    if first:
        return (
            f"<h2>What a caller can ask for, and what it costs</h2>\n<p>{edge} backed by {best}. “Given up, held-out” "
            f"must stay below “give up at most”.</p>\n{table}"
        )
    return f"<details><summary>Targets of {edge} backed by {best}</summary>\n{table}\n</details>"


def _target_row(found: PairFindings, kept: TargetResult) -> str:
    certificate, measured = kept.certificate, kept.measured
    condition = found.pair.conditions[0]
    name = points(certificate.max_drop) + " points"
    if certificate == condition.balanced:
        name += " (balanced)"
    elif certificate == condition.fast:
        name += " (fast)"
    cells = [
        name, threshold(certificate.threshold, "none"), threshold(certificate.intermediate_threshold, "not asked"),
        percent(measured.escalation, 1), percent(measured.to_best, 1),
        points(measured.drop), points(measured.margin), certificate.basis, number(certificate.n),
        f"{certificate.delta:g}" if kept.certified else "–", _status(kept),
    ]  # fmt: skip
    kind = "" if kept.certified else ' class="idle"'
    if kept.certified and kept.broken:
        kind = ' class="missed"'
    body = "".join(f"<td{' class=words' if i in (7, 10) else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    return f"<tr{kind}>{body}</tr>"


def _status(kept: TargetResult) -> str:
    if kept.certificate.to_best == 1.0:
        return "reference stage only"
    if not kept.certified:
        return "not certified"
    if kept.broken:
        return "broken here"
    return "exceeded by chance" if kept.exceeded else "kept"


def _provenance(findings: Findings) -> str:
    profile = findings.profile
    rows = "\n".join(
        f"<tr><td>{escape(stage.name)}</td><td>{percent(stage.accuracy.value, 2)}</td>"
        f"<td>{percent(stage.accuracy.low, 1)}–{percent(stage.accuracy.high, 1)}</td><td>{stage.cost_ms:.2f}</td>"
        f"<td class=hash>{escape(stage.fingerprint)}</td></tr>"
        for stage in profile.stages
    )
    files_ = "\n".join(
        f"<tr><td>{escape(name)}</td><td class=hash>{escape(sha256)}</td></tr>"
        for name, sha256 in {name: sha for stage in profile.stages for name, sha in stage.models.items()}.items()
    )
    data = profile.data
    return (
        "<h2>What was measured</h2>\n"
        f"<p>Images: {escape(findings.data_name)}, {number(findings.images)}, SHA-256 "
        f"<code>{escape(findings.data_sha256)}</code>. The profile was made from {escape(data.name)}, SHA-256 "
        f"<code>{escape(data.sha256)}</code>, split with seed {data.seed}: {_uses(profile)}.</p>\n"
        '<div class="scroll"><table>\n<tr><th>stage</th><th>accuracy</th><th>95 % interval</th><th>core-ms</th>'
        f"<th class=words>fingerprint</th></tr>\n{rows}\n</table></div>\n"
        "<details><summary>Model files and their SHA-256</summary>"
        f'<div class="scroll"><table>\n{files_}\n</table></div></details>\n'
        f'<p class="note">Made by <code>hawkvision report calibration --task {escape(profile.task)}</code> on '
        f"{findings.as_of.isoformat()}.</p>"
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
        return ", ".join(f"{number(n)} images {PURPOSES[purpose]}" for purpose, n in counts.items())
    return ", ".join(
        f"{number(use.n)} images {'' if use.sha256 == data.sha256 else f'of {escape(use.name)} '}"
        f"{PURPOSES[use.purpose]}{'' if use.compared == 1 else f' (δ divided by {use.compared})'}"
        for use in profile.uses
    )
