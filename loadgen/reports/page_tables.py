"""The tables of a load test's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hawkvision.reports.pages import Markup
from hawkvision.reports.svg import DASHES, marker
from hawkvision.reports.tables import Cell, Table, table
from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.compare import Ratio, RatioVerdict, RunComparison, written
from loadgen.analysis.summary import ClassSummary, Figures
from loadgen.reports.charts import ChartSeries
from loadgen.reports.page_text import interval_text, milliseconds, percent, span, targets_words

UNKNOWN: Final = Cell("–")


def latency(total: Figures, share: float) -> tuple[str, str]:
    """A percentile, and its interval."""
    found = total.percentile(share)
    marks = f"{'≥ ' if found.at_least else ''}{milliseconds(found.ms)}{' ?' if found.few else ''}"
    return marks, span(found)


def _latency_cell(total: Figures, share: float) -> Cell:
    value, small = latency(total, share)
    return Cell(value, (small,))


def runs_table(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> Markup:
    """A row per run, each beside the first."""
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
        Cell(one.run.name, key=run_key(place)),
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


def run_key(place: int) -> Markup:
    """A run's colour, dash and marker."""
    dash = DASHES[place % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return Markup(
        f'<svg class="key" viewBox="0 0 34 12" aria-hidden="true"><path d="M1 6H33" class="line c{place % 8}"{dashes}/>'
        f"{marker(place, 17, 6, size=4)}</svg>"
    )


def target_tables(series: Sequence[ChartSeries]) -> list[dict[str, object]]:
    """Of each run a table with a row per target."""
    names = ("target", "verdict", "missing in accuracy", "counting the late as wrong", "given up", "where not flagged",
             "flagged", "right and in time", "accuracy", "P99", "requests")  # fmt: skip
    head = [Cell(name, kind="words" * (name in names[:2])) for name in names]
    return [
        {
            "key": run_key(place),
            "summary": f"{one.run.name}: targets kept {targets_words(one.summary)}",
            "table": table(Table(head, [_target_row(each) for each in one.summary.classes])),
        }
        for place, one in enumerate(series)
    ]


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


def ratio_table(one: RunComparison) -> dict[str, object]:
    """The ratios of one run to the first."""
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
