"""When a datagram may leave: rate control that bursts a picture, bears random loss, and shares a queue.

Pictures are small and hurried: 1 to 40 datagrams, a few to 50 times a second. What must not happen is a picture that
waits at its sender for a window to open. What must not happen either is a queue in the network that grows because we
do not listen (RFC 8085 §3.1). Four ideas, each with its source:

*Two speeds.* The bottleneck's speed is read off one picture: datagrams that leave back to back arrive spaced by it
(packet-train dispersion; Dovrolis, Ramanathan and Moore, INFOCOM 2001). It sets how much may leave at once:
`QUEUE_GOAL_S` of the link's time. The sustained rate fills the bucket again, and is what shares the link. An
application-limited sender, which ours nearly always is, feels only the first.

*Delay says full, loss does not.* One-way delay above its least in ten seconds is queue (LEDBAT, RFC 6817; SCReAM,
RFC 8298; NADA, RFC 8698). Clocks need not agree, for their offset cancels, and 50 ppm of drift make 0.5 ms in ten
seconds. Of the delays in the last tenth of a second the least counts, because a queue that stands is everybody's
problem and one picture's own burst is nobody's (BBR; Cardwell et al., ACM Queue 2016). The rate grows while the
standing queue is below its goal, the slower the nearer, and shrinks above it. What is lost while the queue is short and
the link half empty is radio's affair. Only more than that, lost while we take `HEAVY` of the link or more, is held for
a queue too small to be seen by its delay. As in BBR, the bytes in flight are also bounded by the link's speed times the
round trip plus the goal, so that even a wrong rate makes a bounded queue.

        q = standing queue          one step per round trip
        ┌──────────┐ capacity known, or q > goal ┌──────────┐ no short queue for DRAIN_AFTER ┌──────────┐
        │ STARTING ├────────────────────────────►│ TRACKING ├───────────────────────────────►│ DRAINING │
        │ rate × 2 │                             │ delay    │◄───────────────────────────────┤ rate / 2 │
        └──────────┘                             └──────────┘   q fell: the queue was ours   └────┬─────┘
                                                       ▲  q stays short     ┌───────────┐         │ q stayed:
                                                       └────────────────────┤ COMPETING ◄─────────┘ another's
                                                                            │ AIMD      │
                                                                            └───────────┘
*Competing.* A TCP flow fills a drop-tail queue whatever we do, and a pure delay controller would yield to it until
nothing is left. As in Copa (Arun and Balakrishnan, NSDI 2018) the sender finds out by draining: if the queue stays
though we hold back, it is another's, and then the only fair language is TCP's: one datagram more each round trip, 0.7
of the rate after a loss (CUBIC's factor, RFC 9438), counting only loss beyond what the link loses with a short queue. A
floor of `LEAST_SHARE` of the link keeps a sender alive beside BBR, which hears no loss; it falls when excess loss says
that many keep to such a floor (RFC 8085 §3.1: congestion collapse comes before any one sender's comfort). What the link
is worth stays what it was before: another's datagrams between ours make trains tell less than the link's speed, and
half of a half, and so on, is nothing. Losses at the floor say that it became slower; where trains say that it is
faster, that is believed in small steps. Draining also shows the path without queue, so that the base of the delay stays
true on a saturated link.

*Silence.* Nothing reported for a second probe timeout halves the rate, for a third once more; after three and a second
of silence the circuit breaker opens: one datagram a round trip or second until a report comes (RFC 9002 §7.6, RFC 8085
§3.1.10). Then it starts afresh. Not sooner, because at 50 % loss both ways the reports of a picture fail now and then.

Before any report, one initial window leaves at once (RFC 6928), and then as much per initial round trip (RFC 9002);
the first round trip that is measured raises that to as much per round trip, if it is the shorter one. Probes alone
bring that: without it, the first picture on a quick path would be planned for a third of a megabit a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hawkvision.transport.congestion.path_measurement import (
    GRANULARITY_S,
    INITIAL_RTT_S,
    MAX_RATE,
    MAX_REPORT_DELAY_S,
    Arrival,
    LossEstimate,
    LossMeter,
    RoundTrip,
    StandingQueue,
    Trains,
)

__all__ = ["Arrival", "LossEstimate", "Mode", "RateController"]

DATAGRAM: Final = 1_200
"""Bytes; the largest that is sent."""
INITIAL_WINDOW: Final = 12 * DATAGRAM
"""Bytes that leave at once on an unknown path: 14,400, as the ten segments of RFC 6928."""
QUEUE_GOAL_S: Final = 0.025
"""Standing queue that is aimed at on a full link, and the link time that may leave at once. NADA takes 10 ms and SCReAM
60; below 20, radio schedulers' own delays look like a queue."""
SHORT_QUEUE_S: Final = 0.010
"""A queue no longer than this has been drained: the jitter that a minimum over a tenth of a second leaves."""
MOST_BURST: Final = 40 * DATAGRAM
LEAST_BURST: Final = 6 * DATAGRAM
"""Depth of the token bucket: one picture, of the largest kind; at least what a train's spacing can be read off."""
MIN_RATE: Final = DATAGRAM / 1.0
"""Bytes per second: a datagram a second."""
HEADROOM: Final = 0.1
"""Above the measured speed, less as the queue nears its goal: a sender that is never faster than its estimate never
learns that the link became faster."""
STANDING_S: Final = 0.05
DRAIN_AFTER_S: Final = 1.0
"""A queue that was not short for so long is asked whose it is; that costs some 3 % of a full link."""
COMPETING_EXIT_S: Final = 0.5
"""Of short queue, before delay rules again: a CUBIC flow's queue is short for less after each of its losses."""
GROWTH: Final = 0.05
"""Of the link's speed, per round trip, while the queue is short."""
DECREASE: Final = 0.7
MOST_SHARE: Final = 0.5
LEAST_SHARE: Final = 0.2
FAIR_START: Final = 0.35
"""Of the link's speed: the most that is taken in haste and the least at all while another fills the queue, and where
that begins. Half is fair beside one flow."""
BEYOND_SHARE: Final = 0.5
"""Of TCP's growth, above `MOST_SHARE` of what the link was thought to be worth; only if trains say that it is more."""
CREDIBLE: Final = 3.0
"""Times the speed of the last trains: a busy host bunches some together, which then look faster than any link."""
CROWDED_LOSS: Final = 0.15
"""Excess loss above which the floor is given up."""
BREAKER_SILENCES: Final = 3
BREAKER_S: Final = 1.0
"""Silences, and seconds of silence, that open the circuit breaker; at 50 % loss both ways reports fail now and then."""
MOST_HALVINGS: Final = 2
"""Of the rate by silences before the breaker opens."""
USED: Final = 0.5
"""Share of the rate that must have been sent before a round trip says that more would fit (RFC 7661)."""
MEMORY: Final = 1_000
"""Outcomes over which the loss of a link that is not full is remembered."""
HEAVY: Final = 0.5
"""Share of the link from which on unexplained loss is held for our own doing."""
TOLERATED: Final = 0.005
"""Loss that says nothing: reordering makes some datagrams look lost."""
PROBE_TRAIN: Final = 6 * DATAGRAM
PROBE_EVERY_S: Final = 1.0
LONGEST_PROBE_S: Final = 0.1
"""A saturated sender, paced at its share, no longer sees the link's speed. So once a second it lets tokens for a short
train gather, for a tenth of a second at most."""
TRAIN_GAP_S: Final = 0.002


