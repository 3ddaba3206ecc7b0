"""The interface of a congestion controller: the events that it gets, and the rate and window that it sets.

                        on_packet_sent, on_ack, on_loss, on_report_end, on_outage_end
    RateController ────────────────────────────────────────────────────────────────────► CongestionController
         │  token bucket, timeouts, circuit breaker                                            │
         └────────────────────────── pacing_rate, congestion_window ◄──────────────────────────┘

`PathMeasurement` is shared: a controller reads round trips, losses, queue and the bottleneck's speed there, already up
to date when it is told. Safety that no controller may get wrong lies above it, in `RateController`: silence halves any
rate and opens the circuit breaker, and bursts are bounded. `registry` names the controllers; `tests/hawkvision/
transport/congestion/test_conformance.py` is what each of them must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hawkvision.transport.congestion.packet_trains import Arrival
from hawkvision.transport.congestion.path_measurement import PathMeasurement


class CongestionController(ABC):
    """Decides how fast datagrams leave on one path. `now` is in seconds of a monotonic clock.

    The two results are read after `__init__`, `on_report_end` and `on_outage_end`, not for every datagram.
    """

    pacing_rate: float
    """Bytes per second that may leave over time; above 0, at most `MAX_RATE`."""
    congestion_window: int
    """Bytes that may be in flight; at least one datagram."""

    @abstractmethod
    def __init__(self, path: PathMeasurement, now: float) -> None:
        """Begin on an unknown path."""

    @abstractmethod
    def on_packet_sent(self, size: int, now: float) -> None:
        """A datagram of `size` bytes leaves; `path.in_flight` does not count it yet."""

    @abstractmethod
    def on_ack(self, arrivals: Sequence[Arrival], rtt_s: float | None, now: float) -> None:
        """A report names datagrams for the first time, in order of arrival; `rtt_s` is free of the peer's delay."""

    @abstractmethod
    def on_loss(self, lost: Sequence[float], now: float) -> None:
        """Datagrams that left at these times are lost."""

    @abstractmethod
    def on_report_end(self, now: float) -> None:
        """All events of one report have been passed: decide."""

    @abstractmethod
    def on_outage_end(self, now: float) -> None:
        """A report came after the circuit breaker had opened: begin again, because the path may have changed."""


CongestionFactory: TypeAlias = Callable[[PathMeasurement, float], CongestionController]
"""Makes a path's controller from the present time; a controller's class is one."""
