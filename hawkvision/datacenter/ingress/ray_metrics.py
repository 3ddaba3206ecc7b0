"""Publishes an ingress replica's metrics as Ray metrics, so that each node's endpoint has them beside Serve's own.

    registry of the replica ── every `_PERIOD_S`, on a thread ──► ray.serve.metrics ──► the node's metrics endpoint

Serve adds its tags `application`, `deployment` and `replica`; our labels become tags too. Ray puts `ray_` before each
name. A histogram is published as gauges with Prometheus' names (`_bucket`, `_sum`, `_count`): its state is exact, and
costs the same at any load, while Ray's own histogram would take a call per observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics

log = logging.getLogger("hawkvision.datacenter")

_PERIOD_S: Final = 5.0
"""Half of Ray's own period: a gauge that is not set for two of those disappears."""
_NOT_PUBLISHED: Final = ("process_", "hawkvision_datacenter_key_requests")
"""Ray has metrics of its processes; keys may be thousands."""
MAX_SERIES: Final = 4096
"""Per ingress replica. Tasks, stages, variants, paths and status codes make some hundreds."""


class RayMetrics:
    """Copies a registry to Ray's metrics while it runs. `start` within a running loop of a Serve replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._instruments: dict[str, Any] = {}
        """Ray's counters and gauges, by name."""
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        """The published value of each series; at most `MAX_SERIES`."""
        self._publishing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Publish from now on."""
        self._publishing = asyncio.create_task(self._publish_regularly())

    async def close(self) -> None:
        """Stop."""
        if self._publishing is not None:
            self._publishing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._publishing

    async def _publish_regularly(self) -> None:
        failed = False
        while True:
            try:
                await asyncio.to_thread(self.publish)
                failed = False
            except Exception:  # whatever Ray raises while it is stopped
                if not failed:
                    log.exception("the metrics cannot be given to Ray for now")
                failed = True
            await asyncio.sleep(_PERIOD_S)

    def publish(self) -> None:
        """Bring Ray's metrics up to date. Blocks for some milliseconds."""
        for family in self._registry.collect():
            if family.name.startswith(_NOT_PUBLISHED):
                continue
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    self._publish(family, sample)

    def _publish(self, family: Metric, sample: Sample) -> None:
        series = sample.name, tuple(sample.labels.values())
        if series not in self._values and len(self._values) >= MAX_SERIES:
            return
        before, self._values[series] = self._values.get(series, 0.0), sample.value
        if family.type != "counter":
            self._instrument(metrics.Gauge, sample.name, family, sample).set(sample.value, tags=dict(sample.labels))
        elif sample.value > before:
            # Ray adds the suffix again.
            name = sample.name.removesuffix("_total")
            counter = self._instrument(metrics.Counter, name, family, sample)
            counter.inc(sample.value - before, tags=dict(sample.labels))

    def _instrument(self, kind: Any, name: str, family: Metric, sample: Sample) -> Any:
        found = self._instruments.get(name)
        if found is None:
            found = kind(name, description=family.documentation, tag_keys=tuple(sample.labels))
            self._instruments[name] = found
        return found
