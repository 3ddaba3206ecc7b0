"""`GET /v1/targets`: the targets of a node, with the guarantee, the escalations and the latency to expect of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge.serving.node import LISTED_TARGETS, EdgeNode
from hawkvision.cascade.route import Route
from hawkvision.core.settings.package_settings import HAWKVISION
from hawkvision.core.types import AccuracyStatus, Target, Tier, target_fields

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient


def describe_targets(node: EdgeNode, caller: str = "") -> dict[str, Any]:
    """The node's cascade and, per target, its guarantee and its cost.

    `min_accuracy` is the absolute accuracy that the drop makes certain. `status` and `suspended` are those of this
    caller's own stream; a stream with a name has its own. Shares and latencies are of traffic as certified:
    `escalation` leaves the edge, the reference stage answers `to_best` of it, `intermediate` the rest. Without a
    datacenter, the edge's own values are listed. Latencies are means in milliseconds that the node has measured; null
    before the first image.
    """
    policy = node.policy
    return {
        "task": node.task,
        "policy": HAWKVISION if node.baseline is None else node.baseline.name,
        "edge": {"variant": node.stage.name, "accuracy": _accuracy(policy.edge_accuracy)},
        "best": {"variant": node.best, "accuracy": _accuracy(policy.best_accuracy)},
        "datacenter": None if node.datacenter is None else _datacenter(node.datacenter),
        "certificates_valid": node.guarantees.certificates_valid,
        "certificates": _certificates(node),
        "maximum_min_accuracy": policy.maximum_accuracy,
        "targets": [_target(node, target, caller) for target in LISTED_TARGETS],
    }


def _datacenter(datacenter: DatacenterClient) -> dict[str, Any]:
    """The datacenter and the link to it; `loss` and `rtt_ms` are null while images travel over TCP."""
    rtt_s = datacenter.rtt_s
    return {
        "url": datacenter.url,
        "up": datacenter.up,
        "transport": datacenter.transport.value,
        "loss": datacenter.loss,
        "rtt_ms": None if rtt_s is None else round(rtt_s * 1e3, 3),
    }


def _certificates(node: EdgeNode) -> dict[str, Any]:
    """The images that the guarantees rest on: those of the profile, or the site's own."""
    certificate, source = node.policy.certificate, node.guarantees.source
    return {
        "basis": "agreement" if certificate.basis == "disagreement" else certificate.basis,
        "n": certificate.n,
        "as_of": None if source is None else source.as_of,
        "data": None if source is None else {"name": source.name, "sha256": source.sha256},
    }


def _target(node: EdgeNode, target: Target, caller: str) -> dict[str, Any]:
    route = node.policy.route(target)
    controllers = node.guarantees.controllers(route, None, caller)
    reachable = node.datacenter is not None or route.escalation == 0.0
    guarantee = node.guarantees.of_answer(
        route,
        Tier.DATACENTER if route.direct else Tier.EDGE,
        controllers,
        degraded=not reachable,
        version=node.guarantees.as_certified(route),
    )
    return {
        "target": target_fields(target),
        "max_drop": guarantee.max_drop,
        **({} if guarantee.max_disagreement is None else {"max_disagreement": guarantee.max_disagreement}),
        "min_accuracy": _min_accuracy(node, guarantee.max_drop),
        "status": guarantee.status.value,
        "suspended": guarantee.status is AccuracyStatus.SUSPENDED,
        "basis": guarantee.basis.value,
        "delta": guarantee.delta,
        "n": guarantee.n,
        "escalation": route.escalation if node.datacenter else 0.0,
        "to_best": route.to_best if node.datacenter else 0.0,
        "intermediate": None if route.intermediate is None else route.intermediate.stage,
        "expected_latency_ms": _latency(node, route),
    }


def _min_accuracy(node: EdgeNode, max_drop: float | None) -> float | None:
    """None where nothing is certified, or no accuracy was measured where the certificates were made."""
    if max_drop is None or not node.policy.accuracy_known:
        return None
    return max(0.0, node.policy.certified_accuracy(max_drop))


def _latency(node: EdgeNode, route: Route) -> float | None:
    edge_ms, datacenter = node.pool.service_ms, node.datacenter
    direct = route.direct and datacenter is not None
    if not edge_ms and not direct:
        return None
    total_ms = 0.0 if direct else edge_ms
    if datacenter is not None:
        total_ms += route.to_best * datacenter.mean_ms(node.best)
        if route.intermediate is not None:
            total_ms += (route.escalation - route.to_best) * datacenter.mean_ms(route.intermediate.stage)
    return round(total_ms, 3)


def _accuracy(accuracy: Any) -> dict[str, Any]:
    return {"value": accuracy.value, "n": accuracy.n, "low": accuracy.low, "high": accuracy.high}
