"""Watches whether the head of a Ray cluster can be reached, for a tier that does not outlive its head.

Replicas go on answering for a while after the head is gone. Then a new head refuses the nodes of the old one, and Ray
ends all their processes at once. Until then a load balancer should have found another cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger("hawkvision.datacenter")

_EVERY_S: Final = 1.0
"""From one connection to the next."""
_WITHIN_S: Final = 1.0
"""How long a connection may take."""
_LOST_AFTER: Final = 2
"""Failures in a row. The head counts as gone 4 s after its death at the latest, and one slow accept does not count."""


class HeadWatch:
    """Connects to the head's control service again and again, and sends nothing. Used on one event loop."""

    def __init__(self, address: str, on_change: Callable[[bool], None]) -> None:
        """Prepare; the head counts as present.

        Args:
            address: of the control service (GCS), as `HOST:PORT`.
            on_change: takes whether the head is present, whenever that changes.
        """
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._on_change = on_change
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Watch from now on."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        failures = 0
        while True:
            before, failures = failures, 0 if await self._is_there() else failures + 1
            if failures == _LOST_AFTER:
                log.error("the head of the Ray cluster at %s:%d cannot be reached", self._host, self._port)
                self._on_change(False)
            elif failures == 0 and before >= _LOST_AFTER:
                log.info("the head of the Ray cluster can be reached again")
                self._on_change(True)
            await asyncio.sleep(_EVERY_S)

    async def _is_there(self) -> bool:
        try:
            async with asyncio.timeout(_WITHIN_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
