"""The measurement: servers one after another on one core, in rotated order, each asked the same images.

In every round a server is started anew, checked, warmed, driven at its capacity by callers that wait, then by Poisson
arrivals at shares of that capacity. When all capacities are known, every server is given the same arrivals at one rate
that all can bear, for a user has a rate and not a share. Only one runs at a time, because idle servers are not idle:
Ray's processes and Triton's threads wake up and would take from the others' core.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.system.child_server import running
from loadgen.clients.base import RequestTimes
from loadgen.clients.engine import Engine, LoadJob, ServerAddress, SharedImages
from loadgen.workload.arrivals import PoissonArrivals
from loadgen.workload.record import RequestOutcome
from tests.bench.servers.catalogue import Handler, HandlerWork, ReferenceServer
from tests.bench.servers.handlers.work import Classify
from tests.bench.servers.overhead.node import pinned
from tests.bench.servers.overhead.wire import WireClient, WireClientError
from tests.bench.servers.results import BARE, LoadWindow, ServerVisit, WaitTimes
from tests.bench.servers.serving import RunningServer, ServedTask, serving

T = TypeVar("T")
SHARES: Final = (0.3, 0.6, 0.9)
SAME_RATE_SHARE: Final = 0.6
"""Of the slowest server's capacity: the rate at which all are asked."""
START_S: Final = 0.05
"""Between the order and the first request, so that all callers are there."""
WARM_UP_WAITS: Final = 50
SETTLING: Final = 200
CONNECTS: Final = 3
"""Ray's HAProxy starts anew, and drops its connections, some 0.3 s after a replica's first answer."""
KINDS: Final[tuple[HandlerWork, ...]] = ("decode", "nothing")
"""Of work without a model."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """How long to measure."""

    rounds: int
    window_s: float
    """Of each closed and each open loop."""
    warm_up_s: float
    callers: int
    """Enough to keep one core busy: one image in work, others waiting."""
    requests: int
    """Per round and server, without a model."""
    seed: int
    shares: tuple[float, ...] = SHARES
    """Of each one's own capacity, at which it is asked by Poisson arrivals."""
    same_rate_rounds: int = 0
    """Of all servers at one and the same rate."""
    same_rate_window_s: float = 0.0
    """Of each server in each of those rounds: low rates need longer for as many requests."""


@dataclass(frozen=True, slots=True)
class ComparedServers:
    """Who takes part, with what."""

    peers: Sequence[ReferenceServer]
    pythons: Mapping[str, Path]
    task: ServedTask
    bodies: Sequence[bytes]
    expected: Mapping[Handler, Sequence[int]]
    """The bare loops' classes."""
    logs: Path


