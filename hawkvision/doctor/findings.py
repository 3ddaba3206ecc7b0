"""Findings of checks: a level, what was found, and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from hawkvision.core.errors import HawkVisionError


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The server runs, but slower or with less than it could."""
    PROBLEM = "problem"
    """The server does not start, or does not do its task."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    level: Level
    found: str
    advice: str | None = None
    """What to do; None if nothing."""


def ok(check: str, found: str) -> Finding:
    """A finding without a problem."""
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    """A finding of level `warning`."""
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """A finding of level `problem`."""
    return Finding(check, Level.PROBLEM, found, advice)


Check = Callable[[], Finding | Iterable[Finding]]


def examine(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Run the checks one after the other. A HawkVision error becomes a problem with the check's name."""
    for name, check in checks:
        try:
            found = check()
            yield from (found,) if isinstance(found, Finding) else found
        except HawkVisionError as error:
            yield problem(name, str(error), "mend that first; what comes after it could not be looked at")
        except OSError as error:
            yield problem(name, f"cannot be looked at: {error}", "run this as the user that runs the server")
