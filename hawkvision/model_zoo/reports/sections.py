"""The report's sections with figures: thresholds, costs and reliability."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from hawkvision.model_zoo.reports.figures import (
    cost_figure,
    frontier_figure,
    kept_figure,
    reliability_figure,
)
from hawkvision.model_zoo.reports.metrics import PairFindings, Reliability, StageMeasures
from hawkvision.model_zoo.reports.number_format import number, percent, points

WELL_CALIBRATED: Final = 0.03
"""Expected calibration error up to which a stage's probabilities are called about right."""


def exceeded(pair: PairFindings) -> str:
    """How many of the certified targets were exceeded on held-out images."""
    return share(sum(kept.exceeded for kept in pair.certified), pair)


def share(targets: int, pair: PairFindings) -> str:
    """So many of the certified targets."""
    return f"{targets} of {len(pair.certified)}"


def frontiers_section(pairs: Sequence[PairFindings]) -> str:
    """Accuracy against escalation, and the targets kept, of each pair."""
    parts = ["<h2>Accuracy against escalation: what certainty costs</h2>"]
    for place, found in enumerate(pairs):
        edge, best = escape(found.pair.edge), escape(found.pair.best)
        over = sum(kept.plug_in_exceeded for kept in found.certified)
        parts.append(
            '<div class="grid">'
            + _figure(
                f"{edge} → {best}: {_closing(found)}",
                frontier_figure(found, f"frontier{place}"),
                f"Up and to the left is better. The line is every threshold, measured on {number(found.n)} held-out "
                "images with its 95 % interval relative to the reference stage; dots are the certified targets"
                f"{_aside(found)}, crosses thresholds taken straight from images of the certification part without a "
                "test. Perfect knowledge would escalate only images that the reference stage gets right and the edge "
                "does not.",
            )
            + _figure(
                f"Certified thresholds exceed {exceeded(found)} targets, plug-in ones {over}",
                kept_figure(found, f"kept{place}"),
                "What was given up on held-out images, as a share of what was guaranteed: a guarantee is kept up to "
                f"100 %. Bars are 95 % intervals; a certificate may be wrong with probability {_delta(found):g}.",
            )
            + "</div>"
        )
    return "\n".join(parts)


def costs_section(pairs: Sequence[PairFindings]) -> str:
    """Cost of two levels against three."""
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
            f"{edge}: asking {intermediate} first saves up to {percent(saving)}, at {points(cost.max_drop)} points"
            if saving > 0.01
            else f"{edge}: {intermediate} saves nothing worth having"
        )
        parts.append(
            _figure(
                title,
                cost_figure(found.costs, f"cost{place}"),
                "Expected processor time per image over all stages, an escalation weighed as "
                f"{found.pair.escalation_ms:g} ms more. Each line is certified with all of δ for itself; a profile "
                "divides δ between both and takes the cheaper.",
            )
        )
    parts.append("</div>")
    return "\n".join(parts)


def reliability_section(found: Sequence[Reliability]) -> str:
    """Confidence against accuracy of each stage."""
    worst = max(found, key=lambda one: one.after.error)
    if worst.after.error <= WELL_CALIBRATED:
        title = f"Probabilities mean what they say: every stage is within {100 * WELL_CALIBRATED:g} points on average"
    else:
        title = f"Probabilities are off by {100 * worst.after.error:.1f} points at worst ({escape(worst.stage)})"
    figures = "".join(
        _figure(
            f"{escape(one.stage)}: {_temperature(one)}",
            reliability_figure(one, f"reliability{place}"),
            f"{number(one.n)} images, temperature {one.temperature:.3f}. Bars are exact 95 % intervals; counts are "
            "below.",
        )
        for place, one in enumerate(found)
    )
    return (
        f"<h2>{title}</h2>\n<p>Points on the dotted line are as sure as they are right; above it a stage is too "
        'modest, below it too sure. “Points off” is the expected calibration error.</p>\n<div class="grid small">'
        f"{figures}</div>"
    )


def measures_section(found: Sequence[StageMeasures]) -> str:
    """The kind's own figures of each stage; nothing if it has none."""
    names = list(dict.fromkeys(name for each in found for name in each.figures))
    if not names:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "\n".join(
        f"<tr><td class=words>{escape(each.stage)}</td>"
        + "".join(f"<td>{each.figures[name]:.4f}</td>" if name in each.figures else "<td>–</td>" for name in names)
        + "</tr>"
        for each in found
    )
    table = f"<tr><th class=words>stage</th>{heads}</tr>\n{rows}"
    return (
        "<h2>Figures of this kind of task</h2>\n<p>Measured on the certification and held-out images, each stage as it "
        f'is served.</p>\n<div class="scroll"><table>\n{table}\n</table></div>'
    )


def _figure(title: str, svg: str, caption: str, *, wide: bool = False) -> str:
    """A figure with its title above and its caption below; both are HTML already, or harmless text."""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>"


def _closing(found: PairFindings) -> str:
    half = found.half
    if half is None:
        return "nothing could be certified"
    escalation, certified = percent(half.measured.escalation), points(half.certificate.max_drop)
    if half.exceeded:
        return f"{escalation} escalation gives up {points(half.measured.drop)} points where {certified} are certified"
    return f"{escalation} escalation keeps the drop within {certified} of {points(found.gap)} points"


def _aside(found: PairFindings) -> str:
    return "" if found.pair.intermediate is None else " (off the line where an intermediate stage is asked as well)"


def _temperature(one: Reliability) -> str:
    before, after = 100 * one.before.error, 100 * one.after.error
    if before - after > 0.5:
        return f"{before:.1f} → {after:.1f} points off"
    return f"{after:.1f} points off, and was {before:.1f}"


def _delta(found: PairFindings) -> float:
    return found.pair.conditions[0].balanced.delta
