"""Decides at run time which share of images goes to the FPGA: the planned schedule, corrected by observations.

*Schedule.* It gives the best share per arrival rate. The rate is an average over `RATE_TIME_S`, restarted when a step
differs from it by more than chance explains.

*Feedback.* Replies that follow each other while images wait show the device's true speed; a device κ times slower than
modelled at rate r is treated as one at rate κr. If clearly more than one image in a hundred is late, the share shrinks
by `TRIM_DOWN`; after `RETRY_AFTER_S` with hardly any late ones it grows by `TRIM_UP`. A growth that must be taken back
doubles that time, so that the share settles.

*Hysteresis.* The share moves when the target is `DEAD_BAND` away, at most `STEP_DOWN` or `STEP_UP` per step. Down is
faster, because a queue that is too long grows with every image.

*Failure.* The share drops to 0, and the FPGA is probed after `FIRST_PROBE_S`, twice that, and so on to `LAST_PROBE_S`.
After a correct answer the share rises from 0.

The controller has no clock, randomness or threads: `step` receives observations and the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fpga.offload.model import ByRate

STEP_S: Final = 0.25
"""Seconds between two decisions."""
RATE_TIME_S: Final = 2.0
"""Time constant of the arrival rate's average."""
SURPRISE: Final = 4.0
"""Standard deviations of a Poisson count beyond which the rate's average restarts."""
SPEED_IMAGES: Final = 50.0
"""Images over which the device's speed is averaged."""
SPEED_BAND: Final = 0.08
"""Relative change of the device's speed that is acted upon."""
SPEED_RANGE: Final = (0.5, 20.0)
LATE_SHARE: Final = 0.01
"""Share of late images that a 99th percentile allows."""
LATE_SLACK: Final = 1.5
LATE_BURST: Final = 8
"""Late images beyond `LATE_SLACK` times the allowed number plus `LATE_BURST` are not chance; they come in bursts."""
RETRY_AFTER_S: Final = 5.0
MAX_RETRY_AFTER_S: Final = 64 * RETRY_AFTER_S
TRIM_DOWN: Final = 0.85
TRIM_UP: Final = 1.15
LEAST_TRIM: Final = 0.05
"""Never 0, because without images nothing is observed."""
DEAD_BAND: Final = 0.03
STEP_DOWN: Final = 0.25
STEP_UP: Final = 0.05
FIRST_PROBE_S: Final = 1.0
LAST_PROBE_S: Final = 30.0


@dataclass(slots=True)
class OffloadCounts:
    """Sums over some time."""

    arrivals: int = 0
    fpga: int = 0
    """Images answered by the FPGA."""
    late: int = 0
    """Images that it answered after the deadline."""
    spaced: int = 0
    """Images that it answered while it had been busy since the reply before."""
    spacing_s: float = 0.0
    """Sum of the times from the reply before to each of these."""
    cpu: int = 0
    """Images answered by the CPU, for any reason."""
    no_place: int = 0
    """Images of the CPU that were drawn for the FPGA while it was full."""
    failures: int = 0
    """Errors and wrong answers of the FPGA, those of probes included."""


