"""One replica of a group of variants: an encoded image in, each variant's calibrated output out. Knows no Ray.

The variants of a group evaluate the same images. They share one process, so that an image is sent and decoded once,
and as many of them run on it at a time as there are cores.

Images arrive encoded and are decoded here: a JPEG is smaller to send than a tensor, the server's event loop stays free,
and decoding scales with the replicas. Decoding precedes batching, so a bad image fails alone.

The header tells what decoding costs (`imaging.decoding_cost`). Images wait for memory and for a decoding thread in the
order of their deadlines. Large images leave a thread to the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from itertools import pairwise
from typing import Any

import cv2
import numpy as np

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, NotReady
from hawkvision.core.types import Pixels
from hawkvision.datacenter.execution.batching import BatchedResult
from hawkvision.datacenter.execution.group_settings import GroupSettings, ProcessSettings
from hawkvision.datacenter.execution.model import HEALTH_LIMIT_S, Model, ModelSet
from hawkvision.datacenter.stages.ensemble import (
    Augmentation,
    EvaluationRequest,
    VariantAnswer,
    ViewOutputs,
    enough,
    likely_enough,
)
from hawkvision.imaging.decoding_cost import DecodingCost, check_memory
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import load_inputs, probe
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.core_placement import CorePlacement, PlaceableThreads
from hawkvision.models.manifest import InputSpec
from hawkvision.system.memory import MemoryBudget, divided, give_back_at_once, to_the_end
from hawkvision.tasks.kind import Output, TaskKind, ToImage

log = logging.getLogger("hawkvision.datacenter")


class Replica:
    """A set of models that can be replaced, and the threads that decode and infer."""

    def __init__(self, process: ProcessSettings, settings: GroupSettings) -> None:
        """Load and verify the models, and run each once to warm it up.

        Raises:
            ArtifactError: if a model file is missing or is not the one the manifest names.
            BackendError: if the backend cannot load it.
        """
        self._threads = process.inference_threads
        decoding = process.decoding_threads
        apart = CorePlacement()
        self.inferring = PlaceableThreads(min(self._threads, usable_cores()), "infer", apart)
        self.decoding = PlaceableThreads(decoding, "decode", apart) if decoding else self.inferring
        self.models = self._loaded(settings)
        log.info("replica ready: %s", self.models)
        give_back_at_once()
        self.parts = divided(process.memory_bytes, process.request_memory_bytes, process.replicas)
        """The memory shares, now that the models are loaded."""
        log.info("memory for decoding: %d MB, by %s", self.parts.decoding // 1_000_000, self.parts.basis)
        self.memory = MemoryBudget(self.parts.decoding)
        self._heavy = MemoryBudget(max(1, decoding - 1))
        """The threads that large images may occupy."""
        self._images = 0
        self._replacing = asyncio.Lock()

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of the variants, each once."""
        return self.models.backends

    @property
    def statement(self) -> str:
        """The statement of the variants that new images get."""
        return self.models.statement

    async def reconfigure(self, settings: GroupSettings) -> None:
        """Load other models, or the same with other limits, and use them for new images.

        Images inside finish with the models that they began with; until then, both are in memory.

        Raises:
            ArtifactError, BackendError: as the constructor; the replica then keeps what it has.
        """
        async with self._replacing:
            if settings == self.models.settings:
                return
            replaced, self.models = self.models, await asyncio.to_thread(self._loaded, settings)
            log.info("replica has new models: %s", self.models)
            replaced.retire()

    async def check_health(self, limit_s: float = HEALTH_LIMIT_S) -> None:
        """Infer a blank image with each model that has not inferred lately.

        Raises:
            BackendError: if an inference fails, or takes longer than the limit.
        """
        await asyncio.gather(*(model.check_health(limit_s) for model in self.models.models.values()))

    def _loaded(self, settings: GroupSettings) -> ModelSet:
        models = ModelSet(settings, self._threads, self.inferring)
        _warm_decoders(tuple(models.specs.values()), settings.max_pixels)
        return models

    async def run(
        self, image: bytes, evaluations: Sequence[EvaluationRequest], deadline: Deadline | None, *, streaming: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """The answers of each batch of each evaluation, until the evaluations have enough.

        A finished part is yielded only after the next batch has started: Ray is slow to ask for more.

        Args:
            image: encoded.
            evaluations: what to run, one after the other; `EvaluationRequest` says when one ends.
            deadline: on `MonotonicClock`.
            streaming: parts are smaller: the first view runs alone on all cores that its variant can use, the others
                run side by side.

        Raises:
            RequestError, DeadlineMissed, Overloaded: as their names say.
            NotReady: if a variant is not loaded here, as may happen while a tier is updated.
        """
        known: dict[str, ViewOutputs] = {}
        part: tuple[VariantAnswer, ...] = ()
        models = self.models
        names = _wanted(evaluations, models)
        async with self._evaluation(models, deadline) as running, AsyncExitStack() as decoding:
            inputs = _Inputs(self, models, image, names, running, decoding)
            for evaluation in evaluations:
                if enough(models.kind, evaluation, known):
                    break
                if inputs.missing(evaluation):
                    if part:  # an error of the next decoding must not lose it
                        yield part
                        part = ()
                    await inputs.prepare(evaluation)
                batches = _batches(evaluation, list(models.models), streaming=streaming)
                while batches:
                    batch = next_batch(models.kind, evaluation, known, batches)
                    for name in (name for name in models.models if name in batch):
                        running.start(
                            name, batch[name], inputs.ready[name], inputs.to_image[name], alone=len(batch) == 1
                        )
                    if part:
                        yield part
                    part = await running.answers()
                    for answer in part:
                        known.setdefault(answer.variant, {})[answer.augmentation] = answer.output
                    if enough(models.kind, evaluation, known):
                        yield part
                        return
            if part:
                yield part

    @asynccontextmanager
    async def _evaluation(self, models: ModelSet, deadline: Deadline | None) -> AsyncGenerator[ImageEvaluation]:
        """The work on one image; what is unanswered at the end is cancelled.

        Raises:
            DeadlineMissed: if the deadline has passed.
        """
        if deadline is not None and deadline.passed(now := time.monotonic()):
            raise DeadlineMissed(f"the deadline passed {-deadline.remaining_ms(now):.1f} ms before decoding began")
        running = ImageEvaluation(models.models, models.statement, deadline, lambda: self._images == 1)
        self._images += 1
        try:
            with models.used():
                yield running
        finally:
            self._images -= 1
            running.cancel()

    def cost(self, models: ModelSet, image: bytes, header: ImageHeader) -> DecodingCost:
        """What it costs to decode an image for all variants.

        Raises:
            TooLarge: if it has too many pixels, or needs more memory than one image may take.
        """
        cost = models.cost(image, header)
        check_memory(cost, header, self.parts.request)
        return cost

    async def prepare(
        self, inputs: Iterator[Pixels], names: Sequence[str], cost: DecodingCost, until: float
    ) -> dict[str, Pixels]:
        """The next inputs, one per name, computed on a decoding thread; `until` is on the loop's clock.

        Raises:
            DeadlineMissed: if a heavy image has no thread by then.
        """

        def prepare() -> dict[str, Pixels]:
            # All names in one call: to wake the thread again costs more than a small image's second input.
            return {name: next(inputs) for name in names}

        async with self._heavy.held(1, until) if cost.heavy else nullcontext():
            return await to_the_end(asyncio.get_running_loop().run_in_executor(self.decoding, prepare))


class _Inputs:
    """The variants' inputs of one image, decoded when an evaluation first needs them."""

    def __init__(
        self,
        replica: Replica,
        models: ModelSet,
        image: bytes,
        names: Sequence[str],
        running: ImageEvaluation,
        decoding: AsyncExitStack,
    ) -> None:
        """`names` are in the order of the evaluations; `decoding` holds the memory until all inputs are ready."""
        header = probe(image)
        self.ready: dict[str, Pixels] = {}
        self._replica = replica
        self._cost = replica.cost(models, image, header)
        self._names = names
        self._inputs = models.inputs(image, names, header)
        self.to_image = {name: models.to_image(name, header) for name in names}
        self._running = running
        self._decoding = decoding

    def missing(self, evaluation: EvaluationRequest) -> list[str]:
        """The variants of this evaluation whose inputs are not ready."""
        return [name for name in self._names if name in evaluation.wanted and name not in self.ready]

    async def prepare(self, evaluation: EvaluationRequest) -> None:
        """Make this evaluation's inputs ready.

        Raises:
            RequestError: if the image cannot be decoded.
            DeadlineMissed, Overloaded: as their names say.
        """
        names, deadline = self.missing(evaluation), self._running.deadline
        until = math.inf if deadline is None else deadline.at
        if not self.ready:
            await self._decoding.enter_async_context(self._replica.memory.held(self._cost.bytes, until))
        begun = time.perf_counter()
        prepared = await self._replica.prepare(self._inputs, names, self._cost, until)
        self.ready |= prepared
        self._running.record_decoding(names, (time.perf_counter() - begun) * 1e3)
        if len(self.ready) == len(self._names):
            self._inputs.close()  # frees the decoded image
            await self._decoding.aclose()


def _wanted(evaluations: Sequence[EvaluationRequest], models: ModelSet) -> list[str]:
    """The variants of the evaluations, in their order.

    Raises:
        NotReady: if one of them is not loaded.
    """
    if missing := {name for each in evaluations for name in each.wanted if name not in models.models}:
        raise NotReady(f"{', '.join(sorted(missing))}: not among this replica's variants, {', '.join(models.models)}")
    return list(dict.fromkeys(name for each in evaluations for name in models.models if name in each.wanted))


def _batches(
    evaluation: EvaluationRequest, largest_first: Sequence[str], *, streaming: bool
) -> deque[dict[str, Augmentation]]:
    """The order of the views; with a threshold all at once."""
    if evaluation.threshold is not None:
        return deque([dict(evaluation.wanted)])
    names = [name for name in largest_first if name in evaluation.wanted]
    return deque(view_batches(names, evaluation.wanted, streaming=streaming))


def _warm_decoders(specs: Sequence[InputSpec], max_pixels: int) -> None:
    """Decode and scale an image of each usual format, so that the first caller's image finds the libraries loaded."""
    size = round(1.5 * max(max(spec.height, spec.width) for spec in specs))
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    for suffix in (".jpg", ".png"):
        made, data = cv2.imencode(suffix, noise)
        if made and size * size <= max_pixels:
            deque(load_inputs(data.tobytes(), specs, max_pixels=max_pixels), maxlen=0)


class ImageEvaluation:
    """The variants' work on one image."""

    def __init__(
        self, models: Mapping[str, Model], statement: str, deadline: Deadline | None, only_image: Callable[[], bool]
    ) -> None:
        """The deadline is on `MonotonicClock`; `only_image` tells whether the replica has no other image."""
        self._models = models
        self._statement = statement
        self.deadline = deadline
        self._only_image = only_image
        self._decode_ms: dict[str, float] = {}
        self._tasks: list[asyncio.Task[VariantAnswer]] = []
        self._returned = 0

    def record_decoding(self, names: Sequence[str], decode_ms: float) -> None:
        """Note how long these variants' inputs took; the next answer of each reports it."""
        self._decode_ms |= dict.fromkeys(names, decode_ms)

    def start(self, name: str, views: Augmentation, upright: Pixels, to_image: ToImage | None, *, alone: bool) -> None:
        """Start a variant; `alone` says that no other variant runs on the image meanwhile.

        Alone, it may use several cores, unless there are other images. Several variants share the cores.
        """
        alone = alone and self._only_image()
        done = self._models[name].infer(upright, to_image, views, self.deadline, alone=alone)
        self._tasks.append(asyncio.create_task(self._answer(name, views, done, self._decode_ms.pop(name, 0.0))))

    async def answers(self) -> tuple[VariantAnswer, ...]:
        """The answers of the variants started since the last call, in the order of their start.

        Raises:
            DeadlineMissed: if the deadline passed before one of them ran.
        """
        tasks, self._returned = self._tasks[self._returned :], len(self._tasks)
        return tuple(await asyncio.gather(*tasks))

    def cancel(self) -> None:
        """Cancel the variants that have not answered."""
        for task in self._tasks:
            task.cancel()
            task.add_done_callback(_retrieve)

    async def _answer(
        self, name: str, views: Augmentation, inferring: Awaitable[BatchedResult[Output]], decode_ms: float
    ) -> VariantAnswer:
        done = await inferring
        return VariantAnswer(
            name, views, done.result, decode_ms, done.queue_ms, done.infer_ms, done.batch_size, self._statement
        )


def view_batches(
    names: Sequence[str], wanted: Mapping[str, Augmentation], *, streaming: bool
) -> list[dict[str, Augmentation]]:
    """The order in which variants run; those of one batch run at the same time.

    First all upright views and the smallest variant's mirror image: more than half of all views, which decides most
    classes. Then the rest. With `streaming`, the largest variant's upright view precedes all that, because it is worth
    the most by itself. If no upright view is wanted, the smallest variant's mirror image comes first.

    Args:
        names: the variants, the largest first.
        wanted: the views of each.
        streaming: whether the caller gets parts.
    """
    upright = [(name, Augmentation.UPRIGHT) for name in names if wanted[name] is not Augmentation.MIRROR]
    mirror = [(name, Augmentation.MIRROR) for name in reversed(names) if wanted[name] is not Augmentation.UPRIGHT]
    views = upright + mirror
    cuts = (0, 1 if streaming else 0, min(len(upright) + 1, len(views)), len(views))
    return [_joined(views[begin:end]) for begin, end in pairwise(cuts) if begin < end]


def next_batch(
    kind: TaskKind[Any],
    evaluation: EvaluationRequest,
    known: Mapping[str, ViewOutputs],
    batches: deque[dict[str, Augmentation]],
) -> dict[str, Augmentation]:
    """Takes the first batch from `batches`, joined with the next ones until the prediction is likely to be decided."""
    batch = batches.popleft()
    while batches and not likely_enough(kind, evaluation, known, batch):
        batch = _joined([*batch.items(), *batches.popleft().items()])
    return batch


def _joined(views: Sequence[tuple[str, Augmentation]]) -> dict[str, Augmentation]:
    """The views per variant; both of a variant run together."""
    found: dict[str, Augmentation] = {}
    for name, view in views:
        found[name] = Augmentation.BOTH if name in found else view
    return found


def _retrieve(task: asyncio.Task[VariantAnswer]) -> None:
    """Take the exception, so that asyncio does not log it; the first one was raised already."""
    if not task.cancelled():
        task.exception()
