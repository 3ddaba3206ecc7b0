"""Models share a memory that holds few of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import Overloaded
from tests.bench.policies.baselines.residency import Residency, next_to_evict
from tests.bench.policies.baselines.store import SIZES, LoadedModel, Store
from tests.edge.bench import run
from tests.fuzz.examples import examples
from tests.waiting import until


@pytest.mark.parametrize(
    ("in_use", "evicted"),
    [({"a": False, "b": False}, "a"), ({"a": True, "b": False}, "b"), ({"a": True, "b": True}, "a")],
)
def test_an_idle_model_is_evicted_before_one_in_use(in_use: Mapping[str, bool], evicted: str) -> None:
    assert next_to_evict(in_use) == evicted


# ---------------------------------------------------------------------------------------------------- residency


def residency(store: Store, limit: int = 11, waiting_limit: int = 8) -> Residency:
    return Residency(store.load, SIZES, limit, store.first(), waiting_limit, lambda _name, _ms: None)


async def use(models: Residency, name: str) -> None:
    async with models.held(name):
        pass


def test_the_least_recently_used_model_is_evicted() -> None:
    async def scenario() -> tuple[list[tuple[str, ...]], bool]:
        store, seen = Store(), []
        models = residency(store)
        first = store.models["small"]
        for name in ("mid", "small", "big", "small"):
            await use(models, name)
            seen.append(models.loaded)
        await models.close()
        return seen, first.closed

    seen, closed = run(scenario)
    assert seen == [("small", "mid"), ("mid", "small"), ("big",), ("small",)]
    assert closed, "what left was unloaded"


def test_a_model_in_use_is_unloaded_only_afterwards() -> None:
    async def scenario() -> list[bool]:
        store = Store()
        models = residency(store, limit=8)
        model, seen = store.models["small"], []
        async with models.held("small"):
            waiting = asyncio.create_task(use(models, "big"))
            await until(lambda: models.coming == ("big",) and not models.loaded)
            seen.append(model.closed)
        await waiting
        seen.append(model.closed)
        await models.close()
        return seen

    assert run(scenario) == [False, True]


def test_a_model_that_many_requests_wait_for_is_loaded_once() -> None:
    async def scenario() -> list[str]:
        store = Store()
        models = residency(store)
        await asyncio.gather(*(use(models, "mid") for _ in range(5)))
        await models.close()
        return store.loads

    assert run(scenario) == ["mid"]


def test_requests_that_wait_for_loads_are_bounded() -> None:
    async def scenario() -> None:
        store = Store()
        models = residency(store, waiting_limit=2)
        store.gate.clear()
        waiting = [asyncio.create_task(use(models, "mid")) for _ in range(2)]
        await until(lambda: store.loads == ["mid"])
        with pytest.raises(Overloaded, match="2 requests are already waiting"):
            await use(models, "mid")
        await use(models, "small")  # what is resident needs no wait
        store.gate.set()
        await asyncio.gather(*waiting)
        await models.close()

    run(scenario)


def test_a_failed_load_is_an_error_for_each_waiting_request_and_is_tried_again() -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        store = Store()
        models = residency(store)
        store.broken = True
        failed = await asyncio.gather(*(use(models, "mid") for _ in range(3)), return_exceptions=True)
        store.broken = False
        await use(models, "mid")
        await models.close()
        return [type(error).__name__ for error in failed], store.loads

    assert run(scenario) == (["ArtifactError"] * 3, ["mid", "mid"])


@settings(max_examples=examples(125), deadline=None)
@given(st.lists(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4), max_size=6), st.integers(8, 20))
def test_memory_stays_within_its_limit_and_no_request_gets_an_unloaded_model(
    rounds: list[list[str]], limit: int
) -> None:
    async def one(models: Residency, name: str) -> None:
        async with models.held(name) as stage:
            await asyncio.sleep(0)
            assert isinstance(stage.first.backend, LoadedModel)
            assert not stage.first.backend.closed
            assert stage.name == name

    async def scenario() -> None:
        models = residency(Store(), limit)
        for names in rounds:
            await asyncio.gather(*(one(models, name) for name in names))
            assert models.used_bytes == sum(SIZES[name] for name in models.loaded) <= limit
        await models.close()

    run(scenario)
