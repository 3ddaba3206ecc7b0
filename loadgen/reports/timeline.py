"""A run over time, with the state of its links below: latencies, escalations and failures beside what caused them."""

from __future__ import annotations

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
    log_scale,
    n,
    path,
    rule,
    svg,
    text,
    ticks,
    written,
)
from loadgen.analysis.bootstrap import Floats, quantiles
from loadgen.reports.charts import ChartSeries, run_line
from loadgen.workload.record import LinkSample, Run

WINDOWS: Final = 120
"""Points of a line over time."""
WINDOW_REQUESTS: Final = 30
LINK_STEPS: Final = 200
BAND: Final = 26.0
"""Height of a link's band."""
FULL_LOSS: Final = 0.10
"""Loss that is drawn as strongly as more."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A run over time: what is true of the requests due within a window around each moment.

    A latency is infinite where requests without an answer reach it: refusing quickly does not make a server fast.
    """

    at_s: Floats
    width_s: float
    p50: Floats
    p99: Floats
    escalated: Floats
    unanswered: Floats


def windows(one: ChartSeries) -> Windows:
    """Windows long enough for `WINDOW_REQUESTS` on average, and a thirtieth of the run, and at most a quarter of it."""
    counted, run = one.counted, one.run
    latency = np.where(counted.answered, counted.latency_ms, np.inf)
    due = np.array([each.due_s for each in counted.outcomes])
    escalated = np.array([each.escalated and each.answered for each in counted.outcomes])
    start, end = run.warm_up_s, max(float(due[-1]), run.warm_up_s + 1e-6)
    span = end - start
    width = min(max(span / 30, WINDOW_REQUESTS * span / len(due)), span / 4)
    at = np.linspace(start + width / 2, end - width / 2, WINDOWS)
    rows = []
    for moment in at.tolist():
        some = slice(*np.searchsorted(due, (moment - width / 2, moment + width / 2)))
        answered = counted.answered[some]
        if len(answered) < 2:
            rows.append((math.nan,) * 4)
            continue
        p50, p99 = quantiles(latency[some], (0.5, 0.99))
        share = float(escalated[some].sum() / answered.sum()) if answered.any() else math.nan
        rows.append((float(p50), float(p99), share, 1.0 - float(answered.mean())))
    return Windows(at, width, *np.array(rows).T)


def timeline(one: ChartSeries, width: float, name: str) -> str:
    """One run over time: rolling P50 and P99, escalations and requests without an answer, and its links below."""
    seen = windows(one)
    left, right, top, intermediate = 56.0, width - 12, 30.0, 170.0
    shares_top, bottom = intermediate + 34, intermediate + 114
    deadline = one.summary.deadline_ms
    x = Scale(0.0, _end(one), left, right)
    y = log_scale([*seen.p50.tolist(), *seen.p99.tolist(), *([deadline] if deadline else [])], intermediate, top)
    marks = left_axis(y, left, right, "latency: P99 solid, P50 dashed", "ms", 5) + _time_grid(x, top, intermediate)
    if deadline is not None:
        marks.append(rule(left, y.at(deadline), right, y.at(deadline), "limit"))
    xs = [x.at(moment) for moment in seen.at_s.tolist()]
    for values, style, dash in ((seen.p50, "run c0", "5 3"), (seen.p99, "run c0 first", "")):
        marks.append(path(xs, _heights(y, values), style, dash))
    if deadline is not None:
        marks.append(text(right, y.at(deadline) - 4, "deadline", "end", "limit"))
    share = Scale(0.0, 1.0, bottom, shares_top)
    marks += left_axis(share, left, right, "share: escalated solid, no answer dashed", "%", 3)
    marks += _time_grid(x, shares_top, bottom)
    for values, style, dash in ((seen.escalated, "run c2", ""), (seen.unanswered, "run c1", "5 3")):
        marks.append(path(xs, _heights(share, values), style, dash))
    links, after = link_bands(one.run, x, bottom + 12)
    marks += [*links, *_time_axis(x, after)]
    return svg(
        f"timeline-{name}", width, after + 42, f"{one.run.name} over time",
        f"Rolling over {seen.width_s:.1f} s; the state of the links is below.", marks,
    )  # fmt: skip


def timelines(series: Sequence[ChartSeries], width: float, name: str) -> str:
    """The rolling P99 of several runs, over the links of the first."""
    every = [windows(one) for one in series]
    left, right, top, bottom = 56.0, width - 12, 30.0, 210.0
    deadline = series[0].summary.deadline_ms
    x = Scale(0.0, max(_end(one) for one in series), left, right)
    known = [value for seen in every for value in seen.p99.tolist()]
    y = log_scale([*known, *([deadline] if deadline else [])], bottom, top)
    marks = left_axis(y, left, right, "rolling P99", "ms", 6) + _time_grid(x, top, bottom)
    if deadline is not None:
        marks.append(rule(left, y.at(deadline), right, y.at(deadline), "limit"))
    for place, (one, seen) in reversed(list(enumerate(zip(series, every, strict=True)))):
        xs = [x.at(moment) for moment in seen.at_s.tolist()]
        marks.append(path(xs, _heights(y, seen.p99), run_line(place), DASHES[place % len(DASHES)], one.run.name))
    if deadline is not None:
        marks.append(text(right, y.at(deadline) - 4, "deadline", "end", "limit"))
    links, after = link_bands(series[0].run, x, bottom + 12)
    marks += [*links, *_time_axis(x, after)]
    return svg(
        f"timelines-{name}", width, after + 42, "P99 over time, all runs",
        f"Rolling over {every[0].width_s:.1f} s; the state of the links is below.", marks,
    )  # fmt: skip


