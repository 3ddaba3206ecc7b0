"""A load test as one HTML page that needs nothing else: the story in its first lines, the evidence below.

The page fetches nothing and says so to the browser (its policy allows its own styles and its one script, by hash).
Names, addresses, targets and error codes come from outside and are escaped wherever they are written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final, TypeAlias

from hawkvision.artifacts import write_atomic
from hawkvision.errors import ConfigError
from loadgen.analysis.compare import MOST_RUNS, Comparison, Ratio, compare_all, written
from loadgen.analysis.compare import Verdict as Shown
from loadgen.analysis.samples import counted_of
from loadgen.analysis.summary import ClassSummary, Estimate, Figures, Verdict, summarise
from loadgen.reports.charts import (
    NARROW,
    WIDE,
    Told,
    drop_chart,
    frontier_chart,
    frontier_points,
    latency_chart,
    percentile_chart,
)
from loadgen.reports.svg import DASHES, marker
from loadgen.reports.text import (
    headline,
    milliseconds,
    notes_of,
    percent,
    span,
    steady_words,
    targets_words,
    warnings_of,
    within,
)
from loadgen.reports.timeline import timeline, timelines
from loadgen.workload.record import Run

MOST_CODES: Final = 12
"""Error codes listed per run; they come from the server, which may invent any number."""
WORDS: Final = ' class="words"'


Headline: TypeAlias = Callable[[Sequence[Told], Sequence[Comparison]], tuple[str, str]]
"""The first sentence of a page, and the one below it."""


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
        uplink_bytes: from the edge to the datacenter per request, by the name of each run; None if nobody counted.
        headline: says what the page begins with.
        section: HTML that follows the headline.

    Raises:
        ConfigError: as `write_html`.
    """
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ConfigError(f"a page shows 1 to {MOST_RUNS} runs, got {len(runs)}")
    told = [
        Told(run, counted_of(run), summarise(run), None if uplink_bytes is None else uplink_bytes[run.name])
        for run in runs
    ]
    comparisons = compare_all(runs) if len(runs) > 1 else ()
    script = files("loadgen.reports").joinpath("page.js").read_text(encoding="utf-8")
    template = Template(files("loadgen.reports").joinpath("page.html").read_text(encoding="utf-8"))
    sections = [
        _head(told, comparisons, headline),
        section,
        _runs_table(told, comparisons) if comparisons else _cards(told[0]),
        _latencies(told),
        _over_time(told),
        _targets(told),
        _ratios(comparisons, uplink=uplink_bytes is not None),
        _provenance(told),
        _notes(told),
    ]
    return template.substitute(
        title=escape(f"Load test: {', '.join(one.run.name for one in told)}"),
        body="\n".join(section for section in sections if section),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _head(told: Sequence[Told], comparisons: Sequence[Comparison], headline: Headline) -> str:
    run = told[0].run
    claim, lead = headline(told, comparisons)
    deadline = "no deadline" if run.deadline_ms is None else f"deadline {run.deadline_ms:g} ms"
    kicker = ["HawkVision load test", told[0].summary.conditions, deadline, run.data, run.origin.started]
    doubts = warnings_of(told, comparisons)
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in doubts)
    warnings = f'<ul class="warnings" aria-label="Before believing this">{listed}</ul>' if doubts else ""
    return (
        f'<p class="kicker">{escape(" · ".join(kicker))}</p>\n<h1>{escape(claim)}</h1>\n'
        f'<p class="lead">{escape(lead)}</p>\n{warnings}'
    )


def _cards(one: Told) -> str:
    total = one.summary.total
    cards = [(f"{found.name} latency", *_latency(total, found.share)) for found in total.percentiles]
    if total.in_time is not None:
        cards.append(("in time", percent(total.in_time.value), within(total.in_time)))
    if total.effective is not None:
        cards.append(("right and in time", percent(total.effective.value), within(total.effective)))
    if total.accuracy is not None:
        cards.append(("accuracy of answers", percent(total.accuracy.value), within(total.accuracy)))
    cards.append(("escalated", percent(total.escalated), ""))
    shed = f"{total.shed:,} shed, {percent(total.shed_share)} of all"
    cards.append(("not answered", f"{total.n - total.answered:,}", shed))
    cards.append(("flagged", percent(total.flagged), "do not claim their target"))
    if one.uplink_bytes is not None:
        cards.append(("to the datacenter", f"{one.uplink_bytes / 1000:.1f} kB", "per request"))
    cards.append(
        ("sent per request", f"{total.sent_bytes / 1024:.1f} KiB", f"{percent(total.received_fraction)} received")
    )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
        for name, value, small in cards
    )
    return f'<dl class="cards">{cells}</dl>'


