"""The metrics of a datagram server. They are read when Prometheus asks, so that no datagram pays for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class DatagramCounts:
    """What a datagram server has counted since it was opened, and its sessions now."""

    images: Mapping[str, int]
    """By what came of them: complete, partial, cancelled, and the transport's refusals."""
    sessions: int
    dropped_datagrams: Mapping[str, int]
    """By why."""
    refused_callers: Mapping[str, int]
    """By why their hello was not welcome."""
    received_bytes: int
    sent_bytes: int


def _by_reason(name: str, text: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=("reason",))
    for reason, n in sorted(counts.items()):
        family.add_metric((reason,), n)
    return family


class DatagramServerCounts(Collector):
    """Reads a datagram server's counts when Prometheus asks, so that no datagram pays for it."""

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
