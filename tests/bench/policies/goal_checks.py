"""What a comparison of policies shows: rounds put together, each contender's figures, and ours beside each baseline.

Pure: runs in, rows and claims out. What counts first is the share of all requests that were answered right within the
deadline, and whether answers that claim to keep their accuracy target do. Latencies come second, and only at equal
accuracy: who answers less accurately may be faster for that alone, so a ratio of latencies is shown either way, and
says nothing where the quicker one is less accurate by more than `EQUAL_ACCURACY`.

Nothing is left out for having been disturbed: beside what all rounds show together stand the worst and the best of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict, mean_difference
from loadgen.analysis.bootstrap import quantiles
from loadgen.analysis.compare import LATENCIES, Ratio, RatioVerdict, RunComparison, compare, same_schedule
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import Percentile, RunSummary, summarise
from loadgen.analysis.summary_text import targets_kept
from loadgen.workload.record import LinkSample, Run

OURS: Final = ("hawkvision", "hawkvision-tcp")
"""The second runs without the datagram transport, which shows what that transport contributes."""
EQUAL_ACCURACY: Final = 0.002
"""Accuracies that differ by no more are equal."""
COMPARED: Final = ("P50", "P99")


class LinkBytes(msgspec.Struct, frozen=True):
    """Bytes of IP packets that both links were given during the runs, whatever became of them."""

    client_up: int = 0
    client_down: int = 0
    dc_up: int = 0
    """From the edge to the datacenter: probes, audits, handshakes and retransmissions included."""
    dc_down: int = 0

    def plus(self, other: LinkBytes) -> LinkBytes:
        """Both together."""
        return LinkBytes(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))


def _values(traffic: LinkBytes) -> tuple[int, int, int, int]:
    return traffic.client_up, traffic.client_down, traffic.dc_up, traffic.dc_down


class PolicyResult(msgspec.Struct, frozen=True):
    """One contender in one cell."""

    run: Run
    """All rounds as one."""
    traffic: LinkBytes
    rounds: tuple[Run, ...] = ()
    """Each by itself; none of a single one."""

    @property
    def each(self) -> tuple[Run, ...]:
        """The rounds, of a single one as well."""
        return self.rounds or (self.run,)


class RoundRange(msgspec.Struct, frozen=True):
    """A figure in the rounds that it is worst and best in."""

    worst: float
    best: float


class PolicyRow(msgspec.Struct, frozen=True):
    """One contender in one cell, in numbers. Shares are 0..1, of answers where `Figures` says so."""

    link: str
    rate: float
    name: str
    n: int
    effective: IntervalEstimate | None
    """Right within the deadline, of all requests: what policies are compared by."""
    effective_rounds: RoundRange | None
    kept: str
    """How many of the targets with a number were kept, and how others were missed; empty if there are none."""
    silent: bool
    """Whether one was missed among answers that claim to keep it."""
    p50_ms: float
    p50_rounds: RoundRange
    p99_ms: float
    p99_rounds: RoundRange
    p99_low_ms: float
    p99_high_ms: float
    p99_at_least: bool
    """Requests without an answer reach it, so the true one is larger."""
    p999: Percentile
    accuracy: IntervalEstimate | None
    in_time: IntervalEstimate | None
    escalated: float
    degraded: float
    flagged: float
    unanswered: int
    shed_share: float
    """Refused with 429 or 503, of all requests."""
    client_bytes: float
    """From the client to the edge, per request sent; likewise the next."""
    uplink_bytes: float
    stolen: float | None = None
    """Of the processor time that was wanted, by the machine's host; None where that is not known."""
    slowed: float | None = None
    """CPU slow-down against the processors' best, 0..1; None if idling was not prevented."""
    steady: list[bool | None] = []
    """Per round, whether its second half looked like its first; None where it was too short to tell."""


class GoalCheck(msgspec.Struct, frozen=True):
    """One thing that was to be shown in one cell."""

    link: str
    rate: float
    what: str
    ours: str
    against: str
    """A contender."""
    value: float | None
    low: float | None
    """95 % interval, where there is one."""
    high: float | None
    rounds: RoundRange | None
    """The same in the rounds that are worst and best for ours."""
    goal: str
    met: bool | None
    """None: no difference is shown, or it cannot be said."""
    note: str
    ratio: Ratio | None = None
    """Of latencies: what `value` is the ratio of, what it shows, and what limits it. None of other claims."""
    unequal: str = ""
    """Of latencies: why the ratio says nothing though it is not 1; empty where it does."""


