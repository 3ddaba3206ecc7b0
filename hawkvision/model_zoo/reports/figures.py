"""The charts of the calibration report, drawn with the marks of `hawkvision.reports.svg`.

Titles and captions belong to the page. Colours are Okabe and Ito's, which people with the common kinds of colour
blindness tell apart; shapes and dashes say the same again. Each chart is narrow enough for a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from hawkvision.model_zoo.reports.metrics import LevelCost, PairFindings, Reliability, ReliabilityBins
from hawkvision.reports.svg import (
    TEXT,
    Scale,
    area,
    bar,
    bottom_axis,
    left_axis,
    legend,
    linear_scale,
    log_scale,
    marker,
    path,
    rule,
    series_class,
    svg,
    text,
    whisker,
)
from hawkvision.tasks.class_scores import Floats

CERTIFIED: Final = 0
PLUG_IN: Final = 1
PERFECT: Final = 2
STATIC: Final = 3
INK: Final = 4
"""Numbers of series: the page gives each its colour, the marks its shape."""
DASHED: Final = "5 3"
DOTTED: Final = "2 3"

WIDTH: Final = 440.0
SMALL_WIDTH: Final = 320.0
"""Width of charts that stand three in a row on a wide screen."""
LEFT: Final = 48.0
TOP: Final = 58.0
BELOW: Final = 44.0
"""Room for the lower axis and its name."""
LEAST_USED: Final = -0.5
MOST_USED: Final = 2.0
"""Ends of the axis on which targets are used up; intervals may be wider, points hardly ever are."""


def reliability_figure(found: Reliability, name: str) -> str:
    """Accuracy against confidence, before and after the temperature, above the counts."""
    right, intermediate, bottom = SMALL_WIDTH - 24, 236.0, 290.0
    x, y = Scale(0.0, 1.0, LEFT, right), Scale(0.0, 1.02, intermediate, TOP)
    marks = left_axis(y, LEFT, right, "share right", "%", gap=6)
    marks.append(path([x.at(0), x.at(1)], [y.at(0), y.at(1)], "axis", DOTTED))
    entries = []
    for bins, series, dash, label in ((found.before, STATIC, DASHED, "before"), (found.after, CERTIFIED, "", "after")):
        marks += _reliability_line(bins, series, dash, x, y)
        entries.append((series, dash, f"{label}: {100 * bins.error:.1f} points off"))
    marks += legend(entries, LEFT + 8, 12.0, right)
    counts = Scale(0.0, float(found.after.counts.max()) * 1.4, bottom, intermediate + 12)
    for at, count in zip(found.after.confidence.tolist(), found.after.counts.tolist(), strict=True):
        edge = min(9, int(at * 10)) / 10
        left, top = x.at(edge) + 1, counts.at(count)
        marks.append(bar(left, top, x.at(edge + 0.1) - left - 1, bottom - top, f"solid {series_class(CERTIFIED)}"))
        marks.append(text((left + x.at(edge + 0.1)) / 2, top - 2, f"{count:,}", "intermediate", "small"))
    marks += bottom_axis(x, bottom, bottom, "confidence", "%")
    return svg(
        name, SMALL_WIDTH, bottom + BELOW, "Accuracy against confidence",
        f"Off by {100 * found.before.error:.1f} points before and {100 * found.after.error:.1f} after.", marks,
    )  # fmt: skip


def frontier_figure(found: PairFindings, name: str) -> str:
    """Accuracy against escalation on held-out images: the path, certified and plug-in points, perfect knowledge."""
    right, bottom = WIDTH - 14, 280.0
    best = found.best_accuracy
    share = np.array([one.escalation for one in found.frontier])
    accuracy = best - np.array([one.drop for one in found.frontier])
    margin = np.array([one.margin for one in found.frontier])
    kept = list(found.certified)
    x = Scale(-0.02, 1.02, LEFT, right)
    shown = [*(accuracy - margin).tolist(), *(accuracy + margin).tolist(), found.edge_accuracy, best]
    y = linear_scale([*shown, *(best - one.plug_in.drop for one in kept)], bottom, TOP)
    marks = left_axis(y, LEFT, right, "accuracy, held-out images", "%", gap=6)
    marks += bottom_axis(x, bottom, bottom, "share of images escalated", "%")
    xs = [x.at(value) for value in share.tolist()]
    marks.append(area(xs, _at(y, accuracy - margin), _at(y, accuracy + margin), "band"))
    marks.append(path(xs, _at(y, accuracy), f"thin {series_class(INK)}"))
    corner = min(found.oracle_escalation, max(found.gap, 0.0))
    known = [(0.0, found.edge_accuracy), (corner, best), (1.0, best)]
    perfect = [x.at(a) for a, _ in known], [y.at(b) for _, b in known]
    marks.append(path(*perfect, f"{series_class(PERFECT)}", DASHED))
    for series, measured in (
        (PLUG_IN, [one.plug_in for one in kept]),
        (CERTIFIED, [one.measured for one in kept]),
    ):
        marks += [
            marker(series, x.at(one.escalation), y.at(best - one.drop), hollow=series == PLUG_IN) for one in measured
        ]
    marks += [marker(STATIC, x.at(at), y.at(value), "", size=4) for at, value in ((0, found.edge_accuracy), (1, best))]
    marks.append(text(x.at(0) + 8, y.at(found.edge_accuracy) + 4, "all edge"))
    marks.append(text(x.at(1) - 4, y.at(best) + TEXT + 6, "all reference", "end"))
    named = (
        (INK, "", "by score"),
        (PERFECT, DASHED, "perfect knowledge"),
        (PLUG_IN, "", "plug-in"),
        (CERTIFIED, "", "certified"),
    )
    marks += legend(named, LEFT, 12.0, right)
    return svg(
        name, WIDTH, bottom + BELOW, "Accuracy against escalation",
        f"All edge {found.edge_accuracy:.1%}, all reference {best:.1%}.", marks,
    )  # fmt: skip


def kept_figure(found: PairFindings, name: str) -> str:
    """How much of each target was used up on held-out images, with certified and with plug-in thresholds."""
    right, bottom = WIDTH - 10, 280.0
    kept = list(found.certified)
    x = _points_scale([one.certificate.max_drop for one in kept], right)
    y = Scale(LEAST_USED, MOST_USED, bottom, TOP)
    marks = left_axis(y, LEFT, right, "share of the target used up", "%", gap=6)
    marks += bottom_axis(x, bottom, bottom, "target: give up at most (points)")
    marks.append(area([LEFT, right], [y.at(MOST_USED)] * 2, [y.at(1.0)] * 2, "over"))
    marks += [rule(LEFT, y.at(1.0), right, y.at(1.0), "limit"), rule(LEFT, y.at(0.0), right, y.at(0.0), "axis")]
    marks.append(text(LEFT + 6, TOP + TEXT, "exceeded"))
    for series, shift, measured in (
        (PLUG_IN, 1.03, [one.plug_in for one in kept]),
        (CERTIFIED, 0.97, [one.measured for one in kept]),
    ):
        for one, result in zip(kept, measured, strict=True):
            allowed = one.certificate.max_drop
            at, used = x.at(100 * allowed * shift), result.drop / allowed
            low, high = (y.at(used + sign * result.margin / allowed) for sign in (-1, 1))
            marks.append(whisker(series, low, high, at, upright=True))
            marks.append(marker(series, at, y.at(used), f"{used:.0%} of {100 * allowed:g} points"))
    marks += legend(((PLUG_IN, "", "plug-in"), (CERTIFIED, "", "certified")), LEFT, 12.0, right)
    return svg(
        name, WIDTH, bottom + BELOW, "Share of each target used up",
        "; ".join(f"{100 * one.certificate.max_drop:g} points: {100 * one.measured.drop:.2f}" for one in kept), marks,
    )  # fmt: skip


def cost_figure(costs: Sequence[LevelCost], name: str) -> str:
    """Cost of two and of three stages against the target."""
    right, bottom = WIDTH - 10, 250.0
    x = _points_scale([cost.max_drop for cost in costs], right)
    y = Scale(0.0, 1.1 * max((end for cost in costs for end in (cost.two, cost.three)), default=1.0), bottom, TOP)
    marks = left_axis(y, LEFT, right, "cost (core-ms per image)", gap=6)
    marks += bottom_axis(x, bottom, bottom, "target: give up at most (points)")
    xs = [x.at(100 * cost.max_drop) for cost in costs]
    for series, dash, values in (
        (STATIC, DASHED, [cost.two for cost in costs]),
        (CERTIFIED, "", [cost.three for cost in costs]),
    ):
        ys = [y.at(value) for value in values]
        marks.append(path(xs, ys, series_class(series), dash))
        marks += [marker(series, at, here, f"{value:.2f} ms") for at, here, value in zip(xs, ys, values, strict=True)]
    marks += legend(((STATIC, DASHED, "two stages"), (CERTIFIED, "", "three stages")), LEFT, 12.0, right)
    description = "; ".join(f"{100 * one.max_drop:g} points: {one.two:.1f} and {one.three:.1f}" for one in costs)
    return svg(name, WIDTH, bottom + BELOW, "Cost of two and of three stages", description, marks)


def _reliability_line(bins: ReliabilityBins, series: int, dash: str, x: Scale, y: Scale) -> list[str]:
    xs, ys = _at(x, bins.confidence), _at(y, bins.accuracy)
    marks = [path(xs, ys, series_class(series), dash)]
    for at, here, low, high in zip(xs, ys, _at(y, bins.low), _at(y, bins.high), strict=True):
        marks += [whisker(series, low, high, at, upright=True), marker(series, at, here, size=4)]
    return marks


def _points_scale(drops: Sequence[float], right: float) -> Scale:
    """A logarithmic axis of target drops, in points of accuracy."""
    return log_scale([100 * drop for drop in drops], LEFT, right)


def _at(scale: Scale, values: Floats) -> list[float]:
    return [scale.at(value) if math.isfinite(value) else math.nan for value in values.tolist()]
