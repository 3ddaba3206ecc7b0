"""The words of a report page: its headline, warnings and notes, chosen by the numbers. Plain text throughout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from loadgen.analysis.accuracy import IntervalEstimate, TargetVerdict
from loadgen.analysis.compare import LATENCIES, Ratio, RatioVerdict, RunComparison
from loadgen.analysis.summary import Figures, Percentile, RunSummary
from loadgen.analysis.summary_text import NAMED_CODES, failures, meaning_of_right, targets_kept
from loadgen.host import cpu_slowdown, cpu_steal
from loadgen.reports.charts import ChartSeries
from loadgen.workload.record import Run

IN_TIME: Final = 0.95
"""Share of requests in time from which a headline says that they are."""
LATE_GENERATOR_MS: Final = 5.0
NOISY: Final = 0.1
"""Share of a latency that the generator may add before the page warns."""
BUSY: Final = 0.5
"""Load per core before a run, from which it warns."""
NEAR_CEILING: Final = 0.7
"""Share of the generator's own maximum."""

NOTES: Final = (
    "Latency counts from the moment the schedule wanted a request sent, not from when it was sent, so that a server or "
    "a generator that falls behind cannot hide it (no coordinated omission).",
    "A request that was refused, broken off or timed out is never right, and its latency is at least the time to its "
    "failure and at least its deadline. Percentiles it reaches are marked ≥. Curves end where requests got no answer.",
    "“Right and in time” (effective accuracy) is the share of all requests that were answered right within the "
    "deadline. “Accuracy” is the share of the answers that are right, whenever they came.",
    "An answer is flagged when it does not claim to keep its accuracy target: its guarantee is not “certified”, or it "
    "is degraded. From servers that guarantee nothing, every answer is. A target is “missed silently” when the answers "
    "that claim it fall short by more than their 95 % interval, “never claimed” when there are no such answers, "
    "“within error” when chance explains what is missing, and “kept, not shown” when chance could explain that "
    "nothing is.",
    "Intervals hold 95 %. Latencies and shares in time: circular block bootstrap, stretches of neighbouring requests "
    "drawn together, as long as Politis and White’s rule finds them alike. Accuracies: Clopper and Pearson’s exact "
    "interval, widened where the same image was sent several times. Drops: paired with the reference stage on the same "
    "images. All assume that the run would go on as it went.",
    "A percentile marked ?, drawn hollow, rests on fewer than ten requests (for a P99, on fewer than 1,000 in all), or "
    "was reached on fewer than ten separate occasions, because slow requests came together. Its interval is then "
    "probably too narrow: run longer.",
    "Ratios between runs are paired where both sent the same images at the same moments. With many ratios, about one "
    "in twenty leaves 1 outside its interval by luck. A run is not called faster at a percentile that its requests "
    "without an answer reach.",
)


