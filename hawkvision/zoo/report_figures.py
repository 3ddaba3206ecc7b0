"""The report's figures: from findings to SVG that can stand in a page, light or dark.

Matplotlib draws with stand-in colours, which are then replaced by the page's own (`var(--…)`), so that one drawing
serves both schemes and print. Titles and captions belong to the page. Colours are Okabe and Ito's, which people with
the common kinds of colour blindness tell apart; shapes and dashes say the same again. Every figure is narrow enough for
a phone: its text is as large as the page's there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from hawkvision.cascade.scores import Floats
from hawkvision.zoo.drift import Replay
from hawkvision.zoo.report_findings import Bins, Drift, LevelCost, PairFindings, Reliability

INK: Final = "#010101"
FAINT: Final = "#020202"
CERTIFIED: Final = "#030303"
PLUG_IN: Final = "#040404"
PERFECT: Final = "#050505"
STATIC: Final = "#060606"
PAPER: Final = "#070707"

_VARIABLES: Final = {
    INK: "ink", FAINT: "faint", CERTIFIED: "certified", PLUG_IN: "plug-in", PERFECT: "perfect", STATIC: "static",
    PAPER: "paper",
}  # fmt: skip

_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none", "svg.hashsalt": "hawkvision", "font.family": "DejaVu Sans", "font.size": 9.0,
    "axes.labelsize": 9.0, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK, "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0, "axes.linewidth": 0.8, "grid.color": FAINT, "grid.linewidth": 0.4, "grid.alpha": 0.5,
    "legend.frameon": False, "legend.fontsize": 8.0, "lines.linewidth": 1.6, "legend.handlelength": 1.6,
    "axes.unicode_minus": True,
}  # fmt: skip

WIDTH_IN: Final = 4.4
WIDE_IN: Final = 5.0
SMALL_WIDTH_IN: Final = 3.2
"""Of figures that stand three in a row on a wide screen."""
WINDOW: Final = 500
"""Requests that one point of the replay's escalation stands for."""
DROP_WINDOW: Final = 2_000
"""Of its drop, which is a small difference of rare events."""


STATUS_WINDOW: Final = 100

LEAST_USED: Final = -0.5
MOST_USED: Final = 2.0
"""Ends of the axis on which promises are used up; intervals may be wider, points hardly ever are."""


def reliability_figure(found: Reliability, name: str) -> str:
    """Accuracy against confidence, before and after the temperature, above the counts."""
    with mpl.rc_context(_STYLE):
        figure, (axes, counts) = _figure(3.4, (4, 1), SMALL_WIDTH_IN)
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.0, linestyle=(0, (2, 2)))
        _reliability_line(axes, found.before, STATIC, "before", "s", (0, (3, 1.5)))
        _reliability_line(axes, found.after, CERTIFIED, "after", "o", "solid")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share right")
        axes.legend(loc="lower right", borderaxespad=0.1)
        edges = (found.after.confidence * 10).astype(int).clip(0, 9) / 10 + 0.05
        counts.bar(edges, found.after.counts, width=0.085, color=CERTIFIED, linewidth=0)
        for x, count in zip(edges, found.after.counts, strict=True):
            counts.text(x, count, f"{count:,}", ha="center", va="bottom", fontsize=6)
        counts.set(xlim=(0, 1), ylim=(0, found.after.counts.max() * 1.3), xlabel="confidence", ylabel="pictures")
        counts.set_yticks([])
        axes.tick_params(labelbottom=False)
        counts.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        return _svg(figure, name)


