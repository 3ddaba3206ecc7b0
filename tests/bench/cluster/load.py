"""Load on a datacenter tier: the load generator's own engine, with a client of the escalation API."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from hawkvision.core.errors import NotReady
from hawkvision.core.escalation_api import INFER_PATH
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import ConnectionPool
from loadgen.clients.engine import Engine, LoadJob, ServerAddress, SharedImages
from loadgen.clients.http import exchange, refusal_of
from loadgen.workload.arrivals import PoissonArrivals
from loadgen.workload.dataset import generated
from loadgen.workload.record import UNANSWERED, RequestOutcome
from tests.hawkvision.tasks.classes import read_reply, top_k

TIMEOUT_S: Final = 10.0
MAX_S: Final = 300.0
"""Of an open loop."""
MAX_IN_FLIGHT: Final = 2048


class EscalationClient:
    """A `RequestClient` of `POST /v1/infer` of a datacenter tier."""

    def __init__(self, url: str, key: str, connections: int) -> None:
        self._pool = ConnectionPool(url, limit=connections, timeout_s=TIMEOUT_S, api_key=key)
        self._head = self._pool.head("POST", INFER_PATH, "Content-Type: image/jpeg\r\n")

    async def open(self) -> None:
        """See `RequestClient`."""
        await self._pool.open(1)

    async def ask(self, image: bytes, fields: Mapping[str, str], times: RequestTimes) -> ClientReply:
        """See `RequestClient`; there are no fields."""
        reply = await exchange(self._pool, self._head, image, times)
        if isinstance(reply, ClientReply):
            return reply
        if reply.status != 200:
            return refusal_of(reply, len(image))
        try:
            answer = read_reply(reply.body)
        except msgspec.DecodeError:
            return ClientReply(UNANSWERED, "bad_reply")
        return ClientReply(200, index=top_k(answer)[0].index, model=answer.model, tier="datacenter")

    async def close(self) -> None:
        """See `RequestClient`."""
        await self._pool.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What became of the requests of one run; times count from its start."""

    outcomes: Sequence[RequestOutcome]
    started: float
    """On the monotonic clock."""
    duration_s: float

    def latency_ms(self, percent: float, after_s: float = 0.0) -> float:
        """A percentile of the answered requests' latency; infinite if there are none."""
        found = [1e3 * each.latency_s for each in self.outcomes if each.answered and each.due_s >= after_s]
        return float(np.percentile(found, percent)) if found else float("inf")

    @property
    def failed(self) -> list[RequestOutcome]:
        """Requests without an answer."""
        return [each for each in self.outcomes if not each.answered]

    @property
    def errors(self) -> dict[str, int]:
        """How many failed, by code."""
        return dict(Counter(each.error or str(each.status) for each in self.failed))


async def closed_loop(url: str, key: str, callers: int, duration_s: float) -> Load:
    """So many callers, each of which sends again when it was answered."""
    return await _run(url, key, duration_s, callers=callers)


async def open_loop(url: str, key: str, rate: float, act: Callable[[float], Awaitable[None]], seed: int = 1) -> Load:
    """Poisson arrivals until `act` is over; it gets the start on the monotonic clock.

    Raises:
        NotReady: if that takes longer than `MAX_S`.
    """
    due = PoissonArrivals(rate).due_times(MAX_S, seed).tolist()
    return await _run(url, key, MAX_S, due=due, act=act)


async def _run(
    url: str,
    key: str,
    duration_s: float,
    *,
    due: list[float] | None = None,
    callers: int = 0,
    act: Callable[[float], Awaitable[None]] | None = None,
) -> Load:
    count, most = (len(due), MAX_IN_FLIGHT) if due else (callers, callers)
    client = EscalationClient(url, key, most)
    images = [generated(seed) for seed in range(4)]
    job = LoadJob(
        server=ServerAddress(url, path=INFER_PATH, api_key=key),
        fields=[{}],
        target=[0] * count,
        image=[number % len(images) for number in range(count)],
        duration_s=duration_s,
        max_in_flight=most,
        due=due or [],
        callers=callers,
    )
    await client.open()
    try:
        engine = Engine(job, SharedImages(images, range(len(images)), None), client, grace_s=TIMEOUT_S)
        started = time.monotonic() + 0.1
        running = asyncio.ensure_future(engine.run(started))
        if act is not None:
            await act(started)
            if running.done():
                raise NotReady(f"what happens under load took longer than {duration_s:g} s")
            engine.stop()
            duration_s = time.monotonic() - started
        return Load(sorted(await running, key=lambda each: each.due_s), started, duration_s)
    finally:
        await client.close()


async def until_ready(url: str, within_s: float) -> float:
    """Wait until `/readyz` says 200; how many seconds that took.

    Raises:
        NotReady: if it does not within that time; with the last reply.
    """
    pool, began, last = ConnectionPool(url, limit=1, timeout_s=2.0), time.monotonic(), ""
    head = pool.head("GET", "/readyz")
    try:
        while time.monotonic() - began < within_s:
            reply = await exchange(pool, head, b"", RequestTimes())
            if reply.status == 200:
                return time.monotonic() - began
            last = (
                f"{reply.status} {reply.error}" if isinstance(reply, ClientReply) else f"{reply.status} {reply.body!r}"
            )
            await asyncio.sleep(0.05)
    finally:
        await pool.close()
    raise NotReady(f"{url}/readyz is not 200 after {within_s:g} s: {last}")
