"""A load test as one HTML page that needs nothing else.

Names, addresses, targets and error codes come from outside; they are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.report.html import Html, cell, columns, details, facts, join, percent, table, tag
from hawkvision.report.html import page as whole_page
from hawkvision.system.files import write_atomic
from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.bootstrap import quantiles
from loadgen.analysis.compare import MOST_RUNS, Ratio, RatioVerdict, RunComparison, compare_all, written
from loadgen.analysis.page_charts import (
    MeasuredRun,
    charts_over_time,
    latency_charts,
    link_words,
    milliseconds,
    percentile_words,
)
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import (
    ClassSummary,
    Figures,
    RunSummary,
    failures,
    meaning_of_right,
    summarise,
    targets_kept,
)
from loadgen.host import cpu_steal
from loadgen.workload.record import Run

LATE_GENERATOR_MS: Final = 5.0
NOISY: Final = 0.1
"""Share of a latency that the generator may add before the page warns."""
BUSY: Final = 0.5
"""Load per core before a run, from which it warns."""
NEAR_CEILING: Final = 0.7
"""Share of the generator's own maximum."""

NOTES: Final = (
    "Latency counts from the moment the schedule wanted a request sent. A request without an answer is never right, "
    "and its latency is at least its deadline; percentiles that it reaches are marked ≥, or by an arrow.",
    "“Right and in time” is a share of all requests, “accuracy” one of the answers. An answer is flagged when it does "
    "not claim to keep its accuracy target. “Given up” is against the reference stage on the same images.",
    "Intervals hold 95 %. What is marked ?, or drawn hollow, rests on few requests or few separate occasions, so that "
    "its interval is probably too narrow: run longer.",
)


def write_html(runs: Sequence[Run], path: Path) -> None:
    """Write the page of a run, or of several compared with the first of them.

    Raises:
        ConfigError: for no runs or more than `MOST_RUNS`, or one in which no request counts.
        ArtifactError: if the file cannot be written.
    """
    write_atomic(path, page(runs).encode())


