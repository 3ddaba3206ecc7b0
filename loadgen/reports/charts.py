"""The charts of a load test's page that leave time out: latencies, the frontier, and drops per target.

Every curve has a bounded number of points, whatever the number of requests, so that a page stays small.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hawkvision.reports.svg import (
    DASHES,
    TEXT,
    Scale,
    bottom_axis,
    left_axis,
    linear_scale,
    log_scale,
    marker,
    n,
    onwards,
    path,
    rule,
    series_class,
    svg,
    text,
    whisker,
)
from loadgen.analysis.accuracy import IntervalEstimate
from loadgen.analysis.bootstrap import quantiles
from loadgen.analysis.samples import CountedRequests
from loadgen.analysis.summary import ClassSummary, Figures, Percentile, RunSummary
from loadgen.workload.record import Run

NARROW: Final = 440.0
"""Of charts that a phone shows as large as a desk does."""
WIDE: Final = 1080.0
CURVE_POINTS: Final = 160


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A run with what is said of it."""

    run: Run
    counted: CountedRequests
    summary: RunSummary
    uplink_bytes: float | None = None
    """From the edge to the datacenter, per request sent; None where nobody counted them."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A place on the frontier: a run, or a target of one."""

    place: int
    """Which colour and marker it has."""
    label: str
    name: str
    p99: Percentile
    effective: IntervalEstimate
    bytes_each: float
    """Per request: to the datacenter where that is known, for callers send the same whatever the policy."""
    bytes_words: str
    """`8.2 kB to the datacenter`, `12.0 KiB sent`."""


def latency_chart(series: Sequence[ChartSeries]) -> str:
    """Share of requests answered against time, logarithmic in both the time and the share that is left."""
    height, left, right, top, bottom = 310.0, 52.0, NARROW - 12, 40.0, 310.0 - 44
    most = max(len(one.counted.outcomes) for one in series)
    deadline = series[0].summary.deadline_ms
    seen = [one.counted.latency_ms[one.counted.answered] for one in series]
    spread = [float(value) for values in seen if len(values) for value in quantiles(values, (0.001, 1.0))]
    x = log_scale([*spread, *([deadline] if deadline else [])], left, right)
    y = Scale(0.0, 1.0 - min(0.1, 1.0 / (most + 1)), bottom, top, "tail")
    marks = bottom_axis(x, bottom, top, "latency from when the request was due", "ms")
    marks += left_axis(y, left, right, "share of requests answered by then", "%", gap=2 * TEXT)
    for place, one in reversed(list(enumerate(series))):
        values = np.where(one.counted.answered, one.counted.latency_ms, np.inf)
        last = 1.0 - 1.0 / (len(values) + 1)
        shares = 1.0 - 10.0 ** np.linspace(0.0, math.log10(1.0 - last), CURVE_POINTS)
        times = quantiles(values, np.maximum(shares, 1e-9).tolist())
        xs = [x.at(value) if math.isfinite(value) else math.inf for value in times.tolist()]
        ys = [y.at(share) for share in shares.tolist()]
        marks.append(path(xs, ys, run_line(place), DASHES[place % len(DASHES)], one.run.name))
    marks += _deadline(deadline, x, top, bottom)
    return svg(
        "latency", NARROW, height, "Latency of all requests",
        "For each run, the share of requests answered within a time: "
        + "; ".join(f"{one.run.name} {_spoken(one.summary)}" for one in series), marks,
    )  # fmt: skip


def _spoken(summary: RunSummary) -> str:
    return ", ".join(f"{one.name} {one.ms:.0f} ms" for one in summary.total.percentiles)


def run_line(place: int) -> str:
    """The CSS class of a run's line; the first run's is thicker."""
    return f"{series_class(place)}{' first' if place == 0 else ''}"


def _deadline(deadline_ms: float | None, x: Scale, top: float, bottom: float) -> list[str]:
    if deadline_ms is None:
        return []
    here = x.at(deadline_ms)
    near_end = here > (x.start + x.end) / 2
    label = text(here, top - 5, "deadline", "end" if near_end else "start", "limit")
    return [rule(here, top, here, bottom, "limit"), label]


