"""What the tier does with an image, whichever server brought it: check, let in, look, reply. No protocol here.

    server ── EscalationRequest ──► visit ─┬─ unknown stage, not ready, too late, full ──► error
                                  └─ Visit ── image ──► inside ─┬─ full ──► error
                                                                  └─ look ─┬─► EscalationReply
                                                                           └─► replies so far, … (progressive requests)

A visit counts against `max_in_flight` once its image is there, so that callers whose images do not come keep nobody
out; what of these is in memory has a bound of its own (`hawkvision.servers.bodies`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, TypeVar

from hawkvision.cascade.confidence.scores import top_classes
from hawkvision.core.errors import DeadlineMissed, HawkVisionError, NotFound, NotReady, Overloaded
from hawkvision.core.escalation_api import (
    ClassScore,
    EscalationReply,
    EscalationRequest,
    EscalationTiming,
    IntermediateResult,
    StageList,
)
from hawkvision.core.types import Score
from hawkvision.datacenter.catalog import Catalog, ServedStage
from hawkvision.datacenter.execution.cascade_executor import Second, Variants, run_two_stages
from hawkvision.datacenter.execution.ensemble import Look, VariantAnswer
from hawkvision.datacenter.metrics import DatacenterMetrics

NEVER: Final = math.inf
_STATEMENTS: Final = 64

log = logging.getLogger("hawkvision.datacenter")

ResultT = TypeVar("ResultT")


class Tier:
    """The stages of one task behind their servers. Not ready until `variants` is set."""

    def __init__(self, catalog: Catalog, max_in_flight: int) -> None:
        self.catalog = catalog
        self.variants: Variants | None = None
        self.metrics = DatacenterMetrics()
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._absent: set[str] = set()
        """Groups of variants that should have a live replica, and have none."""
        self._stated: dict[str, None] = {}
        """What replicas have stated, the newest last; of the oldest no more than `_STATEMENTS`."""
        self.metrics.in_flight.set_function(lambda: self._in_flight)

    def ready_variants(self) -> Variants:
        """The way to the replicas.

        Raises:
            NotReady: while there is none.
        """
        if self.variants is None:
            raise NotReady("the datacenter tier is still loading its models, or draining")
        return self.variants

    def check_ready(self) -> None:
        """Whether every stage can be answered.

        Raises:
            NotReady: saying what is missing.
        """
        self.ready_variants()
        if self._absent:
            raise NotReady(f"no live replica of {', '.join(sorted(self._absent))} just now")

    def states(self, stated: str) -> None:
        """A replica states what it runs (`hawkvision.models.fingerprints`)."""
        self._stated.pop(stated, None)
        self._stated[stated] = None
        while len(self._stated) > _STATEMENTS:
            del self._stated[next(iter(self._stated))]

    def listing(self) -> StageList:
        """The reply to `GET /v1/stages`."""
        return self.catalog.listing(tuple(reversed(self._stated)))

    def replicas_changed(self, group: str, live: int) -> None:
        """So many replicas of a group of variants answer from now on."""
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

    def visit(self, asked: EscalationRequest) -> Visit:
        """What is to become of a request whose image may be on its way still; it is let in by `Visit.inside`.

        Raises:
            NotFound: for a task or stage that is not served.
            NotReady, DeadlineMissed, Overloaded: as their names say.
        """
        first, second = self._stages(asked)
        variants = self.ready_variants()
        if asked.deadline_ms is not None and asked.deadline_ms <= 0.0:
            raise DeadlineMissed(f"the deadline had passed by {-asked.deadline_ms:g} ms when the request came")
        self._refuse_if_full()
        return Visit(variants, first, second, asked, self.metrics, self._inside)

    @contextmanager
    def admit(self, asked: EscalationRequest) -> Iterator[Visit]:
        """Let a request whose image is there in for as long as the block lasts.

        Raises:
            HawkVisionError: as `visit`.
        """
        visit = self.visit(asked)
        with visit.inside():
            yield visit

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._refuse_if_full()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def _refuse_if_full(self) -> None:
        if self._in_flight >= self._max_in_flight:
            raise Overloaded(f"{self._in_flight} requests are already inside the tier", retry_after_s=1.0)

    def count(self, path: str, asked_for: str | None, status: int, seconds: float) -> None:
        """Count a request for an image: by the stage asked for (None: the best), and how long it took if answered."""
        stage = self.catalog.stage(asked_for or self.catalog.best.name)
        label = "none" if stage is None else stage.name
        if status == 200:
            self.metrics.duration.labels(label).observe(seconds)
        self.metrics.requests.labels(path, label, str(status)).inc()

    def _stages(self, asked: EscalationRequest) -> tuple[ServedStage, Second | None]:
        """Who looks first, and who looks next if that one is not sure enough."""
        if asked.task not in (None, self.catalog.task):
            raise NotFound(f"no task {asked.task!r} here; this tier serves {self.catalog.task!r}")
        first = self.catalog.best if asked.variant is None else self._stage(asked.variant)
        intermediate = asked.intermediate
        if intermediate is None:
            return first, None
        return first, Second(self._stage(intermediate.otherwise), intermediate.score, intermediate.accept_score)

    def _stage(self, name: str) -> ServedStage:
        stage = self.catalog.stage(name)
        if stage is None:
            known = ", ".join(r.name for r in self.catalog.stages)
            raise NotFound(f"task {self.catalog.task!r} has no stage {name[:80]!r} here; it has {known}")
        return stage


class Visit:
    """One request to the tier, under its deadline. Made by `Tier.visit`."""

    def __init__(
        self,
        variants: Variants,
        first: ServedStage,
        second: Second | None,
        asked: EscalationRequest,
        metrics: DatacenterMetrics,
        inside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.inside = inside
        """Lets it in for as long as the block lasts; raises `Overloaded` if the tier is full."""
        left_s = None if asked.deadline_ms is None else asked.deadline_ms / 1e3
        self._variants = variants
        self._stages = first, second
        self._asked = asked
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_ms: float | None = None
        # Replicas run in other processes, perhaps elsewhere, and compare with their own time of day.
        self._expires_at = NEVER if left_s is None else time.time() + left_s
        self._ends = None if left_s is None else asyncio.get_running_loop().time() + left_s

    async def in_time(self, work: Awaitable[ResultT]) -> ResultT:
        """The work's result.

        Raises:
            DeadlineMissed: if the deadline comes first.
        """
        try:
            async with asyncio.timeout_at(self._ends):
                return await work
        except TimeoutError:
            raise DeadlineMissed(f"no answer within the {self._asked.deadline_ms:g} ms that were left") from None

    async def look(self, image: bytes, hear: Callable[[EscalationReply], None] | None = None) -> EscalationReply:
        """The reply to an image. Of a progressive request, `hear` is told what there is so far.

        The latest of that is the reply, too, if the rest is late or fails.

        Raises:
            HawkVisionError: as `looks.Variants.ask`.
            DeadlineMissed: if it takes longer than was left.
        """
        first, second = self._stages
        so_far: EscalationReply | None = None

        def heard(looks: tuple[Look, ...]) -> None:
            nonlocal so_far
            so_far = self._reply(looks)
            if hear is not None:
                hear(so_far)

        looking = run_two_stages(
            self._variants, first, second, image, self._expires_at, heard if self._asked.progressive else None
        )
        try:
            looks = await self.in_time(looking)
        except HawkVisionError:
            if so_far is None:
                raise
            self._metrics.incomplete.labels(so_far.model).inc()
            return so_far
        self._observe(looks)
        return self._reply(looks)

    def _reply(self, looks: tuple[Look, ...]) -> EscalationReply:
        total_ms = (time.perf_counter() - self._started) * 1e3
        if self._first_ms is None:
            self._first_ms = total_ms
        return _reply(looks, self._asked, total_ms, self._first_ms)

    def _observe(self, looks: tuple[Look, ...]) -> None:
        metrics = self._metrics
        metrics.answers.labels(looks[-1].stage.name).inc()
        if looks[-1].missing:
            metrics.decided.labels(looks[-1].stage.name).inc()
        if len(looks) > 1:
            metrics.ensemble_runs.labels(looks[0].stage.name).inc()
        for answer in (answer for look in looks for answer in look.asked):
            metrics.decode_duration.labels(answer.variant).observe(answer.decode_ms / 1e3)
            metrics.queue_duration.labels(answer.variant).observe(answer.queue_ms / 1e3)
            metrics.inference_duration.labels(answer.variant).observe(answer.infer_ms / 1e3)
            metrics.batch_size.labels(answer.variant).observe(answer.batch_size)


def _reply(looks: tuple[Look, ...], asked: EscalationRequest, total_ms: float, first_ms: float) -> EscalationReply:
    """The last look's answer, with the time that all looks took."""
    counts = looks[-1]
    row = counts.probabilities[0]
    # Of one answer each: the longest wait of one and the longest inference of another may overlap.
    slowest = [max(look.asked, key=_took_ms) for look in looks if look.asked]
    timing = EscalationTiming(
        decode=round(sum(answer.decode_ms for answer in slowest), 3),
        queue=round(sum(answer.queue_ms for answer in slowest), 3),
        infer=round(sum(answer.infer_ms for answer in slowest), 3),
        total=round(total_ms, 3),
        first=round(first_ms, 3),
    )
    return EscalationReply(
        top_k=tuple(ClassScore(int(i), float(row[i])) for i in top_classes(row, asked.top_k)),
        model=counts.stage.name,
        timing_ms=timing,
        batch_size=max(answer.batch_size for look in looks for answer in look.asked),
        score=None if asked.intermediate is None else counts.score(asked.intermediate.score),
        passed_over=None
        if asked.intermediate is None or len(looks) == 1
        else _passed_over(looks, asked.intermediate.score),
        complete=counts.decided,
        fingerprint=_fingerprint(counts, looks),
    )


def _fingerprint(look: Look, looks: tuple[Look, ...]) -> str | None:
    """Of what computed a look, as the replicas state it whose answers it is made of.

    None where there is no single statement, and of what is not the whole stage's answer, which no certificate is about.
    """
    if not look.decided:
        return None
    stated = {answer.stated for each in looks for answer in each.asked if answer.variant in look.stage.members}
    return look.stage.ran(stated.pop()) if len(stated) == 1 else None


def _took_ms(answer: VariantAnswer) -> float:
    return answer.decode_ms + answer.queue_ms + answer.infer_ms


def _passed_over(looks: tuple[Look, ...], kind: Score) -> IntermediateResult:
    look = looks[0]
    (index,) = top_classes(look.probabilities[0], 1)
    return IntermediateResult(int(index), look.score(kind), _fingerprint(look, looks))
