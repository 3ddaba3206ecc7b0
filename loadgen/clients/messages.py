"""The messages between a load test and its worker processes, and how they are framed.

A frame is a length (8 bytes, big-endian) and a MessagePack message.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

import msgspec

from loadgen.clients.engine import LoadJob
from loadgen.workload.judging import KindSpec, Label
from loadgen.workload.record import RequestOutcome

MAX_FRAME: Final = 1 << 34
"""All images of a data set, or all outcomes of a run."""


class LoadImages(msgspec.Struct, frozen=True, tag=True):
    """The images of the jobs that follow."""

    bodies: list[bytes]
    numbers: list[int]
    labels: list[Label] | None
    kind: KindSpec | None


class ConnectClients(msgspec.Struct, frozen=True, tag=True):
    """The next job: connect to its server, and say `WorkerReady`."""

    job: LoadJob


class BeginSending(msgspec.Struct, frozen=True, tag=True):
    """Send, from this moment of the monotonic clock."""

    at: float


class StopSending(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more."""


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """Images are there, or the server is connected."""


class WorkerProgress(msgspec.Struct, frozen=True, tag=True):
    """How far the job is."""

    sent: int
    done: int
    failed: int


class WorkerDone(msgspec.Struct, frozen=True, tag=True):
    """All that came of the job."""

    outcomes: list[RequestOutcome]


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """The server cannot be asked at all."""

    message: str
    config: bool
    """Whether the options are at fault, not the server."""


Order: TypeAlias = LoadImages | ConnectClients | BeginSending | StopSending


Report: TypeAlias = WorkerReady | WorkerProgress | WorkerDone | WorkerFailed


ORDERS: Final = msgspec.msgpack.Decoder(Order)


REPORTS: Final = msgspec.msgpack.Decoder(Report)


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
