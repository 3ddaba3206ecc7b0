"""Prometheus metrics of an edge node, and collectors that both servers share.

Labels take their values from closed sets (tasks, stages, tiers, reasons, status codes), never from a caller's text, so
that no caller can grow the number of series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hawkvision.core import __version__

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)


RECEIVED_BUCKETS = (0.1, 0.25, 0.45, 0.6, 0.75, 0.9, 0.999, 1.0)
"""Share of an image that arrived: the bounds between the conditions of a profile, and some below."""


class KeyRequestsCollector(Collector):
    """Requests by key and outcome, read at each scrape. Names are those of the configured keys, and a few more."""

    def __init__(self, name: str, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._name = name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The metric family of one scrape."""
        family = CounterMetricFamily(
            self._name, "Requests by the name of their key and whether they were let in", labels=("key", "outcome")
        )
        for labels, n in sorted(self._read().items()):
            family.add_metric(labels, n)
        yield family


class TlsCollector(Collector):
    """State of a server's TLS, read at each scrape.

    `read` gives the expiry of its certificate, in seconds since 1970, and the number of failed handshakes.
    """

    def __init__(self, prefix: str, read: Callable[[], tuple[float, int]]) -> None:
        self._prefix = prefix
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The metric families of one scrape."""
        expires, handshakes_failed = self._read()
        yield GaugeMetricFamily(
            f"{self._prefix}_tls_certificate_expiry_timestamp_seconds",
            "When the server's certificate expires",
            expires,
        )
        yield CounterMetricFamily(
            f"{self._prefix}_tls_handshake_failures", "Callers whose TLS handshake failed", handshakes_failed
        )


@runtime_checkable
class Instrumented(Protocol):
    """A part of a server with its own metrics: a backend, a policy, a transport."""

    def collectors(self) -> Iterable[Collector]:
        """The collectors to register; called once."""
        ...


def build_info(registry: CollectorRegistry, prefix: str, text: str) -> Gauge:
    """Register `<prefix>_build_info{version, task, backend}`, whose value is 1 for what a process runs."""
    return Gauge(f"{prefix}_build_info", text, ("version", "task", "backend"), registry=registry)


class EdgeMetrics:
    """The metrics of one edge node, in their own registry."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._count_requests()
        self._count_guarantees()
        self._count_images()
        self._count_escalations()
        self._build_info = build_info(self.registry, "hawkvision", "What the node is and runs")

    def describe(self, task: str, backend: str) -> None:
        """Publish what the node runs for a task, once that is known."""
        self._build_info.labels(__version__, task, backend).set(1.0)

    def watch_keys(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Publish the requests by key."""
        self.registry.register(KeyRequestsCollector("hawkvision_key_requests", read))

    def watch_tls(self, read: Callable[[], tuple[float, int]]) -> None:
        """Publish the state of the server's TLS."""
        self.registry.register(TlsCollector("hawkvision", read))

    def watch(self, part: object) -> None:
        """Publish the metrics of a part, if it is `Instrumented`."""
        if isinstance(part, Instrumented):
            for collector in part.collectors():
                self.registry.register(collector)

    def link(self, task: str) -> LinkMetrics:
        """The metrics of the link of one task to the datacenter."""
        return LinkMetrics(self, task)

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)

    def _count_requests(self) -> None:
        """Requests, and what became of them."""
        self.requests = self._counter("requests", "Requests answered", "task", "variant", "tier", "code")
        self.duration = self._histogram("request_duration_seconds", "First byte in to answer out", "task", "tier")
        self.queue_duration = self._histogram("queue_duration_seconds", "Wait for a worker", "task")
        self.inference_duration = self._histogram("inference_duration_seconds", "Backend time", "task", "variant")
        self.ensemble_runs = self._counter(
            "ensemble_runs", "Images classified by all members of a conditional ensemble", "task"
        )
        self.incomplete_answers = self._counter(
            "incomplete_answers", "Answers by some members of an ensemble, for lack of time for all", "task"
        )
        self.degraded = self._counter("degraded", "Answers below target, flagged as such", "task")
        self.deadline_misses = self._counter("deadline_misses", "Answers after their deadline", "task")
        self.shed = self._counter("shed", "Requests refused because a bound was reached", "task", "reason")
        self.in_flight = self._gauge("requests_in_flight", "Requests being answered")
        self.queue_length = self._gauge("queue_length", "Requests waiting for a worker", "task")
        self.queue_limit = self._gauge("queue_limit", "Most requests that may wait for a worker", "task")

    def _count_guarantees(self) -> None:
        """What is guaranteed, and the state of streams."""
        self.audits = self._counter("audits", "Images drawn to be checked by the reference stage", "task", "outcome")
        self.guarantees = self._counter(
            "guarantees", "Answers by the status of their accuracy guarantee", "task", "status"
        )
        self.certificates_valid = self._gauge(
            "certificates_valid", "Whether certificates match the loaded models and have not expired", "task"
        )
        self.alarms = self._counter("alarms", "Guarantees suspended because traffic is not as certified", "task")
        self.streams = self._gauge("streams", "Streams in memory", "task")
        self.streams_suspended = self._gauge("streams_suspended", "Streams whose guarantee is suspended", "task")
        self.state_failures = self._counter(
            "state_failures",
            "Failures to open, read or write the state file",
            "task",
            "operation",
        )
        self.state_kept = self._gauge(
            "state_kept", "1 while the state of streams is kept in the state file, 0 while it cannot be", "task"
        )

    def _count_images(self) -> None:
        """Bytes, memory and decoding."""
        self.received_fraction = Histogram(
            "hawkvision_datagram_received_fraction",
            "Share of an image that had arrived when it was answered",
            registry=self.registry,
            buckets=RECEIVED_BUCKETS,
        )
        self.refused_costs = self._counter(
            "refused_costs", "Images refused because decoding them takes too many pixels or too much memory", "task"
        )
        self.memory_budget = self._gauge("memory_budget_bytes", "Memory budget of a task by part", "task", "part")
        self.bodies_bytes = self._gauge("bodies_bytes", "Memory that request bodies take", "task")
        self.model_memory = self._gauge("model_memory_bytes", "Memory budget of the models of all tasks")
        self.model_bytes = self._gauge("model_bytes", "Memory of the models that are loaded, as measured at the start")
        self.model_load_duration = self._histogram(
            "model_load_duration_seconds", "Loads of a stage's models while the node serves", "task", "variant"
        )
        self.model_unloads = self._counter("model_unloads", "Unloads of a stage's models", "task", "variant")
        self.decoding_bytes = self._gauge("decoding_bytes", "Upper bound of the memory that decoding takes", "task")
        self.decoding_peak_bytes = self._gauge("decoding_peak_bytes", "Highest value of decoding_bytes", "task")

    def _count_escalations(self) -> None:
        """The datacenter, and the link to it."""
        self.escalations = self._counter(
            "escalations", "Images sent to the datacenter, audits and trials included", "task", "reason"
        )
        self.escalation_failures = self._counter(
            "escalation_failures", "Escalations that got no answer in time", "task"
        )
        self.escalations_abandoned = self._counter(
            "escalations_abandoned", "Escalation failures whose wait ended before the deadline", "task"
        )
        self.escalations_cancelled = self._counter(
            "escalations_cancelled", "Escalations that a confident edge stage made needless while they ran", "task"
        )
        self.datacenter_up = self._gauge("datacenter_up", "Whether the last escalation or probe succeeded", "task")
        self.datacenter_doubted = self._gauge(
            "datacenter_doubted", "Whether replies were late so often that few requests wait for them", "task"
        )
        self.circuit_breaker = self._gauge(
            "circuit_breaker", "1 for the state of the datacenter's circuit breaker", "task", "state"
        )
        self.uplink_bytes = self._counter("uplink_bytes", "Image bytes sent to the datacenter", "task")
        self.uplink_transport = self._gauge("uplink_transport", "1 for the transport in use", "task", "transport")
        self.uplink_loss_ratio = self._gauge("uplink_loss_ratio", "Share of lost datagrams to the datacenter", "task")
        self.uplink_rtt = self._gauge("uplink_rtt_seconds", "Round trip of datagrams to the datacenter", "task")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hawkvision_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"hawkvision_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"hawkvision_{name}", text, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)


class LinkMetrics:
    """The metrics of one task's link to the datacenter."""

    def __init__(self, metrics: EdgeMetrics, task: str) -> None:
        self._metrics = metrics
        self._task = task
        self.up = metrics.datacenter_up.labels(task)
        self.doubted = metrics.datacenter_doubted.labels(task)
        self.sent_bytes = metrics.uplink_bytes.labels(task)
        self.loss_ratio = metrics.uplink_loss_ratio.labels(task)
        self.rtt_s = metrics.uplink_rtt.labels(task)

    def circuit_breaker(self, state: str) -> Gauge:
        """1 while the circuit breaker is in this state."""
        return self._metrics.circuit_breaker.labels(self._task, state)

    def transport(self, transport: str) -> Gauge:
        """1 while this transport is in use."""
        return self._metrics.uplink_transport.labels(self._task, transport)

    def escalations(self, reason: str) -> Counter:
        """Images sent for this reason."""
        return self._metrics.escalations.labels(self._task, reason)
