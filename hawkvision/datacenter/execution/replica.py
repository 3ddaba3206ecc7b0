"""One replica of a group of variants: an encoded image in, each variant's calibrated probabilities out. Knows no Ray.

The variants of a group evaluate the same images. They share one process, so that an image is sent and decoded once,
and as many of them run on it at a time as there are cores.

Images arrive encoded and are decoded here: a JPEG is smaller to send than a tensor, the server's event loop stays free,
and decoding scales with the replicas. Decoding precedes batching, so a bad image fails alone.

The header tells what decoding costs (`imaging.decoding_cost`). Images wait for memory and for a decoding thread in the
order of their deadlines. Large images decode one at a time, which leaves a thread to the others. No decoding begins
that would end too late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import cv2
import numpy as np

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, TooLarge
from hawkvision.core.types import Pixels
from hawkvision.datacenter.execution.group_settings import GroupSettings, load_model
from hawkvision.datacenter.execution.image_evaluation import ImageEvaluation, next_batch, view_batches
from hawkvision.datacenter.stages.ensemble import (
    Augmentation,
    EvaluationRequest,
    VariantAnswer,
    ViewProbabilities,
    enough,
)
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingRates, DecodingScales
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import load_inputs, probe
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.core_placement import CorePlacement, PlaceableThreads
from hawkvision.models.fingerprints import statement
from hawkvision.models.manifest import InputSpec
from hawkvision.system.memory import MemoryBudget, divided, give_back_at_once, to_the_end

log = logging.getLogger("hawkvision.datacenter")

# Decoding is at most half of a small variant's work, so two threads decode while others infer.
_DECODE_THREADS = 2


class Replica:
    """Loaded, warmed-up variants and the threads that they share."""

    def __init__(self, settings: GroupSettings) -> None:
        """Load and verify the models, and run each once to warm it up.

        Raises:
            ArtifactError: if a model file is missing or is not the one the manifest names.
            BackendError: if the backend cannot load it.
        """
        self._settings = settings
        self._specs = {variant.name: variant.input for variant in settings.variants}
        apart = CorePlacement()
        self._decoding = PlaceableThreads(_DECODE_THREADS, "decode", apart)
        at_once = max(1, min(len(settings.variants), usable_cores()))
        inferring = PlaceableThreads(at_once, "infer", apart)
        # The longest job first makes the shortest schedule (Graham, 1969); the largest is also worth the most alone.
        largest_first = sorted(settings.variants, key=lambda variant: -(variant.bytes or 0))
        self._models = {variant.name: load_model(variant, settings, inferring) for variant in largest_first}
        _warm_decoders(tuple(self._specs.values()), settings.max_pixels)
        self.statement = statement([model.run for model in self._models.values()])
        """What this process runs; each answer carries it."""
        self._backends = tuple(dict.fromkeys(model.backend for model in self._models.values()))
        log.info("replica ready: %s", ", ".join(f"{name} ({model.backend})" for name, model in self._models.items()))
        give_back_at_once()
        self._rates = DecodingRates()
        inputs = self._specs.values()
        self._scales = DecodingScales(inputs, self._rates, settings.max_pixels, settings.max_pixels_whole)
        self.parts = divided(settings.memory_bytes, settings.request_memory_bytes, settings.replicas)
        """The memory shares, now that the models are loaded."""
        log.info("memory for decoding: %d MB, by %s", self.parts.decoding // 1_000_000, self.parts.basis)
        self.memory = MemoryBudget(self.parts.decoding)
        self._heavy = MemoryBudget(_DECODE_THREADS - 1)
        """The threads that large images may occupy."""
        self._images = 0

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of the variants, each once."""
        return self._backends

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
        """
        known: dict[str, ViewProbabilities] = {}
        names = list(dict.fromkeys(name for each in evaluations for name in self._models if name in each.wanted))
        part: tuple[VariantAnswer, ...] = ()
        async with self._evaluation(deadline) as running, AsyncExitStack() as decoding:
            inputs = _Inputs(self, image, names, running, decoding)
            for evaluation in evaluations:
                if enough(evaluation, known):
                    break
                if inputs.missing(evaluation):
                    if part:  # an error of the next decoding must not lose it
                        yield part
                        part = ()
                    await inputs.prepare(evaluation)
                batches = self._batches(evaluation, streaming=streaming)
                while batches:
                    batch = next_batch(evaluation, known, batches)
                    for name in (name for name in self._models if name in batch):
                        running.start(name, batch[name], inputs.ready[name], alone=len(batch) == 1)
                    if part:
                        yield part
                    part = await running.answers()
                    for answer in part:
                        known.setdefault(answer.variant, {})[answer.augmentation] = answer.probabilities
                    if enough(evaluation, known):
                        yield part
                        return
            if part:
                yield part

    def _batches(self, evaluation: EvaluationRequest, *, streaming: bool) -> deque[dict[str, Augmentation]]:
        """The order of the views; with a threshold all at once."""
        if evaluation.threshold is not None:
            return deque([dict(evaluation.wanted)])
        names = [name for name in self._models if name in evaluation.wanted]
        return deque(view_batches(names, evaluation.wanted, streaming=streaming))

    @asynccontextmanager
    async def _evaluation(self, deadline: Deadline | None) -> AsyncGenerator[ImageEvaluation]:
        """The work on one image; what is unanswered at the end is cancelled.

        Raises:
            DeadlineMissed: if the deadline has passed.
        """
        if deadline is not None and deadline.passed(now := time.monotonic()):
            raise DeadlineMissed(f"the deadline passed {-deadline.remaining_ms(now):.1f} ms before decoding began")
        running = ImageEvaluation(self._models, self.statement, deadline, lambda: self._images == 1)
        self._images += 1
        try:
            yield running
        finally:
            self._images -= 1
            running.cancel()

    def cost(self, image: bytes, header: ImageHeader) -> DecodingCost:
        """What it costs to decode an image for all variants.

        Raises:
            TooLarge: if it has too many pixels, or needs more memory than one image may take.
        """
        cost = self._scales.cost(image, header)
        if cost.bytes > self.parts.request:
            raise TooLarge(
                f"to decode the image of {header.width}x{header.height} pixels takes up to {cost.bytes} bytes of "
                f"memory; one image may have {self.parts.request}"
            )
        return cost

    def inputs(self, image: bytes, names: Sequence[str], header: ImageHeader) -> Generator[Pixels]:
        """The input of each of these variants, in order; each step decodes or scales."""
        return load_inputs(
            image, [self._specs[name] for name in names], max_pixels=self._settings.max_pixels, header=header
        )

    async def prepare(
        self, inputs: Iterator[Pixels], names: Sequence[str], cost: DecodingCost, until: float
    ) -> dict[str, Pixels]:
        """The next inputs, one per name, computed on a decoding thread; `until` is on the loop's clock.

        Raises:
            DeadlineMissed: if they cannot be ready by then.
        """
        async with self._decoding_turn(cost, until):
            loop = asyncio.get_running_loop()
            return await to_the_end(loop.run_in_executor(self._decoding, self._prepare, inputs, names, cost))

    def _prepare(self, inputs: Iterator[Pixels], names: Sequence[str], cost: DecodingCost) -> dict[str, Pixels]:
        """Blocks. All names in one call: to wake the thread again costs more than a small image's second input."""
        begun = time.perf_counter()
        prepared = {name: next(inputs) for name in names}
        self._rates.learn(cost, time.perf_counter() - begun)
        return prepared

    @asynccontextmanager
    async def _decoding_turn(self, cost: DecodingCost, until: float) -> AsyncGenerator[None]:
        if not cost.heavy:
            yield
            return
        async with self._heavy.held(1, until):
            if asyncio.get_running_loop().time() + cost.heavy_s > until:
                raise DeadlineMissed(
                    f"not begun: decoding takes about {cost.heavy_s * 1e3:.0f} ms, which the deadline does not leave"
                )
            yield


