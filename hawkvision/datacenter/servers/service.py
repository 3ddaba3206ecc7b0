"""The service behind each server of the tier: check a request, admit it, run its stages, build the reply.

    server ── a request's head ──► ObservedRequest: counts it, names it in the log, maps exceptions
           ── EscalationRequest ──► admit ─┬─ unknown task or stage, not ready, too late, full ──► error
                                           └─ AdmittedRequest ── image ──► in_flight ─┬─ full ──► error
                                                                                      └─ run ─┬─► EscalationReply
                                                                                              └─► partial replies

A protocol's module reads requests and writes replies. A request counts against its task's share of the limit once its
image has arrived, so callers whose images stall keep nobody out; the memory of those has its own bound
(`hawkvision.servers.bodies`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, TypeVar

from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, HawkVisionError, InternalError, NotFound, NotReady
from hawkvision.core.escalation_api import (
    INFER_PATH,
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
    PartialEnsemble,
    StageList,
)
from hawkvision.core.logs import bind_request
from hawkvision.core.trace_context import TraceContext, start_trace
from hawkvision.datacenter.servers.metrics import DatacenterMetrics
from hawkvision.datacenter.servers.served_task import ServedTask, TaskState
from hawkvision.datacenter.stages.cascade_executor import SecondStage, Variants, run_two_stages
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage, TaskFailure
from hawkvision.datacenter.stages.ensemble import StageResult, VariantAnswer
from hawkvision.tasks.kind import TaskKind

DATAGRAM_PATH: Final = "datagram"
"""The metrics' path of an image that came as datagrams."""

log = logging.getLogger("hawkvision.datacenter")

_UNEXPLAINED: Final = "task {!r} cannot be served; the log says why, and this answer with a key"

ResultT = TypeVar("ResultT")


