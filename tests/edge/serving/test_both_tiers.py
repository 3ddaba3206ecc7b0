"""Both tiers at once: an image leaves while a slow edge stage runs, and a confident edge cancels the escalation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import AccuracyStatus, Answer, OnMiss, Quality, Reason, Tier
from tests.edge.bench import SURE, UNSURE, Bench, bench, known, misses, run
from tests.edge.peer import Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA
from tests.waiting import until

EDGE_MS, REPLY_MS = 6_000.0, 5_000.0
"""What both take as far as the node knows. Nothing here takes so long: the tests open the gates."""
DEADLINE_MS = 9_000.0
"""Enough for each, and not for one after the other."""


@asynccontextmanager
async def slow(
    large: Peer, lead: float, config: EdgeConfig | None = None, transport: Literal["tcp", "datagram"] = "tcp"
) -> AsyncIterator[Bench]:
    """A node whose edge stage and datacenter are known to be slow, and now at work until they are told to go on."""
    async with bench(large, lead, config=config, transport=transport) as it:
        await known(it.node)
        datacenter = it.node.datacenter
        assert datacenter is not None
        await until(lambda: datacenter.transport.value == transport and datacenter.up)
        times, now = datacenter._breaker.times, it.clock.now()
        for before in range(20, 0, -1):
            times.answered(times.sent(now - before), REPLY_MS, now)
        it.node.pool._recent_ms.extend([EDGE_MS] * 8)
        it.backend.gate.clear()
        large.held = True
        try:
            yield it
        finally:
            large.held = False


async def asked(it: Bench, **fields: Any) -> asyncio.Task[Answer]:
    """A request that the edge stage works at."""
    begun = it.backend.begun
    task = asyncio.create_task(it.ask(**{"target": Quality.BALANCED, "deadline_ms": DEADLINE_MS, **fields}))
    await until(lambda: it.backend.begun > begun)
    return task


@pytest.mark.parametrize("on_miss", list(OnMiss))
def test_a_confident_edge_answers_at_once_and_cancels_the_escalation(large: Peer, on_miss: OnMiss) -> None:
    async def scenario() -> tuple[Answer, float]:
        async with slow(large, SURE) as it:
            task = await asked(it, on_miss=on_miss)
            await until(lambda: len(large.bodies) == 1)
            it.backend.gate.set()
            answer = await task
            large.held = False
            await until(lambda: large.answered == 1)
            return answer, it.counted("escalations_cancelled_total")

    answer, cancelled = run(scenario)
    assert (answer.tier, answer.reason, answer.degraded) == (Tier.EDGE, Reason.EDGE_SLOW, False)
    assert answer.accuracy.status is AccuracyStatus.CERTIFIED
    assert (cancelled, large.gone) == (1, 0), "the connection is kept for the next image"


@pytest.mark.parametrize(("lead", "model", "degraded"), [(SURE, "small", False), (UNSURE, "small+large", True)])
def test_a_part_of_the_ensemble_waits_for_the_edge_that_is_at_work(
    large: Peer, lead: float, model: str, degraded: bool
) -> None:
    large.parts, large.delay_s = [4], 60.0

    async def scenario() -> Answer:
        async with slow(large, lead) as it:
            datacenter = it.node.datacenter
            assert datacenter is not None
            misses(datacenter._selector.carrier.rest, 60_000.0, it.clock.now())
            task = await asked(it)
            await until(lambda: len(datacenter._waits._abandoned) == 1)
            it.backend.gate.set()
            return await task

    answer = run(scenario)
    assert (answer.model, answer.degraded) == (model, degraded)


def test_over_datagrams_the_escalation_is_cancelled_by_its_frame() -> None:
    async def scenario() -> Answer:
        async with slow(large, SURE, transport="datagram") as it:
            task = await asked(it)
            await until(lambda: len(large.datagrams) == 1)
            it.backend.gate.set()
            answer = await task
            await until(lambda: large.gone == 1)
            return answer

    with running_peer(datagram=True, model="large", fingerprint=SHA, delay_s=60.0) as large:
        answer = run(scenario)
    assert (answer.tier, answer.reason) == (Tier.EDGE, Reason.EDGE_SLOW)


def test_an_unsure_edge_waits_for_the_reply_that_is_under_way(large: Peer) -> None:
    async def scenario() -> Answer:
        async with slow(large, UNSURE) as it:
            task = await asked(it)
            await until(lambda: len(large.bodies) == 1)
            it.backend.gate.set()
            await until(lambda: it.backend.inferred == 1)
            large.held = False
            return await task

    answer = run(scenario)
    assert (answer.tier, answer.reason, answer.degraded) == (Tier.DATACENTER, Reason.LOW_CONFIDENCE, False)
    assert answer.edge_score is not None
    assert len(large.bodies) == 1


def test_a_reply_before_the_edge_stage_has_ended_is_the_answer(large: Peer) -> None:
    async def scenario() -> tuple[Answer, int]:
        async with slow(large, SURE) as it:
            task = await asked(it)
            large.held = False
            return await task, it.backend.inferred

    answer, inferred = run(scenario)
    assert (answer.tier, answer.reason, inferred) == (Tier.DATACENTER, Reason.EDGE_SLOW, 0)


def test_a_datacenter_that_fails_leaves_the_answer_to_the_edge(large: Peer) -> None:
    large.status = 500

    async def scenario() -> Answer:
        async with slow(large, UNSURE) as it:
            task = await asked(it)
            await until(lambda: len(large.bodies) == 1)
            large.held = False
            await until(lambda: it.counted("escalation_failures_total") == 1)
            it.backend.gate.set()
            return await task

    answer = run(scenario)
    assert (answer.tier, answer.reason, answer.degraded) == (Tier.EDGE, Reason.EDGE_SLOW, True)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (EdgeConfig(uplink_metered=True), {}),
        (None, {"target": Quality.FAST}),
        (None, {"deadline_ms": None}),
        (None, {"deadline_ms": 10 * DEADLINE_MS}),
    ],
    ids=["metered", "the edge nearly always accepts", "no deadline", "time for one after the other"],
)
def test_the_image_stays_until_the_edge_stage_has_ended(
    large: Peer, config: EdgeConfig | None, fields: dict[str, Any]
) -> None:
    async def scenario() -> Answer:
        async with slow(large, SURE, config) as it:
            task = await asked(it, **fields)
            it.backend.gate.set()
            return await task

    answer = run(scenario)
    assert (answer.tier, answer.escalated) == (Tier.EDGE, False)
    assert not large.bodies