class _Inputs:
    """The variants' inputs of one image, decoded when an evaluation first needs them."""

    def __init__(
        self,
        replica: Replica,
        image: bytes,
        names: Sequence[str],
        running: ImageEvaluation,
        decoding: AsyncExitStack,
    ) -> None:
        """`names` are in the order of the evaluations; `decoding` holds the memory until all inputs are ready."""
        header = probe(image)
        self.ready: dict[str, Pixels] = {}
        self._replica = replica
        self._cost = replica.cost(image, header)
        self._names = names
        self._inputs = replica.inputs(image, names, header)
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
        self.ready |= await self._replica.prepare(self._inputs, names, self._cost, until)
        self._running.record_decoding(names, (time.perf_counter() - begun) * 1e3)
        if len(self.ready) == len(self._names):
            self._inputs.close()  # frees the decoded image
            await self._decoding.aclose()


def _warm_decoders(specs: Sequence[InputSpec], max_pixels: int) -> None:
    """Decode and scale an image of each usual format, so that the first caller's image finds the libraries loaded."""
    size = round(1.5 * max(max(spec.height, spec.width) for spec in specs))
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    for suffix in (".jpg", ".png"):
        made, data = cv2.imencode(suffix, noise)
        if made and size * size <= max_pixels:
            deque(load_inputs(data.tobytes(), specs, max_pixels=max_pixels), maxlen=0)
