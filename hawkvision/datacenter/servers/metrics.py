"""The metrics at `GET /metrics`: Prometheus' conventions, prefix `hawkvision_datacenter_`.

`process_*` describe the server's own process. All else comes from the replies, so nothing is gathered from Ray's
processes. Labels are tasks, their stages and variants, paths that exist and status codes; a caller's text never
becomes a label.
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

from hawkvision.core import __version__
from hawkvision.core.metrics import (
    LATENCY_BUCKETS_S,
    Instrumented,
    KeyRequestsCollector,
    TlsCollector,
    build_info,
)

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64)


class DatacenterMetrics:
    """The metrics of one server, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, label: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            name = f"hawkvision_datacenter_{name}"
            return Histogram(name, text, ("task", label), registry=self.registry, buckets=buckets)

        self.requests = Counter(
            "hawkvision_datacenter_requests",
            "Requests, by the task and the stage asked for",
            ("path", "task", "stage", "code"),
            registry=self.registry,
        )
        self.answers = Counter(
            "hawkvision_datacenter_answers",
            "Answers, by the stage that gave them",
            ("task", "stage"),
            registry=self.registry,
        )
        self.ensemble_runs = Counter(
            "hawkvision_datacenter_ensemble_runs",
            "Images of which this stage was not confident enough, so that another answered",
            ("task", "stage"),
            registry=self.registry,
        )
        self.incomplete = Counter(
            "hawkvision_datacenter_incomplete_answers",
            "Answers of some of a stage's members, given because the others missed the deadline",
            ("task", "stage"),
            registry=self.registry,
        )
        self.decided = Counter(
            "hawkvision_datacenter_decided_answers",
            "Answers given before all of a stage's members had answered, because these could not change the class",
            ("task", "stage"),
            registry=self.registry,
        )
        self._build_info = build_info(self.registry, "hawkvision_datacenter", "The tier's version, tasks and backends")
        self.replicas = Gauge(
            "hawkvision_datacenter_live_replicas",
            "Live replicas, by the group of variants that they run, and those of the ingress",
            ("group",),
            registry=self.registry,
        )
        self.min_replicas = Gauge(
            "hawkvision_datacenter_min_replicas",
            "Fewest replicas that the settings ask for, by the same groups",
            ("group",),
            registry=self.registry,
        )
        self.restarts = Gauge(
            "hawkvision_datacenter_restarts",
            "Tier processes that died and were replaced by this tier's launcher within the last ten minutes",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "hawkvision_datacenter_requests_in_flight",
            "Images inside the tier, queued ones included",
            ("task",),
            registry=self.registry,
        )
        self.duration = histogram(
            "request_duration_seconds",
            "From the request's headers to the answer, with status 200, by the stage asked for",
            "stage",
        )
        self.queue_duration = histogram("queue_duration_seconds", "Wait for the model", "variant")
        self.inference_duration = histogram("inference_duration_seconds", "Time in the model", "variant")
        self.batch_size = histogram("batch_size", "Images inferred together", "variant", BATCH_BUCKETS)

    def watch_keys(self, read: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Add the requests of each key."""
        self.registry.register(KeyRequestsCollector("hawkvision_datacenter_key_requests", read))

    def watch(self, part: Instrumented) -> None:
        """Add the metrics of a part of the tier."""
        for collector in part.collectors():
            self.registry.register(collector)

    def watch_tls(self, read: Callable[[], tuple[float, int]]) -> None:
        """Add the state of the server's TLS."""
        self.registry.register(TlsCollector("hawkvision_datacenter", read))

    def describe(self, task: str, backend: str) -> None:
        """Add a task and its backend, once they are known."""
        self._build_info.labels(__version__, task, backend).set(1.0)

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)
