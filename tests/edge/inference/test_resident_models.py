"""The models of several tasks within one budget: which are in memory, which leave, and who waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.inference.resident_models import ResidentStage
from hawkvision.core.errors import BadField, ConfigError, NotReady
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.types import OnMiss, Quality, Reason, Tier
from tests.edge.bench import SURE, Bench, GatedBackend, bench, run
from tests.edge.disk import Disk
from tests.edge.peer import Peer
from tests.fuzz.examples import examples
from tests.waiting import until

SIZES = {"small": 1, "one": 4, "two": 4, "three": 4, "large": 9, "huge": 11}
LIMIT = 10


class Tasks(Disk):
    """Nodes whose models share a memory."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__(limit, SIZES)

    @asynccontextmanager
    async def node(self, task: str, peer: Peer | None = None, *, pinned: bool = False) -> AsyncIterator[Bench]:
        async with bench(peer, SURE, task=task, use=self.use(task), memory=self.memory, pinned=pinned) as node:
            yield node

    @asynccontextmanager
    async def nodes(self, *tasks: str) -> AsyncIterator[list[Bench]]:
        async with contextlib.AsyncExitStack() as opened:
            yield [await opened.enter_async_context(self.node(task)) for task in tasks]
            assert self.memory.shared.held_bytes <= self.memory.limit

    def ready(self) -> list[str]:
        return [each.task for each in self.memory.stages if each.state == "ready"]


def models_of(node: Bench) -> ResidentStage:
    return node.node.context.executor.models


async def holding(node: Bench) -> Callable[[], None]:
    """A request under way; what is returned lets it end."""
    backend = node.node.stage.first.backend
    assert isinstance(backend, GatedBackend)
    backend.gate.clear()
    asked = asyncio.ensure_future(node.ask(target=Quality.FAST))
    await until(lambda: backend.begun > 0)
    assert not asked.done()
    return backend.gate.set


def test_what_fits_is_loaded_at_the_start_in_order_and_the_rest_when_it_is_asked_for() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("one", "two", "three") as nodes:
            assert disk.ready() == ["one", "two"]
            disk.loads.clear()
            for node in (nodes[0], nodes[2]):
                assert (await node.ask(target=Quality.FAST)).tier is Tier.EDGE
            assert disk.loads == ["three"]
            assert disk.ready() == ["one", "three"], "the least recently used one left"
            assert nodes[1].counted("model_unloads_total", variant="small") == 1.0
            assert nodes[2].counted("model_load_duration_seconds_count", variant="small") == 1.0

    run(scenario)


def test_what_can_never_fit_is_said() -> None:
    disk = Tasks()

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="its models take 0 MB, and 0 MB is all the memory for models"):
            async with disk.node("huge"):
                pass
        async with disk.node("one", pinned=True):
            with pytest.raises(ConfigError, match="and 0 MB those of pinned tasks"):
                async with disk.node("large"):
                    pass
            assert disk.ready() == ["one"]

    run(scenario)


def test_pinned_models_stay() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.node("one", pinned=True) as pinned, disk.nodes("two", "three") as nodes:
            for node in nodes * 2:
                await node.ask(target=Quality.FAST)
            assert "one" in disk.ready()
            with pytest.raises(BadField, match="pinned_tasks"):
                await models_of(pinned).unload()

    run(scenario)


def test_a_model_of_several_tasks_counts_once_and_is_closed_after_the_last() -> None:
    disk = Tasks()

    async def scenario() -> None:
        views = [disk.use(task, "file") for task in ("one", "two", "three")]
        async with contextlib.AsyncExitStack() as opened:
            nodes = [
                await opened.enter_async_context(bench(None, SURE, task=f"view {i}", use=use, memory=disk.memory))
                for i, use in enumerate(views)
            ]
            assert (len(disk.ready()), disk.loads, disk.memory.shared.held_bytes) == (3, ["one"], 4)
            for node in nodes[:2]:
                await models_of(node).unload()
            assert disk.memory.shared.held_bytes == 4
            await models_of(nodes[2]).unload()
            assert disk.memory.shared.held_bytes == 0

    run(scenario)


def test_a_stage_in_use_leaves_after_its_last_use_and_later_requests_wait_for_it() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("large", "one") as (busy, other):
            let_go = await holding(busy)
            waiting = asyncio.ensure_future(other.ask(target=Quality.FAST))
            await until(lambda: models_of(busy).state == "unloaded")
            again = asyncio.ensure_future(busy.ask(target=Quality.FAST))
            await until(lambda: models_of(busy).state == "loading")
            assert not waiting.done()
            assert busy.node.stage.first.is_open
            let_go()
            assert [(await each).tier for each in (waiting, again)] == [Tier.EDGE] * 2
            assert disk.loads == ["large", "one", "one", "large"]

    run(scenario)


def test_idle_models_leave_before_those_in_use() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("one", "two", "three") as (busy, idle, third):
            let_go = await holding(busy)
            await idle.ask(target=Quality.FAST)  # used after the busy one began
            await third.ask(target=Quality.FAST)
            assert disk.ready() == ["one", "three"]
            let_go()

    run(scenario)


def test_all_who_wait_for_a_load_are_answered_before_it_can_leave_again() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("large", "one") as nodes:
            disk.loads.clear()
            asked = [asyncio.ensure_future(node.ask(target=Quality.FAST)) for _ in range(8) for node in nodes[::-1]]
            await asyncio.gather(*asked)
            assert len(disk.loads) <= 3, "each load served all that waited"

    run(scenario)


