"""What a path loses: the share of datagrams, and how long runs of losses are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0
"""How long outcomes are remembered."""


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """What a path loses: share of datagrams, mean length of a run of losses (≥ 1); unknown before 50 outcomes."""

    ratio: float
    burst: float
    known: bool
    outcomes: int = 0
    """Datagrams that the ratio rests on."""


class LossMeter:
    """Losses over the last 500 outcomes or 10 seconds, whichever is less, but never fewer than 50 outcomes.

    Kept as at most ten blocks of about 50 outcomes.
    """

    BLOCK: Final = 50
    BLOCKS: Final = 10

    def __init__(self) -> None:
        self._blocks: deque[_Outcomes] = deque([_Outcomes(0.0)])
        self._estimate: LossEstimate | None = None
        """Of these blocks, once somebody asked: senders do for every datagram, and it changes with reports."""

    def observe(self, received: int, lost: int, runs: int, now: float) -> None:
        """Count outcomes; `runs` are those that begin with them: what goes on with an earlier one makes that longer."""
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
        """Take back losses that were none: so many datagrams did arrive, and so many runs have nothing lost any more.

        Those are the latest of the losses counted; ones that are no longer counted are ignored.
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
