"""The tasks of a node, and which of them answers a request.

A request names its task, or gets the first one: with a typed form of the API the first one of that kind. Each task has
an `EdgeNode` with its own queue, memory, certificates and streams, or a reason why it cannot be served (503).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from edge.inference.resident_models import State
from edge.serving.node import EdgeNode
from hawkvision.core.errors import BadField, NotFound, NotReady
from hawkvision.tasks.registry import INFER_PATH, form_of


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A task that cannot be served until the node is started again, and why."""

    task: str
    reason: str
    kind: str | None = None
    """The name of its kind; None if its manifest could not be read."""


Entry: TypeAlias = EdgeNode | TaskFailure


def kind_of(entry: Entry) -> str | None:
    """The name of a task's kind, if it is known."""
    return entry.kind.name if isinstance(entry, EdgeNode) else entry.kind


class ServedTasks:
    """The tasks of a node by name, the default first."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Serve these; at least one is an `EdgeNode`."""
        self.entries = tuple(entries)
        self.nodes = tuple(entry for entry in entries if isinstance(entry, EdgeNode))
        self.failures = tuple(entry for entry in entries if isinstance(entry, TaskFailure))
        self._by_name = {entry.task: entry for entry in entries}
        self._first: dict[str | None, Entry] = {None: self.entries[0]}
        """The first task of all, and of each kind."""
        for entry in entries:
            if (kind := kind_of(entry)) is not None:
                self._first.setdefault(kind, entry)

    @property
    def names(self) -> tuple[str, ...]:
        """All tasks, those that cannot be served included."""
        return tuple(entry.task for entry in self.entries)

    @property
    def only(self) -> str | None:
        """The task, if there is just one."""
        return self.entries[0].task if len(self.entries) == 1 else None

    def node(self, task: str | None, kind: str | None = None, *, with_reason: bool = True) -> EdgeNode:
        """The node of a task.

        Args:
            task: its name; None for the first one, of this kind if one is given.
            kind: the name of the kind that the task must have; None for any.
            with_reason: whether the error says why the task cannot be served, which may name files.

        Raises:
            NotFound: if there is no such task here.
            BadField: if it is of another kind.
            NotReady: if it could not be loaded.
        """
        found = self._first.get(kind) if task is None else self._by_name.get(task)
        if isinstance(found, EdgeNode) and (kind is None or found.kind.name == kind):
            return found
        if found is None and task is None:  # a task whose kind is unknown may be of this one
            found = next((failed for failed in self.failures if failed.kind is None), None)
        if found is None:
            raise NotFound(self._not_served(task, kind))
        if kind is not None and kind_of(found) not in (None, kind):
            raise BadField(
                f"task: {found.task!r} is of kind {kind_of(found)!r}, not {kind[:40]!r}; POST "
                f"{form_of(kind_of(found))} answers it"
            )
        assert isinstance(found, TaskFailure), "a node of the right kind was returned"
        if not with_reason:
            raise NotReady(f"task {found.task!r} cannot be served; the log says why, and this answer with a key")
        raise NotReady(f"task {found.task!r} cannot be served: {found.reason}")

    def _not_served(self, task: str | None, kind: str | None) -> str:
        served = ", ".join(f"{entry.task!r} ({kind_of(entry) or 'not loaded'})" for entry in self.entries)
        if task is None:
            return (
                f"no task of kind {(kind or '')[:40]!r} is served here; this node serves {served}; POST "
                f"{INFER_PATH}?task=NAME answers any of them"
            )
        return f"task {task[:100]!r} is not served here; this node serves {served}"


class ListedTask(msgspec.Struct, frozen=True):
    """A task of the node. The fields from `pinned` on are absent where it cannot be served."""

    task: Annotated[str, Meta(description="The task's name.")]
    kind: Annotated[str | None, Meta(description="What its answers are; null if its manifest cannot be read.")]
    status: Annotated[
        State, Meta(description="Of its models. A request loads those that are `unloaded`; `failed`: see `reason`.")
    ]
    reason: Annotated[str | UnsetType, Meta(description="Why it cannot be served, or its models not be loaded.")] = (
        UNSET
    )
    pinned: Annotated[bool | UnsetType, Meta(description="Whether its models are never unloaded.")] = UNSET
    model_bytes: Annotated[int | UnsetType, Meta(description="What its models take in memory.")] = UNSET
    labels: Annotated[int | UnsetType, Meta(description="How many labels there are.")] = UNSET
    edge: Annotated[str | UnsetType, Meta(description="The edge stage.")] = UNSET
    best: Annotated[str | UnsetType, Meta(description="The reference stage.")] = UNSET
    max_queue: Annotated[int | UnsetType, Meta(description="Images that may wait.")] = UNSET
    memory_bytes: Annotated[int | UnsetType | None, Meta(description="For bodies and decoding.")] = UNSET
    targets: Annotated[str | UnsetType, Meta(description="The path that lists its targets.")] = UNSET


class Tasks(msgspec.Struct, frozen=True):
    """The tasks of the node and their kinds."""

    tasks: Annotated[list[ListedTask], Meta(description="The default first.")]


def describe_tasks(tasks: ServedTasks) -> Tasks:
    """`GET /v1/tasks`."""
    return Tasks([_described(entry) for entry in tasks.entries])


def _described(entry: Entry) -> ListedTask:
    if isinstance(entry, TaskFailure):
        return ListedTask(entry.task, entry.kind, "failed", entry.reason)
    parts = entry.limits.parts
    return ListedTask(
        entry.task,
        entry.kind.name,
        entry.models.state,
        entry.models.reason or UNSET,
        entry.models.pinned,
        entry.models.bytes,
        labels=len(entry.kind.labels),
        edge=entry.stage.name,
        best=entry.best,
        max_queue=entry.pool.limit,
        memory_bytes=None if parts is None else parts.total,
        targets=f"/v1/targets?task={entry.task}",
    )


def readiness(tasks: ServedTasks, task: str | None, *, with_reasons: bool) -> dict[str, Any]:
    """The body of `GET /readyz`: ready as soon as one task is, or with the state of the one task asked for.

    Args:
        tasks: of the node.
        task: the task asked for; None for all.
        with_reasons: whether to say why a task is not served, which may name files.

    Raises:
        NotFound, NotReady: if the task asked for is not served, or its models are not in memory.
    """
    if task is not None:
        node = tasks.node(task, with_reason=with_reasons)
        node.models.check()
        return {"status": "ready", "task": node.task, "variant": node.stage.name}
    first = tasks.nodes[0]
    ready: dict[str, Any] = {"status": "ready", "task": first.task, "variant": first.stage.name}
    return ready | {"tasks": [_state(entry, with_reasons=with_reasons) for entry in tasks.entries]}


def _state(entry: Entry, *, with_reasons: bool) -> dict[str, Any]:
    if isinstance(entry, TaskFailure):
        state, reason = {"task": entry.task, "status": "failed"}, str(entry.reason)
    else:
        state = {"task": entry.task, "status": entry.models.state, "variant": entry.stage.name}
        reason = entry.models.reason or ""
    return state | {"reason": reason} if with_reasons and reason else state