def headline(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> tuple[str, str]:
    """The page's first sentence, and the one below it."""
    return _beside(series, comparisons) if comparisons else _alone(series[0].summary)


def _alone(summary: RunSummary) -> tuple[str, str]:
    total, deadline = summary.total, summary.deadline_ms
    p99 = total.percentile(0.99)
    bound = "at least " if p99.at_least else ""
    half = f"half of all answered within {milliseconds(total.percentile(0.5).ms)}, "
    if total.percentile(0.5).at_least:
        half = ""
        lead = f"{percent(1 - total.answered / total.n)} got no answer ({', '.join(list(total.errors)[:NAMED_CODES])})"
    elif total.in_time is None or deadline is None:
        lead = f"P99 is {bound}{milliseconds(p99.ms)}"
    elif total.in_time.value >= IN_TIME:
        lead = f"{percent(total.in_time.value)} answered within {deadline:g} ms"
    else:
        lead = f"{percent(1 - total.in_time.value)} of the requests miss their deadline of {deadline:g} ms"
    if total.effective is not None:
        lead += f", {percent(total.effective.value)} right{' and in time' if deadline is not None else ''}"
    said = target_words(summary)
    return (
        f"{summary.name}: {lead}{'; ' + said if said else ''}",
        f"{rate_words(total)} on {summary.conditions}: {half}"
        f"P99 {bound}{milliseconds(p99.ms)} ({span(p99)}), "
        f"{percent(total.escalated)} escalated, {_unanswered(total)}.",
    )


def rate_words(total: Figures) -> str:
    """`1,200 requests at 20 a second`."""
    return f"{total.n:,} requests at {total.offered_per_s:.3g} a second"


def _unanswered(total: Figures) -> str:
    lost = total.n - total.answered
    return f"{lost:,} not answered ({failures(total)})" if lost else "all answered"


def target_words(summary: RunSummary) -> str:
    """How the numerical targets fared, worst first; empty if there are none."""
    verdicts = [one.kept.verdict for one in summary.classes if one.kept is not None]
    if not verdicts:
        return ""
    for bad, word in (
        (TargetVerdict.SILENT, "missed silently"),
        (TargetVerdict.FLAGGED, "missed, and flagged"),
        (TargetVerdict.UNCLAIMED, "missed, though never claimed"),
    ):
        if bad in verdicts:
            return f"{verdicts.count(bad)} of {len(verdicts)} accuracy targets {word}"
    return "no accuracy target shown to be missed"


def _beside(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> tuple[str, str]:
    first = series[0].summary
    shown = "; ".join(difference_words([(_named(one), one.ratio("P99")) for one in comparisons]))
    return f"{first.name}: {latency_words(first, 'P99')}, {shown}", _second_line(series, comparisons)


def _named(one: RunComparison) -> str:
    """The other run; where requests without an answer are why it cannot be compared, with their share."""
    p99 = one.ratio("P99")
    if p99.verdict is not RatioVerdict.UNKNOWN or not p99.other_at_least:
        return one.other
    return f"{one.other} ({percent(1 - one.ratio('answered').other)} got no answer)"


def latency_words(summary: RunSummary, figure: str) -> str:
    """`P99 98.1 ms`."""
    found = summary.total.percentile(LATENCIES[figure])
    return f"{figure} {'at least ' if found.at_least else ''}{milliseconds(found.ms)}"


def difference_words(ratios: Sequence[tuple[str, Ratio]]) -> list[str]:
    """`faster than …`, `slower than …`, `no difference shown to …`, `cannot be compared with …`: to others."""
    slower = [(name, ratio) for name, ratio in ratios if ratio.verdict is RatioVerdict.SLOWER]
    faster = [(name, ratio) for name, ratio in ratios if ratio.verdict is RatioVerdict.FASTER]
    same = [name for name, ratio in ratios if ratio.verdict is RatioVerdict.SAME]
    unknown = [name for name, ratio in ratios if ratio.verdict is RatioVerdict.UNKNOWN]
    if len(slower) == len(ratios) > 3:
        least, most = min(_times(ratio) for _, ratio in slower), max(_times(ratio) for _, ratio in slower)
        parts = [f"{least:.1f} to {most:.1f} times faster than all {len(ratios)} others"]
    else:
        parts = []
        if slower:
            parts.append("faster than " + join_words(f"{name} ({_times(ratio):.1f}x)" for name, ratio in slower))
        if faster:
            parts.append("slower than " + join_words(f"{name} ({1 / _times(ratio):.1f}x)" for name, ratio in faster))
        if same:
            parts.append(f"no difference shown to {join_words(same)}")
        if unknown:
            parts.append(f"cannot be compared with {join_words(unknown)}")
    return parts


def _second_line(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> str:
    first = series[0].summary
    fewer = [one.other for one in comparisons if one.ratio("bytes sent").verdict is RatioVerdict.MORE]
    sends = f"sends fewer bytes than {join_words(fewer)}" if fewer else ""
    return sentence(
        f"{rate_words(first.total)} on {first.conditions}",
        right_in_time_words(series[0], series[1:]),
        sends if series[0].uplink_bytes is None else uplink_words(series[0], series[1:]),
        target_words(first),
    )


def sentence(*parts: str) -> str:
    """Those that say something, in one sentence."""
    return "; ".join(part for part in parts if part) + "."


def right_in_time_words(one: ChartSeries, others: Sequence[ChartSeries]) -> str:
    """Empty if that was not measured."""
    effective = one.summary.total.effective
    if effective is None:
        return ""
    theirs = sorted(
        (other.summary.total.effective.value, other.summary.name) for other in others if other.summary.total.effective
    )
    return f"right and in time: {percent(effective.value)}" + _against(
        f"{percent(value)} ({name})" for value, name in reversed(theirs)
    )


def uplink_words(one: ChartSeries, others: Sequence[ChartSeries]) -> str:
    """`8.2 kB to the datacenter per request, against 12.5 (infaas)`; empty where they were not counted."""
    if one.uplink_bytes is None:
        return ""
    theirs = [(other.run.name, other.uplink_bytes) for other in others if other.uplink_bytes is not None]
    return f"{one.uplink_bytes / 1000:.1f} kB to the datacenter per request" + _against(
        f"{each / 1000:.1f} ({name})" for name, each in theirs
    )


def _against(words: Iterable[str]) -> str:
    """`, against a and b`; empty if there are none."""
    listed = list(words)
    return f", against {join_words(listed)}" if listed else ""


def _times(ratio: Ratio) -> float:
    return ratio.ratio if ratio.ratio is not None else 1.0


def join_words(words: Iterable[str]) -> str:
    """`a, b and c`."""
    listed = list(words)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"


def warnings_of(series: Sequence[ChartSeries], comparisons: Sequence[RunComparison]) -> list[str]:
    """What a reader must know before believing the numbers; what several runs share is said once."""
    doubts: dict[str, list[tuple[str, str]]] = {}
    for one in series:
        for doubt, detail in _doubts(one):
            doubts.setdefault(doubt, []).append((one.run.name, detail))
    found = [_doubt(doubt, runs, len(series)) for doubt, runs in doubts.items()]
    unpaired = [one.other for one in comparisons if not one.paired]
    if unpaired:
        found.append(
            f"Not the same requests as {series[0].run.name}, so compared without pairs: {join_words(unpaired)}."
        )
    if len({one.run.link_words for one in series}) > 1:
        links = join_words(f"{one.run.name} ({one.run.link_words})" for one in series)
        found.append(f"Not behind the same link, so differences are the links' as well: {links}.")
    if len({one.run.deadline_ms for one in series}) > 1:
        found.append(f"The runs had different deadlines; the charts show that of {series[0].run.name}.")
    return found


def _doubt(doubt: str, runs: Sequence[tuple[str, str]], all_runs: int) -> str:
    """`Not steady, …: a (detail) and b (detail).`, shorter where it is true of all."""
    details = {detail for _, detail in runs}
    if len(runs) == all_runs and len(details) == 1:
        (detail,) = details
        return f"{doubt}{f' ({detail})' if detail else ''}."
    return f"{doubt}: {join_words(f'{name} ({detail})' if detail else name for name, detail in runs)}."


def _doubts(one: ChartSeries) -> list[tuple[str, str]]:
    """What is doubtful about a run, each with its number."""
    run, total = one.run, one.summary.total
    p99 = total.percentile(0.99)
    found = []
    if run.interrupted:
        found.append(("Interrupted; this is what was measured until then", ""))
    if run.steady is False:
        found.append(("Not steady; the second half does not look like the first", _rounds(run)))
    if p99.few:
        times = "once" if p99.occasions == 1 else f"on {p99.occasions} separate occasions"
        found.append(
            ("Too short for its P99, whose interval is probably too narrow", f"{total.n:,} requests; reached {times}")
        )
    if any(percentile.at_least for percentile in total.percentiles):
        doubt = "Some requests got no answer; percentiles marked ≥ are larger than shown, ratios cannot say by how much"
        found.append((doubt, f"{total.n - total.answered:,} of {total.n:,}"))
    if run.origin.load_before > BUSY * run.origin.cores:
        found.append(("The machine was busy before the run", f"load {run.origin.load_before:.1f}"))
    if run.stolen is not None and run.stolen >= cpu_steal.MATTERS:
        doubt = "The machine's host held back processor time, so latencies are partly the host's"
        found.append((doubt, f"{percent(run.stolen)} of what was wanted"))
    if run.slowed is not None and run.slowed >= cpu_slowdown.MATTERS:
        doubt = "The processors were slower than they can be, so latencies are partly the host's"
        found.append((doubt, f"by {percent(run.slowed)} on average"))
    late = 1e3 * np.array([each.sent_s - each.due_s for each in one.counted.outcomes])
    behind = float(np.quantile(late, 0.99, method="inverted_cdf"))
    if behind > LATE_GENERATOR_MS:
        found.append(("The generator sent 1 % of the requests late", f"by {behind:.0f} ms or more"))
    if run.noise is not None:
        for at, noise_ms in ((0.5, run.noise.p50_ms), (0.99, run.noise.p99_ms)):
            if noise_ms > NOISY * total.percentile(at).ms:
                doubt = f"A part of {total.percentile(at).name} is the generator's own"
                found.append((doubt, f"about {noise_ms:.1f} ms"))
        if total.offered_per_s > NEAR_CEILING * run.noise.max_rate:
            found.append(("The generator was near its own maximum", f"{run.noise.max_rate:.0f} requests a second"))
    if not run.labelled:
        found.append(("The images have no labels, so nothing is said about accuracy", ""))
    return found


def steady_words(run: Run) -> str:
    """`yes`, `not tested`, `no, in 1 of 3 rounds`."""
    word = {True: "yes", False: "no", None: "not tested"}[run.steady]
    return word if run.steady or not run.rounds_steady else f"{word}, {_rounds(run)}"


def _rounds(run: Run) -> str:
    """In how many rounds a run was as steady as it is said to be; empty if it was one."""
    rounds = run.rounds_steady
    return f"in {rounds.count(run.steady)} of {len(rounds)} rounds" if rounds else ""


def notes_of(series: Sequence[ChartSeries]) -> list[str]:
    """How to read the page."""
    blocks = ", ".join(f"{one.run.name} {one.summary.block}" for one in series)
    meaning = meaning_of_right([one.summary for one in series])
    kinds = [f"{meaning.capitalize()}."] if meaning else []
    return [*NOTES, *kinds, f"Neighbouring requests resampled together: {blocks}."]


def percent(share: float) -> str:
    """`98.4 %`."""
    return f"{100 * share:.1f} %"


def milliseconds(ms: float) -> str:
    """`8.4 ms`, `104 ms`, `1.35 s`."""
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def span(found: Percentile) -> str:
    """`96.4–117 ms`: a percentile's interval."""
    low, high = milliseconds(found.low), milliseconds(found.high)
    same_unit = low.split()[1] == high.split()[1]
    return f"{low.split()[0]}–{high}" if same_unit else f"{low}–{high}"


def interval_text(estimate: IntervalEstimate) -> str:
    """`73.4–81.4`: an interval of a share, in percent."""
    return f"{100 * estimate.low:.1f}–{100 * estimate.high:.1f}"


def targets_words(summary: RunSummary) -> str:
    """How many numerical targets were kept; a dash if there are none."""
    return targets_kept(summary) or "–"
