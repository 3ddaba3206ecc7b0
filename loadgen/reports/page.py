"""A load test as one HTML page that needs nothing else: the story in its first lines, the evidence below.

The page fetches nothing and says so to the browser (its policy allows its own styles and its one script, by hash).
Names, addresses, targets and error codes come from outside; the templates escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError
from hawkvision.reports.pages import Markup, joined, render, script_hash, source
from hawkvision.system.files import write_atomic
from loadgen.analysis.compare import MOST_RUNS, RunComparison, compare_all
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import summarise
from loadgen.reports.charts import (
    NARROW,
    WIDE,
    ChartSeries,
    drop_chart,
    frontier_chart,
    frontier_points,
    latency_chart,
    percentile_chart,
)
from loadgen.reports.page_tables import latency, ratio_table, run_key, runs_table, target_tables
from loadgen.reports.page_text import (
    headline,
    interval_text,
    milliseconds,
    notes_of,
    percent,
    steady_words,
    warnings_of,
)
from loadgen.reports.timeline import timeline, timelines
from loadgen.workload.record import Run

MOST_CODES: Final = 12
"""Error codes listed per run; they come from the server, which may invent any number."""
PACKAGE: Final = "loadgen.reports"

Headline: TypeAlias = Callable[[Sequence[ChartSeries], Sequence[RunComparison]], tuple[str, str]]
"""The first sentence of a page, and the one below it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its words."""

    chart: Markup
    caption: str
    title: str = ""
    summary: str = ""
    """Of one that is folded away."""


def write_html(
    runs: Sequence[Run],
    path: Path,
    *,
    uplink_bytes: Mapping[str, float] | None = None,
    headline: Headline = headline,
    section: str = "",
) -> None:
    """Write the page of a run, or of several beside the first of them; see `page`.

    Raises:
        ConfigError: for no runs or more than `MOST_RUNS`, or one in which no request counts.
        ArtifactError: if the file cannot be written.
    """
    write_atomic(path, page(runs, uplink_bytes=uplink_bytes, headline=headline, section=section).encode())


def page(
    runs: Sequence[Run],
    *,
    uplink_bytes: Mapping[str, float] | None = None,
    headline: Headline = headline,
    section: str = "",
) -> str:
    """The page of a run, or of several beside the first of them.

    Args:
        runs: what was measured.
        uplink_bytes: from the edge to the datacenter per request, by the name of each run; None if not counted.
        headline: says what the page begins with.
        section: markup that follows the headline.

    Raises:
        ConfigError: as `write_html`.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"a page shows 1 to {MOST_RUNS} runs, got {len(runs)}")
    series = [
        ChartSeries(run, counted_of(run), summarise(run), None if uplink_bytes is None else uplink_bytes[run.name])
        for run in runs
    ]
    comparisons = compare_all(runs) if len(runs) > 1 else ()
    script = source(PACKAGE, "page.js")
    first = series[0]
    deadline = "no deadline" if first.run.deadline_ms is None else f"deadline {first.run.deadline_ms:g} ms"
    return str(
        render(
            PACKAGE,
            "page.html",
            title=f"Load test: {', '.join(one.run.name for one in series)}",
            style=joined((source(PACKAGE, "page.css"), source(PACKAGE, "charts.css"))),
            script=script,
            script_hash=script_hash(script),
            kicker=" · ".join(
                ["HawkVision load test", first.summary.conditions, deadline, first.run.data, first.run.origin.started]
            ),
            headline=headline(series, comparisons),
            warnings=warnings_of(series, comparisons),
            section=Markup(section),
            cards=() if comparisons else _cards(first),
            runs=runs_table(series, comparisons) if comparisons else "",
            keys=[{"mark": run_key(place), "name": one.run.name} for place, one in enumerate(series)],
            columns=_latencies(series),
            over_time=_over_time(series),
            targets=target_tables(series),
            targets_note=_targets_note(series),
            ratios=[ratio_table(one) for one in comparisons],
            uplink=uplink_bytes is not None,
            provenance=[
                {"name": one.run.name, "command": one.run.origin.command, "facts": _facts(one)} for one in series
            ],
            notes=notes_of(series),
        )
    )


def _cards(one: ChartSeries) -> list[tuple[str, str, str]]:
    total = one.summary.total
    cards = [(f"{found.name} latency", *latency(total, found.share)) for found in total.percentiles]
    if total.in_time is not None:
        cards.append(("in time", percent(total.in_time.value), interval_text(total.in_time)))
    if total.effective is not None:
        cards.append(("right and in time", percent(total.effective.value), interval_text(total.effective)))
    if total.accuracy is not None:
        cards.append(("accuracy of answers", percent(total.accuracy.value), interval_text(total.accuracy)))
    cards.append(("escalated", percent(total.escalated), ""))
    shed = f"{total.shed:,} shed, {percent(total.shed_share)} of all"
    cards.append(("not answered", f"{total.n - total.answered:,}", shed))
    cards.append(("flagged", percent(total.flagged), "do not claim their target"))
    if one.uplink_bytes is not None:
        cards.append(("to the datacenter", f"{one.uplink_bytes / 1000:.1f} kB", "per request"))
    received = f"{percent(total.received_fraction)} received"
    cards.append(("sent per request", f"{total.sent_bytes / 1024:.1f} KiB", received))
    return cards


