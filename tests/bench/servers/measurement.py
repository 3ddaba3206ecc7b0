"""The measurement: servers one after another on one core, in rotated order, each asked the same images.

In every round a server is started anew, checked, warmed, driven at its capacity by callers that wait, then by Poisson
arrivals at shares of that capacity. Only one runs at a time, because idle servers are not idle: Ray's processes and
Triton's threads wake up and would take from the others' core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from loadgen.clients.base import RequestTimes
from loadgen.clients.engine import Engine, LoadJob, ServerAddress, SharedImages
from loadgen.workload.arrivals import PoissonArrivals
from loadgen.workload.record import RequestOutcome
from tests.bench.servers.catalogue import Handler, ReferenceServer
from tests.bench.servers.handlers.work import Classify
from tests.bench.servers.overhead.node import pinned
from tests.bench.servers.serving import RunningServer, ServedTask, serving

T = TypeVar("T")
BARE: Final[Mapping[Handler, str]] = {"same": "bare loop", "documented": "bare loop, documented"}
START_S: Final = 0.05
"""Between the order and the first request, so that all callers are there."""


class Visit(msgspec.Struct, frozen=True):
    """One server, or one bare loop, in one round."""

    per_s: float
    """Right answers per second of the closed loop."""
    per_cpu_s: float
    """The same per processor second of all its processes."""
    failed: int
    """Requests of the closed loop without a right answer."""
    waits_ms: dict[str, list[float]]
    """By share of that capacity: from when each request was due; infinite for those without a right answer."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """How long to measure."""

    rounds: int
    window_s: float
    """Of each closed and each open loop."""
    callers: int
    """Enough to keep one core busy: one image in work, others waiting."""
    shares: tuple[float, ...]
    """Of each one's own capacity, at which it is asked by Poisson arrivals."""
    seed: int


