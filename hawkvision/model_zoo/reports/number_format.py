"""Numbers as the report writes them."""

from __future__ import annotations


def threshold(written: float | str, never_accepted: str) -> str:
    """A threshold with four decimals, or in words if it is infinite."""
    if isinstance(written, str):
        return never_accepted if written == "always" else "every"
    return f"{written:.4f}"


def points(share: float) -> str:
    """A share in percentage points, with two decimals."""
    return f"{100 * share:.2f}".replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * share:.{digits}f} %"


def number(value: int) -> str:
    """A count with separators of thousands."""
    return f"{value:,}"


def count(value: int, noun: str) -> str:
    """A count with its noun in the right number."""
    return f"{value} {noun}{'' if value == 1 else 's'}"
