"""Asks the datacenter which stages it serves, and brings a lost link back. No caller's request is ever the probe."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from edge.escalation.reply_validation import ListingRefused
from hawkvision.core.clock import Clock
from hawkvision.core.errors import EscalationFailed
from hawkvision.core.escalation_api import StageList
from hawkvision.core.logs import Transitions

if TYPE_CHECKING:
    from edge.escalation.client import DatacenterClient

log = logging.getLogger("hawkvision.edge")

LIST_INTERVAL_S: Final = 5.0
"""Between two requests for the list while the link is up. It finds a model that was replaced behind a proxy, and a
silent link. After a failed or doubted escalation, or the end of a connection, the node asks at once."""
FIRST_PROBE_S: Final = 0.1
LONGEST_PROBE_S: Final = 5.0
PROBE_SHARE: Final = 0.05
"""While the link is down, the interval is this share of the time that it has been down, between the first and the
longest. A tier that takes 20 s to start is found within a second."""


class DatacenterWatch:
    """A background task on the event loop on which it was made."""

    def __init__(
        self, datacenter: DatacenterClient, task: str, clock: Clock, record_list: Callable[[StageList], None]
    ) -> None:
        """Begin to ask for the stages of a task; `record_list` is called with each list."""
        self._datacenter = datacenter
        self._task_name = task
        self._clock = clock
        self._record_list = record_list
        self._refusals = Transitions(log, {"stages": None})
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop asking."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._refusals.close()

    async def _watch(self) -> None:
        datacenter, link, lost = self._datacenter, self._datacenter.link, self._datacenter.lost
        down_since: float | None = None
        while True:
            lost.clear()
            link.connected = await self._answers()
            datacenter.report()
            if link.connected:
                down_since = None
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LIST_INTERVAL_S):
                        await lost.wait()
            if not link.connected:
                now = self._clock.now()
                down_since = now if down_since is None else down_since
                await asyncio.sleep(min(max(FIRST_PROBE_S, PROBE_SHARE * (now - down_since)), LONGEST_PROBE_S))

    async def _answers(self) -> bool:
        try:
            served = await self._datacenter.stages(self._task_name)
        except EscalationFailed as error:
            if isinstance(error, ListingRefused):
                self._refusals.note("stages", str(error), logging.WARNING, "datacenter: %s", error)
            else:
                log.debug("datacenter: %s", error)
            return False
        self._refusals.note("stages", None, logging.INFO, "datacenter: lists the stages of task %s", self._task_name)
        self._record_list(served)
        return True
