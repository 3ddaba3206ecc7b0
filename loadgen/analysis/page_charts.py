"""The charts of a load test's page. Every curve has a bounded number of points, so that a page stays small."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from hawkvision.report.charts import Axis, Chart
from hawkvision.report.html import Html, details, figure, join, percent
from loadgen.analysis.bootstrap import Floats, quantiles
from loadgen.analysis.samples import CountedRequests
from loadgen.analysis.summary import Figures, Percentile, RunSummary
from loadgen.workload.record import LinkSample, Run

CURVE_POINTS: Final = 160
"""Points of a curve, whatever the number of requests, so that a page stays small."""
WINDOWS: Final = 120
"""Points of a line over time."""
WINDOW_REQUESTS: Final = 30
LINK_STEPS: Final = 200
FULL_LOSS: Final = 0.10
"""Loss that is drawn as strongly as more."""
WIDE: Final = 800.0
"""Width of charts over time."""
LEFT: Final = 90.0


class MeasuredRun(NamedTuple):
    """A run with what is computed from it."""

    run: Run
    counted: CountedRequests
    summary: RunSummary


def latency_charts(series: Sequence[MeasuredRun]) -> Iterable[Html]:
    """Latency and its percentiles; accuracy against latency and what was given up, where they are known."""
    yield figure("How long requests took", _latency_chart(series), "The upper scale opens up the tail.")
    yield figure("Percentiles with 95 % intervals", _percentile_chart(series))
    points: list[tuple[str, Figures]] = [(one.run.name, one.summary.total) for one in series]
    if len(series) == 1:
        points = [(short_target(one.target), one.figures) for one in series[0].summary.classes]
    if sum(figures.effective is not None for _, figures in points) > 1:
        yield figure("Accuracy against latency", _frontier_chart(points), "Up and to the left is better.")
    if any(found.drop is not None for one in series for found in one.summary.classes):
        yield figure("Accuracy given up per target", _drop_chart(series), "Dashed: what the target allows.")


def _names(series: Sequence[MeasuredRun]) -> list[str]:
    return [one.run.name for one in series]


def _latency_chart(series: Sequence[MeasuredRun]) -> Html:
    """Share of requests answered against time, logarithmic in the time and in the share that is left."""
    most = max(len(one.counted.outcomes) for one in series)
    deadline = series[0].summary.deadline_ms
    known = [one.counted.latency_ms[one.counted.answered] for one in series]
    ends = [float(value) for values in known if len(values) for value in quantiles(values, (0.001, 1.0))]
    y = Axis("share of requests answered by then", kind="tail", unit="%")
    y.high = 1.0 - min(0.1, 1.0 / (most + 1))
    x = Axis("latency from when the request was due", [*ends, deadline or math.nan], "log", "ms")
    chart = Chart("Latency of all requests", x, y, series=_names(series))
    for place, one in enumerate(series):
        values = np.where(one.counted.answered, one.counted.latency_ms, np.inf)
        shares = 1.0 - 10.0 ** np.linspace(0.0, -math.log10(len(values) + 1), CURVE_POINTS)
        times = quantiles(values, np.maximum(shares, 1e-9).tolist())
        chart.line(place, np.where(np.isfinite(times), times, np.nan), shares, name=one.run.name)
    if deadline is not None:
        chart.limit("deadline", x=deadline)
    return chart.svg()


def _percentile_chart(series: Sequence[MeasuredRun]) -> Html:
    """Percentiles of each run with their intervals."""
    deadline = series[0].summary.deadline_ms
    every = [one.summary.total.percentiles for one in series]
    ends = [end for found in every for one in found for end in (one.low, one.ms, one.high)]
    x = Axis("latency from when the request was due", [*ends, deadline or math.nan], "log", "ms")
    rows = Axis("", kind="rows", rows=[one.name for one in every[0]])
    chart = Chart("Latency percentiles with 95 % intervals", x, rows, series=_names(series), height=None)
    if deadline is not None:
        chart.limit("deadline", x=deadline)
    for place, found in enumerate(every):
        for row, one in enumerate(found):
            name = f"{series[place].run.name} {one.name}: {' '.join(percentile_words(one))}"
            chart.point(place, one.ms, row + (place + 0.5) / len(series), name, x_interval=(one.low, one.high),
                        hollow=one.few, at_least=one.at_least)  # fmt: skip
    return chart.svg()


def _frontier_chart(points: Sequence[tuple[str, Figures]]) -> Html:
    """Effective accuracy against P99."""
    known = [(place, name, one.percentile(0.99), one.effective) for place, (name, one) in enumerate(points)]
    x = Axis("P99 latency", [end for _, _, p99, _ in known for end in (p99.low, p99.high)], "log", "ms")
    ends = [end for *_, share in known if share is not None for end in (share.low, share.high)]
    chart = Chart("Accuracy against latency", x, Axis("right and in time", ends, unit="%"))
    for place, name, p99, share in known:
        if share is not None:
            chart.point(place, p99.ms, share.value,
                        f"{name}: P99 {' '.join(percentile_words(p99))}, {percent(share.value)} right and in time",
                        x_interval=(p99.low, p99.high), y_interval=(share.low, share.high), hollow=p99.few,
                        at_least=p99.at_least, label=name)  # fmt: skip
    return chart.svg()


def _drop_chart(series: Sequence[MeasuredRun]) -> Html:
    """Per target, what was given up against the reference stage, and what the target allows."""
    names = [one.target for one in series[0].summary.classes]
    found = [(place, names.index(each.target), each) for place, one in enumerate(series)
             for each in one.summary.classes if each.target in names and each.drop is not None]  # fmt: skip
    ends = [100 * end for *_, each in found if each.drop is not None for end in (each.drop.low, each.drop.high)]
    allowed = {row: 100 * each.kept.bound for _, row, each in found
               if each.kept is not None and each.kept.field == "max_accuracy_drop"}  # fmt: skip
    x = Axis("points of accuracy given up", [0.0, *ends, *allowed.values()])
    rows = Axis("", kind="rows", rows=[short_target(name) for name in names])
    chart = Chart("Accuracy given up per target", x, rows, series=_names(series), height=None)
    for row, bound in allowed.items():
        chart.limit("", x=bound, span=(row + 0.1, row + 0.9))
    for place, row, each in found:
        assert each.drop is not None
        chart.point(place, 100 * each.drop.value, row + (place + 0.5) / len(series),
                    f"{series[place].run.name}, {each.target}: {100 * each.drop.value:.2f} points",
                    x_interval=(100 * each.drop.low, 100 * each.drop.high), hollow=each.unflagged == 0)  # fmt: skip
    return chart.svg()


def short_target(target: str) -> str:
    """A target that fits beside a chart, with the number that tells it from others."""
    field, _, value = target.partition("=")
    sign, unit = {"max_accuracy_drop": ("give up ≤", "pt"), "min_accuracy": ("accuracy ≥", "%")}.get(field, ("", ""))
    with contextlib.suppress(ValueError):  # no number, or further fields after it
        return f"{sign} {100 * float(value):.4g} {unit}" if sign else target
    return target


def charts_over_time(series: Sequence[MeasuredRun]) -> list[Html]:
    """All runs, then each by itself if there are several."""
    first = series[0].run
    caption = "In windows of few requests, P99 is nearly the slowest of them."
    if first.links:
        caption += " Links: the rate as height, loss below it, red where a link was down."
    if len(series) == 1:
        return [figure("", timeline(series), caption)]
    if any(one.run.links != first.links for one in series[1:]):
        caption += f" The links are those of {first.name}; other runs had links of their own."
    each = [details(f"{one.run.name} by itself", figure("", timeline([one]))) for one in series]
    return [figure("", timeline(series), caption), *each]


def timeline(series: Sequence[MeasuredRun]) -> Html:
    """Rolling P99 of several runs, or P50, P99, escalations and failures of one; below, the links of the first."""
    every = [windows(one) for one in series]
    one, deadline = series[0].run, series[0].summary.deadline_ms
    ends = [max(each.counted.outcomes[-1].due_s, 0.0 if each.run.interrupted else each.run.duration_s)
            for each in series]  # fmt: skip
    seconds = "seconds from the start of the run"
    alone = len(series) == 1
    known = [value for _, _, p99, *_ in every for value in p99.tolist()]
    known += every[0][1].tolist() if alone else []
    y = Axis(f"latency over {every[0][-1]:.1f} s", [*known, deadline or math.nan], "log", "ms")
    chart = Chart("Latency over time", Axis("" if alone or one.links else seconds, [0.0, max(ends)], margin=0), y,
                  series=("P99", "P50") if alone else _names(series), height=230, width=WIDE, left=LEFT)  # fmt: skip
    for place, (at, p50, p99, *_) in enumerate(every):
        chart.line(place, at, p99, name=series[place].run.name)
        if alone:
            chart.line(1, at, p50)
    if deadline is not None:
        chart.limit("deadline", y=deadline)
    drawn = [chart.svg()]
    if alone:
        at, _, _, escalated, unanswered, _ = every[0]
        x = Axis("" if one.links else seconds, [0.0, max(ends)], margin=0)
        shares = Chart("Escalated and not answered over time", x, Axis("share", [0.0, 1.0], unit="%", margin=0),
                       series=("escalated", "not answered"), height=150, width=WIDE, left=LEFT)  # fmt: skip
        shares.line(0, at, escalated)
        shares.line(1, at, unanswered)
        drawn.append(shares.svg())
    if one.links:
        drawn.append(_links_chart(one, Axis(seconds, [0.0, max(ends)], margin=0)))
    return join(*drawn)


def windows(one: MeasuredRun) -> tuple[Floats, Floats, Floats, Floats, Floats, float]:
    """Middles of windows in seconds, and of each P50, P99 and the shares escalated and unanswered; their width.

    A window holds `WINDOW_REQUESTS` on average, at least a thirtieth of the run and at most a quarter of it. A latency
    is infinite where requests without an answer reach it: refusing quickly does not make a server fast.
    """
    counted, run = one.counted, one.run
    latency = np.where(counted.answered, counted.latency_ms, np.inf)
    due = np.array([each.due_s for each in counted.outcomes])
    escalated = np.array([each.escalated and each.answered for each in counted.outcomes])
    start, end = run.warm_up_s, max(float(due[-1]), run.warm_up_s + 1e-6)
    width = min(max((end - start) / 30, WINDOW_REQUESTS * (end - start) / len(due)), (end - start) / 4)
    at = np.linspace(start + width / 2, end - width / 2, WINDOWS)
    rows = []
    for moment in at.tolist():
        some = slice(*np.searchsorted(due, (moment - width / 2, moment + width / 2)))
        answered = counted.answered[some]
        if len(answered) < 2:
            rows.append((math.nan,) * 4)
            continue
        p50, p99 = quantiles(latency[some], (0.5, 0.99)).tolist()
        share = float(escalated[some].sum() / answered.sum()) if answered.any() else math.nan
        rows.append((p50, p99, share, 1.0 - float(answered.mean())))
    p50s, p99s, shares, unanswered = np.array(rows).T
    return at, p50s, p99s, shares, unanswered, width


def _links_chart(run: Run, x: Axis) -> Html:
    """A row for each link: rate as height, loss as a strip below it, a full bar where it was down."""
    links = list(dict.fromkeys(sample.link for sample in run.links))
    chart = Chart("State of the links", x, Axis("", kind="rows", rows=links), height=None, width=WIDE, left=LEFT)
    for row, link in enumerate(links):
        samples = [sample for sample in run.links if sample.link == link]
        chart.box((x.low, x.high), (row + 0.95, row + 0.1), "back", link_words(samples, x.high))
        for start, end, (rate, loss, up) in _stretches(samples, x.high):
            if not up:
                chart.box((start, end), (row + 0.95, row + 0.1), "down", "down")
                continue
            chart.box((start, end), (row + 0.8, row + 0.8 - 0.7 * rate), "rate")
            if loss > 0:
                chart.box((start, end), (row + 0.95, row + 0.95 - 0.15 * max(0.2, min(1.0, loss / FULL_LOSS))), "loss",
                          f"loss {percent(loss)}")  # fmt: skip
    return chart.svg()


def _stretches(samples: Sequence[LinkSample], end_s: float) -> Iterable[tuple[float, float, tuple[float, float, bool]]]:
    """Stretches of time with the share of the link's best rate, its loss, and whether it was up: the worst of each."""
    fastest = max((sample.rate_mbit_s or 0.0 for sample in samples), default=0.0)
    edges = np.linspace(0.0, end_s, LINK_STEPS + 1).tolist()
    starts = np.array([sample.at_s for sample in samples])
    states: list[tuple[float, float, bool]] = []
    for begin, end in itertools.pairwise(edges):
        first = max(0, int(np.searchsorted(starts, begin, side="right")) - 1)
        within = samples[first : max(first + 1, int(np.searchsorted(starts, end, side="left")))]
        rate = min(1.0 if one.rate_mbit_s is None else one.rate_mbit_s / (fastest or 1.0) for one in within)
        states.append((round(math.sqrt(rate), 3), max(one.loss for one in within), all(one.up for one in within)))
    begun = 0
    for step in range(1, LINK_STEPS + 1):
        if step == LINK_STEPS or states[step] != states[begun]:
            yield edges[begun], edges[step], states[begun]
            begun = step


