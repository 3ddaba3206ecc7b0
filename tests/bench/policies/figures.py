"""What a comparison of policies shows: each contender's figures over all rounds, and ours beside each baseline's.

What counts first is the share of all requests that were answered right within the deadline, paired by request, and
whether answers that claim to keep their accuracy target do. Nothing is left out for having been disturbed: beside what
all rounds show together stand the worst and the best of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.analysis.accuracy import IntervalEstimate, mean_difference
from loadgen.analysis.compare import same_schedule
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import summarise, targets_kept
from loadgen.workload.record import Run

OURS: Final = "hawkvision"


class RoundResult(msgspec.Struct, frozen=True):
    """One contender in one round."""

    run: Run
    uplink_bytes: int
    """IP packets from the edge to the datacenter: probes, audits, handshakes and retransmissions included."""


class PolicyRow(msgspec.Struct, frozen=True):
    """One contender over all rounds of a link and rate. Shares are 0..1, of all requests or else of answers."""

    link: str
    rate: float
    name: str
    n: int
    right_in_time: float
    """Of all requests; then in the worst and in the best round."""
    worst: float
    best: float
    ours_less: IntervalEstimate | None
    """Ours less this, paired by request, with a 95 % interval; None for ours, and where the requests differ."""
    targets_kept: str
    """How many of the targets with a number were kept, and how others were missed; empty if there are none."""
    p50_ms: float
    p99_ms: float
    p99_worst_ms: float
    p99_best_ms: float
    accuracy: float | None
    escalated: float
    degraded: float
    unanswered: int
    uplink_bytes: float
    """Per request sent."""
    stolen: list[float | None]
    """Per round, of the processor time that was wanted, by the machine's host; None where that is not known."""


def rows_of(link: str, rate: float, results: Mapping[str, Sequence[RoundResult]]) -> list[PolicyRow]:
    """The figures of all contenders, most often right in time first."""
    runs = {name: merged([result.run for result in found]) for name, found in results.items()}
    rows = []
    for name, found in results.items():
        summary = summarise(runs[name])
        figures = summary.total
        rounds = [summarise(result.run).total for result in found]
        right = [each.effective.value for each in rounds if each.effective is not None]
        p99 = [each.percentile(0.99).ms for each in rounds]
        rows.append(
            PolicyRow(
                link=link,
                rate=rate,
                name=name,
                n=figures.n,
                right_in_time=0.0 if figures.effective is None else figures.effective.value,
                worst=min(right, default=0.0),
                best=max(right, default=0.0),
                ours_less=difference(runs[OURS], runs[name]) if OURS in runs and name != OURS else None,
                targets_kept=targets_kept(summary),
                p50_ms=figures.percentile(0.5).ms,
                p99_ms=figures.percentile(0.99).ms,
                p99_worst_ms=max(p99),
                p99_best_ms=min(p99),
                accuracy=None if figures.accuracy is None else figures.accuracy.value,
                escalated=figures.escalated,
                degraded=figures.degraded,
                unanswered=figures.n - figures.answered,
                uplink_bytes=sum(result.uplink_bytes for result in found)
                / max(1, sum(len(result.run.outcomes) for result in found)),
                stolen=[result.run.stolen for result in found],
            )
        )
    return sorted(rows, key=lambda row: -row.right_in_time)


def difference(ours: Run, theirs: Run) -> IntervalEstimate | None:
    """How much more often ours was right within the deadline; None where the requests are not the same."""
    mine, their = counted_of(ours), counted_of(theirs)
    if not same_schedule(ours, theirs, mine, their):
        return None
    differences = mine.effective - their.effective
    return mean_difference(differences, mine.image, np.ones(len(differences), np.bool_), ours.origin.seed)


def merged(rounds: Sequence[Run]) -> Run:
    """Rounds of one contender as one run: one after another, the warm-up of all but the first cut out."""
    first = rounds[0]
    step_s = first.duration_s - first.warm_up_s
    outcomes = list(first.outcomes)
    for number, run in enumerate(rounds[1:], 1):
        shift_s = number * step_s
        outcomes += [
            msgspec.structs.replace(
                each, due_s=each.due_s + shift_s, sent_s=each.sent_s + shift_s, done_s=each.done_s + shift_s
            )
            for each in run.counted()
        ]
    return msgspec.structs.replace(
        first, outcomes=outcomes, links=[], duration_s=first.warm_up_s + len(rounds) * step_s, steady=None
    )


def show_rows(rows: Sequence[PolicyRow], title: str, console: Console) -> None:
    """A line per contender; ranges are of the worst and the best round."""
    table = Table("policy", title=title, box=None, header_style="bold", title_justify="left")
    for column in (
        "n", "right in time", "worst to best", "ours less it (95 %)", "targets kept", "P50 ms", "P99 ms",
        "worst to best", "accuracy", "escalated", "degraded", "unanswered", "kB to dc",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        less = row.ours_less
        table.add_row(
            row.name, str(row.n), f"{row.right_in_time:.1%}", f"{row.worst:.1%} to {row.best:.1%}",
            "" if less is None else f"{less.value:+.1%} ({less.low:+.1%} to {less.high:+.1%})",
            row.targets_kept, f"{row.p50_ms:.1f}", f"{row.p99_ms:.0f}",
            f"{row.p99_worst_ms:.0f} to {row.p99_best_ms:.0f}", "" if row.accuracy is None else f"{row.accuracy:.1%}",
            f"{row.escalated:.0%}", f"{row.degraded:.0%}", str(row.unanswered), f"{row.uplink_bytes / 1e3:.1f}",
        )  # fmt: skip
    console.print(table)
