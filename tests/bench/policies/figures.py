"""What a comparison of policies shows: for each target and contender, whether it was kept, at what cost, how fast.

Nothing is left out for having been disturbed: beside what all rounds show together stand the worst and the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.analysis.accuracy import IntervalEstimate, mean_difference
from loadgen.analysis.compare import same_schedule
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import ClassSummary, summarise
from loadgen.workload.record import Run
from tests.bench.policies.plan import OURS


class Round(Run, frozen=True, kw_only=True):
    """One contender in one round."""

    uplink_bytes: int
    """IP packets from the edge to the datacenter: probes, audits, handshakes and retransmissions included."""


Rounds: TypeAlias = Mapping[str, Sequence[Round]]
"""By contender; the same rounds of each, in the same order."""


class PolicyRow(msgspec.Struct, frozen=True):
    """One contender and target over all rounds of a link. Shares are 0..1."""

    link: str
    name: str
    summary: ClassSummary
    rounds: int
    right_in_time: tuple[float, float]
    """Share of all requests, in the worst and in the best round; then P99."""
    p99_ms: tuple[float, float]
    ours_less: IntervalEstimate | None
    """How much oftener ours was right in time, paired by request, with a 95 % interval; None for ours."""
    uplink_bytes: float
    """Per request, of all targets together."""
    stolen: list[float | None]
    """Per round, of the processor time that was wanted, by the machine's host; None where that is not known."""


def rows_of(link: str, rounds: Rounds) -> list[PolicyRow]:
    """The figures of all targets and contenders."""
    runs = {name: merged(found) for name, found in rounds.items()}
    rows: list[PolicyRow] = []
    for name, found in rounds.items():
        each_round = [each for run in found for each in summarise(run).classes]
        sent = sum(each.uplink_bytes for each in found) / max(1, sum(len(each.outcomes) for each in found))
        for summary in summarise(runs[name]).classes:
            mine = [each.figures for each in each_round if each.target == summary.target]
            right = [0.0 if each.effective is None else each.effective.value for each in mine]
            p99 = [each.percentile(0.99).ms for each in mine]
            less = difference(runs[OURS], runs[name], summary.target) if OURS in runs and name != OURS else None
            ranges = (min(right), max(right)), (max(p99), min(p99))
            stolen = [each.stolen for each in found]
            rows.append(PolicyRow(link, name, summary, len(found), *ranges, less, sent, stolen))
    return sorted(rows, key=lambda row: row.summary.target)


def difference(ours: Run, theirs: Run, target: str) -> IntervalEstimate | None:
    """How much more often ours was right within the deadline; None where the requests are not the same."""
    mine, their = counted_of(ours), counted_of(theirs)
    if not same_schedule(ours, theirs, mine, their):
        return None
    some = mine.target == [each.name for each in ours.targets].index(target)
    return mean_difference(mine.effective - their.effective, mine.image, some, ours.origin.seed)


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


def show_rows(rows: Sequence[PolicyRow], console: Console) -> None:
    """A line per target and contender; ranges are of the worst and the best round."""
    table = Table("policy", title=f"\n{rows[0].link}", box=None, header_style="bold", title_justify="left")
    columns = ("n", "below (95 %)", "kept", "certified", "escalated", "P50 ms", "P99 ms", "worst to best",
               "right in time", "worst to best", "ours less it (95 %)", "none", "kB to dc")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    target = ""
    for row in rows:
        summary, figures = row.summary, row.summary.figures
        if summary.target != target:
            target = summary.target
            table.add_row(f"[bold]{target}[/]")
        table.add_row(
            row.name, str(figures.n), _points(summary.drop), "" if summary.kept is None else summary.kept.verdict,
            f"{1.0 - figures.flagged:.0%}", f"{figures.escalated:.1%}", f"{figures.percentile(0.5).ms:.1f}",
            f"{figures.percentile(0.99).ms:.0f}", "{:.0f} to {:.0f}".format(*row.p99_ms),
            "" if figures.effective is None else f"{figures.effective.value:.1%}",
            "{:.1%} to {:.1%}".format(*row.right_in_time), _points(row.ours_less),
            str(figures.n - figures.answered), f"{row.uplink_bytes / 1e3:.1f}",
        )  # fmt: skip
    console.print(table)


def _points(found: IntervalEstimate | None) -> str:
    return "" if found is None else f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