class ServerMeasurement:
    """Runs the rounds; `visits` holds what was seen, by name, and `failures` why a server takes no further part."""

    def __init__(
        self,
        plan: MeasurementPlan,
        task: ServedTask,
        bodies: Sequence[bytes],
        bare: Mapping[Handler, Classify],
        report: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            plan: how long to measure.
            task: what all serve.
            bodies: the images.
            bare: the work of each handler in a loop, which also gives the expected classes.
            report: told what is measured now.
        """
        self.rounds = 0
        """Finished."""
        self.visits: dict[str, list[Visit]] = {}
        self.failures: dict[str, str] = {}
        self._plan = plan
        self._task = task
        self._bodies = bodies
        self._bare = {BARE[handler]: classify for handler, classify in bare.items()}
        self._expected = {handler: [classify(body) for body in bodies] for handler, classify in bare.items()}
        self._report = report

    async def run(
        self, peers: Mapping[str, tuple[ReferenceServer, Path]], logs: Path, finished: Callable[[], None]
    ) -> None:
        """All rounds, with the bare loops among them. A server that fails is left out, and the others go on.

        Args:
            peers: who takes part, and the interpreter of each, by name.
            logs: the folder of failed servers' logs.
            finished: called at the end of every round.
        """
        for number, order in enumerate(rotations([*peers, *self._bare], self._plan.rounds)):
            for name in order:
                if name in self.failures:
                    continue
                self._report(f"round {number + 1} of {self._plan.rounds}: {name}")
                try:
                    if name in self._bare:
                        visit = self._loop(self._bare[name])
                    else:
                        server, python = peers[name]
                        log = logs / f"{name}.log"
                        async with serving(server, python, self._task, self._bodies[0], log) as served:
                            visit = await self._visit(served, number)
                except HawkVisionError as error:
                    self.failures[name] = str(error)
                    self._report(f"going on without {name}: {error}")
                else:
                    self.visits.setdefault(name, []).append(visit)
            self.rounds += 1
            finished()

    async def _visit(self, served: RunningServer, number: int) -> Visit:
        plan = self._plan
        await check_answers(served, self._bodies, self._expected[served.peer.handler])
        await self._closed(served, min(2.0, plan.window_s / 4))
        spent_s = served.cpu_seconds()
        outcomes, wall_s = await self._closed(served, plan.window_s)
        spent_s = served.cpu_seconds() - spent_s
        done = sum(map(_is_right, outcomes))
        if done == 0:
            raise NotReady(f"{served.peer.title}: no right answer in {plan.window_s:g} s of {plan.callers} callers")
        per_s = done / wall_s
        waits = {str(share): await self._open(served, share * per_s, number) for share in plan.shares}
        return Visit(per_s, done / spent_s if spent_s else float("nan"), len(outcomes) - done, waits)

    async def _closed(self, served: RunningServer, seconds: float) -> tuple[list[RequestOutcome], float]:
        """(outcomes, seconds until the last answer) of callers that wait for each answer."""
        order = list(range(len(self._bodies)))
        return await self._drive(served, order, seconds, callers=self._plan.callers, connections=self._plan.callers)

    async def _open(self, served: RunningServer, rate: float, number: int) -> list[float]:
        # One seed for all servers of a round: the same pattern of arrivals, stretched to each one's rate.
        due = PoissonArrivals(rate).due_times(self._plan.window_s, self._plan.seed + number)
        images = np.random.default_rng(self._plan.seed + number).integers(0, len(self._bodies), len(due)).tolist()
        connections = self._task.connections
        outcomes, _ = await self._drive(served, images, self._plan.window_s, due=due.tolist(), connections=connections)
        return [each.latency_s * 1e3 if _is_right(each) else float("inf") for each in outcomes]

    async def _drive(
        self,
        served: RunningServer,
        images: list[int],
        seconds: float,
        *,
        connections: int,
        callers: int = 0,
        due: Sequence[float] = (),
    ) -> tuple[list[RequestOutcome], float]:
        job = LoadJob(
            server=ServerAddress(served.url),
            fields=[{}],
            target=[0] * len(images),
            image=images,
            duration_s=seconds,
            max_in_flight=connections,
            due=list(due),
            callers=callers,
        )
        loaded = SharedImages(self._bodies, range(len(self._bodies)), self._expected[served.peer.handler])
        outcomes = await Engine(job, loaded, served.asker).run(time.monotonic() + START_S)
        return outcomes, max((each.done_s for each in outcomes), default=0.0)

    def _loop(self, classify: Classify) -> Visit:
        """The ceiling: the work in a loop on the servers' core."""
        plan = self._plan
        with pinned(self._task.core):
            _repeat(classify, self._bodies, min(2.0, plan.window_s / 4))
            before = time.thread_time()
            turns, wall_s = _repeat(classify, self._bodies, plan.window_s)
            spent_s = time.thread_time() - before
        per_s = turns / wall_s
        return Visit(per_s, turns / spent_s, 0, {})


async def check_answers(served: RunningServer, bodies: Sequence[bytes], expected: Sequence[int]) -> None:
    """Ask for every image once.

    Raises:
        ConfigError: at the first that gets another class than the bare loop's, or none.
    """
    for number, (body, index) in enumerate(zip(bodies, expected, strict=True)):
        replied = await served.asker.ask(body, {}, RequestTimes())
        if replied.index != index:
            raise ConfigError(
                f"{served.peer.title}: image {number}: expected class {index} as of the bare loop, got "
                f"{replied.index} (status {replied.status} {replied.error}); a comparison would mean nothing"
            )


def rotations(names: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """The order of each round: every time another begins."""
    for number in range(rounds):
        start = number % len(names)
        yield [*names[start:], *names[:start]]


def choose_cores() -> tuple[int, int]:
    """One for servers and one for the generator.

    Raises:
        ConfigError: if there are not two.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("peers are compared with the generator on a core of its own; this machine gives us one only")
    return cores[0], cores[1]


def _is_right(outcome: RequestOutcome) -> bool:
    """A fast wrong answer does not count, also under load."""
    return outcome.answered and bool(outcome.right)


def _repeat(classify: Classify, bodies: Sequence[bytes], seconds: float) -> tuple[int, float]:
    """How often it classified in so many seconds, and how long that took."""
    turns, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        classify(bodies[turns % len(bodies)])
        turns += 1
    return turns, took
