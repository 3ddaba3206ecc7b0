"""Which groups have live replicas, for a server that reaches them only through Serve's handles."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from hawkvision.datacenter.local_socket.server_end import PING_S

_SILENT_S: Final = 5.0
"""The longest that a live group may leave a probe, or all requests, unanswered."""


class PolledPresence:
    """Probes each group through its handle. See `handles.ReplicaPresence`.

    A probe may queue behind requests, so their answers count as well.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle],
        on_change: Callable[[str, int], None],
        on_statement: Callable[[str], None],
    ) -> None:
        """No group is known to be live.

        Args:
            handles: by group.
            on_change: takes a group and 1 if it is live, else 0, whenever that changes.
            on_statement: takes the statement in each probe's answer.
        """
        self._handles = handles
        self._on_change = on_change
        self._on_statement = on_statement
        self._absent = {group: asyncio.Event() for group in handles}
        self._replied_at = dict.fromkeys(handles, -math.inf)
        self._probes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Probe from now on; the second call does nothing."""
        if not self._probes:
            for group in self._handles:
                self._absent[group].set()
                self._on_change(group, 0)
            self._probes = [asyncio.create_task(self._probe(group, handle)) for group, handle in self._handles.items()]

    async def wait_until_absent(self, group: str) -> None:
        """Return once no replica of the group is live."""
        await self._absent[group].wait()

    def record_reply(self, group: str) -> None:
        """A replica of the group has answered a request."""
        self._replied_at[group] = asyncio.get_running_loop().time()

    async def _probe(self, group: str, handle: DeploymentHandle) -> None:
        while True:
            live = await self._is_live(group, handle)
            if live == self._absent[group].is_set():
                if live:
                    self._absent[group].clear()
                else:
                    self._absent[group].set()
                self._on_change(group, int(live))
            await asyncio.sleep(PING_S)

    async def _is_live(self, group: str, handle: DeploymentHandle) -> bool:
        try:
            async with asyncio.timeout(_SILENT_S):
                self._on_statement(await handle.present.remote())
        except BackPressureError:  # the queue is full, so a replica is at work
            return True
        except TimeoutError:
            return asyncio.get_running_loop().time() - self._replied_at[group] < _SILENT_S
        except Exception:  # noqa: BLE001 - any failure means that no replica answers
            return False
        return True
