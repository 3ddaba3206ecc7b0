"""`GET /v1/targets`: what can be asked of a node, with the escalations and the latency to expect."""

from __future__ import annotations

from typing import Any

from edge.node import EdgeNode
from hawkvision.cascade.policy import weakened
from hawkvision.cascade.profile import CERTIFIED_DROPS
from hawkvision.types import MaxAccuracyDrop, Quality, Target, Tier, target_fields


def describe_targets(node: EdgeNode) -> dict[str, Any]:
    """The node's ladder and, per target, what is promised and what it costs.

    `min_accuracy` is the absolute accuracy that the drop makes certain. Without a datacenter, what the edge does
    instead is listed. Latencies are expected means in milliseconds, from what the node measured so far; null before
    the first picture.
    """
    policy = node.policy
    drops = [MaxAccuracyDrop(drop) for drop in CERTIFIED_DROPS]
    return {
        "task": node.task,
        "edge": {"variant": node.rung.name, "accuracy": _accuracy(policy.edge_accuracy)},
        "best": {"variant": node.best, "accuracy": _accuracy(policy.best_accuracy)},
        "datacenter": None if node.uplink is None else {"url": node.uplink.url, "up": node.uplink.link.up},
        "certificates_valid": node.certificates_valid,
        "maximum_min_accuracy": policy.maximum_accuracy,
        "targets": [_target(node, target) for target in (*Quality, *drops)],
    }


def _target(node: EdgeNode, target: Target) -> dict[str, Any]:
    route = node.policy.route(target)
    reachable = node.uplink is not None or route.escalation == 0.0
    promise = (
        node.promise(route.promise, Tier.DC if route.direct else Tier.EDGE) if reachable else weakened(route.promise)
    )
    return {
        "target": target_fields(target),
        "max_drop": promise.max_drop,
        "min_accuracy": None if promise.max_drop is None else node.policy.held_accuracy(promise.max_drop),
        "status": promise.status.value,
        "basis": promise.basis.value,
        "delta": promise.delta,
        "n": promise.n,
        "escalation": route.escalation if node.uplink else 0.0,
        "expected_latency_ms": _latency(node, route.escalation, direct=route.direct),
    }


def _latency(node: EdgeNode, escalation: float, *, direct: bool) -> float | None:
    edge_ms = node.pool.service_ms
    if node.uplink is None:
        escalation, direct, away_ms = 0.0, False, 0.0
    else:
        away_ms = node.uplink.link.mean_ms
    if not edge_ms and not direct:
        return None
    return round((0.0 if direct else edge_ms) + escalation * away_ms, 3)


def _accuracy(accuracy: Any) -> dict[str, Any]:
    return {"value": accuracy.value, "n": accuracy.n, "low": accuracy.low, "high": accuracy.high}
