"""Models in memory under a limit: loaded when somebody needs them, and the one used longest ago makes room.

    held(name) ─┬─ loaded ───────────────────────────────────────────────► in use, until the block ends
                └─ not ──► line of loads, one at a time ─► evict until it fits ─► load on a thread ─► in use

An eviction waits for the requests that use the model; whoever asks for it meanwhile queues for loading it anew. Loads
and evictions run on threads, for as long as they take: that time is what switching models costs.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edge.inference.edge_stage import EdgeStage
from hawkvision.core.errors import Overloaded


@dataclass(slots=True, eq=False)
class _Place:
    """A model that is in memory, or on its way there."""

    size: int
    loading: asyncio.Future[EdgeStage]
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def loaded(self) -> bool:
        return self.loading.done()  # a failed one has no place


def first_to_leave(in_use: Mapping[str, bool]) -> str:
    """Who makes room, of those in memory from least to most recently used: the first that nobody uses, else the first.

    An idle one costs nobody a wait, and its place is free at once.
    """
    return next((name for name, used in in_use.items() if not used), next(iter(in_use)))


class Residency:
    """The models of one node. Made and used on one event loop; close it."""

    def __init__(
        self,
        load: Callable[[str], EdgeStage],
        sizes: Mapping[str, int],
        limit: int,
        first: EdgeStage,
        waiting_limit: int,
        on_load: Callable[[str, float], None],
    ) -> None:
        """Start with one.

        Args:
            load: called on a thread.
            sizes: bytes of each model; none above `limit`.
            limit: bytes of all that are in memory, or being loaded.
            first: what is in memory already; unloaded when its time comes, like all others.
            waiting_limit: requests that may wait for loads.
            on_load: told which model was loaded, and in how many milliseconds.
        """
        assert all(size <= limit for size in sizes.values())
        self._load = load
        self._sizes = sizes
        self._limit = limit
        self._waiting_limit = waiting_limit
        self._on_load = on_load
        present: asyncio.Future[EdgeStage] = asyncio.get_running_loop().create_future()
        present.set_result(first)
        self._places = OrderedDict({first.name: _Place(sizes[first.name], present)})
        self._used = sizes[first.name]
        self._waiting = 0
        self._turn = asyncio.Lock()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Models that answer at once, from least to most recently used."""
        return tuple(name for name, place in self._places.items() if place.loaded)

    @property
    def coming(self) -> tuple[str, ...]:
        """Models being loaded or in the line for it, at most one entry each."""
        return tuple(name for name, place in self._places.items() if not place.loaded)

    @property
    def used_bytes(self) -> int:
        """Bytes of the models in memory."""
        return self._used

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[EdgeStage]:
        """The model, loaded if need be, and in memory for as long as the block lasts.

        Raises:
            Overloaded: if too many requests wait for loads already.
            ArtifactError, BackendError: if it cannot be loaded.
        """
        place = self._places.get(name)
        if (place is None or not place.loaded) and self._waiting >= self._waiting_limit:
            raise Overloaded(f"{self._waiting} requests are already waiting for models to be loaded", 1.0)
        if place is None:
            loading = asyncio.create_task(self._bring(name))
            loading.add_done_callback(_hear)
            place = self._places[name] = _Place(self._sizes[name], loading)
        self._places.move_to_end(name)
        place.users += 1
        place.idle.clear()
        try:
            if not place.loaded:
                await self._wait(place)
            yield place.loading.result()
        finally:
            place.users -= 1
            if place.users == 0:
                place.idle.set()

    async def close(self) -> None:
        """Give up what is being loaded, and unload all models; nobody may be using one."""
        places = list(self._places.values())
        for place in places:
            place.loading.cancel()
        await asyncio.gather(*(place.loading for place in places), return_exceptions=True)
        for place in self._places.values():
            place.loading.result().close()
        self._places.clear()

    async def _wait(self, place: _Place) -> None:
        self._waiting += 1
        try:
            await asyncio.shield(place.loading)  # one that gives up must not take the model from the others
        finally:
            self._waiting -= 1

    async def _bring(self, name: str) -> EdgeStage:
        arrived, size = False, self._sizes[name]
        try:
            async with self._turn:
                while self._used + size > self._limit:
                    await self._evict()
                started = time.monotonic()
                stage = await asyncio.to_thread(self._load, name)
                self._on_load(name, (time.monotonic() - started) * 1e3)
                self._used += size
                arrived = True
                return stage
        finally:
            if not arrived:
                del self._places[name]

    async def _evict(self) -> None:
        """Unload one model. With the turn held, so whatever takes up memory is loaded."""
        name = first_to_leave({name: self._places[name].users > 0 for name in self.loaded})
        place = self._places.pop(name)
        if place.users:
            await place.idle.wait()
        await asyncio.to_thread(place.loading.result().close)
        self._used -= place.size


def _hear(loading: asyncio.Future[EdgeStage]) -> None:
    """Those who wait for a load hear of its failure; if none does any more, nobody need."""
    if not loading.cancelled():
        loading.exception()
