"""`GET /v1/targets`: the targets of a node, with the guarantee, the escalations and the latency to expect of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from edge.serving.node import LISTED_TARGETS, EdgeNode
from hawkvision.cascade.route import Route
from hawkvision.core.answer_json import AccuracyFields, Fraction
from hawkvision.core.settings.package_settings import HAWKVISION
from hawkvision.core.types import AccuracyGuarantee, StatusReason, Target, Tier
from hawkvision.guarantee.monitor import Watched
from hawkvision.models.manifest import MeasuredAccuracy
from hawkvision.network.transport_choice import Transport

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient


class ListedAccuracy(msgspec.Struct, frozen=True):
    """The accuracy of a stage on labelled images, with its 95 % interval."""

    value: Annotated[Fraction, Meta(description="Accuracy: 1 − mean loss.")]
    n: Annotated[int, Meta(description="Images.")]
    low: Annotated[Fraction, Meta(description="Lower end of the interval.")]
    high: Annotated[Fraction, Meta(description="Upper end of the interval.")]


class StageAccuracy(msgspec.Struct, frozen=True):
    """A stage of the cascade."""

    variant: Annotated[str, Meta(description="The name of its model.")]
    accuracy: Annotated[ListedAccuracy, Meta(description="Its accuracy by itself.")]


class ListedDatacenter(msgspec.Struct, frozen=True):
    """The datacenter and the link to it."""

    url: Annotated[str, Meta(description="Where it is.")]
    up: Annotated[bool, Meta(description="Whether it can be reached.")]
    transport: Annotated[Transport, Meta(description="What images go over now.")]
    loss: Annotated[Fraction | None, Meta(description="Share of datagrams lost; null while images go over TCP.")]
    rtt_ms: Annotated[
        float | None, Meta(description="Round trip of datagrams, without the datacenter's work; null over TCP.")
    ]


class ListedCertificates(msgspec.Struct, frozen=True):
    """The images that the guarantees rest on."""

    name: Annotated[str, Meta(description="What they are called.")]
    sha256: Annotated[str, Meta(description="A digest of them.")]


class ListedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a target guarantees and costs. Without a datacenter, the edge's own values."""

    accuracy: Annotated[
        AccuracyFields, Meta(description="As in an answer, in this caller's own stream; named streams have their own.")
    ]
    min_accuracy: Annotated[
        Fraction | None,
        Meta(
            description="The `min_accuracy` that is routed like this target, best effort; null where it is not known."
        ),
    ]
    escalation: Annotated[Fraction, Meta(description="Share that leaves the edge, in traffic as certified.")]
    to_best: Annotated[Fraction, Meta(description="Share that the reference stage answers.")]
    intermediate: Annotated[str | None, Meta(description="The stage that answers the rest of what leaves the edge.")]
    expected_latency_ms: Annotated[
        float | None, Meta(description="The mean that the node has measured; null before the first image.")
    ]


class Targets(msgspec.Struct, frozen=True):
    """What can be asked for, and what it costs."""

    task: Annotated[str, Meta(description="The task's name.")]
    policy: Annotated[str, Meta(description="Who decides: `hawkvision`, or a baseline that it is compared with.")]
    edge: Annotated[StageAccuracy, Meta(description="The edge stage.")]
    best: Annotated[StageAccuracy, Meta(description="The reference stage.")]
    datacenter: Annotated[ListedDatacenter | None, Meta(description="Null for a node without one.")]
    certificates_valid: Annotated[
        bool, Meta(description="Whether the certificates are for the models that run, and not expired.")
    ]
    certificates: Annotated[ListedCertificates, Meta(description="What the guarantees rest on.")]
    maximum_min_accuracy: Annotated[Fraction, Meta(description="The highest `min_accuracy` that can be asked for.")]
    targets: Annotated[list[ListedTarget], Meta(description="Some targets; others may be asked for too.")]


def describe_targets(node: EdgeNode, caller: str = "") -> Targets:
    """The node's cascade and, per target, its guarantee and its cost in this caller's own stream."""
    policy = node.policy
    return Targets(
        task=node.task,
        policy=HAWKVISION if node.baseline is None else node.baseline.name,
        edge=StageAccuracy(node.stage.name, _accuracy(policy.edge_accuracy)),
        best=StageAccuracy(node.best, _accuracy(policy.best_accuracy)),
        datacenter=None if node.datacenter is None else _datacenter(node.datacenter),
        certificates_valid=node.guarantees.certificates_valid,
        certificates=ListedCertificates(policy.source.name, policy.source.sha256),
        maximum_min_accuracy=policy.maximum_accuracy,
        targets=[_target(node, target, caller) for target in LISTED_TARGETS],
    )


def expected_guarantee(node: EdgeNode, route: Route, watched: Watched) -> AccuracyGuarantee:
    """The guarantee of answers by a route that meet their target, for requests that are watched so."""
    reason = None if node.guarantees.as_certified(route) else StatusReason.UNCERTIFIED_VERSION
    if node.datacenter is None and route.escalation > 0.0:
        reason = StatusReason.DEGRADED
    tier = Tier.DATACENTER if route.direct else Tier.EDGE
    return node.guarantees.for_answer(route, tier, watched, reason)


def _datacenter(datacenter: DatacenterClient) -> ListedDatacenter:
    rtt_s = datacenter.rtt_s
    return ListedDatacenter(
        datacenter.url,
        datacenter.up,
        datacenter.transport,
        datacenter.loss,
        None if rtt_s is None else round(rtt_s * 1e3, 3),
    )


def _target(node: EdgeNode, target: Target, caller: str) -> ListedTarget:
    route = node.policy.route(target)
    guarantee = expected_guarantee(node, route, node.guarantees.watched(route, None, caller))
    return ListedTarget(
        accuracy=msgspec.convert(guarantee.to_json(), AccuracyFields),
        min_accuracy=_min_accuracy(node, guarantee.max_drop),
        escalation=route.escalation if node.datacenter else 0.0,
        to_best=route.to_best if node.datacenter else 0.0,
        intermediate=None if route.intermediate is None else route.intermediate.stage,
        expected_latency_ms=_latency(node, route),
    )


def _min_accuracy(node: EdgeNode, max_drop: float | None) -> float | None:
    """None where nothing is certified, or no accuracy was measured where the certificates were made."""
    if max_drop is None or not node.policy.accuracy_known:
        return None
    return max(0.0, node.policy.accuracy_with(max_drop))


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


def _accuracy(accuracy: MeasuredAccuracy) -> ListedAccuracy:
    return ListedAccuracy(accuracy.value, accuracy.n, accuracy.low, accuracy.high)
