"""Which groups have live replicas, for a server that reaches them only through Serve's handles and its controller."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Final

from ray import serve
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from hawkvision.core.errors import NotReady
from hawkvision.datacenter.deployment.messages import PROTOCOL, Presence, decode_presence

_SERVING: Final = ("RUNNING", "UPDATING", "PENDING_MIGRATION")
"""States of replicas, as Serve's controller names them."""
FAILED: Final = "DEPLOY_FAILED"
"""The status of a deployment of which Serve starts no more replicas, because too many did not start."""
_ENDED: Final = re.compile(r"Error:\s+(?:ray\.exceptions\.)?ActorDiedError\b|\bThe actor died unexpectedly before")
REASON_CHARS: Final = 1000
_OURS: Final = re.compile(r"^hawkvision\.core\.errors\.\w+: (.+)$", re.MULTILINE)


class ServeStates:
    """Asks Serve's controller, one question at a time for all who wait: one that hangs holds a thread."""

    def __init__(self) -> None:
        self._asked: asyncio.Task[Mapping[str, DeploymentStatusOverview] | None] | None = None

    async def deployments(self) -> Mapping[str, DeploymentStatusOverview] | None:
        """The deployments of this process's application, by name; None if Serve does not say."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(asyncio.to_thread(_deployments))
        return await asyncio.shield(self._asked)

    async def why_missing(self, group: str) -> str | None:
        """Why the group of this process's application has no replica that takes requests.

        None if it has one, or if Serve does not say; an empty text while Serve starts one.
        """
        deployments = await self.deployments()
        deployed = None if deployments is None else deployments.get(group)
        if deployed is None or any(deployed.replica_states.get(state, 0) for state in _SERVING):
            return None
        if deployed.status != FAILED:
            return ""
        return f"its replicas do not start: {cause_of(deployed.message)[:REASON_CHARS]}"


def _deployments() -> Mapping[str, DeploymentStatusOverview] | None:
    """The deployments of this process's application, by name; None if Serve does not say. Blocks."""
    try:
        application: ApplicationStatusOverview = serve.status().applications[serve.get_replica_context().app_name]
    except Exception:  # noqa: BLE001 - whatever Ray raises while its controller restarts
        return None
    deployments: Mapping[str, DeploymentStatusOverview] = application.deployments
    return deployments


def cause_of(message: str) -> str:
    """The error of ours in Serve's message about a replica, which is a traceback; else the whole message.

    In one line.
    """
    if ours := _OURS.findall(message):
        return one_line(ours[-1])
    if _ENDED.search(message):
        return "the process ended before it served; was it killed for memory?"
    return one_line(message)


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())


log = logging.getLogger("hawkvision.datacenter")

_PROBE_S: Final = 0.5
"""From the answer to a probe to the next probe."""
_DOUBT_S: Final = 0.5
"""After so long without an answer, Serve's controller is asked whether there is a replica at all. Its router only waits
for one."""
_SILENT_S: Final = 5.0
"""The longest that a live group may leave a probe, or all requests, unanswered."""
_SECOND_PROBE_S: Final = 1.0
"""The same for the probe after one that failed."""


class _NoReplica(Exception):
    """Serve has no replica of the group; the message says why if Serve has given up to start one, else it is empty."""


