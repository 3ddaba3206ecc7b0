"""What a comparison of policies claims: the headline of its page, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hawkvision.reports.pages import Markup
from hawkvision.reports.tables import Cell, Table, table
from loadgen.analysis.compare import RunComparison
from loadgen.analysis.summary import RunSummary
from loadgen.reports.charts import ChartSeries
from loadgen.reports.page import Headline, page
from loadgen.reports.page_text import (
    difference_words,
    headline,
    join_words,
    latency_words,
    percent,
    rate_words,
    right_in_time_words,
    sentence,
    target_words,
    uplink_words,
)
from loadgen.workload.record import Run
from tests.bench.policies.goal_checks import GoalCheck, PolicyRow, figures

NOTE: Final = (
    "What counts first is the share of all requests that were answered right within the deadline, and whether answers "
    "that claim to keep their accuracy target do. A ratio of latencies counts only at equal accuracy: where the "
    "quicker one is less accurate, it says nothing. Beside each stand the rounds that are worst and best for ours; "
    "none is left out."
)
_COLUMNS: Final = (("claim", True), ("against", True), ("value", False), ("worst to best", False), ("goal", False),
                   ("met", True), ("measured", True))  # fmt: skip
"""Each with whether it has words, not numbers."""
_MET: Final = {True: ("✓", "met", "good"), False: ("✗", "not met", "bad"), None: ("?", "cannot be said", "")}


def goals_page(runs: Sequence[Run], rows: Sequence[PolicyRow], claims: Sequence[GoalCheck]) -> str:
    """The page of a comparison: `rows` are of the contenders that the runs are of, each with its bytes.

    Raises:
        ConfigError: as `loadgen.reports.page.page`.
    """
    return page(
        runs,
        uplink_bytes={row.name: row.uplink_bytes for row in rows} if rows else None,
        headline=headline_of(claims) if claims else headline,
        section=claims_table(claims),
    )


def claims_table(claims: Sequence[GoalCheck]) -> str:
    """A row per claim; empty without claims."""
    if not claims:
        return ""
    head = [Cell(name, kind="words" * words) for name, words in _COLUMNS]
    drawn = table(Table(head, [_row(claim) for claim in claims]))
    return Markup('<h2>Claims</h2>\n{}\n<p class="note">{}</p>').format(drawn, NOTE)


def _row(claim: GoalCheck) -> list[Cell]:
    value, interval, rounds = figures(claim)
    few = claim.ratio is not None and claim.ratio.few
    sign, word, kind = _MET[claim.met]
    return [
        Cell(claim.what, (claim.ours,)),
        Cell(claim.against, kind="words"),
        Cell(f"{value or '–'}{' ?' * few}", (interval,)),
        Cell(rounds or "–"),
        Cell(claim.goal),
        Cell(word, kind=f"words {kind}".strip(), sign=sign),
        Cell(claim.note, kind="said"),
    ]


def headline_of(claims: Sequence[GoalCheck]) -> Headline:
    """The headline of a page that begins with what is claimed."""

    def claimed(series: Sequence[ChartSeries], _: Sequence[RunComparison]) -> tuple[str, str]:
        return _claimed(series, claims)

    return claimed


def _claimed(series: Sequence[ChartSeries], claims: Sequence[GoalCheck]) -> tuple[str, str]:
    """What is claimed of the first contender that anything is claimed of: right in time, guarantees, then latency."""
    own = [claim for claim in claims if claim.ours == claims[0].ours]
    mine = next(one for one in series if one.run.name == own[0].ours)
    others = [one for one in series if one is not mine]
    latencies = [_at_equal_accuracy(mine.summary, figure, own) for figure in _figures(own)]
    return (
        f"{mine.run.name}: {'; '.join(part for part in (_more_often(mine, own), target_words(mine.summary)) if part)}",
        sentence(
            f"{rate_words(mine.summary.total)} on {mine.summary.conditions}",
            *latencies,
            right_in_time_words(mine, others),
            uplink_words(mine, others),
            _goals(own),
        ),
    )


def _figures(claims: Sequence[GoalCheck]) -> list[str]:
    return list(dict.fromkeys(claim.ratio.figure for claim in claims if claim.ratio is not None))


def _more_often(mine: ChartSeries, claims: Sequence[GoalCheck]) -> str:
    """`86.7 % right within 100 ms, more often than static, no difference shown to split`."""
    effective, deadline = mine.summary.total.effective, mine.summary.deadline_ms
    if effective is None:
        return ""
    right = f"{percent(effective.value)} right" + (f" within {deadline:g} ms" if deadline is not None else "")
    beside = [claim for claim in claims if claim.what.startswith("right")]
    words = {True: "more often than", False: "less often than", None: "no difference shown to"}
    parts = [
        f"{word} {join_words(names)}"
        for met, word in words.items()
        if (names := [claim.against for claim in beside if claim.met is met])
    ]
    return ", ".join([right, *parts])


def _at_equal_accuracy(summary: RunSummary, figure: str, claims: Sequence[GoalCheck]) -> str:
    """`P99 98.1 ms, at equal accuracy faster than infaas (3.1x)`."""
    own = [(claim, claim.ratio) for claim in claims if claim.ratio is not None and claim.ratio.figure == figure]
    parts = difference_words([(claim.against, ratio) for claim, ratio in own if not claim.unequal])
    parts = [f"at equal accuracy {', '.join(parts)}"] if parts else []
    unequal = [claim.against for claim, _ in own if claim.unequal]
    if unequal:
        parts.append(f"not at equal accuracy with {join_words(unequal)}")
    return ", ".join([latency_words(summary, figure), *parts])


def _goals(claims: Sequence[GoalCheck]) -> str:
    """`2 of 3 claims met, 1 cannot be said`."""
    met = sum(claim.met is True for claim in claims)
    unsaid = sum(claim.met is None for claim in claims)
    return f"{met} of {len(claims)} claims met" + (f", {unsaid} cannot be said" if unsaid else "")
