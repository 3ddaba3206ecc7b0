"""A pytest plugin: with `--allowed-skips FILE`, a run in which a test is skipped for a reason not in the file fails.

A skipped test is easily overlooked among thousands. The file has one entry for each
reason: a regular expression that the whole of it must match, and why that is all right.

    pytest -p tests.skips --allowed-skips .ci/allowed_skips.toml
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

PREPARED: Final = "HAWKVISION_CI"
PREFIX: Final = "Skipped: "
"""What pytest puts before the reason."""


class Allowed(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A reason that tests may have to be skipped; `why` is for readers."""

    reason: str
    why: str
    in_ci: bool = True
    """Whether it is one where .ci/run has prepared the machine (`HAWKVISION_CI`), too."""


class AllowedSkips(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The file."""

    skip: tuple[Allowed, ...]


@dataclass(frozen=True, order=True)
class Skip:
    """A test, or a whole module, that was skipped."""

    test: str
    reason: str


def read_allowed(path: Path) -> tuple[Allowed, ...]:
    """Raise `pytest.UsageError` if the file is none of ours, naming what is wrong."""
    try:
        allowed = msgspec.toml.decode(path.read_bytes(), type=AllowedSkips).skip
    except (OSError, msgspec.MsgspecError) as error:
        raise pytest.UsageError(f"--allowed-skips {path}: {error}") from None
    for each in allowed:
        try:
            re.compile(each.reason)
        except re.error as error:
            raise pytest.UsageError(f"--allowed-skips {path}: reason {each.reason!r}: {error}") from None
    return allowed if PREPARED not in os.environ else tuple(each for each in allowed if each.in_ci)


def unexpected(skips: Iterable[Skip], allowed: Sequence[Allowed]) -> list[Skip]:
    """Those that no entry allows."""
    return sorted(skip for skip in skips if not any(re.fullmatch(each.reason, skip.reason) for each in allowed))


class Watch:
    """Collects what is skipped in this run, on all workers."""

    def __init__(self, allowed: Sequence[Allowed]) -> None:
        self._allowed = allowed
        self._skips: set[Skip] = set()

    def _take(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips.add(Skip(report.nodeid, reason.removeprefix(PREFIX)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._take(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if unexpected(self._skips, self._allowed) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = unexpected(self._skips, self._allowed)
        if found:
            terminalreporter.section("skipped for a reason that is not allowed", red=True, bold=True)
            for skip in found:
                terminalreporter.line(f"{skip.test}: {skip.reason}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--allowed-skips", type=Path, metavar="FILE", help="fail if a test is skipped for another reason")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--allowed-skips")
    if path is not None and not hasattr(
        config, "workerinput"
    ):  # workers of pytest-xdist report to the one that has none
        config.pluginmanager.register(Watch(read_allowed(path)))
