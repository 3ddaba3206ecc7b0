"""What a comparison of policies shows: rounds put together, each contender's figures, and the claims they bear out.

Pure: runs in, rows and claims out. A claim on latency holds only at equal accuracy, which can mean two things, and each
has a verdict of its own:

- Accuracy of the answers, however late they came (`met`). A rival that is more accurate than ours is made equal, by
  another version of it or by dilution (`equal_accuracy`); the ratio and its interval are those of the rival so made. If
  it cannot be, a claim that fails against the rival as it was tested fails, and of others nothing can be said.
- The share of all requests that were answered right and in time (`met_in_time`): the rival as it was tested, where ours
  is no more than `EQUAL_ACCURACY` below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.compare import LATENCIES, Ratio, compare
from loadgen.equal_accuracy import EQUAL_ACCURACY, Dilution, Opponent, opponent
from loadgen.hindsight import hindsight_ms
from loadgen.link_alone import link_alone_ms
from loadgen.promises import Estimate, Verdict
from loadgen.record import LinkSample, Run
from loadgen.summary import Percentile, Summary, summarise

OURS: Final = ("hawkvision", "hawkvision-tcp")
"""The second without the lossy transport, so that nobody can say it was only that."""
VOLATILE_P99: Final[Mapping[str, float]] = {"infaas": 3.0, "static": 2.0}
"""How many times ours theirs shall be, at least, on a link that changes."""
DILUTING: Final = "all-edge"
"""The contender whose answers dilute a rival."""
STEADY_P50: Final = 4.0
STEADY_P99: Final = 1.15
UPLINK: Final = 3.0


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of IP packets that both links were given during the runs, whatever became of them."""

    client_up: int = 0
    client_down: int = 0
    dc_up: int = 0
    """From the edge to the datacenter: probes, audits, handshakes and retransmissions included."""
    dc_down: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))


def _values(traffic: Traffic) -> tuple[int, int, int, int]:
    return traffic.client_up, traffic.client_down, traffic.dc_up, traffic.dc_down


class Result(msgspec.Struct, frozen=True):
    """One contender in one cell: all rounds."""

    run: Run
    traffic: Traffic


class Row(msgspec.Struct, frozen=True):
    """One contender in one cell, in numbers. Shares are 0..1, of answers where `Figures` says so."""

    link: str
    rate: float
    name: str
    n: int
    p50_ms: float
    p99_ms: float
    p99_low_ms: float
    p99_high_ms: float
    p99_at_least: bool
    """Requests without an answer reach it, so the true one is larger."""
    p999: Percentile
    accuracy: Estimate | None
    effective: Estimate | None
    in_time: Estimate | None
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
    """How much slower than at their best processors were; None where nobody kept them awake."""
    steady: list[bool | None] = []
    """Per round, whether its second half looked like its first; None where it was too short to tell."""


class Claim(msgspec.Struct, frozen=True):
    """One thing that was to be shown in one cell."""

    link: str
    rate: float
    what: str
    ours: str
    against: str
    """A contender; of several with the same policy (`static@0.55`), the one that is best for that policy."""
    value: float | None
    low: float | None
    """95 % interval, where there is one."""
    high: float | None
    goal: str
    met: bool | None
    """None: it cannot be said."""
    note: str
    met_in_time: bool | None = None
    """Of latencies: with accuracies of what came in time, and the rival undiluted."""
    dilution: Dilution | None = None
    """What made a more accurate rival equal; None where nothing had to, or could."""
    unequal: str = ""
    """Why the rival could not be made equal to ours; `value` is then of the rival as it was tested."""
    ratio: Ratio | None = None
    """Of latencies: what `value` is the ratio of, what it shows, and what limits it. None of other claims."""
    link_alone_ms: float | None = None
    """Of latencies: what the caller's link took of it, whoever answered; None where there was no emulated one."""
    hindsight_ms: float | None = None
    """Of latencies: what whoever was quickest for each request had; None where not all were sent the same requests."""


class Cell(msgspec.Struct, frozen=True):
    """A link at a rate, and who was tested there."""

    link: str
    rate: float
    steady: bool
    """Whether the link's profile never changes."""
    results: dict[str, Result]


class Report(msgspec.Struct, frozen=True):
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
    rows: list[Row]
    claims: list[Claim]
    files: list[str]
    failures: list[str]
    """Who could not be tested in which round, and why."""


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
        steady=_all(run.steady for run in rounds),
        rounds_steady=[run.steady for run in rounds] if len(rounds) > 1 else [],
        interrupted=any(run.interrupted for run in rounds),
        stolen=_mean(run.stolen for run in rounds),
        slowed=_mean(run.slowed for run in rounds),
    )


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


