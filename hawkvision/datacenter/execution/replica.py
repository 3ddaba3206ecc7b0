"""One replica of a group of variants: an encoded image in, each one's calibrated probabilities out. Knows no Ray.

A group are variants that look at the same images, a committee's members and the stages that are among them. They live
in one process, so that an image crosses to it once, is decoded once, and is looked at by as many of them at a time as
there are cores.

Images arrive encoded and are decoded here, not at the server: 30 KB of JPEG cross processes in about 1.1 ms where a
300 x 300 tensor takes 1.4 ms (Ray's gRPC transport) or 4.2 ms (its object store), the server's one event loop stays
free, and decoding scales with the replicas. Decoding comes before batching, so a bad image fails alone.

What decoding costs is told from the header (`imaging.decoding_cost`): images wait for memory and for their turn by
deadline, heavy ones one after the other, so that one thread is left to the others; and none is begun that would be
late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np

from hawkvision.core.errors import DeadlineMissed, HawkVisionError, Overloaded, RequestError, TooLarge
from hawkvision.core.logs import LogFormat, LogLevel, RequestIds, resume
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.types import Pixels
from hawkvision.datacenter.catalog import Catalog, Group
from hawkvision.datacenter.execution.ensemble import Errand, Seen, VariantAnswer, Views, enough, likely_enough
from hawkvision.datacenter.execution.model import Model
from hawkvision.datacenter.servers.local_socket import Address, Reported, report
from hawkvision.imaging.decoding_cost import DecodingCost, DecodingRates, DecodingScales
from hawkvision.imaging.image_header import ImageHeader
from hawkvision.imaging.preprocessing import load_inputs, probe
from hawkvision.inference.adaptive_parallelism import divides, open_wide, usable_cores
from hawkvision.inference.backend_registry import BackendKind, backend_name, execution_of, open_backend
from hawkvision.inference.backends.interface import Backend
from hawkvision.inference.core_placement import CorePlacement, PlaceableThreads
from hawkvision.models.artifacts import load_variant
from hawkvision.models.fingerprints import BETWEEN, VariantRun, statement
from hawkvision.models.manifest import InputSpec, Variant, cache_dir
from hawkvision.system.files import sha256_of
from hawkvision.system.memory import MemoryBudget, divided, give_back_at_once, to_the_end

log = logging.getLogger("hawkvision.datacenter")

# Two threads decode while others infer: decoding is about a third of the work of a small variant, never more than half.
_DECODE_THREADS = 2


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """All that a replica needs to know; travels to it in Ray's deployment record."""

    task: str
    variants: tuple[Variant, ...]
    classes: int
    backend: BackendKind
    providers: tuple[str, ...]
    cache_dir: Path | None
    max_batch_size: int
    batch_wait_ms: float
    max_pixels: int
    max_pixels_whole: int
    memory_bytes: int | None
    request_memory_bytes: int | None
    replicas: int
    """That may share a machine's memory, all groups together."""
    intra_op_threads: int
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    group: str = ""
    server: Address | None = None
    """Where to report, if the server is on this machine."""


def settings_of(
    group: Group, catalog: Catalog, config: DatacenterConfig, server: Address | None = None
) -> GroupSettings:
    """A group's part of the tier's settings."""
    return GroupSettings(
        task=catalog.task,
        variants=group.variants,
        classes=catalog.classes,
        backend=config.backend,
        providers=config.onnx_providers,
        cache_dir=config.cache_dir,
        max_batch_size=config.max_batch_size,
        batch_wait_ms=config.batch_wait_ms,
        max_pixels=config.max_pixels,
        max_pixels_whole=config.max_pixels_whole,
        memory_bytes=config.memory_bytes,
        request_memory_bytes=config.request_memory_bytes,
        replicas=config.max_replicas * len(catalog.groups),
        intra_op_threads=config.intra_op_threads,
        log_level=config.log_level,
        log_format=config.log_format,
        group=group.name,
        server=server,
    )


