"""Our controller: it tolerates random loss, keeps the queue short, and holds its share beside flows that fill it.

*Two speeds.* The bottleneck's speed (`packet_trains`) sets how much may leave at once. The sustained rate is what
shares the link.

*Delay says full, loss does not.* One-way delay above its least in ten seconds is queue (LEDBAT, RFC 6817; SCReAM,
RFC 8298; NADA, RFC 8698). The least of recent delays counts, because only a standing queue matters, not an image's own
burst (BBR). The rate grows while the standing queue is below its goal, the slower the nearer,
and shrinks above it. Loss while the queue is short and the link half empty is the radio's. Only more
loss, while we use at least `HEAVY` of the link, counts as a queue too small to show as delay. The window is the link's
speed times round trip plus goal, so that even a wrong rate makes a bounded queue.

        q = standing queue          one step per round trip
        ┌──────────┐ capacity known, or q > goal ┌──────────┐ no short queue for DRAIN_AFTER ┌──────────┐
        │ STARTING ├────────────────────────────►│ TRACKING ├───────────────────────────────►│ DRAINING │
        │ rate × 2 │◄─ the path has eased        │ delay    │◄───────────────────────────────┤ rate / 2 │
        └──────────┘                             └──────────┘   q fell: the queue was ours   └────┬─────┘
                                                       ▲  q stays short     ┌───────────┐         │ q stayed:
                                                       └────────────────────┤ COMPETING ◄─────────┘ another's
                                                                            │ AIMD      │
                                                                            └───────────┘
*Easing.* When the round trip falls to a fraction, a crowd has gone. TCP's window then leaves in that fraction; a rate
would stay. So it begins again at an initial window per round trip.

*Competing.* As in Copa (Arun and Balakrishnan, NSDI 2018) the sender drains to learn whose queue it is. If it is
another's, the sender follows TCP: one datagram more each round trip, 0.7 of the rate after a loss (CUBIC's factor, RFC
9438). A floor of `MIN_SHARE` of the link keeps it alive beside BBR; it falls when excess loss shows that many flows
keep such a floor (RFC 8085 §3.1). `docs/design/congestion-control.md` has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.packet_trains import MAX_RATE, Arrival
from hawkvision.transport.congestion.path_measurement import (
    DATAGRAM,
    INITIAL_RTT_S,
    INITIAL_WINDOW,
    MAX_REPORT_DELAY_S,
    PathMeasurement,
)

QUEUE_GOAL_S: Final = 0.025
"""The goal of the standing queue on a full link. NADA takes 10 ms and SCReAM 60."""
SHORT_QUEUE_S: Final = 0.010
"""A queue up to this length counts as drained; a minimum over a tenth of a second leaves this much jitter."""
MIN_RATE: Final = DATAGRAM / 1.0
"""Bytes per second: a datagram a second."""
HEADROOM: Final = 0.1
"""The factor above the measured speed, which falls as the queue nears its goal: a sender that is never faster than its
estimate cannot notice a faster link."""
DRAIN_AFTER_S: Final = 1.0
"""After this long without a short queue, the sender drains."""
DRAIN_MARGIN_S: Final = 0.05
"""Added to two round trips and twice the queue, within which draining must show."""
COMPETING_EXIT_S: Final = 0.5
"""How long the queue must be short before delay decides again; a CUBIC flow's is short for less after its losses."""
LEAST_STEP_S: Final = 0.01
"""Between steps if the round trip is shorter."""
GROWTH: Final = 0.05
"""The growth per round trip while the queue is short, as a share of the link's speed."""
DECREASE: Final = 0.7
MOST_SHARE: Final = 0.5
MIN_SHARE: Final = 0.2
FAIR_START: Final = 0.35
"""Of the link's speed: the most that is taken in haste and the least at all while another fills the queue, and where
that begins. Half is fair beside one flow."""
BEYOND_SHARE: Final = 0.5
"""Of TCP's growth, above `MOST_SHARE` of what the link was thought to be worth; only if trains say that it is more."""
CREDIBLE: Final = 3.0
"""Times the speed of the last trains: a busy host bunches some together, which then look faster than any link."""
CROWDED_LOSS: Final = 0.15
"""The excess loss above which the floor falls."""
USED: Final = 0.5
"""The share of the rate that must be in use before the rate may grow (RFC 7661)."""
MEMORY: Final = 1_000
"""The outcomes over which the loss of a link that is not full is remembered."""
HEAVY: Final = 0.5
"""The share of the link from which on unexplained loss counts as our own doing."""
TOLERATED: Final = 0.005
"""Loss that is ignored, because reordering makes some datagrams look lost."""


