"""What a comparison of policies claims, as a table of its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from tests.bench.policies.goal_checks import Claim, figures

NOTE: Final = (
    "What counts first is the share of all requests that were answered right within the deadline, and whether answers "
    "that claim to keep their accuracy target do. A ratio of latencies counts only at equal accuracy: where the "
    "quicker one is less accurate, it says nothing. Beside each stand the rounds that are worst and best for ours; "
    "none is left out."
)
_COLUMNS: Final = (("claim", True), ("against", True), ("value", False), ("worst to best", False), ("goal", False),
                   ("met", True), ("measured", True))  # fmt: skip
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
    value, interval, rounds = figures(claim)
    few = claim.ratio is not None and claim.ratio.few
    cells = [
        f"<td{_WORDS}>{escape(claim.against)}</td>",
        f"<td>{value or '–'}{' ?' * few}{_small(interval)}</td>",
        f"<td>{rounds or '–'}</td>",
        f"<td>{escape(claim.goal)}</td>",
        _met(claim.met),
        f'<td class="said">{escape(claim.note)}</td>',
    ]
    return f'<tr><th scope="row">{escape(claim.what)}{_small(claim.ours)}</th>{"".join(cells)}</tr>'


def _met(met: bool | None) -> str:
    sign, word, kind = _MET[met]
    return f'<td class="words {kind}"><span aria-hidden="true">{sign} </span>{word}</td>'


def _small(words: str) -> str:
    return f"<small>{escape(words)}</small>"
