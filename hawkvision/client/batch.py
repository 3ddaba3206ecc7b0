"""Many calls with a bounded number under way at once, their outcomes in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final, TypeAlias

from hawkvision.client.request import Picture
from hawkvision.core.errors import ConfigError, HawkVisionError
from hawkvision.core.types import Answer

Outcome: TypeAlias = Answer | HawkVisionError | OSError
"""The answer to one picture, or why there is none."""

AHEAD: Final = 4
"""Outcomes kept while one before them is awaited, as a multiple of the calls under way: one slow answer in a row of
quick ones does not leave connections idle, and the pictures in memory are bounded."""


async def in_order(
    pictures: Iterable[Picture], call: Callable[[Picture], Awaitable[Answer]], concurrency: int
) -> AsyncGenerator[Outcome]:
    """Outcomes in the order of the pictures; closing the generator cancels what is under way.

    Raises:
        ConfigError: if `concurrency` is no positive number.
    """
    if concurrency < 1:
        raise ConfigError(f"concurrency: expected at least 1, got {concurrency}")
    places = asyncio.Semaphore(concurrency)

    async def outcome(picture: Picture) -> Outcome:
        async with places:
            try:
                return await call(picture)
            except (HawkVisionError, OSError) as error:
                return error

    waiting: deque[asyncio.Task[Outcome]] = deque()
    try:
        for picture in pictures:
            waiting.append(asyncio.create_task(outcome(picture)))
            if len(waiting) >= AHEAD * concurrency:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
