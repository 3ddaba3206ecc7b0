"""The service behind each server of the tier: check a request, admit it, run its stages, build the reply.

    server ── EscalationRequest ──► admit ─┬─ unknown stage, not ready, too late, full ──► error
                                           └─ AdmittedRequest ── image ──► in_flight ─┬─ full ──► error
                                                                                      └─ run ─┬─► EscalationReply
                                                                                              └─► partial replies

A request counts against `max_in_flight` once its image has arrived, so callers whose images stall keep nobody out; the
memory of those has its own bound (`hawkvision.servers.bodies`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeVar

from hawkvision.cascade.confidence.scores import top_classes
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import DeadlineMissed, HawkVisionError, NotFound, NotReady, Overloaded
from hawkvision.core.escalation_api import (
    INFER_PATH,
    ClassScore,
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
    StageList,
)
from hawkvision.core.types import Score
from hawkvision.datacenter.servers.metrics import DatacenterMetrics
from hawkvision.datacenter.stages.cascade_executor import SecondStage, Variants, run_two_stages
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage
from hawkvision.datacenter.stages.ensemble import StageResult, VariantAnswer

DATAGRAM_PATH: Final = "datagram"
"""The metrics' path of an image that came as datagrams."""
_MAX_STATEMENTS: Final = 64

log = logging.getLogger("hawkvision.datacenter")

ResultT = TypeVar("ResultT")


class TierService:
    """The stages of one task. Not ready until `variants` is set."""

    def __init__(self, catalog: Catalog, max_in_flight: int) -> None:
        self.catalog = catalog
        self.variants: Variants | None = None
        self.metrics = DatacenterMetrics()
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._absent: set[str] = set()
        """The groups of variants that should have a live replica and have none."""
        self._statements: dict[str, None] = {}
        """The replicas' statements, the newest last; at most `_MAX_STATEMENTS`."""
        self.metrics.in_flight.set_function(lambda: self._in_flight)

    def ready_variants(self) -> Variants:
        """Access to the replicas.

        Raises:
            NotReady: while there is none.
        """
        if self.variants is None:
            raise NotReady("the datacenter tier is still loading its models, or draining")
        return self.variants

    def check_ready(self) -> None:
        """Check that each stage can answer.

        Raises:
            NotReady: names what is missing.
        """
        self.ready_variants()
        if self._absent:
            raise NotReady(f"no live replica of {', '.join(sorted(self._absent))}")

    def record_statement(self, statement: str) -> None:
        """Note what a replica states that it runs (`hawkvision.models.fingerprints`)."""
        self._statements.pop(statement, None)
        self._statements[statement] = None
        while len(self._statements) > _MAX_STATEMENTS:
            del self._statements[next(iter(self._statements))]

    def listing(self) -> StageList:
        """The reply to `GET /v1/stages`."""
        return self.catalog.listing(tuple(reversed(self._statements)))

    def set_live_replicas(self, group: str, live: int) -> None:
        """Note the number of live replicas of a group of variants."""
        self.metrics.replicas.labels(group).set(live)
        was_absent = group in self._absent
        if live == 0:
            self._absent.add(group)
        else:
            self._absent.discard(group)
        if self.variants is None:  # still loading, or stopping
            return
        if live == 0 and not was_absent:
            log.warning("%s has no live replica: its callers get 503, and the tier is not ready", group)
        elif live > 0 and was_absent:
            log.info("%s has a live replica again", group)

    def admit(self, request: EscalationRequest) -> AdmittedRequest:
        """Check a request whose image may not have arrived yet. `AdmittedRequest.in_flight` is the next step.

        Raises:
            NotFound: for a task or stage that is not served.
            NotReady, DeadlineMissed, Overloaded: as their names say.
        """
        first, second = self._stages(request)
        variants = self.ready_variants()
        if request.deadline_ms is not None and request.deadline_ms <= 0.0:
            raise DeadlineMissed(f"the deadline had passed by {-request.deadline_ms:g} ms when the request came")
        self._refuse_if_full()
        return AdmittedRequest(variants, first, second, request, self.metrics, self._hold_place)

    @contextmanager
    def _hold_place(self) -> Iterator[None]:
        self._refuse_if_full()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def _refuse_if_full(self) -> None:
        if self._in_flight >= self._max_in_flight:
            raise Overloaded(f"{self._in_flight} requests are already inside the tier", retry_after_s=1.0)

    def count(self, path: str, stage_name: str | None, status: int, seconds: float) -> None:
        """Count a request by path and status.

        A request for an image (`INFER_PATH`, `DATAGRAM_PATH`) also counts by the stage that it names (None: the best),
        and its duration if it was answered.
        """
        label = "none"
        if path in (INFER_PATH, DATAGRAM_PATH):
            stage = self.catalog.stage(stage_name or self.catalog.best.name)
            label = "none" if stage is None else stage.name
            if status == 200:
                self.metrics.duration.labels(label).observe(seconds)
        self.metrics.requests.labels(path, label, str(status)).inc()

    def _stages(self, request: EscalationRequest) -> tuple[ServedStage, SecondStage | None]:
        """The stage that runs first, and the one that runs if the first is not confident enough."""
        if request.task not in (None, self.catalog.task):
            raise NotFound(f"no task {request.task!r} here; this tier serves {self.catalog.task!r}")
        first = self.catalog.best if request.variant is None else self._stage(request.variant)
        intermediate = request.intermediate
        if intermediate is None:
            return first, None
        return first, SecondStage(self._stage(intermediate.otherwise), intermediate.score, intermediate.accept_score)

    def _stage(self, name: str) -> ServedStage:
        stage = self.catalog.stage(name)
        if stage is None:
            known = ", ".join(each.name for each in self.catalog.stages)
            raise NotFound(f"task {self.catalog.task!r} has no stage {name[:80]!r} here; it has {known}")
        return stage