class Mode(Enum):
    """What decides the rate; the module's docstring draws the transitions."""

    STARTING = "starting"
    TRACKING = "tracking"
    DRAINING = "draining"
    COMPETING = "competing"


class LossTolerant(CongestionController):
    """Delay decides, or TCP's rules beside TCP; random loss never does."""

    def __init__(self, path: PathMeasurement, now: float) -> None:
        self.mode = Mode.STARTING
        self.pacing_rate = INITIAL_WINDOW / INITIAL_RTT_S
        self.congestion_window = 2 * INITIAL_WINDOW
        self._path = path
        self._trip, self._trains = path.round_trip, path.trains
        self._measured = False
        """Whether there was a round trip."""
        self._light = 0
        """The outcomes that the next attribute is measured on, at most `MEMORY`."""
        self._radio_loss = 0.0
        """The loss while the queue is short, which does not depend on our rate."""
        self._excess_loss = 0.0
        self._carried = 0.0
        """The bytes per second that the link carried recently, and the part that radio lost."""
        self._worth = 0.0
        """While competing: the assumed bytes per second of the whole link."""
        self._round = _Round(now)
        self._short_at = now
        """When the queue was last short."""
        self._long_at = now
        self._drained_by = now
        self._held_until = now
        """When the last decrease must have taken effect."""

    def on_packet_sent(self, size: int, now: float) -> None:  # noqa: ARG002 - the interface's
        """See `CongestionController`."""
        self._round.sent += size

    def on_ack(self, arrivals: Sequence[Arrival], rtt_s: float | None, now: float) -> None:  # noqa: ARG002
        """See `CongestionController`; the first round trip, or an eased path's, raises the rate to a window in it."""
        if self._path.eased:
            self._begin(self.pacing_rate, now)
        if self._trip.smoothed_s is not None and (self._path.eased or not self._measured):
            self._measured = True
            if self.mode is Mode.STARTING:
                self.pacing_rate = min(MAX_RATE, max(self.pacing_rate, INITIAL_WINDOW / self._trip.smoothed_s))
        self._round.received += len(arrivals)
        self._round.received_size += sum(arrival.size for arrival in arrivals)

    def on_loss(self, lost: Sequence[float], now: float) -> None:  # noqa: ARG002 - the interface's
        """See `CongestionController`."""
        self._round.lost += len(lost)

    def on_report_end(self, now: float) -> None:
        """Move the rate once per round trip, and the window each time."""
        smoothed_s = self._trip.smoothed_s
        if smoothed_s is not None and now - self._round.began >= max(smoothed_s, LEAST_STEP_S):
            self._step(now)
        self.congestion_window = self._window()

    def on_outage_end(self, now: float) -> None:
        """Begin again, with the known round trip and radio loss."""
        self._begin(INITIAL_WINDOW / max(INITIAL_RTT_S, self._trip.smoothed_s or 0.0), now)

    def _begin(self, rate: float, now: float) -> None:
        self._carried = 0.0
        self.mode = Mode.STARTING
        self.pacing_rate = rate
        self._short_at = self._long_at = now

    def _window(self) -> int:
        """The window: the link's content without queue, the queue's goal, a report's wait and one burst.

        Divided by one minus the loss, because lost datagrams count until the timeout.
        """
        rtt_s = self._trip.least_s
        if rtt_s is None:
            return 2 * INITIAL_WINDOW
        path = self._path
        queue_s = max(self._goal_s, path.queue.value_s) if self.mode is Mode.COMPETING else self._goal_s
        seconds = rtt_s + queue_s + MAX_REPORT_DELAY_S + path.loss.estimate.ratio * self._trip.probe_timeout_s
        return max(DATAGRAM, int(self.pacing_rate * seconds + path.burst_bytes))

    @property
    def _link(self) -> float:
        """The best estimate of the link's speed."""
        return max(self._trains.speed or 0.0, self._carried)

    @property
    def _goal_s(self) -> float:
        return min(QUEUE_GOAL_S, max(SHORT_QUEUE_S, (self._trip.least_s or INITIAL_RTT_S) / 2))

    def _step(self, now: float) -> None:
        """One round trip is over: move the rate."""
        past, self._round = self._round, _Round(now)
        elapsed_s = now - past.began
        queue_s = self._path.queue.value_s
        if queue_s < self._goal_s / 2:
            self._short_at = now
        else:
            self._long_at = now
        used = past.sent >= USED * self.pacing_rate * elapsed_s
        heavy = past.sent >= HEAVY * self._link * elapsed_s
        crowded = self._weigh_loss(past, heavy)
        carried = past.received_size / elapsed_s / max(0.1, 1.0 - self._radio_loss)
        self._carried += (carried - self._carried) / 8
        match self.mode:
            case Mode.STARTING:
                self._start(used)
            case Mode.TRACKING:
                self._track(now, crowded and heavy)
            case Mode.DRAINING:
                self._drain(now)
            case Mode.COMPETING:
                self._compete(now, crowded, used)
        most = MAX_RATE
        if self._trains.speed is not None and self.mode is not Mode.COMPETING:
            most = self._link * (1.0 + HEADROOM * max(0.0, 1.0 - queue_s / self._goal_s))
        self.pacing_rate = max(MIN_RATE, min(self.pacing_rate, most, MAX_RATE))

    def _weigh_loss(self, past: _Round, heavy: bool) -> bool:
        """Whether a round lost more than the radio explains."""
        outcomes = past.received + past.lost
        if not past.received:
            return False
        ratio = past.lost / outcomes
        if not heavy and self._path.queue.value_s <= self._goal_s:
            self._light = min(self._light + outcomes, MEMORY)
            self._radio_loss += min(1.0, outcomes / self._light) * (ratio - self._radio_loss)
        radio = self._radio_loss
        self._excess_loss += min(0.5, outcomes / 300) * (max(0.0, ratio - radio) - self._excess_loss)
        radio = min(0.9, max(radio, TOLERATED))
        deviation = math.sqrt(outcomes * radio * (1.0 - radio) * (2.0 * self._path.loss.estimate.burst - 1.0))
        return past.lost > outcomes * radio + 3.0 * deviation

    def _start(self, used: bool) -> None:
        speed = self._trains.speed
        if self._path.queue.value_s > self._goal_s or (speed is not None and self.pacing_rate >= speed):
            self.mode = Mode.TRACKING
        elif speed is not None or used:
            window = INITIAL_WINDOW / (self._trip.smoothed_s or INITIAL_RTT_S)
            self.pacing_rate = max(2 * self.pacing_rate, window)

    def _track(self, now: float, overflowing: bool) -> None:
        rtt_s = self._trip.smoothed_s or INITIAL_RTT_S
        queue_s = self._path.queue.value_s
        if overflowing:
            self.pacing_rate *= DECREASE
        elif queue_s <= self._goal_s:
            room = 1.0 - queue_s / self._goal_s
            self.pacing_rate += room * max(GROWTH * self._link, DATAGRAM / rtt_s)
        elif now >= self._held_until:
            over_s = queue_s - self._goal_s
            self._held_until = now + rtt_s
            shrunk = 1.0 - min(1.0 - DECREASE, over_s / (over_s + rtt_s))
            self.pacing_rate = max(min(self.pacing_rate, self._link) * shrunk, MIN_SHARE * self._link)
        if now - self._short_at > max(DRAIN_AFTER_S, 5 * rtt_s):
            self.mode = Mode.DRAINING
            self.pacing_rate /= 2
            self._drained_by = now + 2 * queue_s + 2 * rtt_s + DRAIN_MARGIN_S

    def _drain(self, now: float) -> None:
        if self._path.queue.value_s < self._goal_s / 2:
            self.mode = Mode.TRACKING
            self.pacing_rate *= 2
        elif now >= self._drained_by:
            self.mode = Mode.COMPETING
            self._worth = self._link
            self.pacing_rate = max(2 * self.pacing_rate, FAIR_START * self._worth)

    def _compete(self, now: float, crowded: bool, used: bool) -> None:
        speed = self._trains.speed
        if speed is not None:
            self._worth = min(self._worth, CREDIBLE * speed)
        if now - self._long_at > COMPETING_EXIT_S:
            self.mode = Mode.TRACKING
        elif crowded:
            if self.pacing_rate <= MIN_SHARE * self._worth:
                self._worth *= DECREASE
            self.pacing_rate *= DECREASE
        elif used:
            self.pacing_rate += DATAGRAM / (self._trip.smoothed_s or INITIAL_RTT_S)
        most = MOST_SHARE * self._worth
        if self.pacing_rate > most:
            grown = speed is None or self._worth < speed
            self.pacing_rate = most + BEYOND_SHARE * (self.pacing_rate - most) if grown else most
            self._worth = self.pacing_rate / MOST_SHARE
        if self._excess_loss < CROWDED_LOSS:
            self.pacing_rate = max(self.pacing_rate, MIN_SHARE * max(self._worth, self._link))


@dataclass(slots=True)
class _Round:
    began: float
    sent: int = 0
    received: int = 0
    received_size: int = 0
    lost: int = 0
