"""How long waiting for the datacenter pays.

Round trips have a long tail. Of the answers that a caller still waits for shortly before the deadline, most never come
in time: the wait bought nothing, and every caller who took part in it had the slowest answer of all. What a wait of t
milliseconds has left to hope for is, among the last escalations that took longer than t, the share that came before the
deadline. Once that falls below `GIVE_UP_BELOW`, the edge's answer, which lies ready, is given.

    answered in time, of those still awaited        1 ┤■■■■■■■■■■■■▄▄▄
                                                      │               ▀▀▀▄▄
                                        GIVE_UP_BELOW ┤- - - - - - - - - - -▀▄- - -
                                                    0 └─────────────────────┬──────┬── ms
                                                                    given up here   deadline

The escalation itself goes on until the deadline, and what comes of it is remembered: whoever knew only of waits that
were worth it would never find out that patience pays again. Remembered are only escalations of callers whose wait may
be cut; others' ask for more, and may take longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

REMEMBERED: Final = 64
"""Escalations: at two a second half a minute, in which a radio link is good and bad several times."""
GIVE_UP_BELOW: Final = 0.25
"""On a crowded wireless network the 99th percentile fell by 3 to 14 % for it, and accuracy by at most 0.3 points:
computed from what was recorded of 2,200 requests over each transport, in four runs that waited until the deadline."""
REMEMBERED_S: Final = 60.0
"""What is older says nothing about a link that changes: whoever escalates once a minute always waits."""
DOUBT: Final = 0.5
"""Answers in time, and as many too late, that are taken to have been seen beyond those that were: a hope of which
nothing is known is one half."""
TOLD_FROM: Final = 0.8
"""Share of the time to the deadline that an escalation must have been waited for, to count as too late for it."""
REST_ODDS: Final = 3.0
"""Times the odds that a wait for the rest of an answer must have, which adds less than the first of it does: of what
the edge is unsure of, some members are right as often as all (`edge/README.md`). With `GIVE_UP_BELOW`, the rest must be
more likely in time than not. Computed from what was recorded of 837 escalations over a crowded wireless network in
three runs, the 95th percentile of their waits falls by 1.0 to 2.1 ms of 75, and 554 instead of 571 have the whole
answer."""


def hope_for_rest(give_up_below: float) -> float:
    """How little hope ends the wait for the rest, where so little ends that for anything: shares, 0..1."""
    return REST_ODDS * give_up_below / (1.0 + (REST_ODDS - 1.0) * give_up_below)


@dataclass(frozen=True, slots=True)
class _Wait:
    at: float
    ms: float
    answered: bool


@dataclass(slots=True)
class Patience:
    """Remembers what waits came to, in milliseconds since they began; `now` is seconds of a monotonic clock.

    A wait begins when the picture is sent, and that for the rest of an answer when the first of it is there.
    """

    give_up_below: float = GIVE_UP_BELOW
    """Of those still awaited; 0 waits until the deadline."""
    may_not_wait: bool = False
    """Whether no wait at all may be best: for who has something already, and need not ask whether the link works."""
    _waits: deque[_Wait] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def answered(self, after_ms: float, now: float) -> None:
        """An answer came, in time or not."""
        self._waits.append(_Wait(now, after_ms, answered=True))

    def late(self, waited_ms: float, now: float) -> None:
        """None had come after so long, and nobody waited longer."""
        self._waits.append(_Wait(now, waited_ms, answered=False))

    def forget(self) -> None:
        """Pictures go another way from now on."""
        self._waits.clear()

    def worth_ms(self, cutoff_ms: float, now: float) -> float:
        """How much of the time until `cutoff_ms` is worth waiting; all of it while hardly anything is known."""
        while self._waits and self._waits[0].at < now - REMEMBERED_S:
            self._waits.popleft()
        in_time = sorted(wait.ms for wait in self._waits if wait.answered and wait.ms <= cutoff_ms)
        late = sum(wait.ms > (cutoff_ms if wait.answered else TOLD_FROM * cutoff_ms) for wait in self._waits)
        if self.may_not_wait and self._hopeless(len(in_time), late):
            return 0.0
        for still_to_come, ms in zip(reversed(range(len(in_time))), in_time, strict=True):
            if self._hopeless(still_to_come, late):
                return ms
        return cutoff_ms

    def _hopeless(self, in_time: int, late: int) -> bool:
        """Whether too few are yet to come in time, of those that are yet to come at all."""
        return in_time + DOUBT < self.give_up_below * (in_time + late + 2 * DOUBT)