def page(runs: Sequence[Run]) -> str:
    """The page of a run, or of several compared with the first of them.

    Raises:
        ConfigError: as `write_html`.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"a page shows 1 to {MOST_RUNS} runs, got {len(runs)}")
    series = [MeasuredRun(run, counted_of(run), summarise(run)) for run in runs]
    comparisons = compare_all(runs) if len(runs) > 1 else ()
    run, summary = series[0].run, series[0].summary
    deadline = "no deadline" if run.deadline_ms is None else f"deadline {run.deadline_ms:g} ms"
    doubts = doubts_of(series, comparisons)
    meaning = meaning_of_right([one.summary for one in series])
    return whole_page(
        f"Load test: {', '.join(each.name for each in runs)}",
        tag("p", " · ".join(["HawkVision load test", summary.conditions, deadline, run.data, run.origin.started]),
            kind="kicker"),
        tag("h1", run.name + (f" compared with {', '.join(each.name for each in runs[1:])}" if comparisons else "")),
        tag("ul", *(tag("li", doubt) for doubt in doubts), kind="warnings") if doubts else "",
        _runs_table(series, comparisons) if comparisons else _cards(summary.total),
        tag("h2", "Latency and accuracy"),
        columns(*latency_charts(series)),
        tag("h2", "Over time"),
        *charts_over_time(series),
        tag("h2", "Per target"),
        *(details(f"{one.run.name}: targets kept: {targets_kept(one.summary) or '–'}", _targets_table(one.summary),
                  unfolded=place == 0) for place, one in enumerate(series)),
        *([tag("h2", f"Compared with {run.name}")] if comparisons else []),
        *(_ratios_table(one, unfolded=len(comparisons) == 1) for one in comparisons),
        tag("h2", "What was run"),
        *(details(one.run.name, tag("p", tag("code", one.run.origin.command)), facts(_provenance(one)),
                  unfolded=not comparisons) for one in series),
        tag("ul", *(tag("li", note) for note in (*NOTES, *([meaning] if meaning else []))), kind="note"),
    )  # fmt: skip


def doubts_of(series: Sequence[MeasuredRun], comparisons: Sequence[RunComparison]) -> list[str]:
    """What a reader must know before believing the numbers."""
    named = len(series) > 1
    found = [f"{one.run.name}: {doubt}" if named else doubt for one in series for doubt in _doubts(one)]
    first = series[0].run
    for one in comparisons:
        if not one.paired:
            found.append(f"{one.other}: not the same requests as {first.name}, so compared without pairs")
        if one.other_link != one.first_link:
            found.append(
                f"{one.other}: behind {one.other_link}, {first.name} behind {one.first_link}: differences are the "
                "links' as well"
            )
    if len({one.run.deadline_ms for one in series}) > 1:
        found.append(f"the runs had different deadlines; the charts show that of {first.name}")
    return found


def _doubts(one: MeasuredRun) -> list[str]:
    run, total = one.run, one.summary.total
    p99 = total.percentile(0.99)
    late_ms = 1e3 * np.array([each.sent_s - each.due_s for each in one.counted.outcomes])
    behind_ms = float(quantiles(late_ms, [0.99])[0])
    found = {
        "interrupted; this is what was measured until then": run.interrupted,
        f"not steady: the second half does not look like the first{_rounds(run)}": run.steady is False,
        f"too short for its P99: {total.n:,} requests, reached on {p99.occasions} separate occasions": p99.few,
        f"{total.n - total.answered:,} of {total.n:,} requests got no answer, so percentiles marked ≥ are larger than "
        "shown": any(each.at_least for each in total.percentiles),
        f"the machine was busy before the run: load {run.origin.load_before:.1f}": (
            run.origin.load_before > BUSY * run.origin.cores
        ),
        f"the machine's host held back {percent(run.stolen or 0.0)} of the processor time wanted": (
            (run.stolen or 0.0) >= cpu_steal.MATTERS
        ),
        f"the generator sent 1 % of the requests late, by {behind_ms:.0f} ms or more": behind_ms > LATE_GENERATOR_MS,
        "the images have no labels, so nothing is known about accuracy": not run.labelled,
    }
    if run.noise is not None:
        for share, noise_ms in ((0.5, run.noise.p50_ms), (0.99, run.noise.p99_ms)):
            known = total.percentile(share)
            found[f"about {noise_ms:.1f} ms of {known.name} are the generator's own"] = noise_ms > NOISY * known.ms
        near = total.offered_per_s > NEAR_CEILING * run.noise.max_rate
        found[f"the generator was near its own maximum of {run.noise.max_rate:.0f} requests a second"] = near
    return [doubt for doubt, holds in found.items() if holds]


def _rounds(run: Run) -> str:
    rounds = run.rounds_steady
    return f", in {rounds.count(run.steady)} of {len(rounds)} rounds" if rounds else ""


def _cards(total: Figures) -> Html:
    cards = [(f"{found.name} latency", *percentile_words(found)) for found in total.percentiles]
    for name, share in (("in time", total.in_time), ("right and in time", total.effective),
                        ("accuracy of answers", total.accuracy)):  # fmt: skip
        if share is not None:
            cards.append((name, percent(share.value), _interval(share)))
    return facts(
        [
            *cards,
            ("escalated", percent(total.escalated), ""),
            ("not answered", f"{total.n - total.answered:,}", f"{total.shed:,} shed, {percent(total.shed_share)}"),
            ("flagged", percent(total.flagged), "do not claim their target"),
            ("sent per request", f"{total.sent_bytes / 1024:.1f} KiB", f"{percent(total.received_fraction)} received"),
        ],
        "cards",
    )


def _runs_table(series: Sequence[MeasuredRun], comparisons: Sequence[RunComparison]) -> Html:
    head = ("run", "P50", "P99", "P99.9", "P99 over the first’s", "in time", "right and in time", "accuracy",
            "targets kept", "escalated", "not answered", "shed", "flagged", "KiB sent")  # fmt: skip
    rows = []
    for one, ratio in zip(series, [None, *(each.ratio("P99") for each in comparisons)], strict=True):
        total = one.summary.total
        rows.append([
            one.run.name,
            *(cell(*percentile_words(total.percentile(share))) for share in (0.5, 0.99, 0.999)),
            "first" if ratio is None else _ratio_cell(ratio),
            *(_share_cell(share) for share in (total.in_time, total.effective, total.accuracy)),
            cell(targets_kept(one.summary) or "–", kind="words"),
            percent(total.escalated),
            cell(f"{total.n - total.answered:,}", f"of {total.n:,}"),
            cell(percent(total.shed_share), f"{total.shed:,}"),
            percent(total.flagged),
            f"{total.sent_bytes / 1024:.1f}",
        ])  # fmt: skip
    return table(head, rows, first=True)


def _targets_table(summary: RunSummary) -> Html:
    head = ("target", "verdict", "missing in accuracy", "counting the late as wrong", "given up", "where not flagged",
            "flagged", "right and in time", "accuracy", "P99", "requests")  # fmt: skip
    return table(head, [_target_row(one) for one in summary.classes])


def _target_row(one: ClassSummary) -> list[str]:
    figures, kept = one.figures, one.kept
    bound = "" if one.guaranteed_drop is None else f"guarantees ≤ {100 * one.guaranteed_drop:.2g} points"
    verdict, kind = "not measured" if one.numeric else "no number asked", ""
    if kept is not None:
        sign, kind = _SIGNS.get(kept.verdict, ("", ""))
        verdict = f"{sign}{kept.verdict}"
    return [
        join(one.target, *([tag("small", bound)] if bound else [])),
        cell(verdict, kind=f"words {kind}"),
        _points_cell(None if kept is None else kept.shortfall),
        _points_cell(None if kept is None else kept.effective_shortfall),
        _points_cell(one.drop),
        _points_cell(one.unflagged_drop),
        percent(figures.flagged),
        _share_cell(figures.effective),
        _share_cell(figures.accuracy),
        cell(*percentile_words(figures.percentile(0.99))),
        cell(f"{figures.n:,}", percent(one.share)),
    ]


_SIGNS: Final = {TargetVerdict.KEPT: ("✓ ", "good"), TargetVerdict.SILENT: ("✗ ", "bad")}


def _ratios_table(one: RunComparison, *, unfolded: bool) -> Html:
    rows = [
        [
            ratio.figure,
            written(ratio.figure, ratio.first, at_least=ratio.first_at_least) or "–",
            written(ratio.figure, ratio.other, at_least=ratio.other_at_least) or "–",
            _ratio_cell(ratio),
        ]
        for ratio in one.ratios
    ]
    how = "same requests, in pairs" if one.paired else "different requests, without pairs"
    return details(f"{one.other} ({how})", table(("", one.first, one.other, "ratio"), rows), unfolded=unfolded)


def _interval(share: IntervalEstimate) -> str:
    return f"{100 * share.low:.1f}–{100 * share.high:.1f}"


def _share_cell(found: IntervalEstimate | None) -> Html:
    return cell("–") if found is None else cell(percent(found.value), _interval(found))


def _points_cell(found: IntervalEstimate | None) -> Html:
    if found is None:
        return cell("–")
    return cell(f"{100 * found.value:+.1f}", f"{100 * found.low:.1f} to {100 * found.high:.1f}")


def _ratio_cell(ratio: Ratio) -> Html:
    if ratio.ratio is None:
        return cell("–", ratio.verdict)
    kind = {RatioVerdict.SLOWER: "bad", RatioVerdict.FASTER: "good"}.get(ratio.verdict, "")
    small = f"{ratio.verdict} {ratio.low:.2f}–{ratio.high:.2f}"
    return cell(f"{ratio.ratio:.2f}x{' ?' if ratio.few else ''}", small, kind)


def _provenance(one: MeasuredRun) -> list[tuple[str, str]]:
    run, origin, total, noise = one.run, one.run.origin, one.summary.total, one.run.noise
    steady = {True: "yes", False: "no", None: "not tested"}[run.steady]
    return [
        ("address", f"{run.url} ({run.protocol})"),
        ("server", run.server or "unknown"),
        ("started", origin.started),
        ("schedule", f"{run.schedule}, seed {origin.seed}, {run.duration_s:g} s, of which {run.warm_up_s:g} s warm-up"),
        ("links", "; ".join(f"{link}: {link_words([s for s in run.links if s.link == link], run.duration_s)}"
                            for link in dict.fromkeys(sample.link for sample in run.links)) or "none"),
        ("requests", f"{total.n:,} counted, {total.answered:,} answered; {total.offered_per_s:.4g} a second offered, "
                     f"{total.answered_per_s:.4g} answered"),
        ("without an answer", failures(total) or "none"),
        ("images", f"{run.data}, each sent {one.summary.per_image:.3g} times on average"),
        ("targets", ", ".join(f"{target.name} ({percent(target.share)})" for target in run.targets)),
        ("slowest", milliseconds(total.max_ms)),
        ("generator", "not measured" if noise is None else
            f"adds {noise.p50_ms:.2f} ms at P50, {noise.p99_ms:.2f} ms at P99; at most {noise.max_rate:.0f} a second"),
        ("steady", steady + ("" if run.steady else _rounds(run))),
        ("resampled together", f"{one.summary.block} neighbouring requests"),
        ("generator's versions", f"HawkVision {origin.hawkvision}, Python {origin.python}"),
        ("machine", f"{origin.cpu}, {origin.cores} cores, load {origin.load_before:.2f} before the run" +
            ("" if run.stolen is None else f"; {percent(run.stolen)} of the time wanted was held back by the host")),
    ]  # fmt: skip