def _latency(total: Figures, share: float) -> tuple[str, str]:
    """A percentile, and its interval."""
    found = total.percentile(share)
    marks = f"{'≥ ' if found.at_least else ''}{milliseconds(found.ms)}{' ?' if found.few else ''}"
    return marks, span(found)


def _runs_table(told: Sequence[Told], comparisons: Sequence[Comparison]) -> str:
    sent = "KiB sent" if told[0].uplink_bytes is None else "kB to the datacenter"
    names = ("P50", "P99", "P99.9", "P99 beside the first", "in time", "right and in time", "accuracy", "targets kept",
             "escalated", "not answered", "shed", "flagged", sent)  # fmt: skip
    head = "".join(f'<th scope="col"{WORDS if name == "targets kept" else ""}>{name}</th>' for name in names)
    rows = "".join(
        _run_row(place, one, comparisons[place - 1].ratio("P99") if place else None) for place, one in enumerate(told)
    )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col" class="words">run</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _run_row(place: int, one: Told, ratio: Ratio | None) -> str:
    total = one.summary.total
    cells = [_two(*_latency(total, share)) for share in (0.5, 0.99, 0.999)]
    cells.append(_two("first", "") if ratio is None else _ratio_cell(ratio))
    cells += [_share_cell(estimate) for estimate in (total.in_time, total.effective, total.accuracy)]
    cells.append(f"<td{WORDS}>{escape(targets_words(one.summary))}</td>")
    cells.append(f"<td>{percent(total.escalated)}</td>")
    cells.append(_two(f"{total.n - total.answered:,}", f"of {total.n:,}"))
    cells.append(_two(percent(total.shed_share), f"{total.shed:,}"))
    sent = total.sent_bytes / 1024 if one.uplink_bytes is None else one.uplink_bytes / 1000
    cells += [f"<td>{percent(total.flagged)}</td>", f"<td>{sent:.1f}</td>"]
    first = ' class="first"' if place == 0 else ""
    return f'<tr{first}><th scope="row">{_key(place)}{escape(one.run.name)}</th>{"".join(cells)}</tr>'


def _two(value: str, small: str, kind: str = "") -> str:
    """A cell with a small second line."""
    style = f' class="{kind}"' if kind else ""
    return f"<td{style}>{escape(value)}<small>{escape(small)}</small></td>"


def _share_cell(found: Estimate | None) -> str:
    return "<td>–</td>" if found is None else _two(percent(found.value), within(found))


def _ratio_cell(ratio: Ratio) -> str:
    if ratio.ratio is None:
        return _two("–", str(ratio.verdict))
    kind = {Shown.SLOWER: ' class="bad"', Shown.FASTER: ' class="good"'}.get(ratio.verdict, "")
    value = f"{ratio.ratio:.2f}x{' ?' if ratio.few else ''}"
    return f"<td{kind}>{value}<small>{ratio.verdict}</small><small>{ratio.low:.2f}–{ratio.high:.2f}</small></td>"


def _key(place: int) -> str:
    """A run's colour, dash and marker."""
    dash = DASHES[place % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<svg class="key" viewBox="0 0 34 12" aria-hidden="true"><path d="M1 6H33" class="line c{place % 8}"{dashes}/>'
        f"{marker(place, 17, 6, size=4)}</svg>"
    )


def _legend(told: Sequence[Told]) -> str:
    if len(told) == 1:
        return ""
    items = "".join(
        f'<li><button type="button" data-run="r{place}" aria-pressed="false">{_key(place)}{escape(one.run.name)}'
        "</button></li>"
        for place, one in enumerate(told)
    )
    return f'<ul class="legend" aria-label="Runs; press one to fade the others">{items}</ul>'