class TierService:
    """The tasks of a tier. Each is not ready until `set_variants` was called for it.

    Each task has its own share of the admission limit, in proportion to its groups of variants. No task takes the share
    of another one: the replicas of one task cannot run the images of another, so a place that is lent would only
    lengthen a queue.
    """

    def __init__(self, catalogs: Mapping[str, Catalog | TaskFailure], max_in_flight: int) -> None:
        """No task is ready.

        Args:
            catalogs: by task; requests that name no task are for the first.
            max_in_flight: see `set_limit`.
        """
        self._tasks = {task: ServedTask(task, loaded) for task, loaded in catalogs.items()}
        self._default = next(iter(self._tasks.values()))
        self._task_of_group = {
            group.name: task for task in self._tasks.values() if task.catalog for group in task.catalog.groups
        }
        self.metrics = DatacenterMetrics()
        for task in self._tasks.values():
            self.metrics.in_flight.labels(task.name).set_function(partial(getattr, task.admission, "inside"))
            if task.failure is not None:
                log.error("task %s cannot be served: %s", task.name, task.failure)
        self.has_head = True
        """Whether the cluster's head is there, as far as the tier depends on it."""
        self.set_limit(max_in_flight)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, those that failed to load included; the first is the default."""
        return tuple(self._tasks)

    @property
    def catalogs(self) -> dict[str, Catalog]:
        """The catalogs of the tasks that were loaded."""
        return {task.name: task.catalog for task in self._tasks.values() if task.catalog is not None}

    def set_limit(self, max_in_flight: int) -> None:
        """Set how many requests may be inside this process at once, over all tasks.

        Requests that are inside stay. A task that is above its new share takes no more until it is below.
        """
        total = len(self._task_of_group)
        before = 0
        for task in self._tasks.values():
            groups = 0 if task.catalog is None else len(task.catalog.groups)
            share = max_in_flight * (before + groups) // max(total, 1) - max_in_flight * before // max(total, 1)
            task.admission.limit = max(share, 1) if groups else 0
            before += groups

    def set_variants(self, task: str, variants: Variants | None) -> None:
        """Give a task access to its replicas, after which it is served; None while it loads or drains."""
        self._tasks[task].variants = variants

    def states(self, task: str | None = None, *, with_reason: bool = True) -> tuple[TaskState, ...]:
        """The state of each task, or of the one that is named.

        Args:
            task: None for all.
            with_reason: see `ServedTask.state`.

        Raises:
            NotFound: for a task that is not served.
        """
        tasks = self._tasks.values() if task is None else (self._task(task),)
        return tuple(each.state(with_reason=with_reason) for each in tasks)

    def readiness(self, task: str | None = None, *, with_reason: bool = True) -> tuple[TaskState, ...]:
        """The states that `GET /readyz` replies, of one task or all, as soon as one of these is ready.

        See `states` for the arguments.

        Raises:
            NotFound: for a task that is not served.
            NotReady: if none of them is ready; names what each lacks.
        """
        if not self.has_head:
            raise NotReady("the head of the Ray cluster is gone, and this tier ends with it")
        states = self.states(task, with_reason=with_reason)
        if not any(state.status == "ready" for state in states):
            raise NotReady("; ".join(state.reason or _UNEXPLAINED.format(state.task) for state in states))
        return states

    def record_statement(self, task: str, statement: str) -> None:
        """Note what a replica of a task states that it runs (`hawkvision.models.fingerprints`)."""
        self._tasks[task].record_statement(statement)

    def listing(self, task: str | None = None) -> StageList:
        """The reply to `GET /v1/stages`, by default for the first task.

        Raises:
            NotFound: for a task that is not served.
            NotReady: if a stage cannot answer.
        """
        return self._task(task).listing()

    def record_problem(self, group: str, problem: str, failed: bool = False) -> None:
        """Note what is wrong with a group's replicas, and whether none comes by itself; see `ServedTask`."""
        self._task_of_group[group].record_problem(group, problem, failed=failed)

    def count_replicas(self, group: str, running: int) -> None:
        """Note how many replicas of a group, or of the ingress, run; of a group whose replicas do not answer, none."""
        task = self._task_of_group.get(group)
        self.metrics.replicas.labels(group).set(0 if task is not None and group in task.absent else running)
        if task is not None:
            task.running[group] = running
            task.admission.parallel = max(1, min(task.running.values()))  # every group evaluates each request

    def set_live_replicas(self, group: str, live: int) -> None:
        """Note whether a group of variants has a live replica; `count_replicas` says how many."""
        self.metrics.replicas.labels(group).set(live)
        task = self._task_of_group[group]
        was_absent = group in task.absent
        if live == 0:
            task.absent.add(group)
        else:
            task.absent.discard(group)
        if task.variants is None:  # still loading, or stopping
            return
        if live == 0 and not was_absent:
            log.warning("%s has no live replica: its callers get 503", group)
        elif live > 0 and was_absent:
            log.info("%s has a live replica", group)

    def admit(self, request: EscalationRequest, caller: str = "", waited_s: float = 0.0) -> AdmittedRequest:
        """Check a request whose image may not have arrived yet. `AdmittedRequest.in_flight` is the next step.

        Args:
            request: what is asked.
            caller: the name of its key; callers take turns.
            waited_s: seconds since it reached this machine.

        Raises:
            NotFound, BadField: for a task, stage or score that is not served.
            NotReady, DeadlineMissed, Overloaded: as their names say.
        """
        task = self._task(request.task)
        stages = task.stages(request)
        variants = task.ready_variants()
        deadline, left_ms = None, request.deadline_ms
        if left_ms is not None:
            left_ms -= waited_s * 1e3
            if left_ms <= 0.0:
                raise DeadlineMissed(f"the deadline had passed by {-left_ms:g} ms when the request came")
            deadline = Deadline.after_ms(left_ms, time.monotonic())
        task.check(caller, deadline)
        kind, hold_place = task.ready_catalog().kind, partial(task.hold_place, caller, deadline)
        return AdmittedRequest(task.name, kind, variants, stages, request, deadline, self.metrics, hold_place)

    def count(self, path: str, task: str | None, stage: str | None, status: int, seconds: float) -> None:
        """Count a request by path and status.

        A request for an image (`INFER_PATH`, `DATAGRAM_PATH`) also counts by the task and stage that it names (None:
        the default), and its duration if it was answered.
        """
        labels = ("none", "none")
        if path in (INFER_PATH, DATAGRAM_PATH):
            labels = self._labels(task, stage)
            if status == 200:
                self.metrics.duration.labels(*labels).observe(seconds)
        self.metrics.requests.labels(path, *labels, str(status)).inc()

    def _labels(self, task: str | None, stage: str | None) -> tuple[str, str]:
        """The metrics' task and stage; "none" for those that do not exist."""
        served = self._tasks.get(task) if task else self._default
        if served is None:
            return "none", "none"
        if served.catalog is None:
            return served.name, "none"
        known = served.catalog.stage(stage or served.catalog.best.name)
        return served.name, "none" if known is None else known.name

    def _task(self, name: str | None) -> ServedTask:
        task = self._default if name is None else self._tasks.get(name)
        if task is None:
            known = ", ".join(map(repr, self._tasks))
            raise NotFound(f"no task {name and name[:80]!r} here; this tier serves {known}")
        return task