def _chart(drawn: str) -> Markup:
    return Markup(drawn)


def _arrows(at_least: Iterable[bool]) -> str:
    """What an arrow says, if a chart has any."""
    return " Arrow: at least so much, for unanswered requests are among the slowest." if any(at_least) else ""


def _latencies(series: Sequence[ChartSeries]) -> tuple[list[Chart], list[Chart]]:
    left = [
        Chart(
            _chart(latency_chart(series)),
            "Further left is faster. The upper scale opens up the tail: each step up leaves a tenth of the requests.",
            "How long requests took",
        )
    ]
    right = [
        Chart(
            _chart(percentile_chart(series)),
            "Where intervals are far apart, runs differ. Hollow: rests on few requests or few occasions."
            f"{_arrows(one.at_least for each in series for one in each.summary.total.percentiles)}",
            "Percentiles with 95 % intervals",
        )
    ]
    points = frontier_points(series)
    if len(points) > 1:
        each = "One point per target. " if len(series) == 1 else ""
        where = " to the datacenter" if len(series) > 1 and series[0].uplink_bytes is not None else ""
        left.append(
            Chart(
                _chart(frontier_chart(points)),
                f"{each}Up and to the left is better; a smaller disc sends fewer bytes{where}. Crosses are 95 % "
                "intervals. Hollow: its P99 rests on few requests or few occasions."
                f"{_arrows(one.p99.at_least for one in points)}",
                "Accuracy, latency and bytes together",
            )
        )
    if any(found.drop is not None for one in series for found in one.summary.classes):
        right.append(
            Chart(
                _chart(drop_chart(series)),
                "Accuracy given up against the reference stage on the same images, with 95 % intervals. Left of the "
                "dashed line the target is kept. Hollow: no answer claimed to keep it.",
                "Is the accuracy that was asked for kept?",
            )
        )
    return left, right


def _over_time(series: Sequence[ChartSeries]) -> list[Chart]:
    """The chart of all runs, then each by itself if there are several."""
    first = series[0].run
    caption = (
        "In windows of few requests, P99 is nearly the slowest of them. A line is at the upper edge where requests "
        "without an answer reach it."
    )
    if first.links:
        caption += " Bands: a link's rate as height, loss as the strip below it, solid where it was down."
    if len(series) == 1:
        return [Chart(_both(lambda width, kind: timeline(series[0], width, f"{kind}-0")), caption)]
    each = [
        Chart(
            _both(lambda width, kind, one=one, place=place: timeline(one, width, f"{kind}-{place}")),  # type: ignore[misc]
            caption,
            summary=f"{one.run.name} by itself: P50, P99, escalations and requests without an answer",
        )
        for place, one in enumerate(series)
    ]
    if first.links and any(one.run.links != first.links for one in series[1:]):
        caption += f" The bands are those of {first.name}; other runs had links of their own."
    return [Chart(_both(lambda width, kind: timelines(series, width, kind)), caption), *each]


def _both(draw: Callable[[float, str], str]) -> Markup:
    """A chart for wide and for narrow screens."""
    return joined(
        Markup('<div class="{}">{}</div>').format(kind, _chart(draw(width, kind)))
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )


def _targets_note(series: Sequence[ChartSeries]) -> str:
    unknown = all(one.run.reference is None for one in series)
    return (
        "Points of accuracy with 95 % intervals; above zero, accuracy is missing. “Given up” is against the reference "
        f"stage on the same images{', which was not measured here: use --reference' if unknown else ''}."
    )


def _facts(one: ChartSeries) -> list[tuple[str, str]]:
    run, origin, total = one.run, one.run.origin, one.summary.total
    noise = run.noise
    codes = list(total.errors.items())
    errors = [f"{found} {code}" for code, found in codes[:MOST_CODES]]
    errors += [f"{sum(found for _, found in codes[MOST_CODES:])} others"] if len(codes) > MOST_CODES else []
    return [
        ("address", f"{run.url} ({run.protocol})"),
        ("server", run.server or "says nothing of itself"),
        ("started", origin.started),
        ("schedule", f"{run.schedule}, seed {origin.seed}, {run.duration_s:g} s, of which {run.warm_up_s:g} s warm-up"),
        ("requests", f"{total.n:,} counted, {total.answered:,} answered; {total.offered_per_s:.4g} a second offered, "
                     f"{total.answered_per_s:.4g} answered"),
        ("without an answer", ", ".join(errors) or "none"),
        ("images", f"{run.data}, each sent {one.summary.per_image:.3g} times on average"),
        ("targets", ", ".join(f"{target.name} ({percent(target.share)})" for target in run.targets)),
        ("slowest", milliseconds(total.max_ms)),
        ("generator", "not measured" if noise is None else
            f"adds {noise.p50_ms:.2f} ms at P50, {noise.p99_ms:.2f} ms at P99; at most {noise.max_rate:.0f} a second"),
        ("steady", steady_words(run)),
        ("generator's versions", f"HawkVision {origin.hawkvision}, Python {origin.python}"),
        ("machine", f"{origin.cpu}, {origin.cores} cores, load {origin.load_before:.2f} before the run" +
            ("" if run.stolen is None else f"; {percent(run.stolen)} of the time wanted was held back by the host") +
            ("" if run.slowed is None else f"; {percent(run.slowed)} slower than at its best")),
    ]  # fmt: skip
