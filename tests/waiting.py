"""Waiting for what happens elsewhere: in another task, another thread or a peer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

WAIT_LIMIT_S: Final = 60.0
"""Longer than anything takes on a machine that stands still now and then."""


async def until(condition: Callable[[], bool], within_s: float = WAIT_LIMIT_S) -> None:
    """Poll until a condition holds; seen from outside, there is nothing else to wait on.

    Raises:
        TimeoutError: if it does not within that time.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], bool], within_s: float = WAIT_LIMIT_S) -> None:
    """As `until`, for tests without an event loop.

    Raises:
        TimeoutError: if it does not within that time.
    """
    ends = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(0.01)