def _figure(title: str, chart: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _arrows(at_least: Iterable[bool]) -> str:
    """What an arrow says, if a chart has any."""
    return " Arrow: at least so much, for unanswered requests are among the slowest." if any(at_least) else ""


def _latencies(told: Sequence[Told]) -> str:
    left = [
        _figure(
            "How long requests took",
            latency_chart(told),
            "Further left is faster. The upper scale opens up the tail: each step up leaves a tenth of the requests.",
        )
    ]
    right = [
        _figure(
            "Percentiles with 95 % intervals",
            percentile_chart(told),
            "Where intervals are far apart, runs differ. Hollow: rests on few requests or few occasions."
            f"{_arrows(one.at_least for each in told for one in each.summary.total.percentiles)}",
        )
    ]
    points = frontier_points(told)
    if len(points) > 1:
        each = "One point per target. " if len(told) == 1 else ""
        where = " to the datacenter" if len(told) > 1 and told[0].uplink_bytes is not None else ""
        left.append(
            _figure(
                "Accuracy, latency and bytes together",
                frontier_chart(points),
                f"{each}Up and to the left is better; a smaller disc sends fewer bytes{where}. Crosses are 95 % "
                "intervals. Hollow: its P99 rests on few requests or few occasions."
                f"{_arrows(one.p99.at_least for one in points)}",
            )
        )
    if any(found.drop is not None for one in told for found in one.summary.classes):
        right.append(
            _figure(
                "Is the accuracy that was asked for kept?",
                drop_chart(told),
                "What was given up against the best rung on the same pictures, with 95 % intervals. Left of the dashed "
                "line the target is kept. Hollow: no answer claimed to keep it.",
            )
        )
    columns = f"<div>{''.join(left)}</div><div>{''.join(right)}</div>"
    return f'<h2>Latency and accuracy</h2>\n{_legend(told)}<div class="columns">{columns}</div>'


def _over_time(told: Sequence[Told]) -> str:
    links = " Bands: a link's rate as height, loss as the strip below it, solid where it was down."
    few = (
        "In windows of few requests, P99 is nearly the slowest of them. A line is at the upper edge where requests "
        "without an answer reach it."
    )
    caption = few + (links if told[0].run.links else "")
    if len(told) == 1:
        return f"<h2>Over time</h2>\n{_both(told[0], '0', caption)}"
    together = "".join(
        f'<div class="{kind}">{timelines(told, width, kind)}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    each = "".join(
        f"<details><summary>{escape(one.run.name)} by itself: P50, P99, escalations and requests without an answer"
        f"</summary>{_both(one, str(place), caption)}</details>"
        for place, one in enumerate(told)
    )
    odd = [one.run.name for one in told[1:] if one.run.links != told[0].run.links]
    if odd and told[0].run.links:
        caption += f" The bands are those of {told[0].run.name}; other runs had links of their own."
    figure = f"<figure>{together}<figcaption>{escape(caption)}</figcaption></figure>"
    return f"<h2>Over time</h2>\n{_legend(told)}{figure}\n{each}"


def _both(one: Told, name: str, caption: str) -> str:
    """A run's timeline for wide and for narrow screens."""
    charts = "".join(
        f'<div class="{kind}">{timeline(one, width, f"{kind}-{name}")}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return f"<figure>{charts}<figcaption>{escape(caption)}</figcaption></figure>"


def _targets(told: Sequence[Told]) -> str:
    names = ("target", "verdict", "missing in accuracy", "counting the late as wrong", "given up", "where not flagged",
             "flagged", "right and in time", "accuracy", "P99", "requests")  # fmt: skip
    head = "".join(f'<th scope="col"{WORDS if name in names[:2] else ""}>{name}</th>' for name in names)
    parts = ["<h2>Per target</h2>"]
    for place, one in enumerate(told):
        rows = "".join(_target_row(each) for each in one.summary.classes)
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        if len(told) == 1:
            parts.append(table)
        else:
            shown = " open" if place == 0 else ""
            said = escape(f"{one.run.name}: targets kept {targets_words(one.summary)}")
            parts.append(f"<details{shown}><summary>{_key(place)} {said}</summary>{table}</details>")
    note = (
        "Points of accuracy with 95 % intervals; above zero, accuracy is missing. “Given up” is against the best rung "
        "on the same pictures"
    )
    unknown = ", which was not measured here" if all(one.run.reference is None for one in told) else ""
    parts.append(f'<p class="note">{note}{unknown}.</p>')
    return "\n".join(parts)


def _target_row(one: ClassSummary) -> str:
    figures, kept = one.figures, one.kept
    promised = "" if one.promised_drop is None else f"<small>promises ≤ {100 * one.promised_drop:.2g} points</small>"
    unjudged = "not measured" if one.numeric else "no number asked"
    cells = [
        f"<td{WORDS}>{unjudged}</td>" if kept is None else _verdict_cell(kept.verdict),
        _points_cell(None if kept is None else kept.shortfall),
        _points_cell(None if kept is None else kept.effective_shortfall),
        _points_cell(one.drop),
        _points_cell(one.unflagged_drop),
        f"<td>{percent(figures.flagged)}</td>",
        _share_cell(figures.effective),
        _share_cell(figures.accuracy),
        _two(*_latency(figures, 0.99)),
        _two(f"{figures.n:,}", percent(one.share)),
    ]
    return f'<tr><th scope="row">{escape(one.target)}{promised}</th>{"".join(cells)}</tr>'


def _points_cell(found: Estimate | None) -> str:
    if found is None:
        return "<td>–</td>"
    return _two(f"{100 * found.value:+.1f}", f"{100 * found.low:.1f} to {100 * found.high:.1f}")


def _verdict_cell(verdict: Verdict) -> str:
    sign, kind = {
        Verdict.KEPT: ("✓", "good"),
        Verdict.UNSHOWN: ("≈", ""),
        Verdict.UNCERTAIN: ("≈", ""),
        Verdict.FLAGGED: ("⚑", ""),
        Verdict.UNCLAIMED: ("○", ""),
        Verdict.SILENT: ("✗", "bad"),
    }[verdict]
    return f'<td class="words {kind}"><span aria-hidden="true">{sign} </span>{escape(verdict)}</td>'


def _ratios(comparisons: Sequence[Comparison], *, uplink: bool) -> str:
    if not comparisons:
        return ""
    parts = [f"<h2>Beside {escape(comparisons[0].first)}</h2>"]
    if uplink:
        parts.append('<p class="note">“Bytes sent” are those from callers to the edge.</p>')
    for one in comparisons:
        rows = "".join(
            f'<tr><th scope="row">{ratio.figure}</th><td>{_value(ratio, first=True)}</td>'
            f"<td>{_value(ratio, first=False)}</td>{_ratio_cell(ratio)}</tr>"
            for ratio in one.ratios
        )
        how = "same requests, in pairs" if one.paired else "different requests, without pairs"
        parts.append(
            f"<details{' open' if len(comparisons) == 1 else ''}><summary>{escape(one.other)} ({how})</summary>"
            f'<div class="scroll"><table class="small"><thead><tr><th></th><th scope="col">{escape(one.first)}</th>'
            f'<th scope="col">{escape(one.other)}</th><th scope="col">ratio</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div></details>"
        )
    return "\n".join(parts)


def _value(ratio: Ratio, *, first: bool) -> str:
    value, at_least = (ratio.first, ratio.first_at_least) if first else (ratio.other, ratio.other_at_least)
    return escape(written(ratio.figure, value, at_least=at_least)) or "–"


def _provenance(told: Sequence[Told]) -> str:
    parts = ["<h2>What was run</h2>"]
    for one in told:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(one))
        shown = " open" if len(told) == 1 else ""
        parts.append(
            f"<details{shown}><summary>{escape(one.run.name)}</summary>"
            f'<p><code>{escape(one.run.origin.command)}</code></p><dl class="facts">{facts}</dl></details>'
        )
    return "\n".join(parts)


def _facts(one: Told) -> list[tuple[str, str]]:
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
        ("pictures", f"{run.data}, each sent {one.summary.per_picture:.3g} times on average"),
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


def _notes(told: Sequence[Told]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes_of(told))
    return f'<h2>How to read this</h2>\n<ul class="notes">{items}</ul>'