class Replica:
    """Loaded, warmed-up variants, with the threads that they share."""

    def __init__(self, settings: GroupSettings) -> None:
        """Load and verify the models and run them once, so that the first request finds them warm.

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
        # The largest first: the others fit beside and after it (Graham, 1969), and it is worth the most by itself.
        largest_first = sorted(settings.variants, key=lambda variant: -(variant.bytes or 0))
        self._models = {variant.name: _load(variant, settings, inferring) for variant in largest_first}
        _warm_decoders(tuple(self._specs.values()), settings.max_pixels)
        self.stated = statement([model.run for model in self._models.values()])
        """What this process runs, which goes with every answer."""
        self._backends = tuple(dict.fromkeys(model.backend for model in self._models.values()))
        log.info("replica ready: %s", ", ".join(f"{name} ({model.backend})" for name, model in self._models.items()))
        give_back_at_once()
        self._rates = DecodingRates()
        inputs = self._specs.values()
        self._scales = DecodingScales(inputs, self._rates, settings.max_pixels, settings.max_pixels_whole)
        self.parts = divided(settings.memory_bytes, settings.request_memory_bytes, settings.replicas)
        """Of memory, now that the models are loaded."""
        log.info("memory for decoding: %d MB, by %s", self.parts.decoding // 1_000_000, self.parts.basis)
        self.memory = MemoryBudget(self.parts.decoding)
        self._heavy = MemoryBudget(_DECODE_THREADS - 1)
        """Threads that heavy images may take."""
        self._inside = 0
        """Images."""
        self._reported: Reported | None = None

    async def backends(self) -> tuple[str, ...]:
        """What runs the variants, each name once."""
        return self._backends

    async def check_health(self) -> None:
        """Report to a server on this machine. Serve asks this before it calls the replica started, and ever again.

        Raises:
            OSError: if the server is gone, which makes the replica of no use.
        """
        server = self._settings.server
        if server is not None and (self._reported is None or self._reported.closed):
            self._reported = await report(
                server,
                self._settings.group,
                self.stated,
                lambda q: self._walk(q.image, q.errands, q.expires_at, piecemeal=q.piecemeal),
            )

    async def present(self) -> str:
        """That a replica is there, for a server that asks through Ray, and what it states of its variants."""
        return self.stated

    async def classify(
        self, image: bytes, errands: Sequence[Errand], expires_at: float, request: RequestIds | None = None
    ) -> tuple[tuple[VariantAnswer, ...], ...] | HawkVisionError:
        """What the variants make of the image, errand by errand (`Errand` says when one ends), in parts.

        `expires_at` is a time of day (`time.time()`), because it counts the wait in Ray's router too; the nodes of a
        cluster are assumed to agree to within milliseconds. An image that cannot be read and a missed deadline come
        back as values: Ray would log each raised error with its traceback, and let bad callers fill the disk.
        `request` is whose image it is, for the log.
        """
        resume(request)
        try:
            return tuple([part async for part in self._walk(image, errands, expires_at, piecemeal=False)])
        except (RequestError, DeadlineMissed, Overloaded) as error:
            return error

    async def piecemeal(
        self, image: bytes, errands: Sequence[Errand], expires_at: float, request: RequestIds | None = None
    ) -> AsyncIterator[tuple[VariantAnswer, ...] | HawkVisionError]:
        """As `classify`, but in smaller parts (`_stages`), each told as soon as it is there; an error is the last.

        The first view is looked at by itself, on all the cores that its variant makes use of, the others side by side.
        On two cores of an AMD EPYC, ImageNet's ensemble has an opinion after 13 ms, and ends after 28 where it need
        not look at all views, or 38 (medians in the server; `classify` ends after 27 in all).
        """
        resume(request)
        try:
            async with aclosing(self._walk(image, errands, expires_at, piecemeal=True)) as parts:
                async for part in parts:
                    yield part
        except (RequestError, DeadlineMissed, Overloaded) as error:
            yield error

    async def _walk(
        self, image: bytes, errands: Sequence[Errand], expires_at: float, *, piecemeal: bool
    ) -> AsyncGenerator[tuple[VariantAnswer, ...]]:
        """The answers of each stage of each errand, as long as there is not enough.

        Raises:
            RequestError, DeadlineMissed, Overloaded: as their names say.
        """
        inputs: dict[str, Pixels] = {}
        seen: dict[str, Seen] = {}
        loop = asyncio.get_running_loop()
        names = list(dict.fromkeys(name for errand in errands for name in self._models if name in errand.wanted))
        part: tuple[VariantAnswer, ...] = ()
        async with self._visit(expires_at) as visit, AsyncExitStack() as decoding:
            header = probe(image)
            cost = self._cost(image, header)
            prepared = load_inputs(
                image, [self._specs[name] for name in names], max_pixels=self._settings.max_pixels, header=header
            )
            for errand in errands:
                if enough(errand, seen):
                    break
                if new := [name for name in names if name in errand.wanted and name not in inputs]:
                    if part:  # which must not wait for what comes next, nor be lost by it
                        yield part
                        part = ()
                    if not inputs:
                        await decoding.enter_async_context(self.memory.held(cost.bytes, visit.expires_at))
                    begun = time.perf_counter()
                    async with self._turn(cost, visit.expires_at):
                        running = loop.run_in_executor(self._decoding, self._prepare, prepared, new, cost)
                        ready = await to_the_end(running)
                    inputs |= ready
                    visit.prepared(new, (time.perf_counter() - begun) * 1e3)
                    if len(inputs) == len(names):
                        prepared.close()
                        await decoding.aclose()
                stages = self._stages(errand, piecemeal=piecemeal)
                while stages:
                    stage = self._next_stage(errand, seen, stages)
                    for name, views in stage.items():
                        visit.ask(name, views, inputs[name], alone=len(stage) == 1)
                    if part:  # told now that the next are at work: Ray takes 0.7 ms before it asks for more
                        yield part
                    part = await visit.answers()
                    for answer in part:
                        seen.setdefault(answer.variant, {})[answer.views] = answer.probabilities
                    if enough(errand, seen):
                        yield part
                        return
            if part:
                yield part

    def _stages(self, errand: Errand, *, piecemeal: bool) -> deque[dict[str, Views]]:
        """In which order variants look; with a bar all at once."""
        if errand.bar is not None:
            return deque([dict(errand.wanted)])
        return deque(_stages([name for name in self._models if name in errand.wanted], errand.wanted, piecemeal))

    def _next_stage(
        self, errand: Errand, seen: Mapping[str, Seen], stages: deque[dict[str, Views]]
    ) -> Mapping[str, Views]:
        """The first of those that are left, together with what follows up to where it is likely to be enough."""
        stage = stages.popleft()
        while stages and not likely_enough(errand, seen, stage):
            stage = _together([*stage.items(), *stages.popleft().items()])
        return {name: stage[name] for name in self._models if name in stage}

    def _cost(self, image: bytes, header: ImageHeader) -> DecodingCost:
        """Of decoding it for all variants.

        Raises:
            TooLarge: for too many pixels, or more memory than one image may have.
        """
        cost = self._scales.cost(image, header)
        if cost.bytes > self.parts.request:
            raise TooLarge(
                f"to decode the image of {header.width}x{header.height} pixels takes up to {cost.bytes} bytes of "
                f"memory; one image may have {self.parts.request}"
            )
        return cost

    @asynccontextmanager
    async def _turn(self, cost: DecodingCost, until: float) -> AsyncGenerator[None]:
        """Of the decoding threads; `until` is the loop's clock.

        Raises:
            DeadlineMissed: if it cannot be decoded by then.
        """
        if not cost.heavy:
            yield
            return
        async with self._heavy.held(1, until):
            if asyncio.get_running_loop().time() + cost.heavy_s > until:
                raise DeadlineMissed(
                    f"not begun: to decode it takes about {cost.heavy_s * 1e3:.0f} ms, too long by now"
                )
            yield

    def _prepare(self, inputs: Iterator[Pixels], names: Sequence[str], cost: DecodingCost) -> dict[str, Pixels]:
        """The next input for each: 0.1 ms beyond the first of a small image, less than to be woken for it anew."""
        begun = time.perf_counter()
        prepared = {name: next(inputs) for name in names}
        self._rates.learn(cost, time.perf_counter() - begun)
        return prepared

    @asynccontextmanager
    async def _visit(self, expires_at: float) -> AsyncGenerator[_Visit]:
        """One image's; what it has not got when it ends, it gives up.

        Raises:
            DeadlineMissed: if it comes too late.
        """
        left_s = expires_at - time.time()
        if left_s <= 0.0:
            raise DeadlineMissed(f"the deadline passed {-left_s * 1e3:.1f} ms before decoding began")
        visit = _Visit(self._models, self.stated, time.monotonic() + left_s, self._lonely)
        self._inside += 1
        try:
            yield visit
        finally:
            self._inside -= 1
            visit.end()

    def _lonely(self) -> bool:
        return self._inside == 1


class _Visit:
    """One image's questions to the variants. Made by `Replica._visit`."""

    def __init__(self, models: Mapping[str, Model], stated: str, expires_at: float, lonely: Callable[[], bool]) -> None:
        """`expires_at` is monotonic, and `lonely` tells whether no other image is here."""
        self._models = models
        self._stated = stated
        self.expires_at = expires_at
        self._lonely = lonely
        self._decode_ms: dict[str, float] = {}
        self._asked: list[asyncio.Task[VariantAnswer]] = []
        self._told = 0

    def prepared(self, names: Sequence[str], decode_ms: float) -> None:
        """Their inputs are ready, so long after their preparation began; the next answer of each says so."""
        self._decode_ms |= dict.fromkeys(names, decode_ms)

    def ask(self, name: str, views: Views, upright: Pixels, *, alone: bool) -> None:
        """Put a question; `alone` says that no other variant looks at the image meanwhile.

        Then it may have several cores, unless there are other images. Several variants share out the cores.
        """
        decode_ms = self._decode_ms.pop(name, 0.0)
        answering = self._answer(name, views, upright, decode_ms, alone=alone and self._lonely())
        self._asked.append(asyncio.create_task(answering))

    async def answers(self) -> tuple[VariantAnswer, ...]:
        """The answers to all that was asked since the last time, in the order of the questions.

        Raises:
            DeadlineMissed: if it passed before one of them was looked into.
        """
        asked, self._told = self._asked[self._told :], len(self._asked)
        return tuple(await asyncio.gather(*asked))

    def end(self) -> None:
        """Give up what is not answered."""
        for task in self._asked:
            task.cancel()
            task.add_done_callback(_retrieved)

    async def _answer(
        self, name: str, views: Views, upright: Pixels, decode_ms: float, *, alone: bool
    ) -> VariantAnswer:
        done = await self._models[name].classify(_images(upright, views), self.expires_at, alone=alone)
        return VariantAnswer(
            name, views, done.result, decode_ms, done.queue_ms, done.infer_ms, done.batch_size, self._stated
        )