def frontier_figure(found: PairFindings, name: str) -> str:
    """Accuracy against escalation on held-out pictures: the path, certified and plug-in points, perfect knowledge."""
    best = found.best_accuracy
    with mpl.rc_context(_STYLE):
        figure, (axes,) = _figure(3.3)
        x = np.array([one.escalation for one in found.frontier])
        drop = np.array([one.drop for one in found.frontier])
        margin = np.array([one.margin for one in found.frontier])
        axes.fill_between(x, best - drop - margin, best - drop + margin, color=FAINT, alpha=0.35, linewidth=0)
        axes.plot(x, best - drop, color=INK, linewidth=1.2, label="by score, measured")
        axes.plot(
            [0.0, min(found.oracle_escalation, max(found.gap, 0.0)), 1.0], [found.edge_accuracy, best, best],
            color=PERFECT, linestyle=(0, (4, 1.5)), label="perfect knowledge",
        )  # fmt: skip
        plug_in = [kept.plug_in for kept in found.certified]
        axes.plot(
            [p.escalation for p in plug_in], [best - p.drop for p in plug_in],
            "x", color=PLUG_IN, markersize=5, markeredgewidth=1.3, label="plug-in",
        )  # fmt: skip
        axes.plot(
            [k.measured.escalation for k in found.certified], [best - k.measured.drop for k in found.certified],
            "o", color=CERTIFIED, markersize=4.5, label="certified",
        )  # fmt: skip
        axes.plot([0, 1], [found.edge_accuracy, best], "D", color=INK, markersize=4.5)
        axes.annotate("all edge", (0, found.edge_accuracy), (6, -3), textcoords="offset points", fontsize=8)
        axes.annotate("all best", (1, best), (-2, -11), textcoords="offset points", fontsize=8, ha="right")
        axes.set(xlim=(-0.02, 1.02), xlabel="share of pictures escalated", ylabel="accuracy, held-out pictures")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1%}"))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(axis="y")
        axes.legend(loc="lower right")
        return _svg(figure, name)


def kept_figure(found: PairFindings, name: str) -> str:
    """How much of each promise was used up on held-out pictures, with certified and with plug-in thresholds."""
    promised = np.array([kept.certificate.max_drop for kept in found.certified])
    with mpl.rc_context(_STYLE):
        figure, (axes,) = _figure(3.3)
        axes.axhspan(1.0, MOST_USED, color=PLUG_IN, alpha=0.10, linewidth=0)
        axes.axhline(1.0, color=INK, linewidth=1.0)
        axes.axhline(0.0, color=FAINT, linewidth=0.8)
        for series, color, marker, shift, label in (
            ([kept.plug_in for kept in found.certified], PLUG_IN, "x", 1.03, "plug-in"),
            ([kept.measured for kept in found.certified], CERTIFIED, "o", 0.97, "certified"),
        ):
            used = np.array([one.drop for one in series]) / promised
            margin = np.array([one.margin for one in series]) / promised
            axes.errorbar(
                100 * promised * shift, used, yerr=margin, fmt=marker, color=color, markersize=4.5,
                markeredgewidth=1.3, elinewidth=0.9, label=label,
            )  # fmt: skip
        _points_axis(axes, 100 * promised)
        axes.set(ylim=(LEAST_USED, MOST_USED), ylabel="share of the promise used up")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.text(0.02, 0.96, "promise broken", va="top", fontsize=8, transform=axes.transAxes)
        axes.legend(loc="upper right", ncols=2)
        return _svg(figure, name)


def cost_figure(costs: Sequence[LevelCost], name: str) -> str:
    """Cost of two and of three levels against the target."""
    drops = np.array([100 * cost.max_drop for cost in costs])
    with mpl.rc_context(_STYLE):
        figure, (axes,) = _figure(3.0)
        for values, color, dashes, marker, label in (
            ([cost.two for cost in costs], STATIC, (0, (4, 1.5)), "s", "two levels"),
            ([cost.three for cost in costs], CERTIFIED, "solid", "o", "three levels"),
        ):
            axes.plot(drops, values, color=color, linestyle=dashes, marker=marker, markersize=4, label=label)
        _points_axis(axes, drops)
        axes.set(ylim=(0, None), ylabel="cost (core-ms per picture)")
        axes.grid(axis="y")
        axes.legend(loc="upper right")
        return _svg(figure, name)


