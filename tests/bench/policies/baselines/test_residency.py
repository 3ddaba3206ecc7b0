"""Models share a memory that holds few of them."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.policies.baselines.residency import Residency
from tests.bench.policies.baselines.store import SIZES, LoadedModel, Store
from tests.edge.bench import run
from tests.fuzz.examples import examples

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
