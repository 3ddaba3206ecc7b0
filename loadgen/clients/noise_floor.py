"""`python -m loadgen.clients.noise_floor`: a null server, and the noise floor that the generator measures against it.

Every measurement of a server contains the share of the generator, the machine and loopback. So before a run the same
processes send the same images to a server that only receives them and gives a fixed answer. Its P50 and P99 are the
least that this generator can measure; its highest rate is the most that it can offer.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final, cast

import msgspec
import numpy as np
import uvloop

from hawkvision.core.escalation_api import TRANSPORT_PATH, DatagramEndpoint, Transports
from hawkvision.system.child_server import running
from hawkvision.tasks.registry import CLASSIFY_PATH
from hawkvision.transport.protocol.control import VERSION
from hawkvision.transport.protocol.server_certificate import own_identity
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Incoming
from loadgen.clients.engine import LoadJob
from loadgen.clients.processes import WorkerProcesses
from loadgen.workload.arrivals import PoissonArrivals
from loadgen.workload.record import NoiseFloor, RequestOutcome

LEAST_RATE: Final = 100.0
LEAST_SHARE: Final = 0.1
"""The floor is measured at the run's own rate, but at 100 requests per second at least, for a P99 needs some hundred;
or at a tenth of the highest rate, where that is less: datagrams cost their sender milliseconds."""
FLOOR_S: Final = 4.0
CEILING_S: Final = 2.0
SKIPPED: Final = 0.125
"""Share of both at their beginnings, for connections and caches."""
CALLERS: Final = 16
"""Per process, for the highest rate."""
MOST_SHARE: Final = 0.5
"""Of the highest rate, at which the floor is measured at most: near it the generator queues behind itself."""
MAX_HEAD_BYTES: Final = 64 * 1024

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,18})\r\n", re.IGNORECASE)
ANSWER: Final = msgspec.json.encode(
    {
        "id": "0", "task": "nothing", "label": "nothing", "index": 0, "confidence": 1.0,
        "top_k": [{"label": "nothing", "index": 0, "confidence": 1.0}],
        "model": "nothing", "tier": "edge", "escalated": False, "reason": None, "degraded": False,
        "received_fraction": 1.0,
        "accuracy": {
            "target": {"quality": "fast"}, "max_drop": None, "watched_max_drop": None, "status": "best_effort",
            "status_reason": "no_certificate", "basis": None, "delta": None, "n": None, "labels": None, "from": None,
            "to": None,
        },
        "deadline_met": None, "timing_ms": {},
    }
)  # fmt: skip
OIP_ANSWER: Final = msgspec.json.encode(
    {
        "model_name": "nothing",
        "outputs": [{"name": "index", "datatype": "INT64", "shape": [1], "data": [0]}],
    }
)


async def measure(
    workers: WorkerProcesses,
    job: LoadJob,
    rate: float | None,
    *,
    floor_s: float = FLOOR_S,
    ceiling_s: float = CEILING_S,
) -> NoiseFloor:
    """What this workers measures where there is nothing to measure.

    Args:
        workers: loaded with the images of the run.
        job: of the run, with at least one request: its server's protocol, its classes, its plan.
        rate: of the run; None for a closed loop, whose callers the floor is measured with.
        floor_s: for how long the percentiles are measured.
        ceiling_s: for how long the highest rate is measured.
    """
    ceiling = msgspec.structs.replace(job, due=[], callers=CALLERS * workers.size, duration_s=ceiling_s)
    done = [each for each in await _ask_null(workers, ceiling) if each.answered and each.sent_s >= SKIPPED * ceiling_s]
    max_rate = len(done) / ((1.0 - SKIPPED) * ceiling_s)
    floor = msgspec.structs.replace(job, duration_s=floor_s)
    if rate is not None:
        due = PoissonArrivals(floor_rate(rate, max_rate)).due_times(floor_s, seed=0)
        picked = np.arange(len(due)) % len(job.target)
        floor = msgspec.structs.replace(
            floor,
            due=due.tolist(),
            target=np.array(job.target)[picked].tolist(),
            image=np.array(job.image)[picked].tolist(),
        )
    outcomes = await _ask_null(workers, floor)
    latencies = [each.latency_s * 1e3 for each in outcomes if each.answered and each.due_s >= SKIPPED * floor_s]
    p50, p99 = np.percentile(latencies or [np.inf], (50, 99))
    return NoiseFloor(float(p50), float(p99), max_rate)


async def _ask_null(workers: WorkerProcesses, job: LoadJob) -> list[RequestOutcome]:
    """The job, sent to a null server of its own: one that was just overwhelmed may still be busy with that."""
    with running("loadgen.clients.noise_floor", title="the null server") as null:
        server = msgspec.structs.replace(job.server, url=null.url, path=CLASSIFY_PATH, api_key=None)
        return await workers.run(msgspec.structs.replace(job, server=server))


def floor_rate(rate: float, max_rate: float) -> float:
    """At which rate the floor is measured for a run of `rate`, by a generator that sends `max_rate` at most."""
    return min(max(rate, min(LEAST_RATE, LEAST_SHARE * max_rate)), max(1.0, MOST_SHARE * max_rate))


class NullServer(asyncio.Protocol):
    """One connection: reads requests to their end, and answers each the same."""

    def __init__(self, offer: bytes) -> None:
        self._offer = offer
        self._head = b""
        self._left = 0
        """Bytes of the body that are still to come."""
        self._reply = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are alike, but no subclass

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
            else:
                head = self._head + data
                end = head.find(b"\r\n\r\n")
                if end < 0:
                    self._head = head
                    if len(head) > MAX_HEAD_BYTES:
                        self._transport.abort()
                    return
                self._begin(head[: end + 2])
                self._head, data = b"", head[end + 4 :]
            if not self._left:
                self._transport.write(self._reply)

    def _begin(self, head: bytes) -> None:
        length = _LENGTH.search(head)
        self._left = int(length[1]) if length else 0
        path = head.partition(b" ")[2].partition(b" ")[0]
        body = OIP_ANSWER if path.endswith(b"/infer") else self._offer if path == TRANSPORT_PATH.encode() else ANSWER
        self._reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )


async def _nothing(incoming: Incoming) -> tuple[Status, bytes]:  # noqa: ARG001 - what arrived does not matter
    return Status.OK, ANSWER


async def serve() -> None:
    """Serve on loopback, over HTTP and datagrams, until cancelled."""
    identity = own_identity()
    datagrams = await DatagramListener.start("127.0.0.1", 0, identity, _nothing)
    offer = msgspec.json.encode(Transports(DatagramEndpoint(datagrams.port, identity.pem, identity.name, VERSION)))
    server = await asyncio.get_running_loop().create_server(lambda: NullServer(offer), "127.0.0.1", 0)
    print(f"ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)  # noqa: T201
    await server.serve_forever()


def main() -> int:
    """Be the null server."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