class AdmittedRequest:
    """One request to the tier, under its deadline. Made by `TierService.admit`."""

    def __init__(
        self,
        task: str,
        kind: TaskKind[Any],
        variants: Variants,
        stages: tuple[ServedStage, SecondStage | None],
        request: EscalationRequest,
        deadline: Deadline | None,
        metrics: DatacenterMetrics,
        hold_place: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.in_flight = hold_place
        """Counts the request against its task's limit while the block lasts; raises `Overloaded` if that is reached."""
        self.kind = kind
        """Of the task; writes the replies."""
        self._task = task
        self._variants = variants
        self._stages = stages
        self._request = request
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_ms: float | None = None
        self._deadline = deadline

    async def within_deadline(self, work: Awaitable[ResultT]) -> ResultT:
        """The work's result.

        Raises:
            DeadlineMissed: if the deadline comes first.
        """
        try:
            async with asyncio.timeout_at(None if self._deadline is None else self._deadline.at):
                return await work
        except TimeoutError:
            raise DeadlineMissed(f"no answer within the {self._request.deadline_ms:g} ms that were left") from None

    async def run(
        self, image: bytes, on_partial: Callable[[EscalationReply], None] | None = None, *, reduced: bool = False
    ) -> EscalationReply:
        """The reply to an image, of which the edge has more if it is `reduced`.

        For a progressive request, `on_partial` gets the partial replies, and the last of them is the reply if the rest
        is late or fails.

        Raises:
            HawkVisionError: as `cascade_executor.Variants.ask`.
            DeadlineMissed: if the deadline comes first.
        """
        first, second = self._stages
        partial: EscalationReply | None = None

        def report(results: tuple[StageResult, ...]) -> None:
            nonlocal partial
            partial = self._reply(results, reduced=reduced)
            if on_partial is not None:
                on_partial(partial)

        running = run_two_stages(
            self._variants, self.kind, first, second, image, self._deadline,
            report if self._request.progressive else None,
        )  # fmt: skip
        try:
            results = await self.within_deadline(running)
        except HawkVisionError:
            if partial is None:
                raise
            self._metrics.incomplete.labels(self._task, partial.model).inc()
            return partial
        self._observe(results)
        return self._reply(results, reduced=reduced)

    def _reply(self, results: tuple[StageResult, ...], *, reduced: bool) -> EscalationReply:
        total_ms = (time.perf_counter() - self._started) * 1e3
        if self._first_ms is None:
            self._first_ms = total_ms
        return reply_of(results, self._request, total_ms, self._first_ms, reduced=reduced)

    def _observe(self, results: tuple[StageResult, ...]) -> None:
        metrics, task = self._metrics, self._task
        metrics.answers.labels(task, results[-1].stage.name).inc()
        if results[-1].missing:
            metrics.decided.labels(task, results[-1].stage.name).inc()
        if len(results) > 1:
            metrics.ensemble_runs.labels(task, results[0].stage.name).inc()
        for answer in (answer for result in results for answer in result.answers):
            metrics.queue_duration.labels(task, answer.variant).observe(answer.queue_ms / 1e3)
            metrics.inference_duration.labels(task, answer.variant).observe(answer.infer_ms / 1e3)
            metrics.batch_size.labels(task, answer.variant).observe(answer.batch_size)


CALLER_GONE: Final = 499
"""The metrics' status of a request whose caller is gone; nginx uses the same number."""


class ObservedRequest:
    """Logs and counts what happens in its block as one request.

    The block raises `InternalError` in place of what is no `HawkVisionError`: one request's defect, which is logged,
    must not reach the next.
    """

    def __init__(
        self, tier: TierService, path: str, trace: TraceContext | None = None, request_id: str | None = None
    ) -> None:
        """Begin it, for the metrics' `path`, with the caller's trace and own id."""
        self.span = trace.child() if trace else start_trace()
        self.request_id = bind_request(request_id, self.span)
        self.task: str | None = None
        """The task that the caller names; None is the first."""
        self.stage: str | None = None
        """The stage that the caller names; None is the best."""
        self.status = CALLER_GONE
        """The server sets it; an exception sets its own."""
        self._tier = tier
        self._path = path
        self._started = time.perf_counter()

    def use_trace(self, trace: TraceContext | None) -> None:
        """Take the caller's trace, if it is known only now, for the log as well."""
        if trace is not None:
            self.span = trace.child()
            self.request_id = bind_request(None, self.span)

    def __enter__(self) -> ObservedRequest:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, HawkVisionError):
            self.status = error.status
        elif isinstance(error, Exception):
            self.status = InternalError.status
        self._tier.count(self._path, self.task, self.stage, self.status, time.perf_counter() - self._started)
        if isinstance(error, Exception) and not isinstance(error, HawkVisionError):
            log.error("unexpected failure", exc_info=error)
            raise InternalError("internal error; the datacenter's log has the details") from None