class Mode(Enum):
    """What rules the sustained rate; the file's docstring draws the transitions."""

    STARTING = "starting"
    TRACKING = "tracking"
    DRAINING = "draining"
    COMPETING = "competing"


class RateController:
    """When datagrams may leave on one path. No clock, no sockets; `now` is seconds of a clock that never goes back.

    Its owner calls `sent` for every datagram that asks for a report, `reported` for every report and every loss it
    finds, and `silent` once per timeout without any report.
    """

    def __init__(self, now: float) -> None:
        self.mode = Mode.STARTING
        self._rate = INITIAL_WINDOW / INITIAL_RTT_S
        self._tokens = float(INITIAL_WINDOW)
        self._filled_at = now
        self._trains = Trains()
        self._trip = RoundTrip()
        self._queue = StandingQueue()
        self._loss = LossMeter()
        self._light = 0
        """Outcomes that the next line rests on, at most `MEMORY`."""
        self._radio_loss = 0.0
        """Share that is lost while the queue is short: what no rate of ours would change."""
        self._excess_loss = 0.0
        self._silences = 0
        self._heard_at = now
        self._broken = False
        """Whether the circuit breaker is open."""
        self._carried = 0.0
        """Bytes per second that the link carried of late, and what radio lost of them."""
        self._worth = 0.0
        """While competing: bytes per second that the link is thought to carry for all."""
        self._round = _Round(now)
        self._short_at = now
        """When the queue was last seen short."""
        self._long_at = now
        self._drained_by = now
        self._gathering = False
        self._probed_at = now
        self._held_until = now
        """Until then the last decrease has not shown."""

    @property
    def rate_bytes_s(self) -> float:
        """What may be sent for long, bytes per second."""
        if self._broken:
            return DATAGRAM / max(1.0, self._trip.smoothed_s or 0.0)
        return max(MIN_RATE, self._rate / (1 << min(max(0, self._silences - 1), MOST_HALVINGS)))

    @property
    def link_bytes_s(self) -> float | None:
        """The bottleneck's speed, bytes per second; None before a train of datagrams was seen."""
        return self._trains.speed

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip; None before the first sample."""
        return self._trip.smoothed_s

    @property
    def latest_rtt_s(self) -> float | None:
        """The latest sample, or the smoothed round trip if that is longer; None before the first sample."""
        smoothed_s = self._trip.smoothed_s
        return None if smoothed_s is None else max(smoothed_s, self._trip.latest_s)

    @property
    def newest_rtt_s(self) -> float | None:
        """The latest sample; None before the first. Where samples are seldom, what is smoothed is of another link."""
        return None if self._trip.smoothed_s is None else self._trip.latest_s

    @property
    def min_rtt_s(self) -> float | None:
        """Least round trip of the last ten seconds; None before the first sample."""
        return self._trip.least_s

    @property
    def queue_s(self) -> float:
        """The queue that stands at the bottleneck, without the sender's own bursts."""
        return self._queue.value_s

    @property
    def loss(self) -> LossEstimate:
        """What the path loses."""
        return self._loss.estimate

    @property
    def backlog_allowed(self) -> int:
        """Bytes that may be in flight unreported.

        The link's content without queue, the queue that is aimed at, what waits in a report, one burst; and what was
        lost, because nobody knows of it before the timeout.
        """
        if self._broken:
            return DATAGRAM
        rtt_s = self._trip.least_s
        if rtt_s is None:
            return 2 * INITIAL_WINDOW
        queue_s = max(self._goal_s, self.queue_s) if self.mode is Mode.COMPETING else self._goal_s
        seconds = rtt_s + queue_s + MAX_REPORT_DELAY_S + self._loss.estimate.ratio * self._trip.patience_s
        return int(self.rate_bytes_s * seconds + self._depth)

    def timeout_s(self) -> float:
        """After which a datagram of which nothing was reported counts as lost (RFC 9002 §6.2.1)."""
        return self._trip.timeout_s()

    def carry_s(self, size: float, now: float) -> float:
        """How long so many bytes take that leave from now on: the link's time, and for more than a burst our own."""
        speed = self._trains.speed_now
        if speed is None or self._broken:
            return size / self.rate_bytes_s
        self._fill(now)
        return max(size / speed, (size - max(0.0, self._tokens)) / self.rate_bytes_s)

    def repair_s(self) -> float:
        """How long it may take until what is asked for again is there."""
        return self._trip.reply_s

    def sent(self, size: int, now: float) -> None:
        """A datagram of `size` bytes left; it may have left before `release_at`, then the next ones wait longer."""
        self._fill(now)
        self._tokens = max(self._tokens - size, -self._depth)
        self._trains.sent(size, now, max(TRAIN_GAP_S, 1.5 * DATAGRAM / self._rate))
        self._round.sent += size

    def release_at(self, size: int, now: float) -> float:
        """The earliest time at which a datagram of `size` bytes may leave; `now` if at once.

        Ask again then, and after every report: too much in flight ends by a report or a timeout, not by waiting, and
        the time returned is then only when to ask again.
        """
        self._fill(now)
        missing = self._needed(size, now) - self._tokens
        at = now + missing / self.rate_bytes_s if missing > 0.0 else now
        excess = self._trains.in_flight + size - self.backlog_allowed
        # The open breaker's one datagram a second must leave whatever is out: nothing else can end the silence.
        if excess > 0.0 and self._trains.in_flight > 0.0 and not self._broken:
            at = max(at, now + max(GRANULARITY_S, min(excess, size) / self.rate_bytes_s))
        return at

    def _needed(self, size: int, now: float) -> float:
        """Tokens that must be there before a datagram leaves: its own, or those of a short train."""
        needed = min(float(size), self._depth)
        if self._tokens >= needed and not self._gathering:
            return needed
        seen_at = self._trains.spread_at
        self._gathering = seen_at is not None or self._trip.smoothed_s is not None
        self._gathering &= now - max(seen_at or 0.0, self._probed_at) > PROBE_EVERY_S
        if not self._gathering:
            return needed
        train = min(float(PROBE_TRAIN), self._depth, max(needed, LONGEST_PROBE_S * self.rate_bytes_s))
        if self._tokens >= train:
            self._gathering, self._probed_at = False, now
        return train

    def reported(
        self,
        arrivals: Sequence[Arrival],
        lost: Sequence[float],
        rtt_s: float | None,
        now: float,
        runs: int = 0,
    ) -> None:
        """Learn what became of datagrams.

        Arrivals are newly reported, in order of arrival; `lost` are the times when datagrams newly found lost were
        sent, `runs` how many runs begin with them; `rtt_s` is without the peer's delay.
        """
        self._fill(now)
        if arrivals:
            self._heard(now)
        elif lost and now - self._heard_at > self.timeout_s():
            self._trip.gave_up()
        if rtt_s is not None and rtt_s > 0.0:
            first = self._trip.smoothed_s is None
            self._trip.observe(rtt_s, now)
            if first and self.mode is Mode.STARTING:
                self._rate = min(MAX_RATE, max(self._rate, INITIAL_WINDOW / rtt_s))
        self._queue.observe(arrivals, max(STANDING_S, self._trip.smoothed_s or 0.0), now)
        self._loss.observe(len(arrivals), len(lost), runs, now)
        for arrival in arrivals:
            self._trains.arrived(arrival)
        for sent_at in lost:
            self._trains.lost(sent_at)
        self._trains.settle(now, 2 * self.timeout_s())
        self._round.received += len(arrivals)
        self._round.received_size += sum(arrival.size for arrival in arrivals)
        self._round.lost += len(lost)
        if self._trip.smoothed_s is not None and now - self._round.began >= max(self._trip.smoothed_s, 0.01):
            self._step(now)

    def found(self, received: int, runs: int) -> None:
        """So many datagrams that were reported as lost did arrive, and so many whole runs of them.

        Only the share that is lost is put right: what was sent again and more slowly meanwhile is over.
        """
        self._loss.found(received, runs)

    def silent(self, now: float) -> None:
        """Nothing was reported for a probe timeout although datagrams are out."""
        self._fill(now)
        self._silences += 1
        if self._silences >= BREAKER_SILENCES and now - self._heard_at >= BREAKER_S:
            self._broken = True
        self._tokens = min(self._tokens, self._depth)

    @property
    def _depth(self) -> float:
        """Bytes that may leave at once: one picture, and no more than the link passes in `QUEUE_GOAL_S`."""
        if self._broken:
            return DATAGRAM
        speed = self._trains.speed
        if speed is None:
            return INITIAL_WINDOW
        return min(MOST_BURST, max(LEAST_BURST, speed * QUEUE_GOAL_S))

    def _fill(self, now: float) -> None:
        elapsed = now - self._filled_at
        if elapsed <= 0.0:  # as for all of a burst but the first
            return
        self._filled_at = now
        self._tokens = min(self._depth, self._tokens + elapsed * self.rate_bytes_s)

    def _heard(self, now: float) -> None:
        if self._broken:
            self._broken = False
            self._trains.forget()
            self._carried = 0.0
            self.mode = Mode.STARTING
            self._rate = INITIAL_WINDOW / max(INITIAL_RTT_S, self._trip.smoothed_s or 0.0)
            self._short_at = self._long_at = now
        self._trip.heard()
        self._silences = 0
        self._heard_at = now

    @property
    def _link(self) -> float:
        """The best that is known of the link's speed."""
        return max(self._trains.speed or 0.0, self._carried)

    @property
    def _goal_s(self) -> float:
        return min(QUEUE_GOAL_S, max(SHORT_QUEUE_S, (self._trip.least_s or INITIAL_RTT_S) / 2))

    def _step(self, now: float) -> None:
        """One round trip is over: move the rate."""
        past, self._round = self._round, _Round(now)
        elapsed_s = now - past.began
        if self.queue_s < self._goal_s / 2:
            self._short_at = now
        else:
            self._long_at = now
        used = past.sent >= USED * self._rate * elapsed_s
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
            most = self._link * (1.0 + HEADROOM * max(0.0, 1.0 - self.queue_s / self._goal_s))
        self._rate = max(MIN_RATE, min(self._rate, most, MAX_RATE))

    def _weigh_loss(self, past: _Round, heavy: bool) -> bool:
        """Whether more was lost in a round than what radio explains."""
        outcomes = past.received + past.lost
        if not past.received:
            return False
        ratio = past.lost / outcomes
        if not heavy and self.queue_s <= self._goal_s:
            self._light = min(self._light + outcomes, MEMORY)
            self._radio_loss += min(1.0, outcomes / self._light) * (ratio - self._radio_loss)
        radio = self._radio_loss
        self._excess_loss += min(0.5, outcomes / 300) * (max(0.0, ratio - radio) - self._excess_loss)
        radio = min(0.9, max(radio, TOLERATED))
        deviation = math.sqrt(outcomes * radio * (1.0 - radio) * (2.0 * self._loss.estimate.burst - 1.0))
        return past.lost > outcomes * radio + 3.0 * deviation

    def _start(self, used: bool) -> None:
        speed = self._trains.speed
        if self.queue_s > self._goal_s or (speed is not None and self._rate >= speed):
            self.mode = Mode.TRACKING
        elif speed is not None or used:
            window = INITIAL_WINDOW / (self._trip.smoothed_s or INITIAL_RTT_S)
            self._rate = max(2 * self._rate, window)

    def _track(self, now: float, overflowing: bool) -> None:
        rtt_s = self._trip.smoothed_s or INITIAL_RTT_S
        if overflowing:
            self._rate *= DECREASE
        elif self.queue_s <= self._goal_s:
            room = 1.0 - self.queue_s / self._goal_s
            self._rate += room * max(GROWTH * self._link, DATAGRAM / rtt_s)
        elif now >= self._held_until:
            over_s = self.queue_s - self._goal_s
            self._held_until = now + rtt_s
            self._rate = min(self._rate, self._link) * (1.0 - min(1.0 - DECREASE, over_s / (over_s + rtt_s)))
            self._rate = max(self._rate, LEAST_SHARE * self._link)
        if now - self._short_at > max(DRAIN_AFTER_S, 5 * rtt_s):
            self.mode = Mode.DRAINING
            self._rate /= 2
            self._drained_by = now + 2 * self.queue_s + 2 * rtt_s + STANDING_S

    def _drain(self, now: float) -> None:
        if self.queue_s < self._goal_s / 2:
            self.mode = Mode.TRACKING
            self._rate *= 2
        elif now >= self._drained_by:
            self.mode = Mode.COMPETING
            self._worth = self._link
            self._rate = max(2 * self._rate, FAIR_START * self._worth)

    def _compete(self, now: float, crowded: bool, used: bool) -> None:
        speed = self._trains.speed
        if speed is not None:
            self._worth = min(self._worth, CREDIBLE * speed)
        if now - self._long_at > COMPETING_EXIT_S:
            self.mode = Mode.TRACKING
        elif crowded:
            if self._rate <= LEAST_SHARE * self._worth:
                self._worth *= DECREASE
            self._rate *= DECREASE
        elif used:
            self._rate += DATAGRAM / (self._trip.smoothed_s or INITIAL_RTT_S)
        most = MOST_SHARE * self._worth
        if self._rate > most:
            grown = speed is None or self._worth < speed
            self._rate = most + BEYOND_SHARE * (self._rate - most) if grown else most
            self._worth = self._rate / MOST_SHARE
        if self._excess_loss < CROWDED_LOSS:
            self._rate = max(self._rate, LEAST_SHARE * max(self._worth, self._link))


@dataclass(slots=True)
class _Round:
    began: float
    sent: int = 0
    received: int = 0
    received_size: int = 0
    lost: int = 0