def drift_figure(drift: Drift, name: str) -> str:
    """Escalation, true drop and status over the requests of the replay, with and without control."""
    with mpl.rc_context(_STYLE):
        figure, (escalation, drop, status) = _figure(4.6, (4, 4, 1.1), WIDE_IN)
        start = 0
        for phase in drift.phases:
            for axes in (escalation, drop, status):
                if phase.shifted:
                    axes.axvspan(start, start + phase.requests, color=FAINT, alpha=0.3, linewidth=0)
            escalation.text(start + phase.requests / 2, 1.02, phase.name, ha="center", va="bottom", fontsize=8,
                            transform=escalation.get_xaxis_transform())  # fmt: skip
            start += phase.requests
        for runs, color, dashes, label in (
            (drift.static, STATIC, (0, (4, 1.5)), "threshold fixed"),
            (drift.controlled, CERTIFIED, "solid", "controlled"),
        ):
            _band(escalation, runs, "escalated", WINDOW, 1.0, color, dashes, label)
            _band(drop, runs, "loss", DROP_WINDOW, 100.0, color, dashes, label)
        drop.axhline(100 * drift.max_drop, color=INK, linewidth=1.0)
        drop.text(start, 100 * drift.max_drop, "promised ", ha="right", va="bottom", fontsize=8)
        drop.axhline(0, color=FAINT, linewidth=0.8)
        escalation.legend(loc="upper left", ncols=2, borderaxespad=0.2)
        escalation.set(ylabel="escalated", ylim=(0, None))
        low, high = escalation.get_ylim()
        escalation.set_ylim(low, high * 1.2)
        escalation.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        drop.set(ylabel="given up (points)")
        ends, void = windowed(drift.controlled, "void", STATUS_WINDOW)
        status.fill_between(ends - STATUS_WINDOW / 2, void.mean(axis=0), color=PLUG_IN, alpha=0.75, linewidth=0)
        alarms = [run.alarm for run in drift.controlled if run.alarm is not None]
        status.plot(alarms, np.full(len(alarms), 1.25), "v", color=PLUG_IN, markersize=4)
        status.set(ylabel="void", ylim=(0, 1.5), xlabel="requests", xlim=(0, start))
        status.set_yticks([0, 1], ["0", "all"])
        for axes in (escalation, drop):
            axes.set_xlim(0, start)
            axes.tick_params(labelbottom=False)
        for axes in (escalation, drop, status):
            axes.xaxis.set_major_locator(MultipleLocator(5_000 if start > 10_000 else max(1, start // 4)))
        status.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        return _svg(figure, name)


def windowed(runs: Sequence[Replay], what: str, window: int) -> tuple[Floats, Floats]:
    """Means over consecutive windows: where each ends (windows,), and each run's (runs, windows)."""
    values = np.array([np.asarray(getattr(run, what), np.float64) for run in runs])
    whole = values.shape[1] // window * window
    means = values[:, :whole].reshape(len(runs), -1, window).mean(axis=2)
    return np.arange(1, means.shape[1] + 1, dtype=np.float64) * window, means


def _band(
    axes: Axes, runs: Sequence[Replay], what: str, window: int, unit: float, color: str, dashes: Any, label: str
) -> None:
    """The mean of the runs, and what nine of ten of them stay within."""
    ends, means = windowed(runs, what, window)
    means = means * unit
    low, high = np.quantile(means, [0.05, 0.95], axis=0)
    axes.fill_between(ends - window / 2, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(ends - window / 2, means.mean(axis=0), color=color, linestyle=dashes, label=label)


def _reliability_line(axes: Axes, bins: Bins, color: str, label: str, marker: str, dashes: Any) -> None:
    error = np.array([bins.accuracy - bins.low, bins.high - bins.accuracy])
    axes.errorbar(
        bins.confidence, bins.accuracy, yerr=error.clip(0.0), color=color, marker=marker, markersize=4,
        elinewidth=0.8, linestyle=dashes, label=f"{label}: {100 * bins.error:.1f} points off",
    )  # fmt: skip


def _figure(
    height_in: float, ratios: Sequence[float] = (1,), width_in: float = WIDTH_IN
) -> tuple[Figure, tuple[Axes, ...]]:
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.subplots(len(ratios), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    for one in axes:
        one.patch.set_visible(False)
    return figure, tuple(axes)


def _points_axis(axes: Axes, promised: Floats) -> None:
    """A logarithmic axis of promised drops, in points of accuracy."""
    least, most = (float(promised.min()), float(promised.max())) if len(promised) else (0.1, 10.0)
    ticks = [m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5) if least * 0.9 <= m * 10.0**e <= most * 1.1]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(least * 0.8, most * 1.2), xlabel="promised: give up at most (points)")


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element: no namespaces or metadata, names of its own, colours the page's."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:xlink)?="[^"]*"| version="1.1"| (width|height)="[\d.]+pt"', "", text, count=5)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r"font-family: [^;\"]*;", "", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text.replace("<svg", '<svg role="img"', 1)
