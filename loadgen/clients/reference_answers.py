"""How right the reference stage is about images, asked over plain HTTP before a load test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.request import ClassifyFields
from hawkvision.client.response import answer_from_json
from hawkvision.core.errors import HawkVisionError, NotReady
from hawkvision.core.types import Answer, Quality
from hawkvision.tasks.kind import TaskKind
from loadgen.clients.engine import ServerAddress, Tally
from loadgen.workload.dataset import Dataset

CALLERS: Final = 4
RETRY_S: Final = 10.0
WAITS_S: Final = (0.5, 1.0, 2.0)
"""Before an image is sent again that another stage answered: a link has bad moments."""


async def ask_reference(
    dataset: Dataset, server: ServerAddress, positions: Sequence[int], show: Callable[[Tally], None]
) -> dict[int, float | bool]:
    """How right the reference stage is, by image number, for the labelled images at `positions` of a data set.

    Each image is asked for once, and again where another stage answered. `show` is called after each answer.

    Raises:
        HawkVisionError: if an image is still refused, or unanswered, after `RETRY_S` of waiting.
        NotReady: if the reference stage does not answer an image, however often it is asked.
    """
    labels, spec = dataset.labels, dataset.kind
    assert labels is not None
    assert spec is not None
    kind, right = spec.open(), dict[int, float | bool]()
    waiting = iter(positions)

    async def caller(client: AsyncClient) -> None:
        for position in waiting:
            answer = await _reference_answer(client, dataset.bodies[position], server, kind)
            right[dataset.numbers[position]] = 1.0 - kind.loss(answer.prediction, labels[position])
            show(Tally(len(right), len(right), 0))

    async with AsyncClient(server.url, api_key=server.api_key, connections=CALLERS, retry_budget_s=RETRY_S) as client:
        try:
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLERS):
                    callers.create_task(caller(client))
        except* HawkVisionError as group:
            first = group.exceptions[0]
            if isinstance(first, HawkVisionError):
                first.add_note("while asking for the reference, quality=best")
            raise first from None
    return right


async def _reference_answer(client: AsyncClient, body: bytes, server: ServerAddress, kind: TaskKind[Any]) -> Answer:
    """The reference stage's own answer: a `degraded` one comes from another stage."""
    for wait_s in (*WAITS_S, None):
        fields = ClassifyFields(task=server.task, quality=Quality.BEST)
        answer = answer_from_json(await client.send(server.path, body, fields), kind.prediction)
        if not answer.degraded:
            return answer
        if wait_s is not None:
            await asyncio.sleep(wait_s)
    raise NotReady(
        f"{answer.model} ({answer.tier.value}) answered below the target, {1 + len(WAITS_S)} times; expected "
        "the reference stage: is the datacenter reached?"
    )