class PolicyCell(msgspec.Struct, frozen=True):
    """A link at a rate, and who was tested there."""

    link: str
    rate: float
    results: dict[str, PolicyResult]


class PolicyReport(msgspec.Struct, frozen=True):
    """A comparison, as `summary.json` has it."""

    command: str
    where: list[str]
    client_link: str | None
    """Between client and edge; None: the same as in each row."""
    congestion: str
    rounds: int
    duration_s: float
    warm_up_s: float
    deadline_ms: float
    rows: list[PolicyRow]
    claims: list[GoalCheck]
    files: list[str]
    failures: list[str]
    """Who could not be tested in which round, and why."""


def together(rounds: Sequence[PolicyResult]) -> PolicyResult:
    """All rounds of a contender."""
    traffic = rounds[0].traffic
    for result in rounds[1:]:
        traffic = traffic.plus(result.traffic)
    runs = tuple(result.run for result in rounds)
    return PolicyResult(merged(runs), traffic, runs)


def merged(rounds: Sequence[Run]) -> Run:
    """Rounds of one contender as one run: one after another, the warm-up of all but the first cut out."""
    first = rounds[0]
    step_s = first.duration_s - first.warm_up_s
    outcomes, links = list(first.outcomes), list(first.links)
    for number, run in enumerate(rounds[1:], 1):
        shift_s = number * step_s
        outcomes += [
            msgspec.structs.replace(
                each, due_s=each.due_s + shift_s, sent_s=each.sent_s + shift_s, done_s=each.done_s + shift_s
            )
            for each in run.counted()
        ]
        links += _shifted(run.links, run.warm_up_s, shift_s)
    return msgspec.structs.replace(
        first,
        outcomes=outcomes,
        links=sorted(links, key=lambda sample: sample.at_s),
        duration_s=first.warm_up_s + len(rounds) * step_s,
        steady=_all_steady(run.steady for run in rounds),
        rounds_steady=[run.steady for run in rounds] if len(rounds) > 1 else [],
        interrupted=any(run.interrupted for run in rounds),
        stolen=_mean(run.stolen for run in rounds),
        slowed=_mean(run.slowed for run in rounds),
    )