class PolledPresence:
    """Knows which groups have live replicas: probes each through its handle.

    A probe may queue behind requests, so their answers count as well. A replica of another version counts as none, and
    so does one that cannot load its models.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle],
        on_change: Callable[[str, int], None],
        on_statement: Callable[[str], None],
        on_problem: Callable[[str, str, bool], None] = lambda *_: None,
        states: ServeStates | None = None,
    ) -> None:
        """No group is known to be live.

        Args:
            handles: by group.
            on_change: takes a group and 1 if it is live, else 0, whenever that changes.
            on_statement: takes the statement in each probe's answer.
            on_problem: takes a group, what is wrong with its replicas, or an empty text, and whether they have failed,
                so that only somebody's help brings them back; whenever the text changes.
            states: what Serve says of the groups; several presences may share it.
        """
        self._states = states or ServeStates()
        self._handles = handles
        self._on_change = on_change
        self._on_statement = on_statement
        self._on_problem = on_problem
        self._absent: set[str] = set()
        self._waiting: dict[str, set[asyncio.Timeout]] = {group: set() for group in handles}
        self._replied_at = dict.fromkeys(handles, -math.inf)
        self._problems = dict.fromkeys(handles, "")
        """What is wrong with each group's replicas; empty if nothing is."""
        self._probes: list[asyncio.Task[None]] = []
        self._unprobed = set(handles)
        self._all_probed = asyncio.Event()

    def start(self) -> None:
        """Probe from now on; the second call does nothing."""
        if not self._probes:
            self._absent.update(self._handles)
            for group in self._handles:
                self._on_change(group, 0)
            self._probes = [asyncio.create_task(self._probe(group, handle)) for group, handle in self._handles.items()]

    async def wait_until_probed(self) -> None:
        """Return once it is known of each group whether it is live: some seconds after `start` at the latest."""
        if self._handles:
            await self._all_probed.wait()

    def is_absent(self, group: str) -> bool:
        """Whether no replica of the group is live."""
        return group in self._absent

    def waiting(self, group: str) -> set[asyncio.Timeout]:
        """The timers of the requests that wait for the group; all expire when it has no live replica any more."""
        return self._waiting[group]

    def record_reply(self, group: str) -> None:
        """Note that a replica of the group has answered a request."""
        self._replied_at[group] = asyncio.get_running_loop().time()

    def problem(self, group: str) -> str:
        """Why the group's replicas are refused, or refused their newest settings; empty if neither."""
        return self._problems[group]

    async def _probe(self, group: str, handle: DeploymentHandle) -> None:
        while True:
            self._set_live(group, live=await self._is_live(group, handle))
            self._unprobed.discard(group)
            if not self._unprobed:
                self._all_probed.set()
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
        """Whether a probe is answered. If one fails, which may have met the only replica that is gone, a second is."""
        for within_s in (_SILENT_S, _SECOND_PROBE_S):
            try:
                presence = await self._probed(group, handle, within_s)
            except NotReady as error:  # of another version
                self._note(group, error.message, log_it=True)
                return False
            except _NoReplica as error:
                self._note(group, str(error), failed=True, log_it=True)
                return False
            except BackPressureError:  # before a replica that works, or one that hangs
                return self._replied_within(group, _SILENT_S)
            except TimeoutError:
                return self._replied_within(group, within_s)
            except Exception as error:  # noqa: BLE001 - any failure means that this replica does not answer
                log.debug("%s: a probe failed: %r", group, error)
                continue
            if presence.failed:
                self._note(group, presence.failed, failed=True)
                continue  # another replica may have loaded its models
            self._on_statement(presence.statement)
            self._note(group, presence.refused)
            return True
        return False

    async def _probed(self, group: str, handle: DeploymentHandle, within_s: float) -> Presence:
        """What a replica says of itself.

        Raises:
            _NoReplica: if Serve has no replica that could say it.
            TimeoutError: if none answers in time.
            BackPressureError: if the queue is full, although Serve has a replica.
            Exception: as the call.
        """
        probe = asyncio.ensure_future(_presence(handle))
        try:
            async with asyncio.timeout(within_s):
                while not (await asyncio.wait((probe,), timeout=_DOUBT_S))[0]:
                    await self._check_replica(group)
            return probe.result()
        except (BackPressureError, DeploymentUnavailableError):  # a full queue may stand before no replica
            await self._check_replica(group)
            raise
        finally:
            probe.cancel()

    async def _check_replica(self, group: str) -> None:
        reason = await self._states.why_missing(group)
        if reason is not None:
            raise _NoReplica(reason)

    def _replied_within(self, group: str, seconds: float) -> bool:
        return asyncio.get_running_loop().time() - self._replied_at[group] < seconds

    def _note(self, group: str, problem: str, *, failed: bool = False, log_it: bool = False) -> None:
        """Keep and report a new problem; `log_it` for one that no replica logs itself."""
        if problem == self._problems[group]:
            return
        self._problems[group] = problem
        if problem and log_it:
            log.error("%s: %s", group, problem)
        self._on_problem(group, problem, failed and bool(problem))


async def _presence(handle: DeploymentHandle) -> Presence:
    return decode_presence(await handle.present.remote(PROTOCOL))
