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
from hawkvision.reports.svg import DASHES, marker
from hawkvision.reports.tables import Cell, Table, table
from hawkvision.system.files import write_atomic
from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.compare import MOST_RUNS, Ratio, RatioVerdict, RunComparison, compare_all, written
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import ClassSummary, Figures, summarise
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
from loadgen.reports.page_text import (
    headline,
    interval_text,
    milliseconds,
    notes_of,
    percent,
    span,
    steady_words,
    targets_words,
    warnings_of,
)
from loadgen.reports.timeline import timeline, timelines
from loadgen.workload.record import Run

MOST_CODES: Final = 12
"""Error codes listed per run; they come from the server, which may invent any number."""
PACKAGE: Final = "loadgen.reports"
UNKNOWN: Final = Cell("–")

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
            runs=_runs_table(series, comparisons) if comparisons else "",
            keys=[{"mark": _key(place), "name": one.run.name} for place, one in enumerate(series)],
            columns=_latencies(series),
            over_time=_over_time(series),
            targets=_targets(series),
            targets_note=_targets_note(series),
            ratios=[_ratios(one) for one in comparisons],
            uplink=uplink_bytes is not None,
            provenance=[
                {"name": one.run.name, "command": one.run.origin.command, "facts": _facts(one)} for one in series
            ],
            notes=notes_of(series),
        )
    )


def _cards(one: ChartSeries) -> list[tuple[str, str, str]]:
    total = one.summary.total
    cards = [(f"{found.name} latency", *_latency(total, found.share)) for found in total.percentiles]
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


def _latency(total: Figures, share: float) -> tuple[str, str]:
    """A percentile, and its interval."""
    found = total.percentile(share)
    marks = f"{'≥ ' if found.at_least else ''}{milliseconds(found.ms)}{' ?' if found.few else ''}"
    return marks, span(found)


def _latency_cell(total: Figures, share: float) -> Cell:
    value, small = _latency(total, share)
    return Cell(value, (small,))