def _all_steady(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all were; one that was not counts whatever cannot be said of others."""
    known = set(verdicts)
    return False if False in known else None if None in known else True


def _mean(shares: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _shifted(samples: Sequence[LinkSample], from_s: float, shift_s: float) -> list[LinkSample]:
    """Samples from a moment on, later by so much; what a link was like at that moment begins there."""
    current = {sample.link: sample for sample in samples if sample.at_s <= from_s}
    begun = [msgspec.structs.replace(sample, at_s=from_s) for sample in current.values()]
    later = [sample for sample in samples if sample.at_s > from_s]
    return [msgspec.structs.replace(sample, at_s=sample.at_s + shift_s) for sample in (*begun, *later)]


def row_of(cell: PolicyCell, name: str, summary: RunSummary) -> PolicyRow:
    """A contender's figures."""
    figures, result = summary.total, cell.results[name]
    sent = max(1, len(result.run.outcomes))
    p99 = figures.percentile(0.99)
    rounds = [summarise(run).total for run in result.each] if result.rounds else [figures]
    effective = [each.effective.value for each in rounds if each.effective is not None]
    return PolicyRow(
        link=cell.link,
        rate=cell.rate,
        name=name,
        n=figures.n,
        effective=figures.effective,
        effective_rounds=RoundRange(min(effective), max(effective)) if effective else None,
        kept=targets_kept(summary),
        silent=any(each.kept is not None and each.kept.verdict is TargetVerdict.SILENT for each in summary.classes),
        p50_ms=figures.percentile(0.5).ms,
        p50_rounds=_slowest_and_quickest(each.percentile(0.5) for each in rounds),
        p99_ms=p99.ms,
        p99_rounds=_slowest_and_quickest(each.percentile(0.99) for each in rounds),
        p99_low_ms=p99.low,
        p99_high_ms=p99.high,
        p99_at_least=p99.at_least,
        p999=figures.percentile(0.999),
        accuracy=figures.accuracy,
        in_time=figures.in_time,
        escalated=figures.escalated,
        degraded=figures.degraded,
        flagged=figures.flagged,
        unanswered=figures.n - figures.answered,
        shed_share=figures.shed_share,
        client_bytes=result.traffic.client_up / sent,
        uplink_bytes=result.traffic.dc_up / sent,
        stolen=result.run.stolen,
        slowed=result.run.slowed,
        steady=result.run.rounds_steady or [result.run.steady],
    )


def _slowest_and_quickest(found: Iterable[Percentile]) -> RoundRange:
    ms = [each.ms for each in found]
    return RoundRange(max(ms), min(ms))


def judge(cell: PolicyCell) -> tuple[list[PolicyRow], list[GoalCheck]]:
    """The figures of all contenders of a cell, most often right in time first, and what they show of ours."""
    summaries = {name: summarise(result.run) for name, result in cell.results.items()}
    rows = {name: row_of(cell, name, summary) for name, summary in summaries.items()}
    baselines = [name for name in rows if name not in OURS]
    claims: list[GoalCheck] = []
    for ours in OURS:
        if ours not in rows:
            continue
        claims.append(_guarantees(cell, summaries[ours], ours))
        claims += [_right_in_time(cell, rows, ours, name) for name in baselines]
        for name in baselines:
            found = compare(cell.results[ours].run, cell.results[name].run)
            claims += [_latency(cell, rows, figure, found, ours, name) for figure in COMPARED]
    return sorted(rows.values(), key=lambda row: -1.0 if row.effective is None else -row.effective.value), claims


def _right_in_time(cell: PolicyCell, rows: Mapping[str, PolicyRow], ours: str, name: str) -> GoalCheck:
    """How many more of the very same requests ours answered right within the deadline, as a share of all."""
    mine, theirs = rows[ours].effective, rows[name].effective
    found = _more_often(cell.results[ours].run, cell.results[name].run)
    rounds = _rounds(cell, ours, name, lambda run, other: _value(_more_often(run, other)))
    value = None if mine is None or theirs is None else mine.value - theirs.value
    return GoalCheck(
        cell.link, cell.rate, "right within the deadline, ours less theirs", ours, name, value,
        None if found is None else found.low, None if found is None else found.high,
        RoundRange(min(rounds), max(rounds)) if rounds else None, "> 0",
        None if found is None or found.low <= 0.0 <= found.high else found.value > 0.0,
        f"{_share(mine)} and {_share(theirs)}" + " (not the same requests)" * (found is None),
    )  # fmt: skip


def _more_often(ours: Run, theirs: Run) -> IntervalEstimate | None:
    """The difference of both shares, paired; None without labels, or where the requests are not the same."""
    mine, their = counted_of(ours), counted_of(theirs)
    if not (ours.labelled and theirs.labelled and same_schedule(ours, theirs, mine, their)):
        return None
    differences = mine.effective - their.effective
    return mean_difference(differences, mine.image, np.ones(len(differences), np.bool_), ours.origin.seed)


def _value(found: IntervalEstimate | None) -> float | None:
    return None if found is None else found.value


def _rounds(cell: PolicyCell, ours: str, name: str, figure: Callable[[Run, Run], float | None]) -> list[float]:
    """A figure of each round; none if one of the two missed a round, because rounds could not be paired."""
    mine, theirs = cell.results[ours].each, cell.results[name].each
    if len(mine) != len(theirs):
        return []
    found = (figure(run, other) for run, other in zip(mine, theirs, strict=True))
    return [value for value in found if value is not None and math.isfinite(value)]


def _latency(
    cell: PolicyCell, rows: Mapping[str, PolicyRow], figure: str, found: RunComparison, ours: str, name: str
) -> GoalCheck:
    """Their latency over ours, which counts at equal accuracy."""
    ratio, mine, theirs = found.ratio(figure), rows[ours], rows[name]
    level = [LATENCIES[figure]]
    rounds = _rounds(
        cell, ours, name,
        lambda *runs: float(np.divide(*(quantiles(counted_of(run).latency_ms, level)[0] for run in reversed(runs)))),
    )  # fmt: skip
    unequal = _unequal(mine.accuracy, theirs.accuracy, ratio.verdict)
    return GoalCheck(
        cell.link, cell.rate, f"{figure}, theirs over ours", ours, name, ratio.ratio, ratio.low, ratio.high,
        RoundRange(min(rounds), max(rounds)) if rounds else None, "> 1",
        None if unequal else {RatioVerdict.SLOWER: True, RatioVerdict.FASTER: False}.get(ratio.verdict),
        f"{'≥ ' * ratio.first_at_least}{ratio.first:.1f} ms and {'≥ ' * ratio.other_at_least}{ratio.other:.1f} ms"
        f"{', on few requests' * ratio.few}; accuracy {_share(mine.accuracy)} and {_share(theirs.accuracy)}"
        + f" ({unequal})" * bool(unequal),
        ratio, unequal,
    )  # fmt: skip


def _unequal(ours: IntervalEstimate | None, theirs: IntervalEstimate | None, verdict: RatioVerdict) -> str:
    """Why being quicker proves nothing; empty if it does, or if neither is shown to be quicker."""
    if verdict not in (RatioVerdict.SLOWER, RatioVerdict.FASTER):
        return ""
    if ours is None or theirs is None:
        return "accuracy was not measured"
    quicker, other, who = (ours, theirs, "ours") if verdict is RatioVerdict.SLOWER else (theirs, ours, "theirs")
    return f"{who} is quicker and less accurate" if quicker.value < other.value - EQUAL_ACCURACY else ""


def _guarantees(cell: PolicyCell, summary: RunSummary, ours: str) -> GoalCheck:
    """Whether accuracy is nowhere missed silently; the value is the largest shortfall of answers that claim none.

    The note has, per target, what is missing over all requests when those that came late count as wrong.
    """
    kept = [(each.target, each.kept) for each in summary.classes if each.kept is not None]
    silent = [each.unflagged_shortfall.value for _, each in kept if each.unflagged_shortfall is not None]
    verdicts = "; ".join(
        f"{target} {each.verdict}, right in time {-each.effective_shortfall.value:+.1%} of it" for target, each in kept
    )
    return GoalCheck(
        cell.link, cell.rate, "accuracy missing without a flag", ours, "its targets",
        max(silent, default=None), None, None, None, "≤ 0, or chance",
        all(each.verdict is not TargetVerdict.SILENT for _, each in kept) if kept else None,
        verdicts or "no reference",
    )  # fmt: skip


def show_rows(rows: Sequence[PolicyRow], title: str, console: Console) -> None:
    """One cell, a line per contender; ranges are of the worst and the best round, ✗ marks a target missed silently.

    Below, who was not steady, and in how many rounds.
    """
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("policy", min_width=max((len(row.name) for row in rows), default=0))
    for column in (
        "n", "right in time", "worst–best", "targets kept", "P50 ms", "P99 ms", "worst–best", "accuracy", "escalated",
        "degraded", "flagged", "unanswered", "shed", "kB to edge", "kB to dc", "stolen", "slowed",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        right = row.effective_rounds
        table.add_row(
            row.name, str(row.n), _share(row.effective),
            "" if right is None else f"{100 * right.worst:.1f}–{right.best:.1%}",
            row.kept.partition(" (")[0] + " ✗" * row.silent, f"{row.p50_ms:.1f}",
            f"{'≥ ' if row.p99_at_least else ''}{row.p99_ms:.0f}",
            f"{row.p99_rounds.worst:.0f}–{row.p99_rounds.best:.0f}",
            _share(row.accuracy), f"{row.escalated:.0%}", f"{row.degraded:.0%}", f"{row.flagged:.0%}",
            str(row.unanswered), f"{row.shed_share:.1%}", f"{row.client_bytes / 1e3:.1f}",
            f"{row.uplink_bytes / 1e3:.1f}", "" if row.stolen is None else f"{row.stolen:.1%}",
            "" if row.slowed is None else f"{row.slowed:.0%}",
        )  # fmt: skip
    console.print(table)
    unsteady = [f"{row.name} in {row.steady.count(False)} of {len(row.steady)}" for row in rows if False in row.steady]
    if unsteady:
        console.print(f"rounds that were not steady: {', '.join(unsteady)}", highlight=False, markup=False)


def show_claims(claims: Sequence[GoalCheck], console: Console) -> None:
    """A line per claim."""
    table = Table(title="claims", box=None, header_style="bold", title_justify="left")
    for column in ("link", "rate", "claim", "ours", "against", "value", "(95 %)", "worst–best", "goal", "met", ""):
        table.add_column(column, overflow="fold")
    for claim in claims:
        table.add_row(
            claim.link, f"{claim.rate:g}", claim.what, claim.ours, claim.against, *figures(claim), claim.goal,
            _WORDS[claim.met], claim.note,
        )  # fmt: skip
    console.print(table)


def figures(claim: GoalCheck) -> tuple[str, str, str]:
    """A claim's value, its interval, and its worst and best round, in words; each empty where there is none."""
    words = "{:.3g}" if claim.ratio is not None else "{:+.1%}"
    value = "" if claim.value is None else words.format(claim.value)
    interval = "" if claim.low is None or claim.high is None else f"{words} to {words}".format(claim.low, claim.high)
    rounds = "" if claim.rounds is None else f"{words} to {words}".format(claim.rounds.worst, claim.rounds.best)
    return value, interval, rounds


_WORDS: Final = {True: "yes", False: "NO", None: "?"}


def _share(estimate: IntervalEstimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.1%}"
