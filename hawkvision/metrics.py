"""What a node counts, in Prometheus' own conventions: base units, `_total` counters, bounded labels.

Every label takes its values from a closed set (tasks, rungs, tiers, reasons, status codes), never from a caller's text,
so that no caller can grow the number of series.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)


class EdgeMetrics:
    """The metrics of one edge node, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hawkvision_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hawkvision_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"hawkvision_{name}", text, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)

        self.requests = counter("requests", "Requests answered", "task", "variant", "tier", "code")
        self.duration = histogram("request_duration_seconds", "First byte in to answer out", "task", "tier")
        self.queue_duration = histogram("queue_duration_seconds", "Wait for a worker", "task")
        self.inference_duration = histogram("inference_duration_seconds", "Backend time", "task", "variant")
        self.escalations = counter("escalations", "Pictures sent to the datacenter, audits included", "task", "reason")
        self.escalation_failures = counter("escalation_failures", "Escalations that got no answer in time", "task")
        self.audits = counter("audits", "Accepted answers drawn to be checked by the best rung", "task", "outcome")
        self.promises = counter("promises", "Answers by the status of their accuracy promise", "task", "status")
        self.alarms = counter("alarms", "Promises that became void because traffic is not as certified", "task")
        self.returns = counter("returns", "Promises that came back because traffic is as certified again", "task")
        self.streams = gauge("streams", "Controllers in memory: one per stream, certificate and rung", "task")
        self.streams_void = gauge("streams_void", "Controllers whose promise is void", "task")
        self.accuracy_debt = gauge("accuracy_debt", "Wrong answers, in expectation, that all streams owe", "task")
        self.state_failures = counter(
            "state_failures", "Controller states that could not be read, written or kept", "task", "operation"
        )
        self.degraded = counter("degraded", "Answers below target, flagged as such", "task")
        self.shed = counter("shed", "Requests refused because a bound was reached", "reason")
        self.deadline_misses = counter("deadline_misses", "Answers after their deadline", "task")
        self.received_bytes = counter("received_bytes", "Bytes of request bodies")
        self.uplink_bytes = counter("uplink_bytes", "Picture bytes sent to the datacenter")
        self.in_flight = gauge("requests_in_flight", "Requests being answered")
        self.queue_length = gauge("queue_length", "Requests waiting for a worker")
        self.datacenter_up = gauge("datacenter_up", "Whether the last escalation got through")
        self.certificates_valid = gauge("certificates_valid", "Whether certificates match the loaded models", "task")

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)
