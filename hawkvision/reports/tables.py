"""Tables of reports, as values that `tables.html` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hawkvision.reports.pages import Markup, render


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of a cell, with small lines below it."""

    value: str
    small: Sequence[str] = ()
    kind: str = ""
    """CSS classes: `words` for text, `good`, `bad`, `said` for a longer text."""
    sign: str = ""
    """A decoration; screen readers skip it."""
    key: Markup | str = ""
    """A drawing before the value."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows whose first cell is a heading."""

    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    kind: str = ""
    first: bool = False
    """Whether the first row is highlighted as the baseline of the others."""


def table(drawn: Table) -> Markup:
    """The table as HTML, which scrolls where it is wider than its place."""
    return render("hawkvision.reports", "tables.html", table=drawn)