class ServerMeasurement:
    """Runs the rounds; what was seen is in `visits`, `at_rate` and `waits`, of the round under way as well.

    A server that does not start, does not answer or answers otherwise than the bare loop is in `failures`, with the
    reason, and takes no further part; the others go on.
    """

    def __init__(
        self,
        field: ComparedServers,
        plan: MeasurementPlan,
        say: Callable[[str], None],
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            field: who takes part.
            plan: how long to measure.
            say: told what is measured now.
            finished: called at the end of every round.
        """
        self.rounds = 0
        """Of `visits`, finished; as the next two."""
        self.same_rate_rounds = 0
        self.overhead_rounds = 0
        self.visits: dict[str, list[ServerVisit]] = {}
        self.rate = 0.0
        """Requests per second of `at_rate`; 0 before it is known."""
        self.at_rate: dict[str, list[WaitTimes]] = {}
        self.waits: dict[tuple[str, HandlerWork | None], list[NDArray[np.float64]]] = {}
        self.failures: dict[str, str] = {}
        self._field = field
        self._plan = plan
        self._say = say
        self._finished = finished

    async def run_model(self, bare: Mapping[Handler, Classify]) -> None:
        """All rounds with the model, and with it in the bare loops."""
        loops = {BARE[handler]: (handler, classify) for handler, classify in bare.items()}
        peers = {peer.name: peer for peer in self._field.peers}
        for number, order in enumerate(rotations([*peers, *loops], self._plan.rounds)):
            for name in order:
                if name in self.failures:
                    continue
                self._say(f"round {number + 1} of {self._plan.rounds}: {name}")
                if name in loops:
                    self.visits.setdefault(name, []).append(self._bare(*loops[name], number))
                    continue
                with self._going_on_without(peers[name]):
                    self.visits.setdefault(name, []).append(await self._visit(peers[name], number))
            self.rounds += 1
            self._finished()

    async def run_same_rate(self, bare: Mapping[Handler, Classify]) -> None:
        """All that went the rounds of `run_model` again, at one rate: `SAME_RATE_SHARE` of the slowest's capacity."""
        plan = self._plan
        peers = {peer.name: peer for peer in self._field.peers if len(self.visits.get(peer.name, ())) == plan.rounds}
        if not peers:
            return
        loops = {BARE[handler]: classify for handler, classify in bare.items()}
        self.rate = SAME_RATE_SHARE * min(
            float(np.median([visit.window.per_s for visit in self.visits[name]])) for name in peers
        )
        for number, order in enumerate(rotations([*peers, *loops], plan.same_rate_rounds)):
            for name in order:
                if name in self.failures:
                    continue
                self._say(f"{self.rate:.1f} requests/s, round {number + 1} of {plan.same_rate_rounds}: {name}")
                if name in loops:
                    turns_s, _ = self._turns(loops[name])
                    self.at_rate.setdefault(name, []).append(
                        self._queued(turns_s, self.rate, number, plan.same_rate_window_s)
                    )
                    continue
                with self._going_on_without(peers[name]):
                    async with self._serving(peers[name], "model") as served:
                        await self._closed(served, plan.warm_up_s)
                        found = await self._open(served, self.rate, number, plan.same_rate_window_s)
                    self.at_rate.setdefault(name, []).append(found)
            self.same_rate_rounds += 1
            self._finished()

    async def run_overhead(self) -> None:
        """All rounds without a model, each server for each kind of work it knows."""
        contenders: list[tuple[ReferenceServer | None, HandlerWork]] = [
            (peer, work) for work in KINDS for peer in self._field.peers if work in peer.works
        ]
        contenders.append((None, "nothing"))
        for number, order in enumerate(rotations(contenders, self._plan.rounds)):
            for peer, work in order:
                if peer is None:
                    self.waits.setdefault(("", None), []).append(self._floor())
                    continue
                if peer.name in self.failures:
                    continue
                self._say(f"round {number + 1} of {self._plan.rounds}, no model: {peer.name}, {work}")
                with self._going_on_without(peer):
                    async with self._serving(peer, work) as served:
                        found = _waits(served.url, peer, self._field.bodies[0], self._plan.requests)
                    self.waits.setdefault((peer.name, work), []).append(found)
            self.overhead_rounds += 1
            self._finished()

    @contextmanager
    def _going_on_without(self, peer: ReferenceServer) -> Iterator[None]:
        try:
            yield
        except HawkVisionError as error:
            self.failures[peer.name] = str(error)
            self._say(f"going on without {peer.name}: {error}")

    @asynccontextmanager
    async def _serving(self, peer: ReferenceServer, work: HandlerWork) -> AsyncIterator[RunningServer]:
        field = self._field
        log = field.logs / f"{peer.name}.log"
        async with serving(peer, field.pythons[peer.name], field.task, work, field.bodies[0], log) as served:
            yield served

    async def _visit(self, peer: ReferenceServer, number: int) -> ServerVisit:
        plan = self._plan
        async with self._serving(peer, "model") as served:
            answers = await check_answers(served, self._field.bodies, self._field.expected[peer.handler])
            await self._closed(served, plan.warm_up_s)
            window = await self._closed(served, plan.window_s)
            if window.done == 0:
                raise NotReady(f"{peer.title}: no right answer in {plan.window_s:g} s of {plan.callers} callers")
            at: dict[float, WaitTimes] = {}
            for share in plan.shares:
                at[share] = await self._open(served, share * window.per_s, number, plan.window_s)
        return ServerVisit(window, at, answers)

    async def _closed(self, served: RunningServer, seconds: float) -> LoadWindow:
        n = len(self._field.bodies)
        job = _job(served, list(range(n)), seconds, callers=self._plan.callers, connections=self._plan.callers)
        cpu_s = served.cpu_seconds()
        outcomes, wall_s = await self._drive(served, job)
        failed = sum(not _is_good(each) for each in outcomes)
        return LoadWindow(len(outcomes) - failed, failed, wall_s, served.cpu_seconds() - cpu_s)

    async def _open(self, served: RunningServer, rate: float, number: int, seconds: float) -> WaitTimes:
        # One seed for all servers of a round: the same pattern of arrivals, stretched to each one's rate.
        seed = self._plan.seed + number
        due = PoissonArrivals(rate).due_times(seconds, seed).tolist()
        order = np.random.default_rng(seed).integers(0, len(self._field.bodies), len(due)).tolist()
        job = _job(served, order, seconds, due=due, connections=self._field.task.connections)
        outcomes, _ = await self._drive(served, job)
        ms = np.array([each.latency_s * 1e3 if _is_good(each) else np.inf for each in outcomes])
        return WaitTimes(rate, ms)

    async def _drive(self, served: RunningServer, job: LoadJob) -> tuple[list[RequestOutcome], float]:
        """What came of a job, and the seconds until its last answer."""
        field = self._field
        loaded = SharedImages(field.bodies, range(len(field.bodies)), field.expected[served.peer.handler])
        outcomes = await Engine(job, loaded, served.asker).run(time.monotonic() + START_S)
        return outcomes, max((each.done_s for each in outcomes), default=0.0)

    def _bare(self, handler: Handler, classify: Classify, number: int) -> ServerVisit:
        """The ceiling: the work in a loop, on the servers' core, nothing around it."""
        turns_s, cpu_s = self._turns(classify)
        window = LoadWindow(len(turns_s), 0, float(turns_s.sum()), cpu_s)
        plan = self._plan
        at = {share: self._queued(turns_s, share * window.per_s, number, plan.window_s) for share in plan.shares}
        return ServerVisit(window, at, self._field.expected[handler])

    def _turns(self, classify: Classify) -> tuple[NDArray[np.float64], float]:
        """Seconds that each turn of the loop took on the servers' core, and the CPU seconds of them all."""
        with pinned(self._field.task.core):
            _repeat(classify, self._field.bodies, self._plan.warm_up_s)
            before = time.thread_time()
            turns_s = _repeat(classify, self._field.bodies, self._plan.window_s)
            return turns_s, time.thread_time() - before

    def _queued(self, turns_s: NDArray[np.float64], rate: float, number: int, seconds: float) -> WaitTimes:
        """Latencies computed: the arrivals that every server of the round gets, one after another, each for one turn.

        No server that runs one image at a time can be faster.
        """
        due_s = PoissonArrivals(rate).due_times(seconds, self._plan.seed + number)
        return WaitTimes(rate, sojourns_s(due_s, turns_s) * 1e3)

    def _floor(self) -> NDArray[np.float64]:
        """What the client itself waits, against a loop over one blocking socket."""
        with ExitStack() as stack:
            with pinned(self._field.task.core):
                server = stack.enter_context(running("tests.bench.servers.overhead.echo", "raw"))
            wire = stack.enter_context(WireClient(server.url, "/echo", self._field.bodies[0]))
            return _exchanges(wire, self._plan.requests)


async def check_answers(served: RunningServer, bodies: Sequence[bytes], expected: Sequence[int]) -> list[int]:
    """Every image once: the classes that the server gave.

    Raises:
        ConfigError: at the first that gets another class than the bare loop's, or none.
    """
    answers: list[int] = []
    for number, (body, index) in enumerate(zip(bodies, expected, strict=True)):
        replied = await served.asker.ask(body, {}, RequestTimes())
        if replied.index != index:
            raise ConfigError(
                f"{served.peer.title}: image {number}: expected class {index} as of the bare loop, got "
                f"{replied.index} (status {replied.status} {replied.error}); a comparison would mean nothing"
            )
        answers.append(replied.index)
    return answers


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


def _job(
    served: RunningServer,
    order: list[int],
    seconds: float,
    *,
    connections: int,
    callers: int = 0,
    due: Sequence[float] = (),
) -> LoadJob:
    return LoadJob(
        server=ServerAddress(served.url),
        fields=[{}],
        target=[0] * len(order),
        image=order,
        duration_s=seconds,
        max_in_flight=connections,
        due=list(due),
        callers=callers,
    )


def _is_good(outcome: RequestOutcome) -> bool:
    """Answered with the expected class: a fast wrong answer does not count, also under load."""
    return outcome.answered and bool(outcome.right)


def _repeat(classify: Classify, bodies: Sequence[bytes], seconds: float) -> NDArray[np.float64]:
    """Seconds that each turn of the loop took, for so many seconds in all."""
    turns: list[float] = []
    last = started = time.perf_counter()
    while last - started < seconds:
        classify(bodies[len(turns) % len(bodies)])
        now = time.perf_counter()
        turns.append(now - last)
        last = now
    return np.array(turns)


def sojourns_s(due_s: NDArray[np.float64], service_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """From when each request was due to when one worker, first come first served, is done with it (Lindley, 1952).

    The n-th takes the n-th of `service_s`, which begins anew where it ends.
    """
    done, free_at = np.empty(len(due_s)), 0.0
    for number, due in enumerate(due_s):
        free_at = max(free_at, float(due)) + float(service_s[number % len(service_s)])
        done[number] = free_at
    return done - due_s


def _waits(url: str, peer: ReferenceServer, body: bytes, requests: int) -> NDArray[np.float64]:
    """What a client of one connection waits, in ms.

    Raises:
        NotReady: if the server refuses or breaks off, other than while it settles.
    """
    framed = peer.frame(body)
    for attempt in range(CONNECTS):
        try:
            with WireClient(url, peer.path, framed, peer.headers) as wire:
                _exchanges(wire, SETTLING)
                return _exchanges(wire, requests)
        except (WireClientError, OSError) as error:
            if attempt == CONNECTS - 1:
                raise NotReady(f"{peer.title}, without a model: {error}") from None
    raise AssertionError("the last attempt returns or raises")


def _exchanges(wire: WireClient, requests: int) -> NDArray[np.float64]:
    """What each of so many requests in a row waited, in ms, after some that do not count."""
    waits = np.empty(WARM_UP_WAITS + requests)
    for i in range(len(waits)):
        started = time.perf_counter_ns()
        wire.exchange()
        waits[i] = time.perf_counter_ns() - started
    return waits[WARM_UP_WAITS:] / 1e6