def _stages(names: Sequence[str], wanted: Mapping[str, Views], piecemeal: bool) -> list[dict[str, Views]]:
    """In which order variants look, of which the largest is the first of `names`, each stage side by side.

    All upright views and the smallest variant's mirror image: more than half of all views, by which time most answers
    are settled. Then the rest, unless it is seen before that nothing will be settled by then (`Replica._next_stage`).
    Whoever hears of parts gets the largest variant's upright view before all that, which is worth the most by itself.
    Where no upright view is wanted, the smallest begins, and the rest follows.
    """
    upright = [(name, Views.UPRIGHT) for name in names if wanted[name] is not Views.MIRROR]
    mirror = [(name, Views.MIRROR) for name in reversed(names) if wanted[name] is not Views.UPRIGHT]
    looks = upright + mirror
    cuts = (0, 1 if piecemeal else 0, min(len(upright) + 1, len(looks)), len(looks))
    return [_together(looks[begin:end]) for begin, end in pairwise(cuts) if begin < end]


def _together(looks: Sequence[tuple[str, Views]]) -> dict[str, Views]:
    """Single views, with both of a variant as one question."""
    found: dict[str, Views] = {}
    for name, view in looks:
        found[name] = Views.BOTH if name in found else view
    return found


def _retrieved(task: asyncio.Task[VariantAnswer]) -> None:
    """What came of it was told with the first error."""
    if not task.cancelled():
        task.exception()


