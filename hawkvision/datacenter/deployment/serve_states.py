"""What Serve's controller says of this application's deployments."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Final

from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

_SERVING: Final = ("RUNNING", "UPDATING", "PENDING_MIGRATION")
"""States of replicas, as Serve's controller names them."""
FAILED: Final = "DEPLOY_FAILED"
"""The status of a deployment of which Serve starts no more replicas, because too many did not start."""
_ENDED: Final = re.compile(r"Error:\s+(?:ray\.exceptions\.)?ActorDiedError\b|\bThe actor died unexpectedly before")
_REASON_CHARS: Final = 1000
_OURS: Final = re.compile(r"^hawkvision\.core\.errors\.\w+: (.+)$", re.MULTILINE)


class ServeStates:
    """Asks Serve's controller, one question at a time for all who wait: one that hangs holds a thread."""

    def __init__(self) -> None:
        self._asked: asyncio.Task[Mapping[str, DeploymentStatusOverview] | None] | None = None

    async def why_missing(self, group: str) -> str | None:
        """Why the group of this process's application has no replica that takes requests.

        None if it has one, or if Serve does not say; an empty text while Serve starts one.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(asyncio.to_thread(_deployments))
        deployments = await asyncio.shield(self._asked)
        deployed = None if deployments is None else deployments.get(group)
        if deployed is None or any(deployed.replica_states.get(state, 0) for state in _SERVING):
            return None
        if deployed.status != FAILED:
            return ""
        return f"its replicas do not start: {cause_of(deployed.message)[:_REASON_CHARS]}"


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
