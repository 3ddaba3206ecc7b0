"""The tasks of a node, and which of them answers a request.

task=pets ──► EdgeNode of pets ── its own queue, memory, certificates, streams
no task ────► the first task
task=coco, which could not be loaded ──► 503 with the reason
task=dogs, which is not served ──► 404
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edge.serving.node import EdgeNode
from hawkvision.core.errors import NotFound, NotReady


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that cannot be served until the node is started again, and why."""

    task: str
    reason: str


Entry: TypeAlias = EdgeNode | TaskFailure


class ServedTasks:
    """The tasks of a node by name, the default first."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Serve these; at least one is an `EdgeNode`."""
        self.entries = tuple(entries)
        self.nodes = tuple(entry for entry in entries if isinstance(entry, EdgeNode))
        self.failures = tuple(entry for entry in entries if isinstance(entry, TaskFailure))
        self._by_name: dict[str | None, Entry] = {entry.task: entry for entry in entries}
        self._by_name[None] = self.entries[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All tasks, those that cannot be served included."""
        return tuple(entry.task for entry in self.entries)

    @property
    def only(self) -> str | None:
        """The task, if there is just one."""
        return self.entries[0].task if len(self.entries) == 1 else None

    def node(self, task: str | None, *, with_reason: bool = True) -> EdgeNode:
        """The node of a task; None is the first one.

        Args:
            task: its name.
            with_reason: whether the error says why the task cannot be served, which may name files.

        Raises:
            NotFound: if it is not served here.
            NotReady: if it could not be loaded.
        """
        found = self._by_name.get(task)
        if isinstance(found, EdgeNode):
            return found
        if found is None:
            served = ", ".join(map(repr, self.names))
            raise NotFound(f"task {(task or '')[:100]!r} is not served here; this node serves {served}")
        if not with_reason:
            raise NotReady(f"task {found.task!r} cannot be served; the log says why, and this answer with a key")
        raise NotReady(f"task {found.task!r} cannot be served: {found.reason}")


def describe_tasks(tasks: ServedTasks) -> dict[str, Any]:
    """`GET /v1/tasks`: the tasks, the default first: their kinds, stages, bounds, and why a task is not served."""
    return {"tasks": [_described(entry) for entry in tasks.entries]}


def _described(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, TaskFailure):
        return {"task": entry.task, "status": "failed", "reason": entry.reason}
    parts = entry.admission.parts
    return {
        "task": entry.task,
        "status": "ready",
        "labels": len(entry.labels),
        "edge": entry.stage.name,
        "best": entry.best,
        "max_queue": entry.pool.limit,
        "memory_bytes": None if parts is None else parts.total,
        "targets": f"/v1/targets?task={entry.task}",
    }


def readiness(tasks: ServedTasks, task: str | None, *, with_reasons: bool) -> dict[str, Any]:
    """The body of `GET /readyz`: ready as soon as one task is, or with the state of the one task asked for.

    Args:
        tasks: of the node.
        task: the task asked for; None for all.
        with_reasons: whether to say why a task is not served, which may name files.

    Raises:
        NotFound, NotReady: if the task asked for is not served.
    """
    if task is not None:
        node = tasks.node(task, with_reason=with_reasons)
        return {"status": "ready", "task": node.task, "variant": node.stage.name}
    first = tasks.nodes[0]
    ready: dict[str, Any] = {"status": "ready", "task": first.task, "variant": first.stage.name}
    return ready | {"tasks": [_state(entry, with_reasons=with_reasons) for entry in tasks.entries]}


def _state(entry: Entry, *, with_reasons: bool) -> dict[str, Any]:
    if not isinstance(entry, TaskFailure):
        return {"task": entry.task, "status": "ready", "variant": entry.stage.name}
    failed = {"task": entry.task, "status": "failed"}
    return failed | {"reason": entry.reason} if with_reasons else failed
