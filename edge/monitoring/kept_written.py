"""Keeps a file up to date in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

WRITE_INTERVAL_S: Final = 2.0
"""A crash loses what changed for so long."""


class KeptWritten:
    """Calls `write` every `WRITE_INTERVAL_S`, and once more at the end. Made and used on one event loop."""

    def __init__(self, write: Callable[[], Awaitable[None]]) -> None:
        self._write = write
        self._stopping = asyncio.Event()
        self._writer = asyncio.create_task(self._keep_writing())

    async def close(self) -> None:
        """Write what has changed until now, and end."""
        self._stopping.set()
        await self._writer
        await self._write()

    async def _keep_writing(self) -> None:
        while not self._stopping.is_set():
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_INTERVAL_S):
                    await self._stopping.wait()
            await self._write()
