"""One task of a tier: its stages, its replicas, its state, and its share of the admission limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import msgspec

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import BadField, NotFound, NotReady
from hawkvision.core.escalation_api import SCORE_HEADER, EscalationRequest, StageList
from hawkvision.datacenter.stages.cascade_executor import SecondStage, Variants
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage, TaskFailure
from hawkvision.datacenter.stages.ensemble import AcceptThreshold
from hawkvision.system.admission import Admission

TaskStatus: TypeAlias = Literal["ready", "starting", "failed"]


class TaskState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task. Requests for it get 503 unless it is ready."""

    task: str
    status: TaskStatus
    """`starting`: Serve starts, or replaces, a replica that is missing. `failed`: it needs somebody's help."""
    reason: str = ""
    """Why it is not ready; empty for those who may not know it."""


_MAX_STATEMENTS: Final = 64


class ServedTask:
    """Not ready until `variants` is set, and as long as there is a `failure`."""

    def __init__(self, name: str, loaded: Catalog | TaskFailure) -> None:
        self.name = name
        self.catalog = loaded if isinstance(loaded, Catalog) else None
        self.failure = loaded.reason if isinstance(loaded, TaskFailure) else None
        """The reason why the task cannot be served; None if it can."""
        self.variants: Variants | None = None
        self.absent: set[str] = set()
        """The groups of variants that should have a live replica and have none."""
        self.admission = Admission(0, 1)
        """Of the requests inside."""
        self.running: dict[str, int] = {}
        """Replicas by group."""
        self.problems: dict[str, str] = {}
        """What is wrong with the replicas of groups, as the log says."""
        self.failed: set[str] = set()
        """The groups of which no replica comes by itself."""
        self._statements: dict[str, None] = {}
        """The replicas' statements, the newest last; at most `_MAX_STATEMENTS`."""

    def ready_catalog(self) -> Catalog:
        """The task's stages.

        Raises:
            NotReady: if the task cannot be served.
        """
        if self.failure is not None or self.catalog is None:
            raise NotReady(f"task {self.name!r} cannot be served: {self.failure}")
        return self.catalog

    def ready_variants(self) -> Variants:
        """Access to the replicas.

        Raises:
            NotReady: while there is none.
        """
        self.ready_catalog()
        if self.variants is None:
            raise NotReady(f"the datacenter tier is still loading the models of task {self.name!r}, or draining")
        return self.variants

    def check_ready(self) -> None:
        """Check that each stage can answer.

        Raises:
            NotReady: names what is missing.
        """
        self.ready_variants()
        if self.absent:
            raise NotReady(self._describe_absent(with_reason=True))

    def state(self, *, with_reason: bool) -> TaskState:
        """Whether each stage can answer.

        Args:
            with_reason: whether to say why the task cannot be served, which may name files.
        """
        try:
            self.check_ready()
        except NotReady as error:
            failed = self.failure is not None or bool(self.absent & self.failed)
            if failed and not with_reason:
                return TaskState(self.name, "failed")
            reason = error.message if with_reason or not self.absent else self._describe_absent(with_reason=False)
            return TaskState(self.name, "failed" if failed else "starting", reason)
        return TaskState(self.name, "ready")

    def record_problem(self, group: str, problem: str, *, failed: bool) -> None:
        """Note what is wrong with a group's replicas, as the log says; an empty text if nothing is any more."""
        self.problems.pop(group, None)
        self.failed.discard(group)
        if problem:
            self.problems[group] = problem
        if failed:
            self.failed.add(group)

    def _describe_absent(self, *, with_reason: bool) -> str:
        absent = (self._described(group, with_reason) for group in sorted(self.absent))
        return f"task {self.name!r} has no live replica of {', '.join(absent)}"

    def _described(self, group: str, with_reason: bool) -> str:
        problem = self.problems.get(group) if with_reason else None
        return f"{group} ({problem})" if problem else group

    def record_statement(self, statement: str) -> None:
        """Note what a replica states that it runs (`hawkvision.models.fingerprints`)."""
        self._statements.pop(statement, None)
        self._statements[statement] = None
        while len(self._statements) > _MAX_STATEMENTS:
            del self._statements[next(iter(self._statements))]

    def listing(self) -> StageList:
        """The reply to `GET /v1/stages`.

        Raises:
            NotReady: as `check_ready`.
        """
        self.check_ready()
        return self.ready_catalog().listing(tuple(reversed(self._statements)))

    def stages(self, request: EscalationRequest) -> tuple[ServedStage, SecondStage | None]:
        """The stage that runs first, and the one that runs if the first is not confident enough.

        Raises:
            NotReady: if the task cannot be served.
            NotFound: for a stage that the task does not have.
            BadField: for a score that the task does not have.
        """
        catalog = self.ready_catalog()
        first = catalog.best if request.variant is None else _stage(catalog, request.variant)
        intermediate = request.intermediate
        if intermediate is None:
            return first, None
        second, scores = _stage(catalog, intermediate.otherwise), catalog.kind.scores
        if intermediate.score not in scores:
            raise BadField(f"{SCORE_HEADER}: expected {' or '.join(scores)}, got {intermediate.score[:40]!r}")
        return first, (second, AcceptThreshold(intermediate.score, intermediate.accept_score))

    @contextmanager
    def hold_place(self, caller: str, deadline: Deadline | None) -> Iterator[None]:
        """Count a caller's request among those inside while the block lasts.

        Raises:
            Overloaded: if the task's share of the limit is used up, or the request would be late.
        """
        self.check(caller, deadline)
        self.admission.enter(caller, time.monotonic())
        try:
            yield
        finally:
            self.admission.leave([caller], time.monotonic())

    def check(self, caller: str, deadline: Deadline | None) -> None:
        """Check that one more request may enter.

        Raises:
            Overloaded: as `hold_place`.
        """
        now = time.monotonic()
        self.admission.check(caller, None if deadline is None else deadline.remaining_s(now), now)


def _stage(catalog: Catalog, name: str) -> ServedStage:
    stage = catalog.stage(name)
    if stage is None:
        known = ", ".join(each.name for each in catalog.stages)
        raise NotFound(f"task {catalog.task!r} has no stage {name[:80]!r} here; it has {known}")
    return stage
