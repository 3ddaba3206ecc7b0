"""What a check says: how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from hawkvision.core.errors import HawkVisionError


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It runs, but slower, or with less, than it could."""
    PROBLEM = "problem"
    """It does not start, or does not do what it was set up for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    found: str
    advice: str | None = None
    """What to do; None where nothing is to be done."""


def ok(check: str, found: str) -> Finding:
    """Nothing to be done."""
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """It runs, but less well than it could."""
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """It does not do what it was set up for."""
    return Finding(check, Level.PROBLEM, found, advice)


Check = Callable[[], Finding | Iterable[Finding]]


def examine(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """What each check finds, one after the other. An error that explains itself is a problem of its check's name."""
    for name, check in checks:
        try:
            found = check()
            yield from (found,) if isinstance(found, Finding) else found
        except HawkVisionError as error:
            yield problem(name, str(error), "mend that first; what comes after it could not be looked at")
        except OSError as error:
            yield problem(name, f"cannot be looked at: {error}", "run this as the user that runs the server")
