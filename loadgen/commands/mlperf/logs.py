"""LoadGen's logs: its verdict, its figures, and the accuracy that they hold."""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from hawkvision.core.errors import ConfigError, NotReady
from loadgen.commands.mlperf.accuracy import AnswerJudge

SUMMARY_LOG: Final = "mlperf_log_summary.txt"
_VERDICT: Final = re.compile(r"^Result is : (VALID|INVALID)", re.MULTILINE)
_LOGGED: Final = ":::MLLOG "
_RESULTS: Final = ("result_", "early_stopping_", "num_errors", "num_warnings")


def verdict(summary: str) -> bool:
    """LoadGen's verdict in its summary.

    Raises:
        NotReady: if there is none, because the run ended before it.
    """
    found = _VERDICT.search(summary)
    if found is None:
        raise NotReady(f"LoadGen wrote no verdict: expected 'Result is : VALID' or INVALID in {SUMMARY_LOG}")
    return found[1] == "VALID"


class _LogLine(msgspec.Struct):
    key: str
    value: Any = None


def figures(detail: str) -> dict[str, Any]:
    """LoadGen's results in its detailed log, by its names for them; what is no line of that log is passed over."""
    found: dict[str, Any] = {}
    for line in detail.splitlines():
        if line.startswith(_LOGGED):
            with contextlib.suppress(msgspec.DecodeError):
                read = msgspec.json.decode(line.removeprefix(_LOGGED).encode(), type=_LogLine)
                if read.key.startswith(_RESULTS):
                    found[read.key] = read.value
    return found


class _LogEntry(msgspec.Struct):
    qsl_idx: int
    data: str
    """Hexadecimal; see `loadgen.commands.mlperf.accuracy`."""


def score(log: Path, judge: AnswerJudge) -> float | None:
    """How right the answers in LoadGen's accuracy log are, their mean; None if there is none. The judge has labels.

    Raises:
        ConfigError: if the log is not one.
    """
    try:
        entries = msgspec.json.decode(log.read_bytes(), type=list[_LogEntry])
        right = [judge.read(bytes.fromhex(each.data), each.qsl_idx) for each in entries]
    except (OSError, msgspec.DecodeError, ValueError, struct.error, IndexError) as error:
        raise ConfigError(f"{log}: not LoadGen's accuracy log: {error}") from None
    return sum(right) / len(right) if right else None
