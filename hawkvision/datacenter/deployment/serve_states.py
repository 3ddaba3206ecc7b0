"""What Serve's controller says of this application's deployments."""

from __future__ import annotations

import re
from typing import Final

from ray import serve

_SERVING: Final = ("RUNNING", "UPDATING", "PENDING_MIGRATION")
"""States of replicas, as Serve's controller names them."""
FAILED: Final = "DEPLOY_FAILED"
"""The status of a deployment of which Serve starts no more replicas, because too many did not start."""
_OURS: Final = re.compile(r"^hawkvision\.core\.errors\.\w+: (.+)$", re.MULTILINE)


def missing_replica(group: str) -> str | None:
    """Why the group of this process's application has no replica that takes requests. Blocks.

    None if it has one, or if Serve does not say; an empty text while Serve starts one.
    """
    try:
        application = serve.status().applications[serve.get_replica_context().app_name]
        deployed = application.deployments[group]
    except Exception:  # noqa: BLE001 - whatever Ray raises while its controller restarts
        return None
    if any(deployed.replica_states.get(state, 0) for state in _SERVING):
        return None
    return f"its replicas do not start: {cause_of(deployed.message)}" if deployed.status == FAILED else ""


def cause_of(message: str) -> str:
    """The error of ours in Serve's message about a replica, which is a traceback; the whole message if there is none.

    In one line.
    """
    ours = _OURS.findall(message)
    return one_line(ours[-1] if ours else message)


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())
