"""What the server counts, for `GET /metrics`: Prometheus' conventions, prefix `hawkvision_datacenter_`.

`process_*` are of the server's own process. The server knows all else from its replies, so nothing has to be gathered
from Ray's processes, whose own metrics (`ray.util.metrics`) leave by a port that Ray picks on each node. Labels are
stages and variants of the catalog, paths that exist and status codes; no caller's text becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from hawkvision.core.metrics import (
    LATENCY_BUCKETS_S,
    Instrumented,
    KeyRequestsCollector,
    TlsCollector,
    TlsState,
    describe_process,
)

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64)


class DatacenterMetrics:
    """The metrics of one server, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(f"hawkvision_datacenter_{name}", text, (label,), registry=self.registry, buckets=buckets)

        self.requests = Counter(
            "hawkvision_datacenter_requests",
            "Requests, by the stage asked for",
            ("path", "stage", "code"),
            registry=self.registry,
        )
        self.answers = Counter(
            "hawkvision_datacenter_answers", "Answers, by the stage that gave them", ("stage",), registry=self.registry
        )
        self.ensemble_runs = Counter(
            "hawkvision_datacenter_ensemble_runs",
            "Images of which this stage was not sure enough, so that another answered",
            ("stage",),
            registry=self.registry,
        )
        self.incomplete = Counter(
            "hawkvision_datacenter_incomplete_answers",
            "Answers of some of a stage's members, for the deadline came before the others'",
            ("stage",),
            registry=self.registry,
        )
        self.decided = Counter(
            "hawkvision_datacenter_settled_answers",
            "Answers given before all of a stage's members had looked, who could not have changed them",
            ("stage",),
            registry=self.registry,
        )
        self.replicas = Gauge(
            "hawkvision_datacenter_live_replicas",
            "Replicas that answer, by the group of variants that they run; in a cluster 1 or 0",
            ("group",),
            registry=self.registry,
        )
        self.restarts = Gauge(
            "hawkvision_datacenter_restarts",
            "Tier processes that ended unasked and were replaced, within the last ten minutes, by this tier's launcher",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "hawkvision_datacenter_requests_in_flight",
            "Images inside the tier, queued ones included",
            registry=self.registry,
        )
        self.received_bytes = Counter(
            "hawkvision_datacenter_received_bytes", "Bytes of bodies received over HTTP", registry=self.registry
        )
        self.duration = histogram(
            "request_duration_seconds", "Headers in to answer out, of status 200, by stage asked", "stage"
        )
        self.decode_duration = histogram("decode_duration_seconds", "Decoding an image", "variant")
        self.queue_duration = histogram("queue_duration_seconds", "Wait for the model", "variant")
        self.inference_duration = histogram("inference_duration_seconds", "Time in the model", "variant")
        self.batch_size = histogram("batch_size", "Images inferred together", "variant", BATCH_BUCKETS)

    def watch_keys(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Have the requests of each key on the page."""
        self.registry.register(KeyRequestsCollector("hawkvision_datacenter_key_requests", read))

    def watch(self, part: Instrumented) -> None:
        """Have the metrics of a part of the tier on the page."""
        for collector in part.collectors():
            self.registry.register(collector)

    def watch_tls(self, read: Callable[[], TlsState]) -> None:
        """Have the state of the server's TLS on the page."""
        self.registry.register(TlsCollector("hawkvision_datacenter", read))

    def describe(self, task: str, backend: str) -> None:
        """Say what the tier runs, once that is known."""
        describe_process(self.registry, "hawkvision_datacenter", "What the tier is and runs", task, backend)

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)
