"""Which groups have live replicas, for a server that reaches them only through Serve's handles."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from hawkvision.core.errors import NotReady
from hawkvision.datacenter.deployment.messages import PROTOCOL, decode_presence

log = logging.getLogger("hawkvision.datacenter")

_PROBE_S: Final = 0.5
"""From the answer to a probe to the next probe."""
_SILENT_S: Final = 5.0
"""The longest that a live group may leave a probe, or all requests, unanswered."""


class PolledPresence:
    """Probes each group through its handle. See `handles.ReplicaPresence`.

    A probe may queue behind requests, so their answers count as well. A replica of another version counts as none.
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
        self._absent: set[str] = set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {group: set() for group in handles}
        self._replied_at = dict.fromkeys(handles, -math.inf)
        self._problems = dict.fromkeys(handles, "")
        """What was logged last of each group."""
        self._probes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Probe from now on; the second call does nothing."""
        if not self._probes:
            self._absent.update(self._handles)
            for group in self._handles:
                self._on_change(group, 0)
            self._probes = [asyncio.create_task(self._probe(group, handle)) for group, handle in self._handles.items()]

    def is_absent(self, group: str) -> bool:
        """See `handles.ReplicaPresence`."""
        return group in self._absent

    def waiting(self, group: str) -> set[asyncio.Timeout]:
        """See `handles.ReplicaPresence`."""
        return self._waiting[group]

    def record_reply(self, group: str) -> None:
        """See `handles.ReplicaPresence`."""
        self._replied_at[group] = asyncio.get_running_loop().time()

    def problem(self, group: str) -> str:
        """Why the group's replicas are refused, or refused their newest settings; empty if neither."""
        return self._problems[group]

    async def _probe(self, group: str, handle: DeploymentHandle) -> None:
        while True:
            self._set_live(group, live=await self._is_live(group, handle))
            await asyncio.sleep(_PROBE_S)

    def _set_live(self, group: str, *, live: bool) -> None:
        if live != (group in self._absent):
            return
        if live:
            self._absent.discard(group)
        else:
            self._absent.add(group)
            now = asyncio.get_running_loop().time()
            for timer in self._waiting[group]:
                if not timer.expired():
                    timer.reschedule(now)
        self._on_change(group, int(live))

    async def _is_live(self, group: str, handle: DeploymentHandle) -> bool:
        try:
            async with asyncio.timeout(_SILENT_S):
                presence = decode_presence(await handle.present.remote(PROTOCOL))
        except NotReady as error:  # of another version
            self._note(group, error.message)
            return False
        except BackPressureError:  # the queue is full, so a replica is at work
            return True
        except TimeoutError:
            return asyncio.get_running_loop().time() - self._replied_at[group] < _SILENT_S
        except Exception:  # noqa: BLE001 - any failure means that no replica answers
            return False
        self._on_statement(presence.statement)
        self._note(group, presence.refused)
        return True

    def _note(self, group: str, problem: str) -> None:
        if problem and problem != self._problems[group]:
            log.error("%s: %s", group, problem)
        self._problems[group] = problem
