"""What a comparison found, as tables for a person: on a terminal, or as a page."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.bench.servers.results import AtShare, ServerRatio, ServersReport

PAGE_COLUMNS: Final = 200
FEW: Final = 1000
"""Requests below which a P99 rests on fewer than ten of them."""


def show(report: ServersReport, console: Console) -> None:
    """Print the report for a person."""
    console.print(
        f"{report.origin.cpu}; servers on core {report.cores[0]}, one at a time, the generator on core "
        f"{report.cores[1]}; load average before {report.origin.load_before:.2f}, after {report.load_after:.2f}\n"
        f"{report.model} on {escape(report.data)}; {report.rounds} rounds of {report.window_s:g} s in rotated order"
        + ("" if report.complete else ", finished so far: not all was measured")
        + (
            f"; every answer is that of the bare loop with its handler on {report.checked} images"
            if report.checked
            else ""
        )
    )
    if report.against:
        console.print(_against(report))
    if report.attribution:
        console.print(_attribution(report))
    if report.rows:
        console.print(_capacities(report))
        console.print(_latencies(report))
        if any(found.at_rate for found in report.rows):
            console.print(_same_rate(report))
        for found in report.rows:
            console.print(f"{' '.join(filter(None, (found.title, found.version)))}: {found.how}", highlight=False)
    if report.overhead:
        console.print(_overheads(report))
    for name, reason in report.failures.items():
        console.print(f"{name} is missing: {reason}", markup=False, highlight=False)


def page(report: ServersReport) -> str:
    """The report as one HTML page that needs nothing else."""
    console = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    show(report, console)
    return console.export_html()


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _capacities(report: ServersReport) -> Table:
    table = _table(
        f"capacity: closed loop, {report.callers} callers",
        *("server", "answers/s (range)", "HawkVision / it", "per CPU second", "of the core", "failed"),
        *("top-1", "HawkVision's class"),
    )
    for found in report.rows:
        table.add_row(
            found.title,
            f"{found.capacity:.1f} ({found.capacity_low:.1f}–{found.capacity_high:.1f})",
            _written(found.capacity_ratio),
            f"{found.per_cpu_s:.1f}",
            f"{found.core_share:.0%}",
            str(found.failed),
            _percent(found.top1),
            _percent(found.agreement),
        )
    return table


def _latencies(report: ServersReport) -> Table:
    return _loads(
        "latency: open loop, Poisson arrivals at a share of each one's own capacity, from when a request was due",
        [(found.title, load) for found in report.rows for load in found.loads],
    )


def _same_rate(report: ServersReport) -> Table:
    return _loads(
        "latency at one rate for all, the same arrivals: a share of the slowest one's capacity",
        [(found.title, found.at_rate) for found in report.rows if found.at_rate is not None],
    )


def _loads(title: str, found: Sequence[tuple[str, AtShare]]) -> Table:
    table = _table(
        title,
        *("server", "share", "rate/s", "n", "P50 ms", "P99 ms", "P50 HawkVision / it", "P99 HawkVision / it", "failed"),
    )
    for name, at in found:
        table.add_row(
            name,
            f"{at.share:.0%}",
            f"{at.rate:.1f}",
            str(at.n),
            _ms(at.p50_ms),
            _ms(at.p99_ms) + (" *" if at.n < FEW else ""),
            _written(at.p50_ratio),
            _written(at.p99_ratio),
            str(at.failed),
        )
    if any(at.n < FEW for _, at in found):
        table.caption = f"* of fewer than {FEW} requests"
    return table


def _against(report: ServersReport) -> Table:
    table = _table(
        "HawkVision / the best Python peer, whichever that is in each figure",
        *("peers' handler", "figure", "best", "HawkVision / it"),
    )
    for found in report.against:
        table.add_row(found.handler, found.figure, found.peer, _written(found.ratio))
    return table


def _attribution(report: ServersReport) -> Table:
    table = _table("where that comes from: answers/s, one factor after another", "part", "what", "times (range)")
    for found in report.attribution:
        table.add_row(found.part, found.what, _written(found.ratio))
    return table


def _overheads(report: ServersReport) -> Table:
    table = _table(
        "no model: one connection, one request at a time",
        *("server", "what it does", "n", "P50 ms", "P99 ms", "P50 HawkVision (decodes) / it"),
    )
    done = {"decode": "decodes and scales", "nothing": "receives", "model": "", None: "the client's own floor"}
    for found in report.overhead:
        table.add_row(
            found.title,
            done[found.work],
            str(found.n),
            f"{found.p50_ms:.3f}",
            f"{found.p99_ms:.3f}",
            _written(found.ratio),
        )
    return table


def _written(found: ServerRatio | None) -> str:
    if found is None or not math.isfinite(found.median):
        return ""
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def _percent(found: float | None) -> str:
    return "" if found is None else f"{found:.1%}"


def _ms(found: float) -> str:
    return f"{found:.2f}" if math.isfinite(found) else "unanswered"