def link_words(samples: Sequence[LinkSample], end_s: float) -> str:
    """`0.8–25 Mbit/s, loss up to 8 %, down 2 s`."""
    rates = [sample.rate_mbit_s for sample in samples if sample.up and sample.rate_mbit_s is not None]
    words = [f"{min(rates):g}–{max(rates):g} Mbit/s"] if rates else []
    loss = max(sample.loss for sample in samples)
    words += [f"loss up to {100 * loss:.2g} %"] if loss > 0 else []
    ends = [sample.at_s for sample in samples[1:]] + [end_s]
    down_s = sum(max(0.0, end - sample.at_s) for sample, end in zip(samples, ends, strict=True) if not sample.up)
    words += [f"down {down_s:.3g} s"] if down_s else []
    return ", ".join(words) or "unlimited"


def percentile_words(found: Percentile) -> tuple[str, str]:
    """A percentile, and its interval."""
    low, high = milliseconds(found.low), milliseconds(found.high)
    low = low.split()[0] if low.split()[1] == high.split()[1] else low
    return f"{'≥ ' if found.at_least else ''}{milliseconds(found.ms)}{' ?' if found.few else ''}", f"{low}–{high}"


def milliseconds(ms: float) -> str:
    """`8.4 ms`, `104 ms`, `1.35 s`."""
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
