"""Which tasks of a tier can be served now: the body of `GET /readyz`, and what a deployment waits for."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

TaskStatus: TypeAlias = Literal["ready", "starting", "failed"]


class TaskState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task. Requests for it get 503 unless it is ready."""

    task: str
    status: TaskStatus
    """`starting`: Serve starts, or replaces, a replica that is missing. `failed`: it needs somebody's help."""
    reason: str = ""
    """Why it is not ready; empty for those who may not know it."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """A tier is ready as soon as one of its tasks is."""

    status: Literal["ready"] = "ready"
    tasks: tuple[TaskState, ...]
