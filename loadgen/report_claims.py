"""What a comparison of policies claims, as a table of its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from loadgen.claims import Claim
from loadgen.report_words import percent

NOTE: Final = (
    "Latencies are compared at equal accuracy of all answers, however late they came: a rival that is more accurate "
    "than ours counts as if a share of its requests had been answered as a less accurate contender answered them; one "
    "that is less accurate, as it was tested. “Met in time” takes every rival as it was tested, where ours is right in "
    "time at least as often. “The caller's link alone” is what the weather took of it, whoever answered: the wait "
    "while the link was down, and its delay there and back, without bytes, losses or queues. “The quickest of all” is "
    "what one would have had who knew beforehand which contender answers each request first: no choice among them is "
    "quicker."
)
_COLUMNS: Final = (("claim", True), ("against", True), ("value", False), ("goal", False), ("met", True),
                   ("met in time", True), ("measured", True))  # fmt: skip
"""Each with whether it has words, not numbers."""
_WORDS: Final = ' class="words"'
_MET: Final = {True: ("✓", "met", "good"), False: ("✗", "not met", "bad"), None: ("?", "cannot be said", "")}


def claims_table(claims: Sequence[Claim]) -> str:
    """A row per claim; empty without claims."""
    if not claims:
        return ""
    head = "".join(f'<th scope="col"{_WORDS * words}>{name}</th>' for name, words in _COLUMNS)
    rows = "".join(_row(claim) for claim in claims)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<h2>Claims</h2>\n<div class="scroll">{table}</div>\n<p class="note">{escape(NOTE)}</p>'


def _row(claim: Claim) -> str:
    few = claim.ratio is not None and claim.ratio.few
    value = "–" if claim.value is None else f"{claim.value:.3g}{' ?' * few}"
    interval = "" if claim.low is None or claim.high is None else f"{claim.low:.2f}–{claim.high:.2f}"
    cells = [
        f"<td{_WORDS}>{escape(claim.against)}{_small(_made_equal(claim))}</td>",
        f"<td>{value}{_small(interval)}</td>",
        f"<td>{escape(claim.goal)}</td>",
        _met(claim.met),
        f"<td{_WORDS}>–</td>" if claim.ratio is None else _met(claim.met_in_time),
        f'<td class="said">{escape(claim.note)}</td>',
    ]
    return f'<tr><th scope="row">{escape(claim.what)}{_small(claim.ours)}</th>{"".join(cells)}</tr>'


def _made_equal(claim: Claim) -> str:
    """What was done to a rival so that it is as accurate as ours, or why nothing was."""
    dilution = claim.dilution
    return claim.unequal if dilution is None else f"{percent(dilution.share)} answered as {dilution.by} did"


def _met(met: bool | None) -> str:
    sign, word, kind = _MET[met]
    return f'<td class="words {kind}"><span aria-hidden="true">{sign} </span>{word}</td>'


def _small(words: str) -> str:
    return f"<small>{escape(words)}</small>"
