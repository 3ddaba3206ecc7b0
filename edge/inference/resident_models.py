"""The models of a node within one budget of memory: loaded when asked for; the least recently used leave.

    present() ─┬─ ready ──────────────────────────────────────────────────────────► in use: `with stage`
               └─ unloaded ─► wait for earlier loads ─► unload until it fits ─► load on a thread ─► ready

Only the models of a task come and go: its certificates, streams, evidence, queue and counters stay. One load runs at
a time. A stage in use is not unloaded: who asks for it from then on waits until it is loaded again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from edge.inference.edge_stage import EdgeStage, LoadedModel
from edge.inference.shared_models import SharedModels
from edge.inference.warm_up import warm_stage
from hawkvision.core.errors import BackendError, BadField, ConfigError, HawkVisionError, NotReady
from hawkvision.system.memory import give_back_at_once, room, to_the_end

if TYPE_CHECKING:
    from hawkvision.core.metrics import EdgeMetrics

log = logging.getLogger("hawkvision.edge")

State: TypeAlias = Literal["ready", "loading", "unloaded", "failed"]

MODELS_SHARE: Final = 0.75
"""Share of what the process may use that models may take by default."""


class ModelMemory:
    """The budget of a node's models, and those that are in memory. Made on any thread, used by one event loop."""

    def __init__(self, limit: int | None = None) -> None:
        """A budget in bytes; None for a share of what the process may still use.

        A share has to hold the libraries, too, so models are counted with those that they bring.
        """
        give_back_at_once()
        found = room()
        self.limit = int(found.free_bytes * MODELS_SHARE) if limit is None else limit
        self.basis = found.limited_by if limit is None else "model_memory_bytes"
        self.shared = SharedModels(exact=limit is not None)
        self.stages: list[ResidentStage] = []
        """In the order in which their tasks are loaded at the start."""
        self.turn = asyncio.Lock()
        """Held by the one load or unload under way."""
        self.uses = itertools.count(1)

    def add(self, task: str, stage: EdgeStage, load_s: float = 0.0, *, pinned: bool = False) -> ResidentStage:
        """A stage that was loaded, in so many seconds. It leaves again if there is no room; pinned ones come first.

        Raises:
            ConfigError: if it would never fit.
        """
        found = ResidentStage(self, task, stage, load_s, pinned=pinned)
        self.stages.append(found)
        found.settle()
        return found

    async def make_room(self, stage: ResidentStage) -> None:
        """Unload the least recently used stages until this one fits; idle ones first. The turn is held.

        Raises:
            BackendError: if it does not fit beside what is pinned.
        """
        shared = self.shared
        while shared.held_bytes + shared.bytes_of(stage.keys, closed=True) > self.limit:
            leaving = [each for each in self.stages if each.state == "ready" and not each.pinned]
            if not leaving:
                raise BackendError(f"{_mb(self.limit)} of memory for models do not suffice beside pinned tasks")
            await min(leaving, key=lambda each: (each.users > 0, each.used)).leave()


