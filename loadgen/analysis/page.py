"""A load test as one HTML page that needs nothing else.

Names, addresses, targets and error codes come from outside; they are escaped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from hawkvision.core.errors import ConfigError
from hawkvision.report.charts import Axis, Chart
from hawkvision.report.html import Html, cell, columns, details, facts, figure, join, percent, table, tag
from hawkvision.report.html import page as whole_page
from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.bootstrap import Floats, quantiles
from loadgen.analysis.compare import MOST_RUNS, Ratio, RatioVerdict, RunComparison, compare_all, written
from loadgen.analysis.samples import CountedRequests, counted_of
from loadgen.analysis.summary import (
    ClassSummary,
    Figures,
    Percentile,
    RunSummary,
    failures,
    meaning_of_right,
    summarise,
    targets_kept,
)
from loadgen.workload.record import LinkSample, Run

LATE_GENERATOR_S: Final = 0.005
NOISY: Final = 0.1
"""Share of a latency that the generator may add before the page warns."""
BUSY: Final = 0.5
"""Load per core before a run, from which it warns."""
MUCH_STOLEN: Final = 0.02
"""Share of the processor time wanted, from which the page warns. One request in a hundred makes up a P99."""
NEAR_CEILING: Final = 0.7
"""Share of the generator's own maximum."""

CURVE_POINTS: Final = 160
"""Points of a curve, whatever the number of requests, so that a page stays small."""
WINDOWS: Final = 120
"""Points of a line over time."""
WINDOW_REQUESTS: Final = 30
LINK_STEPS: Final = 200
FULL_LOSS: Final = 0.10
"""Loss that is drawn as strongly as more."""
WIDE: Final = 800.0
"""Width of charts over time."""
LEFT: Final = 90.0

NOTES: Final = (
    "Latency counts from the moment the schedule wanted a request sent. A request without an answer is never right, "
    "and its latency is at least its deadline; percentiles that it reaches are marked ≥, or by an arrow.",
    "“Right and in time” is a share of all requests, “accuracy” one of the answers. An answer is flagged when it does "
    "not claim to keep its accuracy target. “Given up” is against the reference stage on the same images.",
    "Intervals hold 95 %. What is marked ?, or drawn hollow, rests on few requests or few separate occasions, so that "
    "its interval is probably too narrow: run longer.",
)


class MeasuredRun(NamedTuple):
    """A run with what is computed from it."""

    run: Run
    counted: CountedRequests
    summary: RunSummary


