"""The report as one HTML page: text and figures, no scripts, nothing fetched from anywhere.

Titles state what was found, so they are chosen by the numbers. Everything that comes from files (names of tasks, stages
and data) is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.resources import files
from typing import Final

import numpy as np

from hawkvision.cascade.certification.profile import Profile
from hawkvision.model_zoo.calibration.drift import SETTLING, Replay, Summary, alarm_delays, summarise
from hawkvision.model_zoo.reports.figures import (
    cost_figure,
    drift_figure,
    frontier_figure,
    kept_figure,
    reliability_figure,
)
from hawkvision.model_zoo.reports.metrics import Drift, PairFindings, Reliability, TargetResult
from hawkvision.reports.pages import Markup, joined, source
from hawkvision.reports.pages import render as render_page

NARROW: Final = "\u202f"
"""A space that does not break, between a number and its unit."""

WELL_CALIBRATED: Final = 0.03
"""Expected calibration error up to which a stage's probabilities are called about right."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the page says."""

    profile: Profile
    as_of: date
    data_name: str
    data_sha256: str
    images: int
    same_data: bool
    """Whether the images are those that the profile was made of."""
    reliabilities: tuple[Reliability, ...]
    pairs: tuple[PairFindings, ...]
    """The one that a node serves by default comes first."""
    drift: Drift | None


def render(findings: Findings) -> str:
    """The page."""
    body = "\n".join(
        [
            _head(findings),
            *(_targets(pair, first=place == 0) for place, pair in enumerate(findings.pairs)),
            _frontiers(findings.pairs),
            _costs(findings.pairs),
            _reliability(findings.reliabilities),
            _drift(findings.drift),
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
        ("edge stage alone", _percent(pair.edge_accuracy, 1)),
        ("reference stage alone", _percent(pair.best_accuracy, 1)),
        ("certified targets exceeded on held-out images", _exceeded(pair)),
        ("the same with plug-in thresholds", _share(sum(k.plug_in_exceeded for k in pair.certified), pair)),
    ]
    if findings.drift is not None:
        part = _decided(findings.drift.controlled, findings.drift)
        facts.append((f"given up in changed traffic, of {_points(findings.drift.max_drop)} points", _points(part.drop)))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f'<p class="kicker">HawkVision calibration report · task {escape(findings.profile.task)} · '
        f"{escape(pair.pair.edge)} backed by {escape(pair.pair.best)} · {findings.as_of.isoformat()}</p>\n"
        f'<h1>{escape(_claim(pair))}</h1>\n<dl class="facts">{cells}</dl>\n'
        f'<p class="note">ThresholdsResult on {_number(pair.n)} held-out images of {escape(findings.data_name)}, which '
        f"{_part_of_held_out(findings)}. A target "
        "is “exceeded” when the measured drop is larger than guaranteed, if only by chance; “broken” when it is so "
        "beyond its 95 % interval.</p>"
    )


def _claim(pair: PairFindings) -> str:
    """The headline: never more than the table below it shows."""
    certified, half = pair.certified, pair.half
    if half is None:
        left = "every target is best effort" if any(k.certificate.to_best < 1.0 for k in pair.kept) else NOTHING_LEFT
        return f"Too few images to certify anything: {left}"
    broken = sum(kept.broken for kept in certified)
    if broken:
        return f"{_count(broken, 'certified target')} of {len(certified)} broken on held-out images"
    if any(kept.exceeded for kept in certified):
        return f"{_exceeded(pair)} certified targets exceeded on held-out images, none by more than chance explains"
    return (
        f"Giving up less than {_points(half.certificate.max_drop)} points of accuracy takes "
        f"{_percent(half.measured.escalation)} of the images off the edge, and all {len(certified)} certified "
        "targets are kept"
    )


NOTHING_LEFT: Final = "every image goes to the reference stage"


def _exceeded(pair: PairFindings) -> str:
    return _share(sum(kept.exceeded for kept in pair.certified), pair)


def _share(count: int, pair: PairFindings) -> str:
    return f"{count} of {len(pair.certified)}"


