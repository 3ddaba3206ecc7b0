"""A `DatagramLink` under simulated time: its decisions over changing links, without sockets or a wall clock.

The connection is `World`'s sender and receiver instead of a socket and QUIC; everything else is the product's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from hawkvision.client.datagram import ANSWER_S, MAY_MISS
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.connection_manager import Connection
from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.client.pending_responses import ignore_interim
from hawkvision.transport.coding.image_coding import Coded
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.endpoint.path import Path
from hawkvision.transport.protocol.wire import Status
from loadgen.network.link_model import LinkPipe
from loadgen.network.profiles import LinkProfile
from tests.sim.transport_world import World
from tests.sim.virtual_time import VirtualLoop, run

T = TypeVar("T")
LINK = "rate=20mbit,delay=20ms"
REGISTERING_S = 0.05
"""How long QUIC's stream takes to register a JPEG header."""


class LinkWorld(World):
    """A world that an event loop can live in."""

    def advance(self, until: float, loop: VirtualLoop) -> None:
        """Let time pass until then, or until the loop has something to do."""
        self.run(until, lambda: loop.changed)

    def over(self, profile: LinkProfile, offset: int) -> None:
        """Give the one route a profile's links."""
        up, down = profile.specs(offset)
        self.routes[0].up, self.routes[0].down = LinkPipe(up, "up0"), LinkPipe(down, "down0")

    def play(self, main: Callable[[DatagramLink], Coroutine[Any, Any, T]], answer_s: float = ANSWER_S) -> T:
        """The result of `main`, which is given a client's link that is connected."""

        async def linked() -> T:
            link = DatagramLink("simulated", _nowhere, may_miss=MAY_MISS, answer_s=answer_s)
            link._connections._current = Connection(cast(ClientConnection, SimulatedClient(self)))
            return await main(link)

        return run(self, linked())


async def _nowhere() -> Any:
    raise AssertionError("the simulated connection is never lost")


class SimulatedClient:
    """What `DatagramLink` needs of a `ClientConnection`."""

    useful_side = 300
    lost = None
    sent_bytes = 0

    def __init__(self, world: LinkWorld) -> None:
        self._world = world
        self._waiting: dict[int, asyncio.Future[tuple[Status, bytes]]] = {}
        self._tables: dict[bytes, int] = {}
        world.when_answered = self._answered

    def _answered(self, number: int) -> None:
        future, asked = self._waiting.pop(number, None), self._world.asked[number]
        if future is not None and not future.done():
            future.set_result((Status(asked.status or 0), asked.body))

    async def ask(
        self,
        template: bytes,
        coded: Coded,
        *,
        meta: bytes = b"",
        deadline_s: float | None = None,
        timeout_s: float = 30.0,
        on_interim: Callable[[bytes], None] = ignore_interim,
        late_s: float = 0.0,
    ) -> tuple[Status, bytes]:
        """See `ClientConnection.ask`."""
        number = self._world.ask(coded, deadline_s, late_s=late_s)
        assert number is not None, "the simulated sender is never full"
        future: asyncio.Future[tuple[Status, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            if self._waiting.pop(number, None) is not None:
                self._world.sender.cancel(number)

    def probe(self) -> None:
        """See `ClientConnection.probe`."""
        self._world.ping()

    def tables_number(self, header: bytes) -> int:
        """See `ClientConnection.tables_number`."""
        if header not in self._tables:
            self._tables[header] = number = len(self._tables) + 1
            registering = self._world.now + REGISTERING_S
            self._world.at(registering, lambda: self._world.receiver.register_tables(number, header))
        return self._tables[header]

    def loss(self) -> LossEstimate:
        return self._world.sender.loss(self._world.now)

    def rtt_s(self) -> float | None:
        return self._path.rate.latest_rtt_s

    def repair_s(self) -> float:
        return self._path.rate.repair_s()

    def spare_s(self, size: int) -> float:
        return self._world.sender.spare_s(size, self._world.now)

    def silent_s(self) -> float:
        since = self._path.waiting_since
        return 0.0 if since is None else min(0.9, self._world.now - since)  # it never reconnects

    @property
    def queued_bytes(self) -> int:
        return self._world.sender.queued_bytes

    @property
    def behind(self) -> bool:
        return self._path.behind(self._world.now)

    @property
    def _path(self) -> Path[Any]:
        return self._world.sender.channel.best(self._world.now)

    async def close(self) -> None:
        """Nothing is open."""


def quantile(values: list[float], share: float) -> float:
    """The value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