def page(runs: Sequence[Run]) -> str:
    """The page of a run, or of several compared with the first of them.

    Raises:
        ConfigError: for no runs or more than `MOST_RUNS`, or one in which no request counts.
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
        tag("p", " · ".join(["load test", summary.conditions, deadline, run.data, run.origin.started]), kind="kicker"),
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
    behind_s = float(quantiles(np.array([each.sent_s - each.due_s for each in one.counted.outcomes]), [0.99])[0])
    found = {
        "interrupted; this is what was measured until then": run.interrupted,
        "not steady: the second half does not look like the first": run.steady is False,
        f"too short for its P99: {total.n:,} requests, reached on {p99.occasions} separate occasions": p99.few,
        f"{total.n - total.answered:,} of {total.n:,} requests got no answer, so percentiles marked ≥ are larger than "
        "shown": any(each.at_least for each in total.percentiles),
        f"the machine was busy before the run: load {run.origin.load_before:.1f}": (
            run.origin.load_before > BUSY * run.origin.cores
        ),
        f"the machine's host held back {percent(run.stolen or 0.0)} of the processor time wanted": (
            (run.stolen or 0.0) >= MUCH_STOLEN
        ),
        f"the generator sent 1 % of the requests late, by {1e3 * behind_s:.0f} ms or more": behind_s > LATE_GENERATOR_S,
        "the images have no labels, so nothing is known about accuracy": not run.labelled,
    }
    if run.noise is not None:
        for share, noise_ms in ((0.5, run.noise.p50_ms), (0.99, run.noise.p99_ms)):
            known = total.percentile(share)
            found[f"about {noise_ms:.1f} ms of {known.name} are the generator's own"] = noise_ms > NOISY * known.ms
        near = total.offered_per_s > NEAR_CEILING * run.noise.max_rate
        found[f"the generator was near its own maximum of {run.noise.max_rate:.0f} requests a second"] = near
    return [doubt for doubt, holds in found.items() if holds]


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
    return [
        ("address", f"{run.url} ({run.protocol})"),
        ("server", run.server or "unknown"),
        ("schedule", f"{run.schedule}, seed {origin.seed}, {run.duration_s:g} s, of which {run.warm_up_s:g} s warm-up"),
        ("links", "; ".join(f"{link}: {link_words([s for s in run.links if s.link == link], run.duration_s)}"
                            for link in dict.fromkeys(sample.link for sample in run.links)) or "none"),
        ("requests", f"{total.n:,} counted, {total.answered:,} answered; {total.offered_per_s:.4g} a second offered, "
                     f"{total.answered_per_s:.4g} answered"),
        ("without an answer", failures(total) or "none"),
        ("images", f"{run.data}, each sent {one.summary.per_image:.3g} times on average"),
        ("generator", "not measured" if noise is None else
            f"adds {noise.p50_ms:.2f} ms at P50, {noise.p99_ms:.2f} ms at P99; at most {noise.max_rate:.0f} a second"),
        ("steady", {True: "yes", False: "no", None: "not tested"}[run.steady]),
        ("generator's versions", f"HawkVision {origin.hawkvision}, Python {origin.python}"),
        ("machine", f"{origin.cpu}, {origin.cores} cores, load {origin.load_before:.2f} before the run" +
            ("" if run.stolen is None else f"; {percent(run.stolen)} of the time wanted was held back by the host")),
    ]  # fmt: skip


def latency_charts(series: Sequence[MeasuredRun]) -> Iterable[Html]:
    """How long requests took; accuracy against latency where it is known."""
    yield figure("How long requests took", _latency_chart(series), "The upper scale opens up the tail.")
    points: list[tuple[str, Figures]] = [(one.run.name, one.summary.total) for one in series]
    if len(series) == 1:
        points = [(short_target(one.target), one.figures) for one in series[0].summary.classes]
    known = [(name, one.percentile(0.99), one.effective) for name, one in points if one.effective is not None]
    if len(known) > 1:
        yield figure("Accuracy against latency", _frontier_chart(known), "Up and to the left is better.")


def _latency_chart(series: Sequence[MeasuredRun]) -> Html:
    """Share of requests answered against time, logarithmic in the time and in the share that is left."""
    most = max(len(one.counted.outcomes) for one in series)
    deadline = series[0].summary.deadline_ms
    known = [one.counted.latency_ms[one.counted.answered] for one in series]
    ends = [float(value) for values in known if len(values) for value in quantiles(values, (0.001, 1.0))]
    y = Axis("share of requests answered by then", kind="tail", unit="%")
    y.high = 1.0 - min(0.1, 1.0 / (most + 1))
    x = Axis("latency from when the request was due", [*ends, deadline or math.nan], "log", "ms")
    chart = Chart("Latency of all requests", x, y, series=[one.run.name for one in series])
    for place, one in enumerate(series):
        values = np.where(one.counted.answered, one.counted.latency_ms, np.inf)
        shares = 1.0 - 10.0 ** np.linspace(0.0, -math.log10(len(values) + 1), CURVE_POINTS)
        times = quantiles(values, np.maximum(shares, 1e-9).tolist())
        chart.line(place, np.where(np.isfinite(times), times, np.nan), shares, name=one.run.name)
    if deadline is not None:
        chart.limit("deadline", x=deadline)
    return chart.svg()


def _frontier_chart(points: Sequence[tuple[str, Percentile, IntervalEstimate]]) -> Html:
    """Effective accuracy against P99."""
    x = Axis("P99 latency", [end for _, p99, _ in points for end in (p99.low, p99.high)], "log", "ms")
    y = Axis("right and in time", [end for *_, share in points for end in (share.low, share.high)], unit="%")
    chart = Chart("Accuracy against latency", x, y)
    for place, (name, p99, share) in enumerate(points):
        chart.point(place, p99.ms, share.value,
                    f"{name}: P99 {' '.join(percentile_words(p99))}, {percent(share.value)} right and in time",
                    x_interval=(p99.low, p99.high), y_interval=(share.low, share.high), hollow=p99.few,
                    at_least=p99.at_least, label=name)  # fmt: skip
    return chart.svg()


def short_target(target: str) -> str:
    """A target that fits beside a chart, with the number that tells it from others."""
    field, _, value = target.partition("=")
    sign, unit = {"max_accuracy_drop": ("give up ≤", "pt"), "min_accuracy": ("accuracy ≥", "%")}.get(field, ("", ""))
    with contextlib.suppress(ValueError):  # no number, or further fields after it
        return f"{sign} {100 * float(value):.4g} {unit}" if sign else target
    return target


def charts_over_time(series: Sequence[MeasuredRun]) -> list[Html]:
    """All runs, then each by itself if there are several."""
    first = series[0].run
    caption = "In windows of few requests, P99 is nearly the slowest of them."
    if first.links:
        caption += f" Links of {first.name}: the rate as height, loss below it, red where a link was down."
    if len(series) == 1:
        return [figure("", timeline(series), caption)]
    each = [details(f"{one.run.name} by itself", figure("", timeline([one]))) for one in series]
    return [figure("", timeline(series), caption), *each]


def timeline(series: Sequence[MeasuredRun]) -> Html:
    """Rolling P99 of several runs, or P50, P99, escalations and failures of one; below, the links of the first."""
    every = [windows(one) for one in series]
    one, deadline = series[0].run, series[0].summary.deadline_ms
    ends = [each.counted.outcomes[-1].due_s for each in series]
    ends += [each.run.duration_s for each in series if not each.run.interrupted]
    x = Axis("seconds from the start of the run", [0.0, max(ends)], margin=0)
    alone = len(series) == 1
    known = [value for _, _, p99, *_ in every for value in p99.tolist()]
    known += every[0][1].tolist() if alone else []
    y = Axis(f"latency over {every[0][-1]:.1f} s", [*known, deadline or math.nan], "log", "ms")
    names = ("P99", "P50") if alone else [each.run.name for each in series]
    chart = Chart("Latency over time", x, y, series=names, height=230, width=WIDE, left=LEFT)
    for place, (at, p50, p99, *_) in enumerate(every):
        chart.line(place, at, p99, name=series[place].run.name)
        if alone:
            chart.line(1, at, p50)
    if deadline is not None:
        chart.limit("deadline", y=deadline)
    drawn = [chart.svg()]
    if alone:
        at, _, _, escalated, unanswered, _ = every[0]
        shares = Chart("Escalated and not answered over time", x, Axis("share", [0.0, 1.0], unit="%", margin=0),
                       series=("escalated", "not answered"), height=150, width=WIDE, left=LEFT)  # fmt: skip
        shares.line(0, at, escalated)
        shares.line(1, at, unanswered)
        drawn.append(shares.svg())
    if one.links:
        drawn.append(_links_chart(one, x))
    return join(*drawn)


def windows(one: MeasuredRun) -> tuple[Floats, Floats, Floats, Floats, Floats, float]:
    """Middles of windows in seconds, and of each P50, P99 and the shares escalated and unanswered; their width.

    A window holds `WINDOW_REQUESTS` on average, at least a thirtieth of the run and at most a quarter of it. A latency
    is infinite where requests without an answer reach it: refusing quickly does not make a server fast.
    """
    counted, run = one.counted, one.run
    latency = np.where(counted.answered, counted.latency_ms, np.inf)
    due = np.array([each.due_s for each in counted.outcomes])
    escalated = np.array([each.escalated and each.answered for each in counted.outcomes])
    start, end = run.warm_up_s, max(float(due[-1]), run.warm_up_s + 1e-6)
    width = min(max((end - start) / 30, WINDOW_REQUESTS * (end - start) / len(due)), (end - start) / 4)
    at = np.linspace(start + width / 2, end - width / 2, WINDOWS)
    rows = []
    for moment in at.tolist():
        some = slice(*np.searchsorted(due, (moment - width / 2, moment + width / 2)))
        answered = counted.answered[some]
        if len(answered) < 2:
            rows.append((math.nan,) * 4)
            continue
        p50, p99 = quantiles(latency[some], (0.5, 0.99)).tolist()
        share = float(escalated[some].sum() / answered.sum()) if answered.any() else math.nan
        rows.append((p50, p99, share, 1.0 - float(answered.mean())))
    p50s, p99s, shares, unanswered = np.array(rows).T
    return at, p50s, p99s, shares, unanswered, width


def _links_chart(run: Run, x: Axis) -> Html:
    """A row for each link: rate as height, loss as a strip below it, a full bar where it was down."""
    links = list(dict.fromkeys(sample.link for sample in run.links))
    chart = Chart("State of the links", x, Axis("", kind="rows", rows=links), height=None, width=WIDE, left=LEFT)
    for row, link in enumerate(links):
        samples = [sample for sample in run.links if sample.link == link]
        chart.box((x.low, x.high), (row + 0.95, row + 0.1), "back", link_words(samples, x.high))
        for start, end, (rate, loss, up) in _stretches(samples, x.high):
            if not up:
                chart.box((start, end), (row + 0.95, row + 0.1), "down", "down")
                continue
            chart.box((start, end), (row + 0.8, row + 0.8 - 0.7 * rate), "rate")
            if loss > 0:
                chart.box((start, end), (row + 0.95, row + 0.95 - 0.15 * max(0.2, min(1.0, loss / FULL_LOSS))), "loss",
                          f"loss {percent(loss)}")  # fmt: skip
    return chart.svg()


def _stretches(samples: Sequence[LinkSample], end_s: float) -> Iterable[tuple[float, float, tuple[float, float, bool]]]:
    """Stretches of time with the share of the link's best rate, its loss, and whether it was up: the worst of each."""
    fastest = max((sample.rate_mbit_s or 0.0 for sample in samples), default=0.0)
    starts = np.array([sample.at_s for sample in samples])

    def worst(step: tuple[float, float]) -> tuple[float, float, bool]:
        first = max(0, int(np.searchsorted(starts, step[0], side="right")) - 1)
        within = samples[first : max(first + 1, int(np.searchsorted(starts, step[1], side="left")))]
        rate = min(1.0 if one.rate_mbit_s is None else one.rate_mbit_s / (fastest or 1.0) for one in within)
        return round(math.sqrt(rate), 3), max(one.loss for one in within), all(one.up for one in within)

    for state, steps in itertools.groupby(itertools.pairwise(np.linspace(0.0, end_s, LINK_STEPS + 1).tolist()), worst):
        whole = list(steps)
        yield whole[0][0], whole[-1][1], state


