"""Summaries of runs for people: a table for a terminal, and what goes into sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.summary import ClassSummary, Figures, Percentile, RunSummary

NAMED_CODES: Final = 3
"""Error codes that a sentence names; a server may invent any number."""


def show(summaries: Sequence[RunSummary], console: Console) -> None:
    """Print a table for a person: a row per run, and a row per target where there is one run."""
    alone = summaries[0] if len(summaries) == 1 else None
    table = Table(box=None, header_style="bold", title=escape(_title(summaries)))
    table.add_column("target" if alone else "run", no_wrap=True)
    for title in (
        "requests",
        "P50 ms",
        "P99 ms (95 %)",
        "P99.9 ms",
        "in time",
        "right + in time (95 %)",
        "accuracy (95 %)",
        "escalated",
        "no answer (shed)",
        "flagged",
        "KiB sent",
    ):
        table.add_column(title, justify="right")
    table.add_column("targets kept" if alone is None else "against the target")
    for summary in summaries:
        style = "bold" if alone else None
        row = _cells("all" if alone else summary.name, summary.total)
        table.add_row(*row, escape(targets_kept(summary)), style=style)
    for one in alone.classes if alone else ():
        table.add_row(*_cells(f"  {one.target}", one.figures), escape(_standing(one)))
    console.print(table)
    console.print("latency from when a request was due; 95 % intervals by block bootstrap; " + _caution(summaries))
    if meaning := meaning_of_right(summaries):
        console.print(meaning)


def meaning_of_right(summaries: Sequence[RunSummary]) -> str:
    """What `right` means where answers can be partly right; empty where they cannot."""
    kinds = sorted({each.kind for each in summaries if each.partly})
    return f"right: the mean of 1 − the loss of {', '.join(kinds)}" if kinds else ""


def _title(summaries: Sequence[RunSummary]) -> str:
    first = summaries[0]
    deadline = "no deadline" if first.deadline_ms is None else f"deadline {first.deadline_ms:g} ms"
    return f"{first.name} at {first.url}, {first.conditions}, {deadline}" if len(summaries) == 1 else deadline


def _cells(name: str, figures: Figures) -> tuple[str, ...]:
    p99 = figures.percentile(0.99)
    return (
        escape(name),
        str(figures.n),
        _milliseconds(figures.percentile(0.5)),
        f"{_milliseconds(p99)} ({p99.low:.3g}–{p99.high:.3g})",
        _milliseconds(figures.percentile(0.999)),
        "" if figures.in_time is None else f"{figures.in_time.value:.1%}",
        _share(figures.effective),
        _share(figures.accuracy),
        f"{figures.escalated:.1%}",
        f"{figures.n - figures.answered} ({figures.shed_share:.1%})",
        f"{figures.flagged:.1%}",
        f"{figures.sent_bytes / 1024:.1f}",
    )


def _share(estimate: IntervalEstimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.1%} ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})"


def _milliseconds(percentile: Percentile) -> str:
    return f"{'≥' if percentile.at_least else ''}{percentile.ms:.1f}{'?' if percentile.few else ''}"


def targets_kept(summary: RunSummary) -> str:
    """`4 of 5 (1 not shown; 1 missed silently)`: how the targets with a number fared; empty if there are none."""
    verdicts = Counter(one.kept.verdict for one in summary.classes if one.kept is not None)
    total = sum(verdicts.values())
    if not total:
        return ""
    words = {one: str(one) for one in TargetVerdict if one is not TargetVerdict.KEPT} | {
        TargetVerdict.UNSHOWN: "not shown"
    }
    others = [f"{verdicts[one]} {word}" for one, word in words.items() if verdicts[one]]
    kept = verdicts[TargetVerdict.KEPT] + verdicts[TargetVerdict.UNSHOWN]
    return f"{kept} of {total}" + (f" ({'; '.join(others)})" if others else "")


def failures(figures: Figures) -> str:
    """`148 unreachable, 2 timeout`: how many requests got no answer, by the most frequent codes."""
    codes = list(figures.errors.items())
    named = [f"{found} {code}" for code, found in codes[:NAMED_CODES]]
    others = sum(found for _, found in codes[NAMED_CODES:])
    return ", ".join([*named, *([f"{others} others"] if others else [])])


def _standing(one: ClassSummary) -> str:
    if one.kept is None:
        if one.drop is not None:
            return f"drop {100 * one.drop.value:+.1f} ± {50 * (one.drop.high - one.drop.low):.1f} pt"
        return "not measured" if one.numeric else ""
    missing = one.kept.shortfall
    side = "short by" if missing.value > 0 else "spare"
    error = 100 * (missing.high - missing.low) / 2
    return f"{one.kept.verdict} ({side} {100 * abs(missing.value):.1f} ± {error:.1f} pt)"


def _caution(summaries: Sequence[RunSummary]) -> str:
    found = ["? rests on few requests or few occasions"]
    if any(one.at_least for summary in summaries for one in summary.total.percentiles):
        found.append("≥ requests without an answer reach it")
    found += [f"{summary.name}: no answer: {failures(summary.total)}" for summary in summaries if summary.total.errors]
    found += [f"{summary.name} was interrupted" for summary in summaries if summary.interrupted]
    found += [f"{summary.name} was not steady" for summary in summaries if summary.steady is False]
    return escape("; ".join(found))
