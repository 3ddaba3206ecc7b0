"""How much of the processors' time the machine's host gave to somebody else.

On a virtual machine a processor that is wanted may not be there: the host runs another guest on it. Linux counts that
time as stolen (proc_stat(5); `st` in top and vmstat). Whoever measures latencies meanwhile measures the neighbours: a
request waits for a processor that no process of this machine holds. So runs say how much was stolen, and `rivals`
can repeat what was disturbed (`--most-stolen`).

    all that the processors had  ├─ used ─┼───── idle ─────┼─ stolen ─┤
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MATTERS: Final = 0.01
"""Share from which reports warn. One percent of the time is enough to make up a P99."""

_STAT: Final = Path("/proc/stat")
_STOLEN: Final = 7
"""Place of the stolen time among the counters of a processor; guests' time, which follows, is part of others."""


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Since the machine started, all processors together, in ticks of a hundredth of a second."""

    total: int
    stolen: int

    def stolen_since(self, before: ProcessorTime) -> float:
        """The share that was stolen since `before`, 0..1; 0 where no time passed."""
        total = self.total - before.total
        return max(0.0, (self.stolen - before.stolen) / total) if total > 0 else 0.0


def read() -> ProcessorTime | None:
    """The counters now; None where the system has none."""
    try:
        return parse(_STAT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def parse(text: str) -> ProcessorTime:
    """The counters in the text of /proc/stat.

    Raises:
        ValueError: if they are not there.
    """
    words = text.partition("\n")[0].split()
    if len(words) <= _STOLEN + 1 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:]):
        raise ValueError(f"/proc/stat: expected 'cpu' and {_STOLEN + 1} counters or more, got {text[:60]!r}")
    counters = [int(word) for word in words[1 : _STOLEN + 2]]
    return ProcessorTime(sum(counters), counters[_STOLEN])


def since(before: ProcessorTime | None) -> float | None:
    """The share that was stolen since `before`; None where the system does not say."""
    now = read()
    return None if before is None or now is None else now.stolen_since(before)
