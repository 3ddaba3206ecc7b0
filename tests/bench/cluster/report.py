"""Tables of the studies of this folder."""

from __future__ import annotations

from rich.table import Table


def table(*titles: str) -> Table:
    """An empty table; the first column is of words, the others of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(titles):
        made.add_column(title, justify="right" if number else "left")
    return made
