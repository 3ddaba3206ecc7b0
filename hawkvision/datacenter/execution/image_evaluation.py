"""One image inside a replica: its inputs, the variants' tasks, and the order of its views."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hawkvision.core.clock import Deadline
from hawkvision.datacenter.execution.model import Model, ModelInput
from hawkvision.datacenter.stages.ensemble import (
    Augmentation,
    EvaluationRequest,
    VariantAnswer,
    ViewOutputs,
    likely_enough,
)
from hawkvision.tasks.kind import TaskKind


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

    def start(self, name: str, views: Augmentation, upright: ModelInput, *, alone: bool) -> None:
        """Start a variant; `alone` says that no other variant runs on the image meanwhile.

        Alone, it may use several cores, unless there are other images. Several variants share the cores.
        """
        decode_ms = self._decode_ms.pop(name, 0.0)
        answer = self._answer(name, views, upright, decode_ms, alone=alone and self._only_image())
        self._tasks.append(asyncio.create_task(answer))

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
        self, name: str, views: Augmentation, upright: ModelInput, decode_ms: float, *, alone: bool
    ) -> VariantAnswer:
        done = await self._models[name].infer(upright, views, self.deadline, alone=alone)
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
