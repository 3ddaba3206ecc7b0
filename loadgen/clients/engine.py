"""Sends a schedule and records the outcomes, in one process on one event loop.

In the open loop every request is sent when it is due, whatever became of earlier ones. If `max_in_flight` requests have
no answer yet, a further one is not sent later but counts as unanswered (`generator_full`). In the closed loop every
caller waits for its answer. Latency counts from when a request was due until its answer was complete; how late the
generator was is `sent_s - due_s` in the record.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from hawkvision.tasks.kind import TaskKind
from loadgen.clients.base import ClientReply, RequestClient, RequestTimes
from loadgen.clients.connections import ConnectionPool
from loadgen.clients.datagram import DatagramLoadClient
from loadgen.clients.http import HttpClient
from loadgen.clients.oip import OipClient
from loadgen.clients.timer import PreciseTimer
from loadgen.workload.judging import rightness
from loadgen.workload.record import INTERRUPTED, UNANSWERED, RequestOutcome

GRACE_S: Final = 5.0
"""How long answers are waited for after an interrupt."""
AHEAD_S: Final = 3.5e-4
"""How long before it is due the engine wakes for a request and prepares it: its bytes leave on time (`Times.send`), in
the median less than a microsecond late at 8 and at 100 a second on an EPYC, where they were 0.1 ms late at 8."""
REFUSED_PAUSE_S: Final = 0.05
"""Pause of a caller in the closed loop after a failure, so that a dead server is not asked a million times."""
MAX_OUTCOMES: Final = 5_000_000
"""Of one process: a closed loop against a server that does nothing reaches it in three minutes, and 2 GB."""
MOST_LATENCIES: Final = 1000
"""Of a report of progress, and of those that a person sees the P99 of."""
GENERATOR_FULL: Final = "generator_full"

Protocol: TypeAlias = Literal["http", "datagram", "oip"]


class ServerAddress(msgspec.Struct, frozen=True):
    """The server to ask, and how."""

    url: str
    protocol: Protocol = "http"
    task: str | None = None
    """None: not named; over OIP it is part of the path, and this is `imagenet`."""
    path: str = "/v1/classify"
    """Of plain HTTP: where images go."""
    api_key: str | None = None
    timeout_s: float = 10.0


class LoadJob(msgspec.Struct, frozen=True, tag=True):
    """What one process sends. The n-th request is of class `target[n]` with image `image[n]`."""

    server: ServerAddress
    fields: list[dict[str, str]]
    """Per target class."""
    target: list[int]
    image: list[int]
    """Positions among the images loaded, not numbers in the data set."""
    duration_s: float
    max_in_flight: int
    due: list[float] = []
    """When, for the open loop: as many as there are targets and images."""
    callers: int = 0
    """Above 0: the closed loop, which begins the lists anew when it comes to their end."""
    once: bool = False
    """The closed loop ends with the lists instead."""


@dataclass(frozen=True, slots=True)
class SharedImages:
    """Images with their numbers in the data set, and their labels where they have any."""

    bodies: Sequence[bytes]
    numbers: Sequence[int]
    labels: Sequence[Any] | None
    """As the loss of the kind takes them."""
    kind: TaskKind[Any] | None = None
    """Of the task; None if it is not known, and answers are the indices of classes."""


class Tally(msgspec.Struct, tag=True):
    """How far a job is."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    """Of those done: not answered with 200."""
    latencies_ms: list[float] = []
    """Of answers since the last report, at most `MOST_LATENCIES`."""


def client_for(server: ServerAddress, connections: int, kind: TaskKind[Any] | None = None) -> RequestClient:
    """A client of the server's protocol for a kind of task, with so many connections at most.

    Raises:
        ConfigError: if the URL is none.
    """
    if server.protocol == "datagram":
        return DatagramLoadClient(
            server.url,
            timeout_s=server.timeout_s,
            path=server.path,
            task=server.task,
            kind=kind,
            api_key=server.api_key,
        )
    pool = ConnectionPool(server.url, limit=connections, timeout_s=server.timeout_s, api_key=server.api_key)
    if server.protocol == "oip":
        return OipClient(pool, connections, server.task or "imagenet", kind)
    return HttpClient(pool, connections, server.path, server.task, kind)


class Engine:
    """Runs one job. `stop` may be called any time, from the loop."""

    def __init__(self, job: LoadJob, loaded: SharedImages, asker: RequestClient, grace_s: float = GRACE_S) -> None:
        self.tally = Tally()
        self.interrupted = False
        self._job = job
        self._loaded = loaded
        self._asker = asker
        self._grace_s = grace_s
        self._outcomes: list[RequestOutcome] = []
        self._tasks: set[asyncio.Task[bool] | asyncio.Task[None]] = set()
        self._alarm: PreciseTimer | None = None
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more; answers are waited for `grace_s`."""
        self.interrupted = True
        self._stopping.set()
        if self._alarm is not None:
            self._alarm.ring()

    async def run(self, start: float) -> list[RequestOutcome]:
        """Send everything, the times counting from `start` on the monotonic clock; wait for the answers."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._cut_off())
                if self._job.callers:
                    callers = [group.create_task(self._call(n, start)) for n in range(self._job.callers)]
                    self._tasks.update(callers)
                    await asyncio.wait(callers)
                else:
                    await self._send(group, start)
                    if self._tasks:
                        await asyncio.wait(self._tasks)
                watch.cancel()
        finally:
            if self._alarm is not None:
                self._alarm.close()
        return self._outcomes

    async def _send(self, group: asyncio.TaskGroup, start: float) -> None:
        """The open loop."""
        alarm = self._alarm = PreciseTimer()
        for number, due_s in enumerate(self._job.due):
            if start + due_s > time.monotonic():
                await alarm.until(start + due_s - AHEAD_S)
            else:
                await asyncio.sleep(0)  # late: let answers and other requests have their turn nevertheless
            if self._stopping.is_set():
                return
            if len(self._tasks) >= self._job.max_in_flight:
                now_s = max(due_s, time.monotonic() - start)
                self._note(number, due_s, now_s, now_s, ClientReply(UNANSWERED, GENERATOR_FULL))
                continue
            self.tally.sent += 1
            task = group.create_task(self._ask(number, due_s, start))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _call(self, caller: int, start: float) -> None:
        """One caller of the closed loop: takes every so-many-th request of the plan."""
        plan = len(self._job.target)
        number = caller
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        while not self._stopping.is_set() and time.monotonic() - start < self._job.duration_s:
            if self.tally.sent >= MAX_OUTCOMES or (self._job.once and number >= plan):
                return
            self.tally.sent += 1
            # Timers may fire a little early; a request before the start would count as one of the warm-up.
            if not await self._ask(number % plan, max(0.0, time.monotonic() - start), start):
                await asyncio.sleep(REFUSED_PAUSE_S)
            number += self._job.callers

    async def _ask(self, number: int, due_s: float, start: float) -> bool:
        """Ask, note, and say whether a reply came."""
        body = self._loaded.bodies[self._job.image[number]]
        fields = self._job.fields[self._job.target[number]]
        times, begun = RequestTimes(start + due_s), time.monotonic()
        try:
            replied = await self._asker.ask(body, fields, times)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            replied = ClientReply(UNANSWERED, INTERRUPTED)  # by `_cut_off`; the task ends with this
        sent = begun if times.sent is None else times.sent
        done = time.monotonic() if times.done is None else times.done
        self._note(number, due_s, max(due_s, sent - start), done - start, replied)
        return replied.status != UNANSWERED

    def _note(self, number: int, due_s: float, sent_s: float, done_s: float, replied: ClientReply) -> None:
        position = self._job.image[number]
        right: float | bool | None = None
        if self._loaded.labels is not None and replied.status == 200:
            truth = self._loaded.labels[position]
            right = rightness(self._loaded.kind, replied.prediction, replied.index, truth)
        self.tally.done += 1
        self.tally.failed += replied.status != 200
        if replied.status == 200 and len(self.tally.latencies_ms) < MOST_LATENCIES:
            self.tally.latencies_ms.append((done_s - due_s) * 1e3)
        self._outcomes.append(
            RequestOutcome(
                due_s=due_s,
                sent_s=sent_s,
                done_s=done_s,
                target=self._job.target[number],
                image=self._loaded.numbers[position],
                right=right,
                **replied.recorded(),
            )
        )

    async def _cut_off(self) -> None:
        """After an interrupt, and the time of grace, end what is still unanswered."""
        await self._stopping.wait()
        await asyncio.sleep(self._grace_s)
        for task in self._tasks:
            task.cancel()
