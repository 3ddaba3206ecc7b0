"""Many calls with bounded concurrency, and their outcomes in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final, TypeAlias

from hawkvision.client.request import Image
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.types import Answer

Outcome: TypeAlias = Answer | HawkVisionError | OSError
"""The answer to one image, or the error."""

AHEAD: Final = 4
"""Bound of finished outcomes that wait for an earlier one, as a multiple of `concurrency`. A slow answer does not leave
connections idle, and the number of images in memory is bounded."""


async def in_order(
    images: Iterable[Image], call: Callable[[Image], Awaitable[Answer]], concurrency: int
) -> AsyncGenerator[Outcome]:
    """Yield outcomes in the order of the images. Closing the generator cancels pending calls.

    Raises:
        ConfigError: if `concurrency` is less than 1.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency: expected at least 1, got {concurrency}")
    places = asyncio.Semaphore(concurrency)

    async def outcome(image: Image) -> Outcome:
        async with places:
            try:
                return await call(image)
            except (HawkVisionError, OSError) as error:
                return error

    waiting: deque[asyncio.Task[Outcome]] = deque()
    try:
        for image in images:
            task = asyncio.create_task(outcome(image))
            task.add_done_callback(_mark_retrieved)
            waiting.append(task)
            if len(waiting) >= AHEAD * concurrency:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _mark_retrieved(task: asyncio.Task[Outcome]) -> None:
    """Keep asyncio from logging the exception of a call whose outcome nobody waits for any more."""
    if not task.cancelled():
        task.exception()