class ResidentStage:
    """A stage whose models come and go, and what uses it. Enter it, once it is `present`, to keep it in memory."""

    def __init__(self, memory: ModelMemory, task: str, stage: EdgeStage, load_s: float, *, pinned: bool) -> None:
        self.task = task
        self.stage = stage
        self.pinned = pinned
        self.keys = tuple(model.use.key for model in stage.models if model.use is not None)
        """Of its models in memory."""
        self.state: State = "ready"
        self.reason: str | None = None
        """Why it could not be loaded."""
        self.users = 0
        self.used = 0
        """The number of its last use, among those of all stages."""
        self.load_s = load_s
        """Seconds of its last load."""
        self._waiting_limit = 1
        self._metrics: EdgeMetrics | None = None
        self._memory = memory
        self._waiting = 0
        self._nobody_waits = asyncio.Event()
        self._nobody_waits.set()
        self._loading: asyncio.Task[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        """Done when the load under way has ended."""
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        """Begin a use."""
        if not self.users:
            self._idle.clear()
        self.users += 1
        self.used = next(self._memory.uses)

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.users -= 1
        if not self.users:
            self._idle.set()

    @property
    def bytes(self) -> int:
        """Bytes of its models, in memory or not."""
        return self._memory.shared.bytes_of(self.keys)

    def beside(self, stage: EdgeStage) -> ResidentStage:
        """Another stage of the task, which is not in memory until it is asked for."""
        found = ResidentStage(self._memory, self.task, stage, self.load_s, pinned=False)
        found.state = "unloaded"
        self._memory.stages.append(found)
        return found

    def settle(self) -> None:
        """At the start: stay if there is room beside the stages before this one, else leave.

        Raises:
            ConfigError: if it would never fit; it leaves for ever.
        """
        memory, shared = self._memory, self._memory.shared
        pinned = {key for each in memory.stages if each.pinned for key in each.keys}
        needed, others = shared.bytes_of({*pinned, *self.keys}), shared.bytes_of(pinned - set(self.keys))
        stays = self.pinned or shared.held_bytes <= memory.limit
        self.state = "ready" if stays else "unloaded"
        if needed > memory.limit:
            memory.stages.remove(self)
            stays = False
        if not stays:
            self.stage.close()
        if needed > memory.limit:
            beside = f" and {_mb(others)} those of pinned tasks" if others else ""
            raise ConfigError(
                f"its models take {_mb(self.bytes)}{beside}, and {_mb(memory.limit)} is all the memory for models, by "
                f"{memory.basis}"
            )

    def grown(self, model: LoadedModel, size: int) -> None:
        """Record that a model takes so many bytes more than when it was loaded."""
        if model.use is not None:
            self._memory.shared.grown(model.use.key, size)

    def serve(self, metrics: EdgeMetrics, waiting_limit: int) -> None:
        """Let at most so many requests wait for a load, and count in these metrics."""
        self._metrics, self._waiting_limit = metrics, waiting_limit
        metrics.model_memory.set(self._memory.limit)
        metrics.model_bytes.set_function(lambda: self._memory.shared.held_bytes)

    def in_time(self, left_s: float | None) -> bool:
        """Whether its models are in memory within so many seconds, or ever. Asks for them, if they are not."""
        if self.state == "ready":
            return True
        if self.state == "failed" or self._waiting >= self._waiting_limit:
            return False
        self._ask()
        return left_s is None or self.load_s < left_s

    def check(self) -> None:
        """Raise `NotReady` unless the models are in memory."""
        if self.state == "failed":
            raise NotReady(f"the models of task {self.task!r} could not be loaded: {self.reason}")
        if self.state != "ready":
            raise NotReady(f"the models of task {self.task!r} are {self.state}; a request loads them")

    async def present(self, until: float | None = None) -> None:
        """Return when the models are in memory; between that and entering, nothing may be awaited.

        Args:
            until: latest time of the monotonic clock.

        Raises:
            NotReady: if they could not be loaded, not by then, or too many requests wait for that.
        """
        while self.state != "ready":
            if self.state == "failed":
                self.check()
            if self._waiting >= self._waiting_limit:
                raise NotReady(f"{self._waiting} requests already wait for the models of task {self.task!r}")
            settled = self._ask()
            self._waiting += 1
            self._nobody_waits.clear()
            try:
                async with asyncio.timeout(None if until is None else max(0.0, until - time.monotonic())):
                    await asyncio.shield(settled)
            except TimeoutError:
                raise NotReady(f"the models of task {self.task!r} are loaded, and that takes too long") from None
            finally:
                self._waiting -= 1
                if not self._waiting:
                    self._nobody_waits.set()

    async def load(self) -> None:
        """Load it for an operator, also if that failed before.

        Raises:
            NotReady: if it cannot be loaded.
        """
        if self.state == "failed":
            self.state = "unloaded"
        await self.present()

    async def unload(self) -> None:
        """Unload it for an operator, after its last use. It is loaded again when it is asked for.

        Raises:
            BadField: if it is pinned, or its models cannot be unloaded.
        """
        if self.pinned or not self.keys:
            why = "it is in pinned_tasks" if self.pinned else "its backend holds a device"
            raise BadField(f"cannot unload {self.task!r}: {why}")
        async with self._memory.turn:
            if self.state == "ready":
                await self.leave()
            elif self.state == "failed":
                self.state = "unloaded"

    async def leave(self) -> None:
        """Give the memory back after the last use. The turn is held."""
        self.state = "unloaded"  # from now on, requests wait
        await self._idle.wait()
        await to_the_end(asyncio.ensure_future(asyncio.to_thread(self.stage.close)))
        if self._metrics is not None:
            self._metrics.model_unloads.labels(self.task, self.stage.name).inc()
        log.info("%s: unloaded %s", self.task, self.stage.name)

    async def close(self) -> None:
        """Give up a load, so that requests that wait for it fail, and give the memory back."""
        self.state, self.reason = "failed", "the node is shutting down"
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        if self in self._memory.stages:
            self._memory.stages.remove(self)
        self.stage.close()

    def _ask(self) -> asyncio.Future[None]:
        """The end of the load under way, which begins unless one does."""
        if self._settled is None or self._settled.done():
            self.state = "loading"
            self._settled = asyncio.get_running_loop().create_future()
            self._loading = asyncio.create_task(self._load(self._settled))
        return self._settled

    async def _load(self, settled: asyncio.Future[None]) -> None:
        async with self._memory.turn:
            try:
                await self._memory.make_room(self)
                began = time.monotonic()
                await to_the_end(asyncio.ensure_future(asyncio.to_thread(self._open)))
                self.load_s = time.monotonic() - began
                self.state, self.reason = "ready", None
                if self._metrics is not None:
                    self._metrics.model_load_duration.labels(self.task, self.stage.name).observe(self.load_s)
                log.info("%s: loaded %s in %.0f ms", self.task, self.stage.name, self.load_s * 1e3)
            except Exception as error:
                self.state = "failed"
                self.reason = error.message if isinstance(error, HawkVisionError) else type(error).__name__
                log.exception("%s: %s could not be loaded", self.task, self.stage.name)
            settled.set_result(None)
            await self._nobody_waits.wait()  # those that waited use it before another load unloads it

    def _open(self) -> None:
        self.stage.open()
        warm_stage(self.stage)


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
