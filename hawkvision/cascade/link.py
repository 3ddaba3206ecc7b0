"""The link to the datacenter: how long a round trip takes, predicted without starving.

Trap (found in simulation): an estimate fed only by uploads never recovers from one bad spell, because a bad estimate
stops the uploads that would mend it; the edge then never escalates again. So the estimate decays back towards its
prior while no samples come. And a link that failed is not probed with callers' requests, which may have none to spare,
but by whoever watches it (`edge.node` asks for the served rungs at growing intervals) until `restored`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from hawkvision.cascade.patience import GIVE_UP_BELOW, Patience, hope_for_rest

PRIOR_MS = 40.0
"""Round trip assumed before anything was measured: a metropolitan link and 10 ms of datacenter work."""
GAIN = 0.125
VARIANCE_GAIN = 0.25
DEVIATIONS = 4.0
"""Smoothing as in RFC 6298 §2, which waits SRTT + 4 RTTVAR before it calls an answer late."""
HALF_LIFE_S = 2.0
TRY_GAIN: Final = 0.25
"""Weight of the newest try in the share of them that were in time."""
TRY_HALF_LIFE_S: Final = 4.0
"""How fast that share recovers while nothing is tried: a link that keeps no deadline is tried every other second."""
DOUBTED_BELOW: Final = 0.3
TRUSTED_FROM: Final = 0.75
"""Of the share of tries in time with `ROOM`, which does not recover by itself: five late ones in a row make a link
doubtful that was always in time, four or five in time mend it. With three independent tries a second, simulated, it is
so for 6 % of them where 70 % are in time, for 57 % where 50 % are, and for 99.7 % where 20 % are."""
UNTRIED: Final = 0.5
"""That share while nothing was tried: as likely in time as not, so that two late tries are enough for doubt. Simulated,
with two independent tries a second where none, 10, 70 and 90 % are in time, 2.2, 2.5, 2.8 and 1.0 of the first ten wait
in vain, and 7.8, 7.2, 0.7 and 0.1 are not waited for; it was 5.7, 5.9, 3.0 and 1.0, and 4.3, 3.4, 0.1 and none, while
a new link was taken for one that was always in time."""
ROOM: Final = 0.75
"""Share of a wait in which an answer must come to speak for the link: one that comes later was nearly late, and the
next may be. Whoever waits where most are so has the slowest answer of all, or none in time."""
TRIAL_ROOM: Final = 0.9
"""Share of the longest wait in vain in which a trial must be answered: callers' waits are shorter by what they spent
before, which differs."""
STEADY: Final = 10
"""So many tries in time, one after the other, end doubt and prevent it, however little room they left: a link may be
slow and keep every deadline. Computed from the round trips of 1,377 escalations over an emulated satellite link, whose
medians in four runs are 87 to 90 of the 92 ms that are waited, 2.0 to 2.1 of 19 unsure callers wait; it was 15 to 17
while nearly late counted as in time. Over a crowded wireless network 18 wait either way. Of 38 over a link that takes
80 ms, give or take 2, 26 do, for the others are answered by the edge while it is tried."""
VAIN_REACH: Final = 1.25
"""Times the longest wait in vain: whoever would wait longer than that is not put off by it."""
MOST_BUSY_MS: Final = 10_000.0
"""What a tier that refuses because it is busy makes of the round trip at most."""


@dataclass(slots=True)
class LinkEstimate:
    """Smoothed round trip and deviation; every method takes `now` in seconds of a monotonic clock."""

    mean_ms: float = PRIOR_MS
    deviation_ms: float = PRIOR_MS / 4
    in_time: float = 1.0
    """Smoothed share of tries that were answered in time."""
    up: bool = True
    """Whether the last attempt got through."""
    doubtful: bool = False
    """Whether tries were late, or nearly, so often that waiting seldom pays; it takes tries in time to end that."""
    room: float = ROOM
    """Share of a wait in which an answer must come to speak for the link, see `ROOM`."""
    patience: Patience = field(default_factory=Patience)
    """How much of a wait pays. Whoever asks tells it what came of waits that may be cut short."""
    patience_for_rest: Patience = field(
        default_factory=lambda: Patience(hope_for_rest(GIVE_UP_BELOW), may_not_wait=True)
    )
    """The same for who has the answer of some of a rung's members, since then, and waits for that of all."""
    patience_for_arrival: Patience = field(default_factory=Patience)
    """The same for a picture's arrival there, which is seen before any answer, and must be early enough for one."""
    _kept: float = UNTRIED
    """The share of tries that were answered in time with room to spare; time alone does not change it."""
    _in_a_row: int = 0
    """Tries in time since the last that was not."""
    _vain_ms: float = 0.0
    """The longest wait of late that was in vain, or nearly."""
    _late_at: float = float("-inf")
    _updated: float | None = None

    def succeeded(self, round_trip_ms: float, now: float, *, within_ms: float = math.inf, awaited: bool = True) -> None:
        """Learn from an answer for which somebody waited up to `within_ms`.

        One that is not `awaited` any more (`gave_up`) tells of the round trip alone.
        """
        self._learn(round_trip_ms, now)
        self.up = True
        if not awaited:
            return
        if self.doubtful:
            if round_trip_ms > self.trial_ms:
                return  # somebody more patient had it: nothing to those who are not
            within_ms = self._vain_ms
        self.in_time += TRY_GAIN * (1.0 - self.in_time)
        self._in_a_row += 1
        if round_trip_ms > self.room * within_ms:
            self._poor(round_trip_ms, within_ms, now)
            return
        self._kept += TRY_GAIN * (1.0 - self._kept)
        self._judge()
        if not self.doubtful:
            self._vain_ms = 0.0

    def late(self, waited_ms: float, now: float, *, awaited: bool = True) -> None:
        """Learn from an answer that had not come after `waited_ms`: it takes at least that long."""
        if awaited:
            self.gave_up(waited_ms, now)
        if waited_ms > self.mean_ms:
            self._learn(waited_ms, now)

    def gave_up(self, waited_ms: float, now: float) -> None:
        """Somebody has waited in vain, whatever comes now: a try that was not in time for whoever waited."""
        self._decay(now)
        self._in_a_row = 0
        if self._poor(waited_ms, waited_ms, now):
            self.in_time -= TRY_GAIN * self.in_time

    def busy(self, now: float) -> None:
        """The tier refused at once, for it has too much to do: nobody waited, but the next one may have to."""
        self._learn(min(2 * self.mean_ms, MOST_BUSY_MS), now)

    def changed(self) -> None:
        """Pictures go this way from now on, after another one: what was late before says nothing."""
        self.in_time, self._kept, self.doubtful, self._in_a_row, self._vain_ms = 1.0, UNTRIED, False, 0, 0.0
        for patience in self._patiences:
            patience.forget()

    def set_give_up_below(self, share: float) -> None:
        """How little hope ends a wait for something rather than nothing, see `Patience`; with 0 any time will do."""
        self.patience.give_up_below = self.patience_for_arrival.give_up_below = share
        self.patience_for_rest.give_up_below = hope_for_rest(share)
        self.room = ROOM if share > 0.0 else 1.0

    @property
    def _patiences(self) -> tuple[Patience, ...]:
        return self.patience, self.patience_for_rest, self.patience_for_arrival

    def doubts(self, wait_ms: float) -> bool:
        """Whether waiting so long has been in vain too often to be worth it."""
        return self.doubtful and wait_ms <= VAIN_REACH * self._vain_ms

    @property
    def trial_ms(self) -> float:
        """Within what time a try must be answered that is to end the doubt."""
        return TRIAL_ROOM * self._vain_ms

    def failed(self) -> None:
        """The connection was refused or broke, or nothing came for as long as anybody waits."""
        self.up = False

    def restored(self) -> None:
        """A probe got through."""
        self.up = True

    def predict_ms(self, now: float) -> float | None:
        """What an escalation would hardly take longer than; None while the link is down."""
        if not self.up:
            return None
        self._decay(now)
        return self.mean_ms + DEVIATIONS * self.deviation_ms

    def expect_ms(self, now: float) -> float | None:
        """What an escalation is likely to take; None while the link is down.

        That is the mean, as long as every other try was in time: round trips have a long tail, so most are shorter.
        How long the late ones would have taken nobody waited to see, so where they prevail the mean knows nothing, and
        it is what is hardly exceeded.
        """
        predicted_ms = self.predict_ms(now)
        return self.mean_ms if predicted_ms is not None and self.in_time >= 0.5 else predicted_ms

    def _poor(self, took_ms: float, within_ms: float, now: float) -> bool:
        """A try was late or nearly; False if another that was under way at the same time told of that before."""
        new = now - took_ms * 1e-3 >= self._late_at
        if new:
            self._kept -= TRY_GAIN * self._kept
            self._late_at = now
        self._vain_ms = max(self._vain_ms, within_ms)
        self._judge()
        return new

    def _judge(self) -> None:
        """Doubt comes below a share of tries that were worth it, and goes from another on."""
        self.doubtful = self._in_a_row < STEADY and self._kept < (TRUSTED_FROM if self.doubtful else DOUBTED_BELOW)

    def _learn(self, round_trip_ms: float, now: float) -> None:
        self._decay(now)
        self.deviation_ms += VARIANCE_GAIN * (abs(round_trip_ms - self.mean_ms) - self.deviation_ms)
        self.mean_ms += GAIN * (round_trip_ms - self.mean_ms)

    def _decay(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            keep = 0.5 ** ((now - self._updated) / HALF_LIFE_S)
            self.in_time = 1.0 - 0.5 ** ((now - self._updated) / TRY_HALF_LIFE_S) * (1.0 - self.in_time)
            if self.mean_ms > PRIOR_MS:
                self.mean_ms = PRIOR_MS + keep * (self.mean_ms - PRIOR_MS)
            if self.deviation_ms > PRIOR_MS / 4:
                self.deviation_ms = PRIOR_MS / 4 + keep * (self.deviation_ms - PRIOR_MS / 4)
        self._updated = now
