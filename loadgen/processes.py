"""Several client processes that send one schedule: started, loaded, begun at one instant, gathered.

    Crew ── Load, Job, Begin, Stop ──► python -m loadgen.processes   (one or more)
         ◄── Ready, Progress, Done, Failed ──┘

Frames of both pipes are a length (8 bytes, big-endian) and a message in MessagePack. Every client process takes every
N-th request. They share the machine's monotonic clock, so one start instant and one time line hold for all. A client
has a session of its own, so that Ctrl-C on a terminal reaches the crew alone, which tells it what to do; it ends when
the pipe from the crew does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import uvloop

from hawkvision.client.response import Unreachable
from hawkvision.errors import ConfigError, HawkVisionError, InternalError
from loadgen.engine import GRACE_S, Engine, Job, Loaded, Tally, asker_for
from loadgen.priority import before_others
from loadgen.record import Outcome

if TYPE_CHECKING:
    from loadgen.dataset import Dataset  # OpenCV, which clients do not need

MAX_PROCESSES: Final = 64
LEAD_S: Final = 0.1
"""From when all are ready to when the first request may be due."""
TELL_S: Final = 0.2
"""Between reports of progress."""
SPARE_S: Final = 30.0
"""Beyond the longest that a job can take, before a process counts as hanging."""
START_S: Final = 60.0
MAX_FRAME: Final = 1 << 34
"""All pictures of a data set, or all outcomes of a run."""
REALTIME: Final = "--realtime"


class Load(msgspec.Struct, frozen=True, tag=True):
    """The pictures of the jobs that follow."""

    bodies: list[bytes]
    numbers: list[int]
    labels: list[int] | None


class Connect(msgspec.Struct, frozen=True, tag=True):
    """The next job: connect to its server, and say `Ready`."""

    job: Job


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Send, from this moment of the monotonic clock."""

    at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Pictures are there, or the server is connected."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far the job is."""

    sent: int
    done: int
    failed: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """All that came of the job."""

    outcomes: list[Outcome]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The server cannot be asked at all."""

    message: str
    config: bool
    """Whether the options are at fault, not the server."""


Order: TypeAlias = Load | Connect | Begin | Stop
Report: TypeAlias = Ready | Progress | Done | Failed

_ORDERS: Final = msgspec.msgpack.Decoder(Order)
_REPORTS: Final = msgspec.msgpack.Decoder(Report)


# ------------------------------------------------------------------------------------------- the crew


class Crew:
    """Client processes, used as a context manager; they keep their pictures from one job to the next."""

    def __init__(self, size: int, prefix: Sequence[str] = (), *, realtime: bool = False) -> None:
        """Prepare; nothing is started yet.

        Args:
            size: how many processes.
            prefix: a command that becomes the one behind it: `ip netns exec …`.
            realtime: run them before all ordinary processes, where that is allowed (`loadgen.priority`). Only for jobs
                that leave the processors free most of the time: callers that never rest would starve the servers.

        Raises:
            ConfigError: if the size is out of bounds.
        """
        self._prefix = tuple(prefix)
        self._arguments = (REALTIME,) if realtime else ()
        if not 1 <= size <= MAX_PROCESSES:
            raise ConfigError(f"--processes: expected 1 to {MAX_PROCESSES}, got {size}")
        self.size = size
        self._clients: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Crew:
        for _ in range(self.size):
            client = await asyncio.create_subprocess_exec(
                *self._prefix, sys.executable, "-m", "loadgen.processes", *self._arguments,
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
        """Give all of them the pictures."""
        labels = None if dataset.labels is None else list(dataset.labels)
        order = Load(list(dataset.bodies), list(dataset.numbers), labels)
        await self._all_ready(order)

    async def run(
        self,
        job: Job,
        *,
        stop: asyncio.Event | None = None,
        show: Callable[[Tally], None] | None = None,
        begun: Callable[[], None] | None = None,
    ) -> list[Outcome]:
        """Run a job, dealt among the processes, and give what came of it in the order in which it was due.

        Args:
            job: for all processes together.
            stop: when set, nothing more is sent, and answers are waited for `GRACE_S`.
            show: told how far all of them are, some times a second.
            begun: called when all are connected, `LEAD_S` before the first moment of the schedule; it must be quick.

        Raises:
            Unreachable: if the server cannot be connected to.
            ConfigError: if the options do not fit it.
            InternalError: if a client process ends or hangs.
        """
        for client, part in zip(self._clients, parts(job, self.size), strict=True):
            await _tell(client, Connect(part))
        await self._ready(START_S)
        begin = Begin(time.monotonic() + LEAD_S)
        for client in self._clients:
            await _tell(client, begin)
        if begun is not None:
            begun()
        stopping = asyncio.create_task(self._stop_when(stop))
        tallies = [Tally() for _ in self._clients]

        def told(number: int, progress: Progress) -> None:
            tallies[number] = Tally(progress.sent, progress.done, progress.failed)
            if show is not None:
                show(Tally(*(sum(getattr(t, name) for t in tallies) for name in ("sent", "done", "failed"))))

        limit_s = job.duration_s + job.server.timeout_s + GRACE_S + SPARE_S
        try:
            async with asyncio.timeout(limit_s):
                gathered = await asyncio.gather(
                    *(_outcomes(client, number, told) for number, client in enumerate(self._clients))
                )
        except TimeoutError:
            raise InternalError(f"a client process had not finished after {limit_s:g} s") from None
        finally:
            stopping.cancel()
        return sorted((outcome for each in gathered for outcome in each), key=lambda outcome: outcome.due_s)

    async def _all_ready(self, order: Order) -> None:
        for client in self._clients:
            await _tell(client, order)
        await self._ready(START_S)

    async def _ready(self, within_s: float) -> None:
        """All say `Ready`, or one says why not."""
        reports = await asyncio.wait_for(asyncio.gather(*(_hear(client) for client in self._clients)), within_s)
        for report in reports:
            if isinstance(report, Failed):
                raise ConfigError(report.message) if report.config else Unreachable(report.message)
            if not isinstance(report, Ready):
                raise InternalError(f"a client process said {type(report).__name__} when it should be ready")

    async def _stop_when(self, stop: asyncio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
            for client in self._clients:
                await _tell(client, Stop())


def parts(job: Job, size: int) -> list[Job]:
    """Every process's share: each N-th request, or each N-th caller with the requests it would take."""
    if size == 1:
        return [job]
    if job.callers:
        # Caller c takes requests c, c + callers, …; without callers a process would have nothing to do.
        callers = [len(range(part, job.callers, size)) for part in range(size)]
        return [_share(job, part, size, callers[part]) for part in range(size)]
    return [_share(job, part, size, 0) for part in range(size)]