def _part_of_held_out(findings: Findings) -> str:
    """What part the held-out images had in the profile."""
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
            "give up at most", "accept from score", "middle from", "leave the edge", "reach the reference stage",
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
    name = _points(certificate.max_drop) + " points"
    if certificate == condition.balanced:
        name += " (balanced)"
    elif certificate == condition.fast:
        name += " (fast)"
    cells = [
        name, _threshold(certificate.threshold, "none"), _threshold(certificate.intermediate_threshold, "not asked"),
        _percent(measured.escalation, 1), _percent(measured.to_best, 1),
        _points(measured.drop), _points(measured.margin), certificate.basis, _number(certificate.n),
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


def _frontiers(pairs: Sequence[PairFindings]) -> str:
    parts = ["<h2>Accuracy against escalation: what certainty costs</h2>"]
    for place, found in enumerate(pairs):
        edge, best = escape(found.pair.edge), escape(found.pair.best)
        over = sum(kept.plug_in_exceeded for kept in found.certified)
        parts.append(
            '<div class="grid">'
            + _figure(
                f"{edge} → {best}: {_closing(found)}",
                frontier_figure(found, f"frontier{place}"),
                f"Up and to the left is better. The line is every threshold, measured on {_number(found.n)} held-out "
                "images with its 95 % interval relative to the reference stage; dots are the certified targets"
                f"{_aside(found)}, crosses thresholds taken straight from images of the certification part without a "
                "test. Perfect knowledge would escalate only images that the reference stage gets right and the edge "
                "does "
                "not.",
            )
            + _figure(
                f"Certified thresholds exceed {_exceeded(found)} targets, plug-in ones {over}",
                kept_figure(found, f"kept{place}"),
                "What was given up on held-out images, as a share of what was guaranteed: a guarantee is kept up to "
                f"100 %. Bars are 95 % intervals; a certificate may be wrong with probability {_delta(found):g}.",
            )
            + "</div>"
        )
    return "\n".join(parts)


def _costs(pairs: Sequence[PairFindings]) -> str:
    parts = ["<h2>Two levels or three</h2>"]
    three = [found for found in pairs if found.costs]
    if not three:
        parts.append("<p>No intermediate stage lies between edge and best here, or none pays: two levels it is.</p>")
        return "\n".join(parts)
    parts.append('<div class="grid">')
    for place, found in enumerate(pairs):
        if not found.costs:
            continue
        cost = max(found.costs, key=lambda one: 1 - one.three / one.two)
        saving = 1 - cost.three / cost.two
        assert found.pair.intermediate is not None
        intermediate = escape(found.pair.intermediate.name)
        edge = escape(found.pair.edge)
        title = (
            f"{edge}: asking {intermediate} first saves up to {_percent(saving)}, at {_points(cost.max_drop)} points"
            if saving > 0.01
            else f"{edge}: {intermediate} saves nothing worth having"
        )
        parts.append(
            _figure(
                title,
                cost_figure(found.costs, f"cost{place}"),
                "Expected processor time per image over all stages, an escalation weighed as "
                f"{found.pair.escalation_ms:g} ms more. Each line is certified with all of δ for itself; a profile "
                "divides δ "
                "between both and takes the cheaper.",
            )
        )
    parts.append("</div>")
    return "\n".join(parts)


def _reliability(found: Sequence[Reliability]) -> str:
    worst = max(found, key=lambda one: one.after.error)
    if worst.after.error <= WELL_CALIBRATED:
        title = f"Probabilities mean what they say: every stage is within {100 * WELL_CALIBRATED:g} points on average"
    else:
        title = f"Probabilities are off by {100 * worst.after.error:.1f} points at worst ({escape(worst.stage)})"
    figures = "".join(
        _figure(
            f"{escape(one.stage)}: {_temperature(one)}",
            reliability_figure(one, f"reliability{place}"),
            f"{_number(one.n)} images, temperature {one.temperature:.3f}. Bars are exact 95 % intervals; counts are "
            "below.",
        )
        for place, one in enumerate(found)
    )
    return (
        f"<h2>{title}</h2>\n<p>Points on the dotted line are as sure as they are right; above it a stage is too "
        "modest, "
        'below it too sure. “Points off” is the expected calibration error.</p>\n<div class="grid small">'
        f"{figures}</div>"
    )


def _drift(drift: Drift | None) -> str:
    if drift is None:
        return (
            "<h2>When traffic changes</h2>\n<p>No certificate leaves an image at the edge, so there is nothing to "
            "control: the reference stage answers everything, whatever the traffic.</p>"
        )
    controlled, static = (_decided(runs, drift) for runs in (drift.controlled, drift.static))
    kept = controlled.drop <= drift.max_drop
    delays = [delay for delay in alarm_delays(drift.controlled) if delay is not None and delay >= 0]
    false = sum(delay is not None and delay < 0 for delay in alarm_delays(drift.controlled))
    alarm = f"the alarm comes after {_number(int(np.median(delays)))} requests" if delays else "no alarm is raised"
    title = (
        f"When traffic changes, {alarm}, and the guarantee is {'kept' if kept else 'not kept'}: "
        f"{_points(controlled.drop)} of {_points(drift.max_drop)} points are given up"
    )
    rows = "\n".join(
        f"<tr><td>{escape(one.name)}</td><td class=words>{name}</td><td>{_percent(one.escalation, 1)}</td>"
        f"<td>{_percent(one.audits, 2)}</td><td>{_points(one.drop)}</td><td>{_percent(one.suspended)}</td></tr>"
        for pair in zip(
            summarise(drift.static, drift.phases), summarise(drift.controlled, drift.phases), strict=True
        )
        for one, name in zip(pair, ("fixed", "controlled"), strict=True)
    )  # fmt: skip
    requests = sum(phase.requests for phase in drift.phases)
    return (
        f"<h2>{escape(title)}</h2>\n"
        f"<p>{escape(drift.edge)} backed by {escape(drift.best)}, {len(drift.controlled)} runs of {_number(requests)} "
        f"requests drawn from {_number(drift.images)} held-out images, as they are and with noise, blur or lower "
        f"contrast. With the threshold fixed, {_points(static.drop)} points are given up once changed traffic has "
        f"settled, and the node does not know. {_false_alarms(false, len(drift.controlled))}</p>\n"
        + _figure(
            "Requests in order; the shaded stretch is corrupted",
            drift_figure(drift, "drift"),
            "Top: share escalated. Middle: accuracy given up against the reference stage, by the labels that the node "
            "never "
            "sees; it must stay below the line. Bottom: share of runs whose guarantee is suspended, and a mark at "
            "each alarm. "
            "Lines are means over the runs, bands hold nine runs of ten.",
            wide=True,
        )
        + '<details><summary>The same as a table</summary><div class="scroll"><table>\n<tr><th>requests</th>'
        "<th class=words>threshold</th><th>escalated</th><th>audited</th><th>given up (points)</th><th>void</th></tr>\n"
        f"{rows}\n</table></div></details>"
    )


def _provenance(findings: Findings) -> str:
    profile = findings.profile
    rows = "\n".join(
        f"<tr><td>{escape(stage.name)}</td><td>{_percent(stage.accuracy.value, 2)}</td>"
        f"<td>{_percent(stage.accuracy.low, 1)}–{_percent(stage.accuracy.high, 1)}</td><td>{stage.cost_ms:.2f}</td>"
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
        f"<p>Images: {escape(findings.data_name)}, {_number(findings.images)}, SHA-256 "
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
    """What was used for what, by the profile's record; by its split, where it has none."""
    data = profile.data
    if not profile.uses:
        counts = {"fit": data.profile, "certify": data.certify, "test": data.held_out}
        return ", ".join(f"{_number(n)} images {PURPOSES[purpose]}" for purpose, n in counts.items())
    return ", ".join(
        f"{_number(use.n)} images {'' if use.sha256 == data.sha256 else f'of {escape(use.name)} '}"
        f"{PURPOSES[use.purpose]}{'' if use.compared == 1 else f' (δ divided by {use.compared})'}"
        for use in profile.uses
    )


def _figure(title: str, svg: str, caption: str, *, wide: bool = False) -> str:
    """A figure with its title above and its caption below; both are HTML already, or harmless text."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>"


def _decided(runs: Iterable[Replay], drift: Drift) -> Summary:
    """The shifted stretch after the first `SETTLING` requests, or all of it if it is shorter."""
    summaries = summarise(tuple(runs), drift.phases)
    shifted = next((phase for phase in drift.phases if phase.shifted), drift.phases[-1])
    names = (f"{shifted.name}, rest", f"{shifted.name}, first {min(SETTLING, shifted.requests):,}", shifted.name)
    return next(one for name in names for one in summaries if one.name == name)


def _closing(found: PairFindings) -> str:
    half = found.half
    if half is None:
        return "nothing could be certified"
    escalation, certified = _percent(half.measured.escalation), _points(half.certificate.max_drop)
    if half.exceeded:
        return f"{escalation} escalation gives up {_points(half.measured.drop)} points where {certified} are certified"
    return f"{escalation} escalation keeps the drop within {certified} of {_points(found.gap)} points"


def _aside(found: PairFindings) -> str:
    return "" if found.pair.intermediate is None else " (off the line where an intermediate stage is asked as well)"


def _temperature(one: Reliability) -> str:
    before, after = 100 * one.before.error, 100 * one.after.error
    if before - after > 0.5:
        return f"{before:.1f} → {after:.1f} points off"
    return f"{after:.1f} points off, and was {before:.1f}"


def _false_alarms(false: int, runs: int) -> str:
    if not false:
        return f"No run of {runs} raised a false alarm."
    return f"{_count(false, 'run')} of {runs} raised a false alarm before the change."


def _delta(found: PairFindings) -> float:
    return found.pair.conditions[0].balanced.delta


def _threshold(written: float | str, never_accepted: str) -> str:
    if isinstance(written, str):
        return never_accepted if written == "always" else "every"
    return f"{written:.4f}"


def _points(share: float) -> str:
    return f"{100 * share:.2f}".replace("-", "−")


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _number(value: int) -> str:
    return f"{value:,}"


def _count(value: int, noun: str) -> str:
    return f"{value} {noun}{'' if value == 1 else 's'}"