def _images(upright: Pixels, views: Views) -> Pixels:
    """(1 or 2, height, width, 3): the image, its mirror image, or both."""
    match views:
        case Views.UPRIGHT:
            return upright[None]
        case Views.MIRROR:
            return _mirrored(upright)[None]
        case Views.BOTH:
            return np.stack((upright, _mirrored(upright)))


def _mirrored(upright: Pixels) -> Pixels:
    """As `upright[:, ::-1]`, which NumPy takes forty times as long to copy: 0.3 ms, on the event loop."""
    mirrored: Pixels = cv2.flip(upright, 1)
    return mirrored


def _warm_decoders(specs: Sequence[InputSpec], max_pixels: int) -> None:
    """Decode and scale an image of each usual format as all variants take it in, so that the first caller's finds what
    that needs loaded.
    """
    size = round(1.5 * max(max(spec.height, spec.width) for spec in specs))
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    for suffix in (".jpg", ".png"):
        made, data = cv2.imencode(suffix, noise)
        if made and size * size <= max_pixels:
            deque(load_inputs(data.tobytes(), specs, max_pixels=max_pixels), maxlen=0)


def _load(variant: Variant, settings: GroupSettings, threads: Executor) -> Model:
    cache = cache_dir(settings.cache_dir)
    data = b"" if settings.backend == "noop" else load_variant(cache, settings.task, variant)

    def opened(intra_op: int) -> Backend:
        return open_backend(
            settings.backend, data, variant.input, settings.classes, settings.providers, threads=intra_op
        )

    narrow, wide = opened(1), None
    if divides(settings.backend, settings.providers):
        # Replicas load beside each other: what one measured of threads would be the others' doing.
        wide = open_wide(narrow, opened, settings.intra_op_threads, known=True)
    return Model(
        narrow,
        wide,
        variant.temperature,
        threads,
        max_batch_size=settings.max_batch_size,
        batch_wait_s=settings.batch_wait_ms / 1e3,
        backend=backend_name(settings.backend, narrow),
        run=VariantRun(
            variant.name,
            sha256_of(data) if data else None,
            variant.input,
            variant.temperature,
            BETWEEN.join(dict.fromkeys(execution_of(settings.backend, each) for each in (narrow, wide) if each)),
        ),
    )
