"""`GET /v1/status`: what a node does now, for people who watch it. Nothing here is computed unless somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from edge.inference.resident_models import State
from edge.monitoring.stream_keys import stream_key
from edge.serving.node import EdgeNode
from edge.serving.recent_answers import MOST_SHOWN, Shown
from edge.serving.targets_listing import expected_guarantee
from edge.serving.tasks import ServedTasks
from hawkvision.cascade.route import Route
from hawkvision.core import __version__
from hawkvision.core.answer_json import Fraction
from hawkvision.core.types import AccuracyStatus, Basis, DegradedReason, Quality, Reason, StatusReason, Tier
from hawkvision.guarantee.monitor import Stream
from hawkvision.network.circuit_breaker import BreakerState
from hawkvision.network.transport_choice import Transport
from hawkvision.system.memory import resident_bytes

MOST_STREAMS: Final = 20
"""Rows of a task's guarantee beside the node's own."""
ANSWERS_PATH: Final = "/v1/status/answers"
_END: Final = datetime.max.replace(tzinfo=UTC).timestamp()


class GuaranteeStatus(msgspec.Struct, frozen=True):
    """The guarantee of `balanced`, the default target, and the audits in one log: the node's own, that of a caller, or
    of a stream that a caller names.
    """

    stream: Annotated[
        str | None, Meta(description="A hash that tells streams and callers apart, as in log lines; null: the node.")
    ]
    named: Annotated[bool, Meta(description="Whether a caller's requests name it; else it is a caller, or the node.")]
    status: Annotated[
        AccuracyStatus,
        Meta(description="Of an answer that meets the target, as far as this log and the node's decide."),
    ]
    reason: Annotated[StatusReason | None, Meta(description="Why it is not `certified`; null if it is.")]
    audits_due: Annotated[int, Meta(description="The last audits that were due, 200 at most, and those that wait.")]
    audits_made: Annotated[int, Meta(description="How many of them were made.")]
    audits_waiting: Annotated[int, Meta(description="How many wait; the others are missing.")]
    disagreement: Annotated[
        Fraction | None,
        Meta(
            description="Share of the last audits, 200 at most, in which the edge stage would answer and differs from "
            "the reference stage; null before the first since the start."
        ),
    ]
    certified_disagreement: Annotated[
        Fraction | None, Meta(description="What is certified of that share; null without a certificate.")
    ]
    max_drop: Annotated[Fraction | None, Meta(description="As in an answer.")]
    basis: Annotated[Basis | None, Meta(description="As in an answer.")]


class AlarmStatus(msgspec.Struct, frozen=True):
    """An alarm, which suspends the guarantee of its stream."""

    time: Annotated[datetime | None, Meta(description="When it was raised; null if the clock was not set.")]
    stream: Annotated[str | None, Meta(description="Whose it is, as in `guarantee`.")]
    cause: Annotated[str, Meta(description="Why, in a sentence.")]
    ended: Annotated[datetime | None, Meta(description="When it ended; null while it stands.")]


class TaskStatus(msgspec.Struct, frozen=True):
    """A task. Rates and shares are of the requests of the last minute, 4,096 at most."""

    task: Annotated[str, Meta(description="The task's name.")]
    kind: Annotated[str, Meta(description="What its answers are.")]
    models: Annotated[State, Meta(description="Whether its models are in memory, as in `/v1/tasks`.")]
    per_s: Annotated[float, Meta(description="Requests a second.")]
    answers: Annotated[int, Meta(description="Those that were answered.")]
    p50_ms: Annotated[float | None, Meta(description="Half of the answers took at most so long; null without any.")]
    p99_ms: Annotated[float | None, Meta(description="And 99 % of them.")]
    edge: Annotated[Fraction, Meta(description="Share answered without asking the datacenter.")]
    escalated: Annotated[Fraction, Meta(description="Share answered after asking it.")]
    degraded: Annotated[Fraction, Meta(description="Share answered below what the target asks for.")]
    refused: Annotated[Fraction, Meta(description="Share that got an error, of the caller or of the node.")]
    queue: Annotated[int, Meta(description="Images that wait for a worker.")]
    queue_limit: Annotated[int, Meta(description="Images that may wait.")]
    guarantee: Annotated[
        tuple[GuaranteeStatus, ...],
        Meta(description="The node's own log first, then 20 others at most: those in alarm, then those used last."),
    ]
    alarms: Annotated[
        tuple[AlarmStatus, ...],
        Meta(description="Those that stand in `guarantee`, then the last 20 that ended since the start."),
    ]


class DatacenterStatus(msgspec.Struct, frozen=True):
    """The datacenter; of several tasks, as the first sees it that has trouble."""

    configured: Annotated[bool, Meta(description="Whether the node has one.")]
    up: Annotated[bool | None, Meta(description="Whether it can be reached.")] = None
    circuit_breaker: Annotated[BreakerState | None, Meta(description="Whether its answers are waited for.")] = None
    rtt_ms: Annotated[
        float | None, Meta(description="Mean time to its answer, its work included; null before the first.")
    ] = None


class LinkStatus(msgspec.Struct, frozen=True):
    """The link to it."""

    transport: Annotated[Transport | None, Meta(description="What images go over now.")] = None
    loss: Annotated[Fraction | None, Meta(description="Share of datagrams lost; null while images go over TCP.")] = None
    rtt_ms: Annotated[
        float | None, Meta(description="Round trip of datagrams, without the datacenter's work; null over TCP.")
    ] = None


class MemoryStatus(msgspec.Struct, frozen=True):
    """The memory of the process."""

    resident_bytes: Annotated[int | None, Meta(description="In use; null where the system does not say.")]
    bodies_bytes: Annotated[int, Meta(description="Of requests' bodies.")]
    bodies_limit_bytes: Annotated[int, Meta(description="What those may take.")]


class AnswerStatus(msgspec.Struct, frozen=True):
    """One of the last answers."""

    id: Annotated[str, Meta(description="As the answer says.")]
    time: Annotated[datetime, Meta(description="When it was ready.")]
    task: Annotated[str, Meta(description="The task that answered.")]
    stream: Annotated[str, Meta(description="Of the request, or else of its caller, as in `guarantee`.")]
    text: Annotated[str, Meta(description="The answer in words.")]
    confidence: Annotated[float | None, Meta(description="As in the answer; null if its kind states none.")]
    tier: Annotated[Tier, Meta(description="Where it was computed.")]
    model: Annotated[str, Meta(description="By which stage.")]
    status: Annotated[AccuracyStatus, Meta(description="Of its guarantee.")]
    status_reason: Annotated[StatusReason | None, Meta(description="Why that is not `certified`; null if it is.")]
    reason: Annotated[Reason | None, Meta(description="Why the datacenter was asked; null if it was not.")]
    degraded_reason: Annotated[DegradedReason | None, Meta(description="Why it is degraded; null if it is not.")]
    ms: Annotated[float, Meta(description="From the first byte received to the answer.")]
    image: Annotated[
        str | None,
        Meta(description="Path of its image, for a key that may review; null unless the node keeps images."),
    ]


class Status(msgspec.Struct, frozen=True):
    """What the node does now."""

    time: Annotated[datetime, Meta(description="Of this status.")]
    ready: Annotated[bool, Meta(description="Whether it answers images.")]
    draining: Annotated[bool, Meta(description="Whether it was told to stop.")]
    version: Annotated[str, Meta(description="Of HawkVision.")]
    uptime_s: Annotated[float, Meta(description="Seconds since its start.")]
    tasks: Annotated[tuple[TaskStatus, ...], Meta(description="Those that are served.")]
    failed: Annotated[tuple[str, ...], Meta(description="Tasks that cannot be served; `/v1/tasks` says why.")]
    datacenter: Annotated[DatacenterStatus, Meta(description="The datacenter.")]
    link: Annotated[LinkStatus, Meta(description="The link to it.")]
    memory: Annotated[MemoryStatus, Meta(description="The memory of the process.")]
    answers: Annotated[tuple[AnswerStatus, ...], Meta(description="The newest first, 24 at most.")]


def describe_status(
    tasks: ServedTasks | None, now: float, wall: float, uptime_s: float, bodies: tuple[int, int], *, draining: bool
) -> Status:
    """The status of a node.

    Args:
        tasks: None before it is ready.
        now: time of the node's clock.
        wall: seconds since 1970.
        uptime_s: seconds since the start.
        bodies: bytes of bodies in memory, and what they may take.
        draining: whether it was told to stop.
    """
    nodes = () if tasks is None else tasks.nodes
    datacenter, link = _datacenter(nodes)
    return Status(
        time=datetime.fromtimestamp(wall, UTC),
        ready=tasks is not None and not draining,
        draining=draining,
        version=__version__,
        uptime_s=round(uptime_s, 3),
        tasks=tuple(_task(node, now) for node in nodes),
        failed=() if tasks is None else tuple(failure.task for failure in tasks.failures),
        datacenter=datacenter,
        link=link,
        memory=MemoryStatus(resident_bytes(), *bodies),
        answers=tuple(_answers(nodes, now, wall)),
    )


def _task(node: EdgeNode, now: float) -> TaskStatus:
    monitor, route = node.streams.monitor, node.policy.route(Quality.BALANCED)
    streams, waiting = monitor.foremost(1 + MOST_STREAMS), monitor.waiting()
    standing = [
        AlarmStatus(_time(each.state.raised), _name(each.key), each.state.cause, None) for each in streams if each.alarm
    ]
    ended = [
        AlarmStatus(_time(each.raised), _name(each.stream), each.cause, _time(each.ended))
        for each in reversed(node.streams.ended_alarms)
    ]
    return TaskStatus(
        task=node.task,
        kind=node.kind.name,
        models=node.models.state,
        queue=node.pool.waiting,
        queue_limit=node.pool.limit,
        guarantee=tuple(_guarantee(node, route, stream, waiting) for stream in streams),
        alarms=(*standing, *ended),
        **msgspec.structs.asdict(node.recent.last_minute(now)),
    )


def _guarantee(node: EdgeNode, route: Route, stream: Stream, waiting: Counter[bytes]) -> GuaranteeStatus:
    watched = node.streams.watching(
        stream, route.claims if node.guarantees.edge_certified(route) else None, route.counted_as
    )
    guarantee, claims = expected_guarantee(node, route, watched), watched.edge_claims
    log = None if claims is None else stream.logs.get(claims.key)
    differing, audits = (0.0, 0) if log is None else log.differing(route.threshold)
    return GuaranteeStatus(
        stream=_name(stream.key),
        named=stream.state.named,
        status=guarantee.status,
        reason=guarantee.status_reason,
        audits_due=len(stream.due) + waiting[stream.key],
        audits_made=len(stream.due) - stream.missing,
        audits_waiting=waiting[stream.key],
        disagreement=differing / audits if audits else None,
        certified_disagreement=None if claims is None else claims.disagreement(route.threshold),
        max_drop=guarantee.max_drop,
        basis=guarantee.basis,
    )


def _datacenter(nodes: Sequence[EdgeNode]) -> tuple[DatacenterStatus, LinkStatus]:
    links = [node.datacenter for node in nodes if node.datacenter is not None]
    if not links:
        return DatacenterStatus(configured=False), LinkStatus()
    seen = next((each for each in links if not each.up or each.state is not BreakerState.CLOSED), links[0])
    rtt_ms = None if seen.rtt_s is None else round(seen.rtt_s * 1e3, 3)
    answer_ms = None if seen.round_trip_ms is None else round(seen.round_trip_ms, 3)
    return (
        DatacenterStatus(configured=True, up=seen.up, circuit_breaker=seen.state, rtt_ms=answer_ms),
        LinkStatus(seen.transport, seen.loss, rtt_ms),
    )


def _answers(nodes: Sequence[EdgeNode], now: float, wall: float) -> Iterator[AnswerStatus]:
    found = sorted((shown for node in nodes for shown in node.recent.shown), key=lambda each: -each.at)
    pictured = {name for node in nodes for name in node.recent.images(now)}
    for shown in found[:MOST_SHOWN]:
        yield _answer(shown, wall - (now - shown.at), pictured=shown.answer.id in pictured)


def _answer(shown: Shown, wall: float, *, pictured: bool) -> AnswerStatus:
    answer = shown.answer
    return AnswerStatus(
        id=answer.id,
        time=datetime.fromtimestamp(wall, UTC),
        task=answer.task,
        stream=stream_key(shown.stream, shown.caller).hex(),
        text=answer.prediction.summary(),
        confidence=getattr(answer.prediction, "confidence", None),
        tier=answer.tier,
        model=answer.model,
        status=answer.accuracy.status,
        status_reason=answer.accuracy.status_reason,
        reason=answer.reason,
        degraded_reason=answer.degraded_reason,
        ms=round(answer.timing_ms.total, 3),
        image=f"{ANSWERS_PATH}/{answer.id}/image" if pictured else None,
    )


def _name(key: bytes) -> str | None:
    return key.hex() if any(key) else None


def _time(seconds: float) -> datetime | None:
    """None for the end of time, when an alarm is raised by a clock that is not set."""
    return datetime.fromtimestamp(seconds, UTC) if seconds < _END else None