def percentile_chart(series: Sequence[ChartSeries]) -> str:
    """P50, P90, P99 and P99.9 of every run with their intervals; hollow where they rest on little.

    An arrow stands at those that are only known to be no less, for requests that had no answer count among the slowest.
    """
    row, gap, left, right, top = 13.0, 14.0, 52.0, NARROW - 12, 30.0
    names = [one.name for one in series[0].summary.total.percentiles]
    bottom = top + len(names) * (len(series) * row + gap)
    every = [one.summary.total.percentiles for one in series]
    deadline = series[0].summary.deadline_ms
    ends = [end for found in every for one in found for end in (one.low, one.ms, one.high)]
    x = log_scale([*ends, *([deadline] if deadline else [])], left, right)
    marks = bottom_axis(x, bottom, top, "latency from when the request was due", "ms")
    marks += _deadline(deadline, x, top, bottom)
    for group, name in enumerate(names):
        start = top + group * (len(series) * row + gap) + gap / 2
        marks.append(text(left - 6, start + len(series) * row / 2 + TEXT * 0.35, name, "end"))
        if group:
            marks.append(rule(left, start - gap / 2, right, start - gap / 2, "grid"))
        for place, found in enumerate(every):
            one, y = found[group], start + (place + 0.5) * row
            marks.append(whisker(place, x.at(one.low), x.at(one.high), y))
            spoken = f"{series[place].run.name} {name}: {'at least ' if one.at_least else ''}{one.ms:.1f} ms"
            marks.append(marker(place, x.at(one.ms), y, f"{spoken} ({one.low:.1f}–{one.high:.1f})", hollow=one.few))
            if one.at_least:
                marks.append(onwards(place, x.at(one.ms), y))
    return svg(
        "percentiles", NARROW, bottom + 44, "Latency percentiles with 95 % intervals",
        "; ".join(f"{one.run.name} {_spoken(one.summary)}" for one in series), marks,
    )  # fmt: skip


def frontier_points(series: Sequence[ChartSeries]) -> list[FrontierPoint]:
    """One for each run, or for each target where there is one run; those whose effective accuracy is known."""
    every: list[tuple[str, str, Figures, float | None]]
    if len(series) > 1:
        every = [(one.run.name, one.run.name, one.summary.total, one.uplink_bytes) for one in series]
    else:
        every = [(_short(one.target), one.target, one.figures, None) for one in series[0].summary.classes]
    return [
        FrontierPoint(
            place,
            label,
            name,
            figures.percentile(0.99),
            figures.effective,
            figures.sent_bytes if uplink is None else uplink,
            f"{figures.sent_bytes / 1024:.1f} KiB sent"
            if uplink is None
            else f"{uplink / 1000:.1f} kB to the datacenter",
        )
        for place, (label, name, figures, uplink) in enumerate(every)
        if figures.effective is not None
    ]


def frontier_chart(points: Sequence[FrontierPoint]) -> str:
    """Effective accuracy against P99; the area of a disc is the bytes per request."""
    height, left, right, top, bottom = 300.0, 52.0, NARROW - 12, 30.0, 300.0 - 44
    x = log_scale([end for one in points for end in (one.p99.low, one.p99.ms, one.p99.high)], left, right - 14)
    y = linear_scale([end for one in points for end in (one.effective.low, one.effective.high)], bottom, top)
    marks = bottom_axis(x, bottom, top, "P99 latency", "ms") + left_axis(y, left, right, "right and in time", "%")
    largest = max((one.bytes_each for one in points), default=1.0) or 1.0
    discs, dots, taken = [], [], list[tuple[float, float]]()
    for one in points:
        place, p99, found = one.place, one.p99, one.effective
        at_x, at_y = x.at(p99.ms), y.at(found.value)
        radius = 24.0 * math.sqrt(one.bytes_each / largest)
        discs.append(f'<circle cx="{n(at_x)}" cy="{n(at_y)}" r="{n(radius)}" class="disc {series_class(place)}"/>')
        spoken = (
            f"{one.name}: P99 {'at least ' if p99.at_least else ''}{p99.ms:.0f} ms, "
            f"right and in time {found.value:.1%}, {one.bytes_words} per request"
        )
        dots += [
            whisker(place, x.at(p99.low), x.at(p99.high), at_y),
            whisker(place, y.at(found.low), y.at(found.high), at_x, upright=True),
            marker(place, at_x, at_y, spoken, hollow=p99.few),
        ]
        if p99.at_least:
            dots.append(onwards(place, at_x, at_y))
        dots.append(_label(one.label, at_x, at_y, right, taken))
    return svg(
        "frontier", NARROW, height, "Accuracy, latency and bytes together",
        "Right and in time against P99; larger discs send more bytes. "
        + "; ".join(f"{one.name} {one.effective.value:.1%}, {one.p99.ms:.0f} ms" for one in points),
        [*marks, *discs, *dots],
    )  # fmt: skip


