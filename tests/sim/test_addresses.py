"""Clients whose address changes, and forged changes, under simulated time, by seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from hawkvision.transport.protocol.packet_protection import peek
from hawkvision.transport.protocol.wire import Status
from tests.sim.transport_world import World, small_image

Address = tuple[str, int]

LINK = "rate=20mbit,delay=20ms"
BAD = f"{LINK},loss=20%,reorder=30%,reorder_delay=30ms"
IMAGE = small_image()
VICTIM = ("198.51.100.9", 9)


class Moving(World):
    """A world in which datagrams have source addresses, and reach a client at its present one only."""

    def __init__(self, links: Sequence[tuple[str, str]], seed: int) -> None:
        super().__init__(links, seed)
        self.address: list[Address] = [(f"192.0.2.{number + 1}", 1000) for number in range(len(links))]
        self.switches: list[Address] = []
        """Addresses that the server has begun to use, one after the other."""
        self.bytes_from: Counter[Address] = Counter()
        self.bytes_to: Counter[Address] = Counter()
        self.stealing = 0.0
        """The share of datagrams that somebody on the way copies and has arrive first, from `VICTIM`."""
        self._random = random.Random(seed)
        self._sources: dict[bytes, Address] = {}

    def _up(self, path: int, datagram: bytes) -> None:
        self._sources[datagram] = self.address[path]
        super()._up(path, datagram)

    def _arrived(self, datagram: bytes) -> bool:
        stolen = self._random.random() < self.stealing and self._received(datagram, VICTIM)
        return self._received(datagram, self._sources[datagram]) or stolen

    def _received(self, datagram: bytes, source: Address) -> bool:
        self.bytes_from[source] += len(datagram)
        number = peek(datagram).path
        authentic = self.receiver.receive(peek(datagram), datagram, self.now, source)
        used: Address = self.receiver.channel.paths[number].where.used.address
        if len(self.routes) == 1 and (not self.switches or used != self.switches[-1]):
            self.switches.append(used)
        return authentic

    def _flush_server(self) -> None:
        asides = self.receiver.channel.asides
        for address, datagram in asides:
            self._send(address, datagram)
        asides.clear()
        super()._flush_server()

    def _down(self, path: int, datagram: bytes) -> None:
        for address in self.receiver.channel.paths[path].where.destinations(len(datagram), self.now):
            self._send(address, datagram)

    def _send(self, address: Address, datagram: bytes) -> None:
        self.bytes_to[address] += len(datagram)
        path = peek(datagram).path
        if address == self.address[path]:
            super()._down(path, datagram)


def watched(world: Moving, images: int = 40, every_s: float = 0.05) -> Moving:
    world.stream(IMAGE, images, every_s)
    world.run(world.now + images * every_s + 15.0)
    assert len(world.asked) == images
    assert not world.unanswered, f"seed {world.seed}"
    assert {asked.status for asked in world.asked.values()} == {Status.OK}, f"seed {world.seed}"
    return world


@pytest.mark.parametrize("moved", [("192.0.2.1", 2000), ("203.0.113.7", 1000)], ids=["port", "host"])
@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_is_moved_misses_nothing_and_waits_for_nothing(moved: Address, seed: int) -> None:
    world = Moving([(LINK, LINK)], seed)
    world.at(world.now + 1.01, lambda: world.address.__setitem__(0, moved))
    watched(world)
    assert world.switches == [("192.0.2.1", 1000), moved]
    late = [latency for latency in world.latencies if latency > 0.05]
    assert len(late) <= 1, "only what was answered before anything came from there went to the old address alone"
    assert max(world.latencies) < 0.15


@pytest.mark.parametrize("seed", range(20))
def test_an_address_changes_once_however_datagrams_overtake_one_another(seed: int) -> None:
    world, moved = Moving([(BAD, BAD)], seed), ("192.0.2.1", 2000)
    world.at(world.now + 1.01, lambda: world.address.__setitem__(0, moved))
    assert watched(world).switches == [("192.0.2.1", 1000), moved], f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_a_forger_of_the_first_datagram_does_not_keep_the_session(seed: int) -> None:
    world = Moving([(LINK, LINK)], seed)
    world.stealing = 1.0
    world.at(world.now + 0.03, lambda: setattr(world, "stealing", 0.0))
    watched(world)
    assert world.switches == [VICTIM, ("192.0.2.1", 1000)]
    assert world.bytes_to[VICTIM] <= 3 * world.bytes_from[VICTIM]
