"""Models in memory under a limit: loaded on demand; the least recently used one is evicted.

    held(name) ─┬─ loaded ─────────────────────────────────────────────────────────────────► in use until the block ends
                └─ not loaded ─► wait for earlier loads ─► evict until it fits ─► load on a thread ─► in use

An eviction waits for the requests that use the model. Requests that ask for it meanwhile wait for it to be loaded
again. Loads and evictions run on threads.
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
    """A model that is in memory or being loaded."""

    size: int
    loading: asyncio.Future[EdgeStage]
    users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def loaded(self) -> bool:
        return self.loading.done()  # a failed one has no place


def next_to_evict(in_use: Mapping[str, bool]) -> str:
    """The model to evict, of those in memory from least to most recently used: the first idle one, else the first."""
    return next((name for name, used in in_use.items() if not used), next(iter(in_use)))


class Residency:
    """The models of one node. Made and used on one event loop. Must be closed."""

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
            first: the model that is in memory already; evicted like all others.
            waiting_limit: requests that may wait for loads.
            on_load: called with the name of each model that was loaded, and the milliseconds that it took.
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
        """Models that are being loaded or wait for it, each once."""
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
            loading = asyncio.create_task(self._load_one(name))
            loading.add_done_callback(_retrieve_error)
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
        """Cancel loads and unload all models; none may be in use."""
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
            await asyncio.shield(place.loading)  # a request that gives up must not cancel the load for others
        finally:
            self._waiting -= 1

    async def _load_one(self, name: str) -> EdgeStage:
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
        """Unload one model. The turn is held, so every model that takes up memory is loaded."""
        name = next_to_evict({name: self._places[name].users > 0 for name in self.loaded})
        place = self._places.pop(name)
        if place.users:
            await place.idle.wait()
        await asyncio.to_thread(place.loading.result().close)
        self._used -= place.size


def _retrieve_error(loading: asyncio.Future[EdgeStage]) -> None:
    """Requests that wait for a load get its error. If none waits any more, it must not be logged as never retrieved."""
    if not loading.cancelled():
        loading.exception()
