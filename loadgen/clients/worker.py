"""`python -m loadgen.clients.worker`: a worker process, which takes orders on standard input and reports on standard
output, and the messages of both ways.

A frame is a length (8 bytes, big-endian) and a MessagePack message.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import Final, Literal, TypeAlias

import msgspec
import uvloop

from hawkvision.core.errors import ConfigError, HawkVisionError
from loadgen.clients.engine import Engine, LoadJob, SharedImages, Tally, client_for
from loadgen.workload.judging import KindSpec, Label, truths
from loadgen.workload.record import RequestOutcome

MAX_FRAME: Final = 1 << 34
"""All images of a data set, or all outcomes of a run."""


class LoadImages(msgspec.Struct, frozen=True, tag=True):
    """The images of the jobs that follow."""

    bodies: list[bytes]
    numbers: list[int]
    labels: list[Label] | None
    kind: KindSpec | None


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The server cannot be asked at all."""

    message: str
    config: bool
    """Whether the options are at fault, not the server."""


Order: TypeAlias = LoadImages | LoadJob | float | Literal["stop"]
"""Images for the jobs that follow; a job to connect for; when to send it, on the monotonic clock; send nothing more."""
Report: TypeAlias = Literal["ready"] | Tally | list[RequestOutcome] | WorkerFailed
"""Images are there, or the server is connected; how far the job is; all that came of it; why nothing came."""

ORDERS: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
REPORTS: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)


def frame(body: bytes) -> bytes:
    """A message as it is written to a pipe."""
    return len(body).to_bytes(8) + body


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """The next message of a pipe.

    Raises:
        asyncio.IncompleteReadError: at its end.
    """
    size = int.from_bytes(await stream.readexactly(8))
    assert size <= MAX_FRAME, f"a frame of {size} bytes"
    return await stream.readexactly(size)


PROGRESS_INTERVAL_S: Final = 0.2
"""Between reports of progress."""


async def _serve(orders: asyncio.StreamReader, out: int) -> None:
    """Take orders until the pipe ends."""
    loaded = SharedImages([], [], None)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            order = ORDERS.decode(await read_frame(orders))
            match order:
                case LoadImages(bodies, numbers, labels, spec):
                    kind = None if spec is None else spec.open()
                    known = None if labels is None or kind is None else truths(kind, labels)
                    loaded = SharedImages(bodies, numbers, known, kind)
                    _say(out, "ready")
                case LoadJob():
                    await _work(order, loaded, orders, out)
                case _:
                    pass  # the start or the stop of a job that failed, or was over already


async def _work(job: LoadJob, loaded: SharedImages, orders: asyncio.StreamReader, out: int) -> None:
    """One job, from connecting to its outcomes."""
    try:
        asker = client_for(job.server, max(job.max_in_flight, job.callers), loaded.kind)
        await asker.open()
    except HawkVisionError as error:
        _say(out, WorkerFailed(str(error), isinstance(error, ConfigError)))
        return
    _say(out, "ready")
    start = ORDERS.decode(await read_frame(orders))
    if not isinstance(start, float):
        await asker.close()
        return
    engine = Engine(job, loaded, asker)
    helpers = [asyncio.create_task(_report_progress(engine, out)), asyncio.create_task(_obey(engine, orders))]
    try:
        outcomes = await engine.run(start)
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    await asker.close()
    _say(out, outcomes)


async def _report_progress(engine: Engine, out: int) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        _say(out, engine.tally)
        engine.tally.latencies_ms.clear()


async def _obey(engine: Engine, orders: asyncio.StreamReader) -> None:
    """Stop when told to; end the process when the pipe closes, because its parent has ended."""
    try:
        while True:
            if ORDERS.decode(await read_frame(orders)) == "stop":
                engine.stop()
    except asyncio.IncompleteReadError:
        os._exit(1)


def _say(out: int, report: Report) -> None:
    """Write at once: the parent always reads."""
    left = memoryview(frame(msgspec.msgpack.encode(report)))
    while left:
        left = left[os.write(out, left) :]


def main() -> int:
    """Be a client process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
