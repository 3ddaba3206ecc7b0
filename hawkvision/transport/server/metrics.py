"""The metrics of a datagram server, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class DatagramCounts:
    """The counts of a datagram server since its start, and its present sessions."""

    images: Mapping[str, int]
    """By outcome: complete, partial, cancelled, and the transport's refusals."""
    sessions: int
    dropped_datagrams: Mapping[str, int]
    """By reason."""
    refused_callers: Mapping[str, int]
    """By reason."""
    received_bytes: int
    """QUIC included."""
    sent_bytes: int
    """Sealed datagrams."""


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=("reason",))
    for reason, n in sorted(counts.items()):
        family.add_metric((reason,), n)
    return family


class DatagramServerCounts(Collector):
    """Collects a datagram server's counts at each scrape."""

    def __init__(self, prefix: str, read: Callable[[], DatagramCounts]) -> None:
        self._prefix = prefix
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        counts, prefix = self._read(), f"{self._prefix}_datagram"
        images = CounterMetricFamily(
            f"{prefix}_images", "Images that came as datagrams, by what came of them", labels=("outcome",)
        )
        for outcome, n in sorted(counts.images.items()):
            images.add_metric((outcome,), n)
        yield images
        yield GaugeMetricFamily(f"{prefix}_sessions", "Callers connected for datagrams", counts.sessions)
        yield _by_reason(f"{prefix}_dropped_datagrams", "Datagrams of strangers, or broken", counts.dropped_datagrams)
        yield _by_reason(
            f"{prefix}_refused_callers", "Callers that were not let in for datagrams", counts.refused_callers
        )
        yield CounterMetricFamily(f"{prefix}_received_bytes", "Bytes of datagrams received", counts.received_bytes)
        yield CounterMetricFamily(f"{prefix}_sent_bytes", "Bytes of sealed datagrams sent", counts.sent_bytes)
