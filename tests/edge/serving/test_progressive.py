"""Answers of some of a stage's members, for callers whose deadline comes before that of all."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from hypothesis import given
from hypothesis import strategies as st

from edge.escalation.client import DatacenterClient
from edge.escalation.http_transport import read_lines
from hawkvision.core.types import (
    AccuracyStatus,
    Answer,
    DegradedReason,
    MaxAccuracyDrop,
    OnMiss,
    Quality,
    Received,
    StatusReason,
    Tier,
)
from tests.edge.bench import UNSURE, Bench, bench, misses, run
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.waiting import until

PART_CLASS = 4
DEADLINE_MS = 1_000.0
LONG_DEADLINE_MS = 20_000.0


def uplink_of(it: Bench) -> DatacenterClient:
    assert it.node.datacenter is not None
    return it.node.datacenter


def counted(it: Bench) -> tuple[float, float]:
    """Answers of some members, and those below target."""
    return it.counted("incomplete_answers_total"), it.counted("degraded_total")


def asked(
    large: Peer, deadline_ms: float = DEADLINE_MS, on_miss: OnMiss = OnMiss.DEGRADE, lead: float = UNSURE
) -> Answer:
    async def scenario() -> Answer:
        async with bench(large, lead) as it:
            return await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=deadline_ms, on_miss=on_miss)

    return run(scenario)


@pytest.fixture
def slow(large: Peer) -> Peer:
    """A tier that says something at once, and all of it too late."""
    large.parts = [5, PART_CLASS]
    large.delay_s = 30.0
    return large


def test_the_latest_part_is_the_answer_where_the_whole_is_late(slow: Peer) -> None:
    answer = asked(slow)
    assert (answer.tier, answer.index, answer.model) == (Tier.DATACENTER, PART_CLASS, f"small+{slow.model}")
    assert (answer.degraded, answer.degraded_reason, answer.escalated) == (True, DegradedReason.INCOMPLETE, True)
    guarantee = answer.accuracy
    assert (guarantee.status, guarantee.status_reason) == (AccuracyStatus.BEST_EFFORT, StatusReason.DEGRADED)
    assert answer.confidence == pytest.approx((0.1 + 0.5) / 2, abs=1e-4)  # of ten classes, the edge knows nothing


def test_a_part_that_is_less_sure_than_the_edge_does_not_change_its_class(slow: Peer) -> None:
    slow.part_output = np.eye(10, dtype=np.float32)[PART_CLASS] * np.float32(0.2)
    answer = asked(slow, lead=1.5)  # of class 3, a third
    assert (answer.index, answer.model, answer.degraded) == (3, "small+large", True)


def test_a_model_of_both_tiers_counts_once(slow: Peer) -> None:
    slow.part_members = ("small", "large_a")
    answer = asked(slow, lead=1.5)
    assert (answer.index, answer.model) == (PART_CLASS, "large")
    assert answer.confidence == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("member", ["small", "large_a"])
def test_a_part_that_had_less_of_the_image_than_the_edge_counts_for_nothing(slow: Peer, member: str) -> None:
    slow.part_members, slow.part_fraction = (member,), 0.99
    answer = asked(slow, lead=1.5)
    assert (answer.tier, answer.model, answer.index) == (Tier.EDGE, "small", 3)
    assert (answer.escalated, answer.degraded_reason) == (True, DegradedReason.NO_REPLY)


@pytest.mark.parametrize(("received", "tier"), [(0.8, Tier.DATACENTER), (0.1, Tier.EDGE)])
def test_a_complete_answer_to_a_part_of_the_image_counts_where_it_was_measured_to_be_right_oftener(
    large: Peer, received: float, tier: Tier
) -> None:
    large.received = Received(received, 80)

    async def scenario() -> Answer:
        async with bench(large, UNSURE, conditions=True) as it:
            return await it.ask(deadline_ms=LONG_DEADLINE_MS)

    answer = run(scenario)
    assert (answer.tier, answer.escalated) == (tier, True)


@pytest.mark.parametrize(
    ("member", "model", "confidence"), [("large_a", "small+large", (0.1 + 0.7) / 2), ("small", "small", 0.1)]
)
def test_an_answer_to_an_image_encoded_anew_is_that_of_both_tiers_together(
    large: Peer, member: str, model: str, confidence: float
) -> None:
    large.received, large.part_members = Received(1.0, 80), (member,)
    large.part_output = np.eye(10, dtype=np.float32)[PART_CLASS] * np.float32(0.7)
    answer = asked(large, LONG_DEADLINE_MS)
    assert answer.model == model
    assert answer.confidence == pytest.approx(confidence, abs=1e-4)
    assert (answer.accuracy.status, answer.escalated) == (AccuracyStatus.BEST_EFFORT, True)


def test_both_tiers_together_are_not_below_a_target_that_the_datacenter_alone_would_meet(large: Peer) -> None:
    large.received, large.part_output = Received(1.0, 80), np.eye(10, dtype=np.float32)[PART_CLASS]

    async def scenario() -> Answer:
        async with bench(large, UNSURE, conditions=True) as it:
            return await it.ask(target=MaxAccuracyDrop(0.1), deadline_ms=LONG_DEADLINE_MS)

    answer = run(scenario)
    assert (answer.tier, answer.model, answer.degraded) == (Tier.DATACENTER, "small+large", False)


@pytest.mark.parametrize(("edge_runs", "model"), [(True, "small+large"), (False, "large")])
def test_the_edge_is_part_of_the_last_answer_if_it_has_run_by_then(slow: Peer, edge_runs: bool, model: str) -> None:
    async def scenario() -> Answer:
        async with bench(slow, UNSURE) as it:
            if not edge_runs:
                it.backend.gate.clear()
            try:
                return await it.ask(target=Quality.BEST, deadline_ms=DEADLINE_MS)
            finally:
                it.backend.gate.set()

    answer = run(scenario)
    assert (answer.index, answer.model, answer.degraded) == (PART_CLASS, model, True)


def test_the_whole_is_the_answer_where_it_is_in_time(large: Peer) -> None:
    large.parts = [PART_CLASS]
    answer = asked(large, LONG_DEADLINE_MS)
    assert (answer.index, answer.degraded, answer.accuracy.status) == (ANSWER_CLASS, False, AccuracyStatus.CERTIFIED)


@pytest.mark.parametrize("on_miss", [OnMiss.FAIL, OnMiss.WAIT])
def test_who_wants_the_target_met_is_not_offered_parts(large: Peer, on_miss: OnMiss) -> None:
    large.parts = [PART_CLASS]
    assert asked(large, LONG_DEADLINE_MS, on_miss).index == ANSWER_CLASS
    assert "x-hawkvision-progressive" not in large.headers[-1]


def test_without_a_deadline_nobody_asks_for_parts(large: Peer) -> None:
    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            return await it.ask(target=Quality.BEST)

    assert run(scenario).index == ANSWER_CLASS
    assert "x-hawkvision-progressive" not in large.headers[-1]


def test_a_connection_that_breaks_after_a_part_leaves_the_part(large: Peer) -> None:
    large.parts, large.breaks_off = [PART_CLASS], True
    answer = asked(large, LONG_DEADLINE_MS)
    assert (answer.index, answer.degraded) == (PART_CLASS, True)


def test_a_part_that_cannot_be_counts_for_nothing(slow: Peer) -> None:
    slow.parts = [5_000]
    answer = asked(slow)
    assert (answer.tier, answer.degraded) == (Tier.EDGE, True)


def test_a_link_that_brings_parts_in_time_is_not_doubted(slow: Peer) -> None:
    async def scenario() -> bool:
        async with bench(slow, UNSURE) as it:
            datacenter = uplink_of(it)
            for _ in range(6):
                answer = await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=500.0)
                assert answer.index in slow.parts
            return datacenter.admits(500.0)

    assert run(scenario)


def test_where_the_whole_is_hardly_ever_in_time_a_part_is_the_answer_as_soon_as_it_is_there(slow: Peer) -> None:
    async def scenario() -> tuple[Answer, int]:
        async with bench(slow, UNSURE) as it:
            datacenter = uplink_of(it)
            misses(datacenter._selector.carrier.rest, 60_000.0, it.clock.now())
            answer = await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=LONG_DEADLINE_MS)
            assert counted(it) == (1, 1)
            return answer, datacenter._pending

    answer, pending = run(scenario)
    assert answer.tier is Tier.DATACENTER
    assert answer.timing_ms.total < LONG_DEADLINE_MS / 2
    assert pending == 1, "the escalation goes on, to learn whether waiting pays again"


@pytest.mark.parametrize(("deadline_ms", "index"), [(DEADLINE_MS, PART_CLASS), (LONG_DEADLINE_MS, ANSWER_CLASS)])
def test_the_rest_is_waited_for_where_it_usually_takes_less_than_there_is_time(
    large: Peer, deadline_ms: float, index: int
) -> None:
    large.parts, large.delay_s = [PART_CLASS], 0.5  # before the deadline in either case, but that is not usual

    async def scenario() -> Answer:
        async with bench(large, UNSURE) as it:
            rest = uplink_of(it)._selector.carrier.rest
            for _ in range(20):
                rest.answered(rest.sent(it.clock.now() - DEADLINE_MS * 1.5e-3), DEADLINE_MS * 1.5, it.clock.now())
            return await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=deadline_ms)

    answer = run(scenario)
    assert (answer.index, answer.degraded) == (index, index == PART_CLASS)


def test_what_was_given_up_for_a_part_is_learned_from(large: Peer) -> None:
    large.parts, large.delay_s = [PART_CLASS], 0.1

    async def scenario() -> int:
        async with bench(large, UNSURE) as it:
            datacenter = uplink_of(it)
            rest = datacenter._selector.carrier.rest
            misses(rest, 60_000.0, it.clock.now())
            await it.ask(target=MaxAccuracyDrop(0.01), deadline_ms=LONG_DEADLINE_MS)
            await until(lambda: datacenter._pending == 0)
            return sum(each.answered for each in rest._observations)

    assert run(scenario) == 1


@given(st.lists(st.binary(min_size=1, max_size=8).map(lambda line: line.replace(b"\n", b"-")), min_size=1), st.data())
def test_lines_are_read_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    ended = data.draw(st.booleans())
    body = b"\n".join(lines) + (b"\n" if ended else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    arrived: list[bytes] = []

    async def read() -> bytes:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.connection_made(asyncio.Transport())
        stream = StreamReader(protocol, 2**16, loop=loop)

        async def feed() -> None:
            for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
                stream.feed_data(body[start:end])
                await asyncio.sleep(0)
            stream.feed_eof()

        feeding = asyncio.create_task(feed())
        last = await read_lines(stream, arrived.append)
        await feeding
        return last

    assert asyncio.run(read()) == lines[-1]
    assert arrived == (lines if ended else lines[:-1])


def test_the_answer_is_read_from_the_last_line_over_a_real_connection(large: Peer) -> None:
    large.parts = [5, PART_CLASS]

    async def lines() -> int:
        async with aiohttp.ClientSession() as session:
            headers = {"X-HawkVision-Progressive": "1"}
            async with session.post(f"{large.url}/v1/infer", data=b"image", headers=headers) as response:
                arrived: list[bytes] = []
                assert await read_lines(response.content, arrived.append) == arrived[-1]
                return len(arrived)

    assert asyncio.run(lines()) == 3
