"""What an ingress replica gives to Ray's metrics; `deployment/test_deploy.py` shows it at a real node's endpoint."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from ray.serve import metrics

from hawkvision.datacenter.ingress.cluster_watch import MAX_SERIES, RayMetrics
from hawkvision.datacenter.servers.metrics import DatacenterMetrics

GIVEN: Tally[tuple[str, str]] = Tally()
"""The sums of what Ray's instruments got, by name and labels."""


class Recording:
    """Stands for Ray's counter and gauge."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._keys = name, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0.0
        assert tuple(tags) == self._keys
        GIVEN[self._name, ",".join(tags.values())] += value  # type: ignore[assignment]

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._keys
        GIVEN[self._name, ",".join(tags.values())] = value  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    GIVEN.clear()
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(metrics, kind, Recording)


def test_counters_add_up_and_gauges_follow_over_several_periods() -> None:
    registry = CollectorRegistry()
    counter = Counter("answers", "Text", ("task",), registry=registry)
    gauge = Gauge("inside", "Text", registry=registry)
    published = RayMetrics(registry)
    for inside in (3, 1, 2):
        counter.labels("pets").inc(inside)
        gauge.set(inside)
        published.publish()
        published.publish()
    assert GIVEN == {("answers", "pets"): 6.0, ("inside", ""): 2.0}


def test_histograms_are_exact_and_neither_processes_nor_keys_are_published() -> None:
    tier = DatacenterMetrics()
    tier.watch_keys(lambda: {("a key", "let in"): 1})
    for seconds in (0.002, 0.03):
        tier.duration.labels("pets", "best").observe(seconds)
    RayMetrics(tier.registry).publish()
    name = "hawkvision_datacenter_request_duration_seconds"
    assert GIVEN[f"{name}_sum", "pets,best"] == pytest.approx(0.032)
    assert [GIVEN[f"{name}_bucket", f"pets,best,{le}"] for le in ("0.001", "0.002", "0.035", "+Inf")] == [0, 1, 2, 2]
    assert not [name for name, _ in GIVEN if "key" in name or name.startswith("process_")]


def test_the_number_of_series_is_bounded() -> None:
    registry = CollectorRegistry()
    gauge: Any = Gauge("inside", "Text", ("task",), registry=registry)
    for number in range(MAX_SERIES + 10):
        gauge.labels(str(number)).set(1.0)
    RayMetrics(registry).publish()
    assert len(GIVEN) == MAX_SERIES