def _label(name: str, x: float, y: float, right: float, taken: list[tuple[float, float]]) -> str:
    """A name beside its point, moved up until it is clear of those before it."""
    short = name if len(name) <= 18 else f"{name[:17]}…"
    width = 0.56 * TEXT * len(short)
    start = x + 8 if x + 8 + width < right else x - 8 - width
    line = y - 6
    for _ in range(len(taken)):
        if all(abs(line - other) >= TEXT or abs(start - begun) > 110 for begun, other in taken):
            break
        line -= TEXT
    taken.append((start, line))
    return text(start, line, short, "start", "name")


def drop_chart(series: Sequence[ChartSeries]) -> str:
    """Per target, what was given up against the reference stage, beside what the target allows."""
    row, gap, right, top = 12.0, 16.0, NARROW - 12, 30.0
    left = 150.0
    names = [one.target for one in series[0].summary.classes]
    found: list[list[ClassSummary | None]] = [
        [next((each for each in one.summary.classes if each.target == name), None) for one in series] for name in names
    ]
    drops = [each.drop for group in found for each in group if each is not None and each.drop is not None]
    allowed = [100 * each.kept.bound for group in found for each in group if _bounds_drop(each) and each and each.kept]
    x = linear_scale([0.0, *(100 * end for one in drops for end in (one.low, one.high)), *allowed], left, right)
    bottom = top + len(names) * (len(series) * row + gap)
    marks = bottom_axis(x, bottom, top, "points of accuracy given up", most=5)
    marks.append(rule(x.at(0.0), top, x.at(0.0), bottom, "axis"))
    for group, (name, classes) in enumerate(zip(names, found, strict=True)):
        start = top + group * (len(series) * row + gap) + gap / 2
        end = start + len(series) * row
        marks.append(text(left - 6, (start + end) / 2 + TEXT * 0.35, _short(name), "end"))
        first = next((each for each in classes if _bounds_drop(each)), None)
        if first is not None and first.kept is not None:
            at = x.at(100 * first.kept.bound)
            marks.append(rule(at, start - gap / 3, at, end + gap / 3, "limit"))
        for place, each in enumerate(classes):
            if each is None or each.drop is None:
                continue
            y = start + (place + 0.5) * row
            verdict = f", {each.kept.verdict}" if each.kept else ""
            spoken = f"{series[place].run.name}, {name}: {100 * each.drop.value:.2f} points{verdict}"
            marks.append(whisker(place, x.at(100 * each.drop.low), x.at(100 * each.drop.high), y))
            marks.append(marker(place, x.at(100 * each.drop.value), y, spoken, hollow=each.unflagged == 0))
    return svg(
        "drops", NARROW, bottom + 44, "Accuracy given up per target", "Dots are what was measured, upright dashed "
        "lines what the target allows; hollow where no answer claimed to keep it.", marks,
    )  # fmt: skip


def _bounds_drop(each: ClassSummary | None) -> bool:
    return each is not None and each.kept is not None and each.kept.field == "max_accuracy_drop"


def _short(target: str) -> str:
    """A target that fits beside a chart, with the number that tells it from others; whether it was kept or not."""
    field, _, value = target.partition("=")
    sign, unit = {"max_accuracy_drop": ("give up ≤", "pt"), "min_accuracy": ("accuracy ≥", "%")}.get(field, ("", ""))
    with contextlib.suppress(ValueError):  # no number, or further fields after it
        target = f"{sign} {100 * float(value):.4g} {unit}" if sign else target
    return target if len(target) <= 20 else f"{target[:19]}…"