def row_of(cell: Cell, name: str, summary: Summary) -> Row:
    """A contender's figures."""
    figures, result = summary.total, cell.results[name]
    sent = max(1, len(result.run.outcomes))
    p99 = figures.percentile(0.99)
    return Row(
        link=cell.link,
        rate=cell.rate,
        name=name,
        n=figures.n,
        p50_ms=figures.percentile(0.5).ms,
        p99_ms=p99.ms,
        p99_low_ms=p99.low,
        p99_high_ms=p99.high,
        p99_at_least=p99.at_least,
        p999=figures.percentile(0.999),
        accuracy=figures.accuracy,
        effective=figures.effective,
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


def judge(cell: Cell) -> tuple[list[Row], list[Claim]]:
    """The figures of all contenders of a cell, and what they show of ours."""
    summaries = {name: summarise(result.run) for name, result in cell.results.items()}
    rows = {name: row_of(cell, name, summary) for name, summary in summaries.items()}
    claims: list[Claim] = []
    for ours in OURS:
        if ours not in rows:
            continue
        if not cell.steady:
            claims += [
                _latency(cell, rows, "P99", ours, rival, goal)
                for rival, goal in VOLATILE_P99.items()
                if _versions(cell, rival)
            ]
        if "split" in rows:
            claims += _against_split(cell, rows, ours)
        claims.append(_promises(cell, summaries[ours], ours))
    return list(rows.values()), claims


def _against_split(cell: Cell, rows: Mapping[str, Row], ours: str) -> list[Claim]:
    mine, theirs = rows[ours].uplink_bytes, rows["split"].uplink_bytes
    ratio = theirs / mine if mine else None
    note = f"{mine / 1e3:.1f} kB and {theirs / 1e3:.1f} kB per request"
    met = None if ratio is None else ratio >= UPLINK
    bytes_ = Claim(
        cell.link, cell.rate, "uplink bytes, theirs over ours", ours, "split", ratio, None, None,
        f"≥ {UPLINK:g}", met, note,
    )  # fmt: skip
    if not cell.steady:
        return [bytes_]
    return [
        bytes_,
        _latency(cell, rows, "P50", ours, "split", STEADY_P50),
        _latency(cell, rows, "P99", ours, "split", 1.0 / STEADY_P99),
    ]


def _versions(cell: Cell, policy: str) -> list[Run]:
    """The runs of a policy: alone, and with every setting that it was tested with."""
    return [result.run for name, result in cell.results.items() if name.partition("@")[0] == policy]


def _latency(cell: Cell, rows: Mapping[str, Row], figure: str, ours: str, policy: str, goal: float) -> Claim:
    """Their latency over ours, at equal accuracy."""
    run, edge = cell.results[ours].run, cell.results.get(DILUTING)
    rival = opponent(figure, run, _versions(cell, policy), None if edge is None else edge.run)
    plain = rival.ratio if rival.dilution is None else compare(run, cell.results[rival.name].run).ratio(figure)
    mine, theirs = rows[ours], rows[rival.name]
    equal = None if rival.unequal else True
    level = LATENCIES[figure]
    alone_ms = link_alone_ms(run, level)
    quickest_ms = hindsight_ms([each.run for each in cell.results.values()], level)
    return Claim(
        cell.link, cell.rate, f"{figure}, theirs over ours", ours, rival.name,
        rival.ratio.ratio, rival.ratio.low, rival.ratio.high, f"≥ {goal:.3g}",
        _all((_reached(rival.ratio, goal), equal)), _latency_note(rival, mine, theirs, alone_ms, quickest_ms),
        _all((_reached(plain, goal), _equal(mine.effective, theirs.effective))), rival.dilution, rival.unequal,
        rival.ratio, alone_ms, quickest_ms,
    )  # fmt: skip


def _reached(found: Ratio, goal: float) -> bool | None:
    # A percentile of ours that unanswered requests reach is larger than it says, and shows nothing.
    return None if found.ratio is None else found.ratio >= goal and not found.first_at_least


def _latency_note(rival: Opponent, mine: Row, theirs: Row, alone_ms: float | None, quickest_ms: float | None) -> str:
    found, dilution = rival.ratio, rival.dilution
    bounds = "" if alone_ms is None else f"; the caller's link alone {alone_ms:.1f} ms"
    bounds += "" if quickest_ms is None else f"; the quickest of all for each request {quickest_ms:.1f} ms"
    diluted = (
        f", {dilution.accuracy:.1%} with {dilution.share:.1%} of requests answered as {dilution.by} did"
        if dilution is not None
        else f" ({rival.unequal})" * bool(rival.unequal)
    )
    return (
        f"{'≥ ' * found.first_at_least}{found.first:.1f} ms and {'≥ ' * found.other_at_least}{found.other:.1f} ms"
        f"{', on few requests' * found.few}{bounds}; "
        f"accuracy {_share(mine.accuracy)} and {_share(theirs.accuracy)}{diluted}; "
        f"right in time {_share(mine.effective)} and {_share(theirs.effective)}"
    )


def _equal(ours: Estimate | None, theirs: Estimate | None) -> bool | None:
    return None if ours is None or theirs is None else ours.value >= theirs.value - EQUAL_ACCURACY


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether all hold; what is known to fail fails whatever cannot be said of others."""
    known = set(verdicts)
    return False if False in known else None if None in known else True


def _promises(cell: Cell, summary: Summary, ours: str) -> Claim:
    """Whether accuracy is nowhere missed silently; the value is the largest shortfall of answers that claim none.

    The note has, per target, what is missing over all requests when those that came late count as wrong.
    """
    kept = [(each.target, each.kept) for each in summary.classes if each.kept is not None]
    silent = [each.unflagged_shortfall.value for _, each in kept if each.unflagged_shortfall is not None]
    verdicts = "; ".join(
        f"{target} {each.verdict}, right in time {-each.effective_shortfall.value:+.1%} of it" for target, each in kept
    )
    return Claim(
        cell.link, cell.rate, "accuracy missing without a flag", ours, "its targets",
        max(silent, default=None), None, None, f"≤ {EQUAL_ACCURACY:g}, or chance",
        all(each.verdict is not Verdict.SILENT for _, each in kept) if kept else None,
        verdicts or "no reference",
    )  # fmt: skip


def show_rows(rows: Sequence[Row], title: str, console: Console) -> None:
    """One cell, a line per contender; `?` marks a P99.9 that rests on few requests or few occasions.

    Below it, who was not steady, and in how many rounds.
    """
    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    table.add_column("policy")
    for column in (
        "n", "P50 ms", "P99 ms", "(95 %)", "P99.9 ms", "accuracy", "right in time", "in time", "escalated", "degraded",
        "flagged", "unanswered", "shed", "kB to edge", "kB to dc", "stolen",
        "slowed",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name, str(row.n), f"{row.p50_ms:.1f}", f"{'≥ ' if row.p99_at_least else ''}{row.p99_ms:.0f}",
            f"{row.p99_low_ms:.0f}–{row.p99_high_ms:.0f}",
            f"{'≥ ' * row.p999.at_least}{row.p999.ms:.0f}{' ?' * row.p999.few}", _share(row.accuracy),
            _share(row.effective), _share(row.in_time), f"{row.escalated:.0%}", f"{row.degraded:.0%}",
            f"{row.flagged:.0%}", str(row.unanswered), f"{row.shed_share:.1%}", f"{row.client_bytes / 1e3:.1f}",
            f"{row.uplink_bytes / 1e3:.1f}", "" if row.stolen is None else f"{row.stolen:.1%}",
            "" if row.slowed is None else f"{row.slowed:.0%}",
        )  # fmt: skip
    console.print(table)
    unsteady = [f"{row.name} in {row.steady.count(False)} of {len(row.steady)}" for row in rows if False in row.steady]
    if unsteady:
        console.print(f"rounds that were not steady: {', '.join(unsteady)}", highlight=False, markup=False)


def show_claims(claims: Sequence[Claim], console: Console) -> None:
    """A line per claim."""
    table = Table(title="claims", box=None, header_style="bold", title_justify="left")
    for column in ("link", "rate", "claim", "ours", "against", "value", "(95 %)", "goal", "met", "in time", ""):
        table.add_column(column, overflow="fold")
    for claim in claims:
        table.add_row(
            claim.link, f"{claim.rate:g}", claim.what, claim.ours, _against(claim),
            "" if claim.value is None else f"{claim.value:.3g}",
            "" if claim.low is None or claim.high is None else f"{claim.low:.2f}–{claim.high:.2f}",
            claim.goal, _WORDS[claim.met], "" if claim.met_in_time is None else _WORDS[claim.met_in_time], claim.note,
        )  # fmt: skip
    console.print(table)


def _against(claim: Claim) -> str:
    if claim.dilution is None:
        return claim.against
    return f"{claim.against}, {claim.dilution.share:.0%} as {claim.dilution.by}"


_WORDS: Final = {True: "yes", False: "NO", None: "?"}


def _share(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.1%}"
