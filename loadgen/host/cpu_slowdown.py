"""Measures how much slower than at their best the processors are.

Two virtual processors may be two threads of one real core, and the host may change that within seconds. Nothing is
counted as stolen then (`loadgen.host.cpu_steal`), but each is slower while both work. The spinners of
`--prevent-cpu-idle` see it: their rounds per second of CPU time fall below the most that they ever made. They do not
see whether two processors share a cache.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Final

MATTERS: Final = 0.1
"""Share from which reports warn."""
_LINE: Final = struct.Struct("=3d")


@dataclass(frozen=True, slots=True)
class SpinnerLap:
    """What one spinner has done since it began."""

    turns: float = 0.0
    cpu_s: float = 0.0
    best: float = 0.0
    """The most turns per second of `cpu_s` in any stretch of time."""


@dataclass(frozen=True, slots=True)
class SpinnerProgress:
    """What the spinners of all processors have done since they began."""

    laps: tuple[SpinnerLap, ...]

    def slowed_since(self, before: SpinnerProgress) -> float | None:
        """By how much slower than at their best they were since `before`, 0..1; None if they did nothing."""
        spent_s = at_best_s = 0.0
        for now, then in zip(self.laps, before.laps, strict=True):
            if now.best > 0.0:
                spent_s += now.cpu_s - then.cpu_s
                at_best_s += (now.turns - then.turns) / now.best
        return max(0.0, 1.0 - at_best_s / spent_s) if spent_s > 0.0 else None


def since(before: SpinnerProgress | None, now: SpinnerProgress | None) -> float | None:
    """CPU slow-down between two readings, 0..1, against the processors' best; None without spinners."""
    return None if before is None or now is None else now.slowed_since(before)


def board_bytes(spinners: int) -> int:
    """What a `SpinnerBoard` needs."""
    return spinners * _LINE.size


class SpinnerBoard:
    """Where spinners, processes of their own, write how far they are, and others read it.

    What is read of one spinner may be of two moments that are one of its stretches of time apart.
    """

    def __init__(self, descriptor: int, spinners: int) -> None:
        """Map a file of `board_bytes`."""
        self._map = mmap.mmap(descriptor, board_bytes(spinners))
        self._spinners = spinners

    def write(self, spinner: int, lap: SpinnerLap) -> None:
        """Of one spinner, counted from 0."""
        _LINE.pack_into(self._map, spinner * _LINE.size, lap.turns, lap.cpu_s, lap.best)

    def read(self) -> SpinnerProgress:
        """Of all."""
        return SpinnerProgress(
            tuple(SpinnerLap(*_LINE.unpack_from(self._map, n * _LINE.size)) for n in range(self._spinners))
        )

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
