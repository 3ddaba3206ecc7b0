"""A node's monitor in virtual time, and what asks it: seeded, without sockets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import numpy as np

from hawkvision.guarantee.bets import MOST_SHARE, Claim, Claims, Log
from hawkvision.guarantee.monitor import Dates, Monitor, Stream, StreamState, Watched
from tests.clocks import ManualClock

SHARE = 0.02
"""Of the images that are audited without suspicion."""
NAMED_PART = 0.5
"""Of δ, for the log of a stream that requests name."""
MOST_REQUESTS = 1_000_000
CLAIMS = Claims("p", "edge", (Claim(-math.inf, 0.05), Claim(0.5, 0.02)), 0.05)
EIGHT = Claims("p", "edge", tuple(Claim(k / 10, 0.05) for k in range(8)), 0.05)


def delay(times: float, quiet: int, rng: np.random.Generator, *, fractions: bool = False) -> int:
    """Requests from when all eight claims of a named stream are broken so many times until its alarm; `quiet` audits
    of half their disagreement came before. At most `MOST_REQUESTS`.

    With `fractions` disagreements are beta distributed, of the same mean.
    """

    def disagreement(mean: float) -> float:
        if mean >= 1.0:
            return 1.0
        return float(rng.beta(2.0 * mean, 2.0 * (1.0 - mean)) if fractions else rng.random() < mean)

    log, requests = Log(EIGHT, NAMED_PART), 0
    for _ in range(quiet):
        log.record(0.9, disagreement(0.025))
    while not log.alarm and requests < MOST_REQUESTS:
        requests += int(rng.geometric(min(SHARE * log.suspicion, MOST_SHARE)))
        log.record(0.9, disagreement(min(1.0, 0.05 * times)))
    return requests


class Node:
    """A monitor that sees requests."""

    def __init__(
        self,
        seed: int = 0,
        *,
        limit: int = 1000,
        states: dict[bytes, StreamState] | None = None,
        claims: Claims = CLAIMS,
        dates: Dates = Dates(),  # noqa: B008 - immutable
        profile: str = "p",
        wall: float = 2e9,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.wall = ManualClock(wall)
        self.turns: list[Stream] = []
        self.claims = claims
        self.rows: dict[bytes, Stream | None] = {}
        self.monitor = Monitor(
            limit,
            SHARE,
            self.clock.now,
            self.rng.random,
            on_change=self.rows.__setitem__,
            on_turn=self.turns.append,
            in_force={f"{profile}/edge"},
            dates=dates,
            states=states,
            wall=self.wall.now,
        )

    def watched(self, caller: str = "me", stream: str | None = None) -> Watched:
        key = None if stream is None else f"{caller}/{stream}".encode()
        return Watched(self.monitor, self.monitor.logs(caller.encode(), key))

    def request(self, differs: float, caller: str = "me", stream: str | None = None, score: float = 0.9) -> bool:
        """Whether the answer to a request says that it is suspended; audits are made at once."""
        watched = self.watched(caller, stream)
        said = watched.suspended
        due = self.monitor.draw(watched)
        if due is not None:
            self.monitor.settle(due, [(self.claims, score, float(self.rng.random() < differs))])
        return said

    def until(self, suspended: bool, most: int, request: Callable[[int], bool]) -> int:
        """Requests until one says so."""
        return next((number for number in range(most) if request(number) is suspended), most)

    def suspend(self, caller: str = "me", stream: str | None = None) -> None:
        """Raise the alarm of its own log, in less than a tenth of the traffic."""
        while not self.watched(caller, stream).logs[0].alarm:
            self.request(1.0, caller, stream)
            for _ in range(15):
                self.request(0.0, "quiet")

    def restarted(self, limit: int = 1000, dates: Dates = Dates(), profile: str = "p") -> Node:  # noqa: B008
        """Another node with what this one would have written."""
        kept = {stream.key: self.monitor.kept(stream) for stream in self.monitor.all()}
        states = msgspec.json.decode(msgspec.json.encode({key.hex(): state for key, state in kept.items()}),
                                     type=dict[str, StreamState])  # fmt: skip
        found = {bytes.fromhex(key): state for key, state in states.items()}
        return Node(limit=limit, states=found, dates=dates, profile=profile)