def reply_of(
    results: tuple[StageResult, ...],
    request: EscalationRequest,
    total_ms: float,
    first_ms: float,
    *,
    reduced: bool = False,
) -> EscalationReply:
    """The last result's answer, with the time that all stages took.

    Args:
        results: of the stages that ran, in their order.
        request: what was asked for.
        total_ms: milliseconds from the request to this reply.
        first_ms: milliseconds from the request to its first reply.
        reduced: whether the edge has more of the image, so that its own models are to count as well.
    """
    final = results[-1]
    members = tuple(final.members or results[0].members)
    intermediate = request.intermediate
    return EscalationReply(
        prediction=final.kind.predict(final.output, request.top_k),
        model=final.stage.name,
        timing_ms=_timing(results, total_ms, first_ms),
        batch_size=max(answer.batch_size for result in results for answer in result.answers),
        score=None if intermediate is None else final.score(intermediate.score),
        passed_over=None if intermediate is None or len(results) == 1 else _passed_over(results, intermediate.score),
        part=PartialEnsemble(members, final.output, final.decided) if reduced or not final.decided else None,
        fingerprint=_fingerprint(final, results),
    )


def _timing(results: tuple[StageResult, ...], total_ms: float, first_ms: float) -> EscalationTiming:
    # The times of one answer per stage: one member's wait may overlap another one's inference.
    slowest = [max(result.answers, key=_duration_ms) for result in results if result.answers]
    return EscalationTiming(
        decode=round(sum(answer.decode_ms for answer in slowest), 3),
        queue=round(sum(answer.queue_ms for answer in slowest), 3),
        infer=round(sum(answer.infer_ms for answer in slowest), 3),
        total=round(total_ms, 3),
        first=round(first_ms, 3),
    )


def _fingerprint(result: StageResult, results: tuple[StageResult, ...]) -> str | None:
    """The fingerprint of a stage as the replicas stated it whose answers it used.

    None if they made different statements, and for an undecided result, which no certificate covers.
    """
    if not result.decided:
        return None
    members = result.stage.members
    statements = {answer.statement for each in results for answer in each.answers if answer.variant in members}
    return result.stage.ran(statements.pop()) if len(statements) == 1 else None


def _duration_ms(answer: VariantAnswer) -> float:
    return answer.decode_ms + answer.queue_ms + answer.infer_ms


def _passed_over(results: tuple[StageResult, ...], score: str) -> IntermediateResult:
    first = results[0]
    return IntermediateResult(first.kind.predict(first.output, 1), first.score(score), _fingerprint(first, results))