def _runs_table(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> Markup:
    sent = "KiB sent" if series[0].uplink_bytes is None else "kB to the datacenter"
    names = ("P50", "P99", "P99.9", "P99 beside the first", "in time", "right and in time", "accuracy", "targets kept",
             "escalated", "not answered", "shed", "flagged", sent)  # fmt: skip
    head = [Cell("run", kind="words"), *(Cell(name, kind="words" * (name == "targets kept")) for name in names)]
    rows = [_run_row(place, one, comparisons[place - 1].ratio("P99") if place else None)
            for place, one in enumerate(series)]  # fmt: skip
    return table(Table(head, rows, first=True))


def _run_row(place: int, one: ChartSeries, ratio: Ratio | None) -> list[Cell]:
    total = one.summary.total
    sent = total.sent_bytes / 1024 if one.uplink_bytes is None else one.uplink_bytes / 1000
    return [
        Cell(one.run.name, key=_key(place)),
        *(_latency_cell(total, share) for share in (0.5, 0.99, 0.999)),
        Cell("first") if ratio is None else _ratio_cell(ratio),
        *(_share_cell(estimate) for estimate in (total.in_time, total.effective, total.accuracy)),
        Cell(targets_words(one.summary), kind="words"),
        Cell(percent(total.escalated)),
        Cell(f"{total.n - total.answered:,}", (f"of {total.n:,}",)),
        Cell(percent(total.shed_share), (f"{total.shed:,}",)),
        Cell(percent(total.flagged)),
        Cell(f"{sent:.1f}"),
    ]


def _share_cell(found: IntervalEstimate | None) -> Cell:
    return UNKNOWN if found is None else Cell(percent(found.value), (interval_text(found),))


def _ratio_cell(ratio: Ratio) -> Cell:
    if ratio.ratio is None:
        return Cell("–", (ratio.verdict,))
    kind = {RatioVerdict.SLOWER: "bad", RatioVerdict.FASTER: "good"}.get(ratio.verdict, "")
    small = (ratio.verdict, f"{ratio.low:.2f}–{ratio.high:.2f}")
    return Cell(f"{ratio.ratio:.2f}x{' ?' if ratio.few else ''}", small, kind)


def _key(place: int) -> Markup:
    """A run's colour, dash and marker."""
    dash = DASHES[place % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return Markup(
        f'<svg class="key" viewBox="0 0 34 12" aria-hidden="true"><path d="M1 6H33" class="line c{place % 8}"{dashes}/>'
        f"{marker(place, 17, 6, size=4)}</svg>"
    )


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


def _targets(series: Sequence[ChartSeries]) -> list[dict[str, object]]:
    names = ("target", "verdict", "missing in accuracy", "counting the late as wrong", "given up", "where not flagged",
             "flagged", "right and in time", "accuracy", "P99", "requests")  # fmt: skip
    head = [Cell(name, kind="words" * (name in names[:2])) for name in names]
    return [
        {
            "key": _key(place),
            "summary": f"{one.run.name}: targets kept {targets_words(one.summary)}",
            "table": table(Table(head, [_target_row(each) for each in one.summary.classes])),
        }
        for place, one in enumerate(series)
    ]


def _targets_note(series: Sequence[ChartSeries]) -> str:
    unknown = all(one.run.reference is None for one in series)
    return (
        "Points of accuracy with 95 % intervals; above zero, accuracy is missing. “Given up” is against the reference "
        f"stage on the same images{', which was not measured here: use --reference' if unknown else ''}."
    )


def _target_row(one: ClassSummary) -> list[Cell]:
    figures, kept = one.figures, one.kept
    small = () if one.guaranteed_drop is None else (f"guarantees ≤ {100 * one.guaranteed_drop:.2g} points",)
    unjudged = "not measured" if one.numeric else "no number asked"
    return [
        Cell(one.target, small),
        Cell(unjudged, kind="words") if kept is None else _verdict_cell(kept.verdict),
        _points_cell(None if kept is None else kept.shortfall),
        _points_cell(None if kept is None else kept.effective_shortfall),
        _points_cell(one.drop),
        _points_cell(one.unflagged_drop),
        Cell(percent(figures.flagged)),
        _share_cell(figures.effective),
        _share_cell(figures.accuracy),
        _latency_cell(figures, 0.99),
        Cell(f"{figures.n:,}", (percent(one.share),)),
    ]


def _points_cell(found: IntervalEstimate | None) -> Cell:
    if found is None:
        return UNKNOWN
    return Cell(f"{100 * found.value:+.1f}", (f"{100 * found.low:.1f} to {100 * found.high:.1f}",))


def _verdict_cell(verdict: TargetVerdict) -> Cell:
    sign, kind = {
        TargetVerdict.KEPT: ("✓", "good"),
        TargetVerdict.UNSHOWN: ("≈", ""),
        TargetVerdict.UNCERTAIN: ("≈", ""),
        TargetVerdict.FLAGGED: ("⚑", ""),
        TargetVerdict.UNCLAIMED: ("○", ""),
        TargetVerdict.SILENT: ("✗", "bad"),
    }[verdict]
    return Cell(verdict, kind=f"words {kind}".strip(), sign=sign)


def _ratios(one: RunComparison) -> dict[str, object]:
    how = "same requests, in pairs" if one.paired else "different requests, without pairs"
    rows = [
        [
            Cell(ratio.figure),
            Cell(written(ratio.figure, ratio.first, at_least=ratio.first_at_least) or "–"),
            Cell(written(ratio.figure, ratio.other, at_least=ratio.other_at_least) or "–"),
            _ratio_cell(ratio),
        ]
        for ratio in one.ratios
    ]
    head = [Cell(""), Cell(one.first), Cell(one.other), Cell("ratio")]
    return {"summary": f"{one.other} ({how})", "table": table(Table(head, rows, kind="small"))}


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