def link_words(samples: Sequence[LinkSample], end_s: float) -> str:
    """`0.8–25 Mbit/s, loss up to 8 %, down 2 s`."""
    rates = [sample.rate_mbit_s for sample in samples if sample.up and sample.rate_mbit_s is not None]
    words = [f"{min(rates):g}–{max(rates):g} Mbit/s"] if rates else []
    loss = max(sample.loss for sample in samples)
    words += [f"loss up to {100 * loss:.2g} %"] if loss > 0 else []
    ends = [sample.at_s for sample in samples[1:]] + [end_s]
    down_s = sum(max(0.0, end - sample.at_s) for sample, end in zip(samples, ends, strict=True) if not sample.up)
    words += [f"down {down_s:.3g} s"] if down_s else []
    return ", ".join(words) or "unlimited"


def percentile_words(found: Percentile) -> tuple[str, str]:
    """A percentile, and its interval."""
    low, high = milliseconds(found.low), milliseconds(found.high)
    low = low.split()[0] if low.split()[1] == high.split()[1] else low
    return f"{'≥ ' if found.at_least else ''}{milliseconds(found.ms)}{' ?' if found.few else ''}", f"{low}–{high}"


def milliseconds(ms: float) -> str:
    """`8.4 ms`, `104 ms`, `1.35 s`."""
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
