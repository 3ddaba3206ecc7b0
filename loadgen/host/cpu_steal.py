"""How much of the processor time that this machine wanted it did not get, because its host held it back.

On a virtual machine a processor that is wanted may not be there: the host runs somebody else on it, or the machine has
had its share. Linux counts such time as stolen (proc_stat(5); `st` in top and vmstat). A request then waits for a
processor that no process of this machine holds, so latencies measured meanwhile tell of the host. Runs say how much was
stolen; none is left out for it.

    all that the processors had  ├─ used ─┼─ stolen ─┼───── idle ─────┤
                                 └──── wanted ───────┘

The share is of what was wanted: of a machine that is mostly idle, little can be stolen, and it still may be half of
what a request needed. Machines whose host does not count (stolen nothing since they started) say nothing.
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