def _share(job: Job, part: int, size: int, callers: int) -> Job:
    return msgspec.structs.replace(
        job,
        target=job.target[part::size],
        picture=job.picture[part::size],
        due=job.due[part::size],
        callers=callers,
        max_in_flight=max(1, job.max_in_flight // size),
    )


async def _outcomes(
    client: asyncio.subprocess.Process, number: int, told: Callable[[int, Progress], None]
) -> list[Outcome]:
    """A client's outcomes, once it is done."""
    while True:
        match await _hear(client):
            case Done(outcomes):
                return outcomes
            case Progress() as progress:
                told(number, progress)
            case other:
                raise InternalError(f"a client process said {type(other).__name__} in the middle of a job")


async def _tell(client: asyncio.subprocess.Process, order: Order) -> None:
    assert client.stdin is not None
    with contextlib.suppress(ConnectionError):  # it ended: what is heard next says so
        client.stdin.write(_frame(msgspec.msgpack.encode(order)))
        await client.stdin.drain()


async def _hear(client: asyncio.subprocess.Process) -> Report:
    assert client.stdout is not None
    try:
        report: Report = _REPORTS.decode(await _read(client.stdout))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise InternalError(f"a client process ended with status {await client.wait()}") from None
    return report


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(8) + body


async def _read(stream: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await stream.readexactly(8))
    assert size <= MAX_FRAME, f"a frame of {size} bytes"
    return await stream.readexactly(size)


# ------------------------------------------------------------------------------------------- a client


async def _serve(orders: asyncio.StreamReader, out: int) -> None:
    """Take orders until the pipe ends."""
    loaded = Loaded([], [], None)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            order = _ORDERS.decode(await _read(orders))
            match order:
                case Load(bodies, numbers, labels):
                    loaded = Loaded(bodies, numbers, labels)
                    _say(out, Ready())
                case Connect(job):
                    await _work(job, loaded, orders, out)
                case Begin() | Stop():
                    pass  # of a job that failed, or was over already


async def _work(job: Job, loaded: Loaded, orders: asyncio.StreamReader, out: int) -> None:
    """One job, from connecting to its outcomes."""
    try:
        asker = asker_for(job.server, max(job.max_in_flight, job.callers))
        await asker.open()
    except HawkVisionError as error:
        _say(out, Failed(str(error), isinstance(error, ConfigError)))
        return
    _say(out, Ready())
    begin = _ORDERS.decode(await _read(orders))
    if not isinstance(begin, Begin):
        await asker.close()
        return
    engine = Engine(job, loaded, asker)
    helpers = [asyncio.create_task(_tell_progress(engine, out)), asyncio.create_task(_obey(engine, orders))]
    try:
        outcomes = await engine.run(begin.at)
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    await asker.close()
    _say(out, Done(outcomes))


async def _tell_progress(engine: Engine, out: int) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        _say(out, Progress(engine.tally.sent, engine.tally.done, engine.tally.failed))


async def _obey(engine: Engine, orders: asyncio.StreamReader) -> None:
    """`Stop` stops; the pipe's end ends the process, for nobody is left to tell."""
    try:
        while True:
            if isinstance(_ORDERS.decode(await _read(orders)), Stop):
                engine.stop()
    except asyncio.IncompleteReadError:
        os._exit(1)


def _say(out: int, report: Report) -> None:
    """Written at once: the crew always reads."""
    left = memoryview(_frame(msgspec.msgpack.encode(report)))
    while left:
        left = left[os.write(out, left) :]


def main() -> int:
    """Be a client process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if REALTIME in sys.argv[1:]:
        before_others()
    out = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print does not go among the frames
    # Outcomes are never garbage while a job runs; walking all of them is a pause that latencies would show.
    gc.set_threshold(700, 10, 1_000_000)

    async def client() -> None:
        orders = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        await _serve(orders, out)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client())
    return 0


if __name__ == "__main__":
    sys.exit(main())