class AdmittedRequest:
    """One request to the tier, under its deadline. Made by `TierService.admit`."""

    def __init__(
        self,
        variants: Variants,
        first: ServedStage,
        second: SecondStage | None,
        request: EscalationRequest,
        metrics: DatacenterMetrics,
        hold_place: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.in_flight = hold_place
        """Counts the request against `max_in_flight` while the block lasts; raises `Overloaded` if the tier is full."""
        self._variants = variants
        self._stages = first, second
        self._request = request
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_ms: float | None = None
        left_ms = request.deadline_ms
        self._deadline = None if left_ms is None else Deadline.after_ms(left_ms, time.monotonic())

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

    async def run(self, image: bytes, on_partial: Callable[[EscalationReply], None] | None = None) -> EscalationReply:
        """The reply to an image.

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
            partial = self._reply(results)
            if on_partial is not None:
                on_partial(partial)

        running = run_two_stages(
            self._variants, first, second, image, self._deadline, report if self._request.progressive else None
        )
        try:
            results = await self.within_deadline(running)
        except HawkVisionError:
            if partial is None:
                raise
            self._metrics.incomplete.labels(partial.model).inc()
            return partial
        self._observe(results)
        return self._reply(results)

    def _reply(self, results: tuple[StageResult, ...]) -> EscalationReply:
        total_ms = (time.perf_counter() - self._started) * 1e3
        if self._first_ms is None:
            self._first_ms = total_ms
        return _reply(results, self._request, total_ms, self._first_ms)

    def _observe(self, results: tuple[StageResult, ...]) -> None:
        metrics = self._metrics
        metrics.answers.labels(results[-1].stage.name).inc()
        if results[-1].missing:
            metrics.decided.labels(results[-1].stage.name).inc()
        if len(results) > 1:
            metrics.ensemble_runs.labels(results[0].stage.name).inc()
        for answer in (answer for result in results for answer in result.answers):
            metrics.decode_duration.labels(answer.variant).observe(answer.decode_ms / 1e3)
            metrics.queue_duration.labels(answer.variant).observe(answer.queue_ms / 1e3)
            metrics.inference_duration.labels(answer.variant).observe(answer.infer_ms / 1e3)
            metrics.batch_size.labels(answer.variant).observe(answer.batch_size)


def _reply(
    results: tuple[StageResult, ...], request: EscalationRequest, total_ms: float, first_ms: float
) -> EscalationReply:
    """The last result's answer, with the time that all stages took."""
    final = results[-1]
    row = final.probabilities[0]
    intermediate = request.intermediate
    return EscalationReply(
        top_k=tuple(ClassScore(int(i), float(row[i])) for i in top_classes(row, request.top_k)),
        model=final.stage.name,
        timing_ms=_timing(results, total_ms, first_ms),
        batch_size=max(answer.batch_size for result in results for answer in result.answers),
        score=None if intermediate is None else final.score(intermediate.score),
        passed_over=None if intermediate is None or len(results) == 1 else _passed_over(results, intermediate.score),
        complete=final.decided,
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


def _passed_over(results: tuple[StageResult, ...], kind: Score) -> IntermediateResult:
    first = results[0]
    (index,) = top_classes(first.probabilities[0], 1)
    return IntermediateResult(int(index), first.score(kind), _fingerprint(first, results))
