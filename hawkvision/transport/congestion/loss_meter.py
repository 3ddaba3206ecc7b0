"""The loss of a path: the share of datagrams, and the length of loss runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0
"""The memory of outcomes."""


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """The share of lost datagrams, and the mean length of a loss run (≥ 1); unknown before 50 outcomes."""

    ratio: float
    burst: float
    known: bool
    outcomes: int = 0
    """The datagrams that the ratio is measured on."""


class LossMeter:
    """Losses over the last 500 outcomes or 10 seconds, whichever is less, but over at least 50 outcomes.

    Holds at most ten blocks of about 50 outcomes.
    """

    BLOCK: Final = 50
    BLOCKS: Final = 10

    def __init__(self) -> None:
        self._blocks: deque[_Outcomes] = deque([_Outcomes(0.0)])
        self._estimate: LossEstimate | None = None
        """Cached, because senders read it for each datagram and it changes only with reports."""

    def observe(self, received: int, lost: int, runs: int, now: float) -> None:
        """Count outcomes; `runs` is the number of loss runs that begin with them, continued runs excluded."""
        self._estimate = None
        block = self._blocks[-1]
        if block.received + block.lost >= self.BLOCK:
            block = _Outcomes(now)
            self._blocks.append(block)
        block.at = now
        block.received += received
        block.lost += lost
        block.runs += runs
        while len(self._blocks) > 1 and (
            len(self._blocks) > self.BLOCKS + 1
            or (self._blocks[0].at < now - WINDOW_S and self._outcomes() - self._blocks[0].outcomes >= self.BLOCK)
        ):
            self._blocks.popleft()

    def retract(self, received: int, runs: int) -> None:
        """Take back false losses: `lost` datagrams did arrive, and `runs` runs have no loss any more.

        They are the latest losses counted; losses that are no longer counted are ignored.
        """
        self._estimate = None
        for block in reversed(self._blocks):
            late, whole = min(received, block.lost), min(runs, block.runs)
            block.lost -= late
            block.received += late
            block.runs -= whole
            received, runs = received - late, runs - whole

    def _outcomes(self) -> int:
        return sum(block.outcomes for block in self._blocks)

    @property
    def estimate(self) -> LossEstimate:
        """The state of the path."""
        if self._estimate is None:
            self._estimate = self._estimated()
        return self._estimate

    def _estimated(self) -> LossEstimate:
        outcomes = self._outcomes()
        lost = sum(block.lost for block in self._blocks)
        runs = sum(block.runs for block in self._blocks)
        return LossEstimate(
            ratio=lost / outcomes if outcomes else 0.0,
            burst=max(1.0, lost / runs) if runs else 1.0,
            known=outcomes >= self.BLOCK,
            outcomes=outcomes,
        )


@dataclass(slots=True)
class _Outcomes:
    at: float
    received: int = 0
    lost: int = 0
    runs: int = 0

    @property
    def outcomes(self) -> int:
        return self.received + self.lost
