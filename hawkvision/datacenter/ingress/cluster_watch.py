"""What an ingress replica follows: the numbers of replicas, and on a cluster the head and Ray's own metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics

from hawkvision.datacenter.deployment.presence import ServeStates

log = logging.getLogger("hawkvision.datacenter")

_ASK_S: Final = 2.0
"""Between two questions to Serve's controller. Meanwhile the replicas may admit too few, or for as long too many."""


class Watch:
    """What runs beside the requests. `start` within a running loop of a Serve replica."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        raise NotImplementedError


class AdmissionShare:
    """Tells an ingress replica how many requests it may have inside: the limit divided by the number of replicas."""

    def __init__(self, limit: int, replicas: int, on_change: Callable[[int], None]) -> None:
        """Set the share of the application's limit for this many replicas; `on_change` takes each new share."""
        self._limit = limit
        self._replicas = replicas
        self._on_change = on_change
        on_change(share(limit, replicas))

    def set_limit(self, limit: int) -> None:
        """Share another limit."""
        self._limit = limit
        self._on_change(share(limit, self._replicas))

    def set_replicas(self, replicas: int) -> None:
        """Share the limit among another number of replicas; 0 changes nothing."""
        if replicas not in (0, self._replicas):
            self._replicas = replicas
            self._on_change(share(self._limit, replicas))


def share(limit: int, replicas: int) -> int:
    """One replica's part of the limit, at least one request; together at most a request per replica above it."""
    return max(1, math.ceil(limit / replicas))


class ReplicaCounts(Watch):
    """Tells how many replicas of each deployment serve, every few seconds."""

    def __init__(self, states: ServeStates, on_count: Callable[[str, int], None]) -> None:
        """`on_count` takes the name of a deployment and the number of its replicas that run."""
        self._states = states
        self._on_count = on_count

    async def _run(self) -> None:
        while True:
            for name, deployed in (await self._states.deployments() or {}).items():
                self._on_count(name, int(deployed.replica_states.get("RUNNING", 0)))
            await asyncio.sleep(_ASK_S)


_EVERY_S: Final = 1.0
"""From one connection to the next."""
_WITHIN_S: Final = 1.0
"""How long a connection may take."""
_LOST_AFTER: Final = 2
"""Failures in a row. The head counts as gone 4 s after its death at the latest, and one slow accept does not count."""


class HeadWatch(Watch):
    """Connects to the head's control service again and again, and sends nothing. Used on one event loop."""

    def __init__(self, address: str, on_change: Callable[[bool], None]) -> None:
        """Prepare; the head counts as present.

        Args:
            address: of the control service (GCS), as `HOST:PORT`.
            on_change: takes whether the head is present, whenever that changes.
        """
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._on_change = on_change

    async def _run(self) -> None:
        failures = 0
        while True:
            before, failures = failures, 0 if await self._is_there() else failures + 1
            if failures == _LOST_AFTER:
                log.error("the head of the Ray cluster at %s:%d cannot be reached", self._host, self._port)
                self._on_change(False)
            elif failures == 0 and before >= _LOST_AFTER:
                log.info("the head of the Ray cluster can be reached again")
                self._on_change(True)
            await asyncio.sleep(_EVERY_S)

    async def _is_there(self) -> bool:
        try:
            async with asyncio.timeout(_WITHIN_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


_PUBLISH_S: Final = 5.0
"""Half of Ray's own period: a gauge that is not set for two of those disappears."""
_NOT_PUBLISHED: Final = ("process_", "hawkvision_datacenter_key_requests")
"""Ray has metrics of its processes; keys may be thousands."""
MAX_SERIES: Final = 4096
"""Per ingress replica. Tasks, stages, variants, paths and status codes make some hundreds."""


class RayMetrics(Watch):
    """Copies a registry to Ray's metrics while it runs. `start` within a running loop of a Serve replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._instruments: dict[str, Any] = {}
        """Ray's counters and gauges, by name."""
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        """The published value of each series; at most `MAX_SERIES`."""

    async def _run(self) -> None:
        failed = False
        while True:
            try:
                await asyncio.to_thread(self.publish)
                failed = False
            except Exception:  # whatever Ray raises while it is stopped
                if not failed:
                    log.exception("the metrics cannot be given to Ray for now")
                failed = True
            await asyncio.sleep(_PUBLISH_S)

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
