"""Worker processes that send one schedule together.

    WorkerProcesses ── images, a job, when to begin, stop ───────► python -m loadgen.clients.worker (one or more)
                    ◄── ready, how far it is, outcomes or an error ──┘

Each of N processes sends every N-th request. They share the machine's monotonic clock, so one start instant holds for
all. A process has its own session, so that Ctrl-C on a terminal reaches the parent only; it ends when the pipe from the
parent closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec

from hawkvision.client.response import Unreachable
from hawkvision.core.errors import ConfigError, InternalError
from loadgen.clients.engine import GRACE_S, LoadJob, Tally
from loadgen.clients.worker import (
    REPORTS,
    LoadImages,
    Order,
    Report,
    WorkerFailed,
    frame,
    read_frame,
)
from loadgen.workload.record import RequestOutcome

if TYPE_CHECKING:
    from loadgen.workload.dataset import Dataset  # OpenCV, which clients do not need

MAX_PROCESSES: Final = 64
LEAD_S: Final = 0.1
"""From when all are ready to when the first request may be due."""
SPARE_S: Final = 30.0
"""Beyond the longest that a job can take, before a process counts as hanging."""
START_S: Final = 60.0


# ------------------------------------------------------------------------------------------- the workers


class WorkerProcesses:
    """Client processes, used as a context manager; they keep their images from one job to the next."""

    def __init__(self, size: int, prefix: Sequence[str] = ()) -> None:
        """Prepare; nothing is started yet.

        Args:
            size: how many processes.
            prefix: a command that becomes the one behind it: `ip netns exec …`.

        Raises:
            ConfigError: if the size is out of bounds.
        """
        self._prefix = tuple(prefix)
        if not 1 <= size <= MAX_PROCESSES:
            raise ConfigError(f"--processes: expected 1 to {MAX_PROCESSES}, got {size}")
        self.size = size
        self._clients: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> WorkerProcesses:
        for _ in range(self.size):
            client = await asyncio.create_subprocess_exec(
                *self._prefix, sys.executable, "-m", "loadgen.clients.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            self._clients.append(client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            if kind is not None and client.returncode is None:
                client.kill()
            assert client.stdin is not None
            client.stdin.close()
        for client in self._clients:
            try:
                await asyncio.wait_for(client.wait(), SPARE_S)
            except TimeoutError:
                client.kill()
                await client.wait()

    async def load(self, dataset: Dataset) -> None:
        """Give all of them the images."""
        order = LoadImages(list(dataset.bodies), list(dataset.numbers), dataset.written, dataset.kind)
        await self._all_ready(order)

    async def run(
        self,
        job: LoadJob,
        *,
        stop: asyncio.Event | None = None,
        show: Callable[[Tally], None] | None = None,
        begun: Callable[[], None] | None = None,
    ) -> list[RequestOutcome]:
        """Run a job, dealt among the processes, and give what came of it in the order in which it was due.

        Args:
            job: for all processes together.
            stop: when set, nothing more is sent, and answers are waited for `GRACE_S`.
            show: called with the progress of all of them, some times a second.
            begun: called when all are connected, `LEAD_S` before the first moment of the schedule; it must be quick.

        Raises:
            Unreachable: if the server cannot be connected to.
            ConfigError: if the options do not fit it.
            InternalError: if a client process ends or hangs.
        """
        for client, part in zip(self._clients, parts(job, self.size), strict=True):
            await _send(client, part)
        await self._ready(START_S)
        start = time.monotonic() + LEAD_S
        for client in self._clients:
            await _send(client, start)
        if begun is not None:
            begun()
        stopping = asyncio.create_task(self._stop_when(stop))
        tallies = [Tally() for _ in self._clients]

        def on_progress(number: int, tally: Tally) -> None:
            tallies[number] = tally
            if show is not None:
                sent, done, failed = (sum(getattr(t, name) for t in tallies) for name in ("sent", "done", "failed"))
                show(Tally(sent, done, failed, tally.latencies_ms))

        limit_s = job.duration_s + job.server.timeout_s + GRACE_S + SPARE_S
        try:
            async with asyncio.timeout(limit_s):
                gathered = await asyncio.gather(
                    *(_outcomes(client, number, on_progress) for number, client in enumerate(self._clients))
                )
        except TimeoutError:
            raise InternalError(f"a client process had not finished after {limit_s:g} s") from None
        finally:
            stopping.cancel()
        return sorted((outcome for each in gathered for outcome in each), key=lambda outcome: outcome.due_s)

    async def _all_ready(self, order: Order) -> None:
        for client in self._clients:
            await _send(client, order)
        await self._ready(START_S)

    async def _ready(self, within_s: float) -> None:
        """All say that they are ready, or one says why not."""
        reports = await asyncio.wait_for(asyncio.gather(*(_receive(client) for client in self._clients)), within_s)
        for report in reports:
            if isinstance(report, WorkerFailed):
                raise ConfigError(report.message) if report.config else Unreachable(report.message)
            if report != "ready":
                raise InternalError(f"a client process said {type(report).__name__} when it should be ready")

    async def _stop_when(self, stop: asyncio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
            for client in self._clients:
                await _send(client, "stop")


def parts(job: LoadJob, size: int) -> list[LoadJob]:
    """Every process's share: each N-th request, or each N-th caller with the requests it would take."""
    if size == 1:
        return [job]
    if job.callers:
        # Caller c takes requests c, c + callers, …; without callers a process would have nothing to do.
        callers = [len(range(part, job.callers, size)) for part in range(size)]
        return [_share(job, part, size, callers[part]) for part in range(size)]
    return [_share(job, part, size, 0) for part in range(size)]


def _share(job: LoadJob, part: int, size: int, callers: int) -> LoadJob:
    return msgspec.structs.replace(
        job,
        target=job.target[part::size],
        image=job.image[part::size],
        due=job.due[part::size],
        callers=callers,
        max_in_flight=max(1, job.max_in_flight // size),
    )


async def _outcomes(
    client: asyncio.subprocess.Process, number: int, on_progress: Callable[[int, Tally], None]
) -> list[RequestOutcome]:
    """A client's outcomes, once it is done."""
    while True:
        match await _receive(client):
            case list() as outcomes:
                return outcomes
            case Tally() as tally:
                on_progress(number, tally)
            case other:
                raise InternalError(f"a client process said {other!r} in the middle of a job")


async def _send(client: asyncio.subprocess.Process, order: Order) -> None:
    assert client.stdin is not None
    with contextlib.suppress(ConnectionError):  # it ended: what is heard next says so
        client.stdin.write(frame(msgspec.msgpack.encode(order)))
        await client.stdin.drain()


async def _receive(client: asyncio.subprocess.Process) -> Report:
    assert client.stdout is not None
    try:
        return REPORTS.decode(await read_frame(client.stdout))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise InternalError(f"a client process ended with status {await client.wait()}") from None
