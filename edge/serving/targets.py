"""`GET /v1/targets`: what can be asked of a node, with the escalations and the latency to expect."""

from __future__ import annotations

from typing import Any

from edge.escalation.client import Uplink
from edge.serving.node import LISTED_TARGETS, EdgeNode
from hawkvision.cascade.route import Route
from hawkvision.core.types import AccuracyStatus, Target, Tier, target_fields


def describe_targets(node: EdgeNode, caller: str = "") -> dict[str, Any]:
    """The node's cascade and, per target, what is guaranteed and what it costs.

    `min_accuracy` is the absolute accuracy that the drop makes certain. `status` and `suspended` are those of the
    caller who asks and names no stream; other streams have theirs. Shares and latencies are of traffic as certified:
    `escalation` leaves the edge, `to_best` of it is answered by the reference stage, the rest by `intermediate`.
    Without a datacenter, what the edge does instead is listed. Latencies are expected means in milliseconds, from what
    the node measured so far; null before the first image.
    """
    policy = node.policy
    return {
        "task": node.task,
        "policy": "hawkvision" if node.baseline is None else node.baseline.name,
        "edge": {"variant": node.stage.name, "accuracy": _accuracy(policy.edge_accuracy)},
        "best": {"variant": node.best, "accuracy": _accuracy(policy.best_accuracy)},
        "datacenter": None if node.uplink is None else _datacenter(node.uplink),
        "certificates_valid": node.certificates_valid,
        "certificates": _certificates(node),
        "maximum_min_accuracy": policy.maximum_accuracy,
        "targets": [_target(node, target, caller) for target in LISTED_TARGETS],
    }


def _datacenter(uplink: Uplink) -> dict[str, Any]:
    """Where escalations go and over what; `loss` and `rtt_ms` are null where only TCP knows the link."""
    rtt_s = uplink.rtt_s
    return {
        "url": uplink.url,
        "up": uplink.up,
        "transport": uplink.transport.value,
        "loss": uplink.loss,
        "rtt_ms": None if rtt_s is None else round(rtt_s * 1e3, 3),
    }


def _certificates(node: EdgeNode) -> dict[str, Any]:
    """What stands behind the guarantees: the images of the profile, or those of the site."""
    certificate, source = node.policy.certificate, node.source
    return {
        "basis": certificate.basis,
        "n": certificate.n,
        "as_of": None if source is None else source.as_of,
        "data": None if source is None else {"name": source.name, "sha256": source.sha256},
    }


def _target(node: EdgeNode, target: Target, caller: str) -> dict[str, Any]:
    route = node.policy.route(target)
    watched = node.watched(route, None, caller)
    reachable = node.uplink is not None or route.escalation == 0.0
    guarantee = node.guarantee(
        route,
        Tier.DATACENTER if route.direct else Tier.EDGE,
        watched,
        degraded=not reachable,
        version=node.as_certified(route),
    )
    return {
        "target": target_fields(target),
        "max_drop": guarantee.max_drop,
        "min_accuracy": _min_accuracy(node, guarantee.max_drop),
        "status": guarantee.status.value,
        "suspended": guarantee.status is AccuracyStatus.SUSPENDED,
        "basis": guarantee.basis.value,
        "delta": guarantee.delta,
        "n": guarantee.n,
        "escalation": route.escalation if node.uplink else 0.0,
        "to_best": route.to_best if node.uplink else 0.0,
        "intermediate": None if route.intermediate is None else route.intermediate.stage,
        "expected_latency_ms": _latency(node, route),
    }


def _min_accuracy(node: EdgeNode, max_drop: float | None) -> float | None:
    """None where nothing is certified, or no accuracy was measured where the certificates were made."""
    if max_drop is None or not node.policy.accuracy_known:
        return None
    return node.policy.certified_accuracy(max_drop)


def _latency(node: EdgeNode, route: Route) -> float | None:
    edge_ms, uplink = node.pool.service_ms, node.uplink
    direct = route.direct and uplink is not None
    if not edge_ms and not direct:
        return None
    total_ms = 0.0 if direct else edge_ms
    if uplink is not None:
        total_ms += route.to_best * uplink.mean_ms(node.best)
        if route.intermediate is not None:
            total_ms += (route.escalation - route.to_best) * uplink.mean_ms(route.intermediate.stage)
    return round(total_ms, 3)


def _accuracy(accuracy: Any) -> dict[str, Any]:
    return {"value": accuracy.value, "n": accuracy.n, "low": accuracy.low, "high": accuracy.high}