class ShareController:
    """Decides the share.

    Args:
        schedule: the planned share by arrival rate.
        service_s: the modelled time from one image to the next.
    """

    def __init__(self, schedule: ByRate, service_s: float) -> None:
        self._schedule, self._service_s = schedule, service_s
        self.share = self.rate_hz = 0.0
        self.slowness = self._acted_slowness = 1.0
        """κ, as measured; acted upon in steps of `SPEED_BAND`."""
        self.failed = False
        self._trim = 1.0
        self._then: float | None = None
        self._moving = False
        self._steps = 0
        """Steps since the rate's average restarted."""
        self._seen = self._late = 0
        self._watched_s = 0.0
        self._retry_after_s, self._grown = RETRY_AFTER_S, False
        self._probe_at, self._probe_after_s = math.inf, FIRST_PROBE_S

    def due(self, now: float) -> bool:
        """Whether it is time for a step."""
        return self._then is None or now - self._then >= STEP_S

    def step(self, seen: OffloadCounts, now: float) -> float:
        """Take a step and return the new share.

        Args:
            seen: the sums since the last step.
            now: seconds of any monotonic clock.
        """
        elapsed_s = now - self._then if self._then is not None else 0.0
        self._then = now
        if elapsed_s > 0:
            self._watch_rate(seen.arrivals, elapsed_s)
        elif self._steps == 0:
            self.share = self._schedule.at(0.0)
        self._watch_speed(seen)
        self._watch_deadline(seen, elapsed_s)
        if not self.failed and self._steps:
            self._move()
        return self.share

    def fail(self, now: float) -> None:
        """Stop sending to the FPGA until a probe succeeds."""
        if not self.failed:
            self._probe_after_s = FIRST_PROBE_S
        self.failed, self.share, self._moving = True, 0.0, True
        self._probe_at = now + self._probe_after_s

    def probe_due(self, now: float) -> bool:
        """Whether to probe a failed FPGA now; true once for each probe."""
        if not self.failed or now < self._probe_at:
            return False
        self._probe_after_s = min(LAST_PROBE_S, self._probe_after_s * 2)
        self._probe_at = now + self._probe_after_s
        return True

    def recover(self) -> None:
        """Resume after a successful probe."""
        self.failed = False
        self._probe_at = math.inf

    def _watch_rate(self, arrivals: int, elapsed_s: float) -> None:
        found = arrivals / elapsed_s
        # A deviation of at least one image, so that the first image after a pause is no surprise.
        deviation = math.sqrt(max(self.rate_hz, 1 / elapsed_s) / elapsed_s)
        if self._steps and abs(found - self.rate_hz) > SURPRISE * deviation:
            self._steps = 0
        self._steps += 1
        weight = max(1 / self._steps, 1 - math.exp(-elapsed_s / RATE_TIME_S))
        self.rate_hz += weight * (found - self.rate_hz)

    def _watch_speed(self, seen: OffloadCounts) -> None:
        if not seen.spaced:
            return
        found = seen.spacing_s / seen.spaced / self._service_s
        weight = 1 - math.exp(-seen.spaced / SPEED_IMAGES)
        self.slowness += weight * (found - self.slowness)
        self.slowness = min(max(self.slowness, SPEED_RANGE[0]), SPEED_RANGE[1])
        if abs(self.slowness / self._acted_slowness - 1) > SPEED_BAND:
            # Late images may have been caused by this, so the trim starts again.
            self._acted_slowness, self._trim = self.slowness, 1.0
            self._forget()

    def _watch_deadline(self, seen: OffloadCounts, elapsed_s: float) -> None:
        self._seen += seen.fpga
        self._late += seen.late
        self._watched_s += elapsed_s if seen.fpga else 0.0
        allowed = LATE_SHARE * self._seen
        if self._late > LATE_SLACK * allowed + LATE_BURST:
            self._trim = max(LEAST_TRIM, self._trim * TRIM_DOWN)
            if self._grown:
                self._retry_after_s, self._grown = min(MAX_RETRY_AFTER_S, self._retry_after_s * 2), False
            self._forget()
        elif self._watched_s >= self._retry_after_s:
            if self._late <= allowed / 2 and self._trim < 1:
                self._trim, self._grown = min(1.0, self._trim * TRIM_UP), True
            self._forget()

    def _forget(self) -> None:
        """Restart the count of late images, because those before a change say nothing about the time after it."""
        self._seen = self._late = 0
        self._watched_s = 0.0

    def _move(self) -> None:
        target = self._schedule.at(self.rate_hz * self._acted_slowness) * self._trim
        if not self._moving and abs(target - self.share) <= DEAD_BAND:
            return
        before = self.share
        self.share = min(max(target, self.share - STEP_DOWN), self.share + STEP_UP)
        self._moving = self.share != target
        if abs(self.share - before) > DEAD_BAND:
            self._forget()