def test_a_load_that_fails_is_tried_again_by_the_operator_alone() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.node("one") as node:
            models = models_of(node)
            await models.unload()
            disk.broken = True
            for _ in range(2):
                with pytest.raises(NotReady, match="the disk is broken"):
                    await node.ask(target=Quality.FAST)
            assert (models.state, disk.loads) == ("failed", ["one", "one"])
            with pytest.raises(NotReady):
                await models.load()
            disk.broken = False
            await models.load()
            assert (await node.ask(target=Quality.FAST)).tier is Tier.EDGE

    run(scenario)


def test_requests_that_wait_for_a_load_or_for_its_turn_fail_when_the_node_closes() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("large", "one", "two") as (busy, *others):
            let_go = await holding(busy)
            asked = [asyncio.ensure_future(node.ask(target=Quality.FAST)) for node in others]
            await until(lambda: [models_of(node).state for node in (busy, *others)] == ["unloaded", *["loading"] * 2])
            await asyncio.gather(*(models_of(node).close() for node in others))
            for each in asked:
                with pytest.raises(NotReady, match="the node is shutting down"):
                    await asyncio.wait_for(each, 10.0)
            let_go()

    run(scenario)


def test_requests_wait_in_a_bounded_number_and_until_their_deadline() -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.nodes("large", "one") as (busy, other):
            let_go = await holding(busy)
            models_of(other).serve(other.node.metrics, 1)
            waiting = asyncio.ensure_future(other.ask(target=Quality.FAST))
            await until(lambda: models_of(other).state == "loading")
            with pytest.raises(NotReady, match="1 requests already wait"):
                await other.ask(target=Quality.FAST)
            models_of(other).serve(other.node.metrics, 2)
            with pytest.raises(NotReady, match="takes too long"):
                await other.ask(target=Quality.FAST, deadline_ms=50.0)
            let_go()
            assert (await waiting).tier is Tier.EDGE

    run(scenario)


def test_the_datacenter_answers_what_would_wait_too_long(large: Peer) -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.node("large") as busy, disk.node("one", large) as other:
            let_go = await holding(busy)
            models_of(other).load_s = 60.0
            answer = await other.ask(deadline_ms=20_000.0)
            assert (answer.tier, answer.reason) == (Tier.DATACENTER, Reason.EDGE_NOT_READY)
            assert models_of(other).state == "loading", "it is loaded meanwhile"
            let_go()
            await until(lambda: models_of(other).state == "ready")

    run(scenario)


@pytest.mark.parametrize("fields", [{}, {"deadline_ms": 20_000.0}, {"deadline_ms": 1.0, "on_miss": OnMiss.WAIT}])
def test_the_datacenter_answers_while_models_cannot_be_loaded(large: Peer, fields: dict[str, Any]) -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.node("one", large) as node, disk.node("two") as alone:
            await asyncio.gather(models_of(node).unload(), models_of(alone).unload())
            early = await node.node.infer_early(node.request(**fields))
            assert (early, models_of(node).state) == ((None, False), "unloaded"), "the whole image is waited for"
            disk.broken = True
            for _ in range(2):  # the first finds out
                answer = await node.ask(**fields)
                assert (answer.tier, answer.reason) == (Tier.DATACENTER, Reason.EDGE_NOT_READY)
                assert not answer.degraded
            assert models_of(node).state == "failed"
            assert await node.node.infer_early(node.request(**fields)) == (None, False)
            with pytest.raises(NotReady, match="the disk is broken"):
                await node.ask(target=Quality.FAST)
            with pytest.raises(NotReady, match="the disk is broken"):
                await alone.ask(**fields)
            large.status = 503
            with pytest.raises(NotReady, match="the disk is broken"):
                await node.ask(**fields)

    run(scenario)


def test_the_datacenter_answers_those_for_whom_there_is_no_place_to_wait(large: Peer) -> None:
    disk = Tasks()

    async def scenario() -> None:
        async with disk.node("large") as busy, disk.node("one", large) as other:
            let_go = await holding(busy)
            models_of(other).serve(other.node.metrics, 1)
            waiting = asyncio.ensure_future(other.ask())
            await until(lambda: models_of(other).state == "loading")
            assert (await other.ask()).reason is Reason.EDGE_NOT_READY
            large.status, large.held = 500, True
            asking = asyncio.ensure_future(other.ask())
            await until(lambda: len(large.bodies) == 2)
            let_go()
            assert (await waiting).tier is Tier.EDGE
            large.held = False
            assert (await asking).tier is Tier.EDGE, "there is a place now, and the datacenter has failed"

    run(scenario)


@settings(max_examples=examples(125), deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4), max_size=6), st.integers(11, 26))
def test_memory_stays_within_its_limit_and_no_request_gets_an_unloaded_model(
    rounds: list[list[str]], limit: int
) -> None:
    async def one(models: ResidentStage) -> None:
        await models.present()
        with models:
            await asyncio.sleep(0)
            assert models.stage.first.is_open

    async def scenario() -> None:
        disk = Tasks(limit)
        first = disk.memory.add("small", disk.stage("small"))
        first.serve(EdgeMetrics(), 8)
        await first.unload()
        found = {name: first.beside(disk.stage(name)) for name in SIZES}
        for models in found.values():
            models.serve(EdgeMetrics(), 8)
        for names in rounds:
            await asyncio.gather(*(one(found[name]) for name in names))
            held = sum(SIZES[name] for name, models in found.items() if models.state == "ready")
            assert disk.memory.shared.held_bytes == held <= limit
        for models in (first, *found.values()):
            await models.close()

    run(scenario)
