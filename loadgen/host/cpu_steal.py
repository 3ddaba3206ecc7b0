"""Measures CPU steal: the share of the processor time wanted by this machine that its host held back.

Linux counts it (proc_stat(5); `st` in top). A request that needs a processor meanwhile waits for one that no process of
this machine holds, so its latency says something about the host. Records state the share; no run is left out for it.

    all processor time  ├─ used ─┼─ stolen ─┼───── idle ─────┤
                        └──── wanted ───────┘

The share is of the time wanted: on a machine that is mostly idle, little can be stolen, and may still be half of what a
request needed. The share is unknown where the host does not count it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MATTERS: Final = 0.02
"""Share from which reports warn. One request in a hundred makes up a P99."""

_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
_STOLEN: Final = 7
"""Places of idle and of stolen time among a processor's counters; guests' time, which follows, is part of others."""


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Since the machine started, all processors together, in ticks of a hundredth of a second."""

    wanted: int
    """Used or stolen."""
    stolen: int

    def stolen_since(self, before: ProcessorTime) -> float | None:
        """The share that was stolen of what was wanted since `before`, 0..1; None where that is not known."""
        wanted = self.wanted - before.wanted
        return max(0.0, (self.stolen - before.stolen) / wanted) if wanted > 0 and self.stolen > 0 else None


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
    return ProcessorTime(sum(counters) - sum(counters[place] for place in _IDLE), counters[_STOLEN])


def since(before: ProcessorTime | None) -> float | None:
    """The share that was stolen since `before`; None where the system does not say."""
    now = read()
    return None if before is None or now is None else now.stolen_since(before)
