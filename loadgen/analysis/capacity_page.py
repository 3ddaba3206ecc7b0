"""A search for a server's capacity as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hawkvision.report.charts import Axis, Chart
from hawkvision.report.html import Html, columns, facts, figure, percent, table, tag
from hawkvision.report.html import page as whole_page
from loadgen.analysis.capacity import Probe
from loadgen.workload.record import Origin


def capacity_page(
    url: str, conclusion: str, probes: Sequence[Probe], p99_ms: float, origin: Origin, *, labelled: bool
) -> str:
    """The page: what was found, latency and goodput against the rate, and every run."""
    tried = sorted(probes, key=lambda each: each.rate)
    right = "right and " if labelled else ""
    return whole_page(
        f"Capacity of {url}",
        tag("p", f"capacity · {origin.started}", kind="kicker"),
        tag("h1", url),
        *(tag("p", line) for line in conclusion.splitlines()),
        columns(
            figure("Latency against rate", _latency(tried, p99_ms), "Hollow: the rate did not hold."),
            figure("Goodput against rate", _goodput(tried), f"Answers {right}within {p99_ms:g} ms; dashed: all."),
        ),
        tag("h2", "All runs, in their order"),
        _runs(probes),
        facts([("command", origin.command), ("machine", f"{origin.cpu}, {origin.cores} cores")]),
    )


def _latency(tried: Sequence[Probe], p99_ms: float) -> Html:
    rates = [each.rate for each in tried]
    curves = {"P99": [each.p99_ms for each in tried], "P50": [each.p50_ms for each in tried]}
    known = [value for values in curves.values() for value in values if value is not None]
    chart = Chart(
        "Latency against rate", _rates(tried), Axis("latency", [*known, p99_ms], "log", "ms"), series=[*curves]
    )
    for series, (name, values) in enumerate(curves.items()):
        chart.line(series, rates, [math.inf if value is None else value for value in values], name=name)
        for each, value in zip(tried, values, strict=True):
            if value is not None:
                said = f"{each.rate:.4g}/s: {name} {value:.4g} ms"
                chart.point(series, each.rate, value, said, hollow=not each.held)
    chart.limit(f"{p99_ms:g} ms", y=p99_ms)
    return chart.svg()


def _goodput(tried: Sequence[Probe]) -> Html:
    rates = [each.rate for each in tried]
    chart = Chart("Goodput against rate", _rates(tried), Axis("goodput per second", [0.0, *rates]))
    chart.line(1, [0.0, *rates], [0.0, *rates], dash="4 4", name="all requests")
    chart.line(0, rates, [each.goodput for each in tried], name="goodput")
    for each in tried:
        said = f"{each.rate:.4g}/s: goodput {each.goodput:.4g}/s"
        chart.point(0, each.rate, each.goodput, said, hollow=not each.held)
    return chart.svg()


def _runs(probes: Sequence[Probe]) -> Html:
    rows = [
        (
            f"{each.rate:.4g}/s" + (" confirming" if each.confirming else ""),
            f"{each.n:,}",
            "none" if each.p50_ms is None else f"{each.p50_ms:.1f} ms",
            "none" if each.p99_ms is None else f"{each.p99_ms:.1f} ms",
            f"{each.goodput:.4g}/s",
            "–" if each.accuracy is None else percent(each.accuracy),
            f"{sum(each.errors.values()):,}",
            "held" if each.held else "interrupted" if each.interrupted else ", ".join(each.failing),
        )
        for each in probes
    ]
    return table(("rate", "requests", "P50", "P99", "goodput", "right", "not answered", "came of it"), rows)


def _rates(tried: Sequence[Probe]) -> Axis:
    return Axis("requests per second", [0.0, *(each.rate for each in tried)])