def _heights(scale: Scale, values: Floats) -> list[float]:
    """Where values are drawn: infinite ones at the upper edge, and those that are not known nowhere."""
    return [math.nan if math.isnan(value) else scale.at(value) for value in values.tolist()]


def _end(one: ChartSeries) -> float:
    return max(one.counted.outcomes[-1].due_s, one.run.duration_s if not one.run.interrupted else 0.0)


def _time_grid(x: Scale, top: float, bottom: float) -> list[str]:
    return [rule(x.at(tick), top, x.at(tick), bottom, "grid") for tick in ticks(x)]


def _time_axis(x: Scale, y: float) -> list[str]:
    return bottom_axis(x, y, y, "seconds from the start of the run")


def link_bands(run: Run, x: Scale, top: float) -> tuple[list[str], float]:
    """A band for each of the run's links, and where they end: rate as height, loss as a strip below, down hatched."""
    marks: list[str] = []
    for link in dict.fromkeys(sample.link for sample in run.links):
        samples = [sample for sample in run.links if sample.link == link]
        marks.append(text(x.start, top + TEXT, link_words(link, samples, x.high), "start", "name"))
        marks += _band(samples, x, top + TEXT + 5)
        top += TEXT + 5 + BAND + 10
    return marks, top


def link_words(link: str, samples: Sequence[LinkSample], end_s: float) -> str:
    """`edge-dc: 0.8–25 Mbit/s, loss up to 8 %, down 2 s`."""
    rates = [sample.rate_mbit_s for sample in samples if sample.up and sample.rate_mbit_s is not None]
    words = (
        [f"{min(rates):g}–{max(rates):g} Mbit/s" if len(set(rates)) > 1 else f"{rates[0]:g} Mbit/s"] if rates else []
    )
    loss = max(sample.loss for sample in samples)
    if loss > 0:
        words.append(f"loss up to {100 * loss:.2g} %")
    ends = [sample.at_s for sample in samples[1:]] + [end_s]
    down = sum(max(0.0, end - sample.at_s) for sample, end in zip(samples, ends, strict=True) if not sample.up)
    if down:
        words.append(f"down {down:.3g} s")
    return f"{link}: {', '.join(words) or 'unlimited'}"


def _band(samples: Sequence[LinkSample], x: Scale, top: float) -> list[str]:
    fastest = max((sample.rate_mbit_s or 0.0 for sample in samples), default=0.0)
    edges = np.linspace(x.low, x.high, LINK_STEPS + 1)
    starts = np.array([sample.at_s for sample in samples])
    states: list[tuple[float, float, bool]] = []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        # Every state within the step counts, and the one it began in; the worst of them is drawn.
        first = max(0, int(np.searchsorted(starts, begin, side="right")) - 1)
        within = samples[first : max(first + 1, int(np.searchsorted(starts, end, side="left")))]
        rate = min(1.0 if one.rate_mbit_s is None else one.rate_mbit_s / (fastest or 1.0) for one in within)
        states.append((round(math.sqrt(rate), 3), max(one.loss for one in within), all(one.up for one in within)))
    marks = [f'<rect x="{n(x.start)}" y="{n(top)}" width="{n(x.end - x.start)}" height="{n(BAND)}" class="band"/>']
    begun = 0
    for step in range(1, LINK_STEPS + 1):
        if step < LINK_STEPS and states[step] == states[begun]:
            continue
        at, wide = x.at(float(edges[begun])), x.at(float(edges[step])) - x.at(float(edges[begun]))
        marks += _stretch(at, wide, top, *states[begun])
        begun = step
    return marks


def _stretch(at: float, wide: float, top: float, rate: float, loss: float, up: bool) -> list[str]:
    """A stretch of time in which a link stayed the same; `rate` is a height, 0..1."""
    if not up:
        label = [text(at + wide / 2, top + BAND / 2 + 4, "down", "intermediate", "down")] if wide > 29 else []
        return [f'<rect x="{n(at)}" y="{n(top)}" width="{n(wide)}" height="{n(BAND)}" class="off"/>', *label]
    tall = max(1.0, rate * (BAND - 5))
    marks = [f'<rect x="{n(at)}" y="{n(top + BAND - 5 - tall)}" width="{n(wide)}" height="{n(tall)}" class="rate"/>']
    if loss > 0:
        strength = 0.15 + 0.85 * min(1.0, loss / FULL_LOSS)
        marks.append(
            f'<rect x="{n(at)}" y="{n(top + BAND - 4)}" width="{n(wide)}" height="4" class="loss" '
            f'fill-opacity="{strength:.2f}"><title>loss {written(loss, "%")}</title></rect>'
        )
    return marks
