"""A `DatagramLink` over changing links, by seed: callers that accept late responses get one."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from edge.servers.datagram import RECEIVE_TIMEOUTS
from hawkvision.core.errors import DeadlineMissed
from hawkvision.transport.client.datagram_client import MAX_DOUBLED, MAX_LATE, DatagramLink
from hawkvision.transport.coding.image_coding import Arrived, Coded, Complete, Partial
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.assembly import ReceivedImage
from loadgen.network.link_model import LinkPipe
from loadgen.network.link_spec import LinkSpec, LinkTrace, TraceStep
from loadgen.network.profiles import load_profile
from tests.images import encoded
from tests.sim.client_world import LinkWorld, quantile
from tests.sim.transport_world import seeded

DEADLINE_S = 0.1
IMAGE = encoded(height=400, width=400)
RATE = 8.0
CALM = "rate=20mbit,delay=5ms"


@dataclass
class Answered:
    """What became of one image."""

    at: float
    after_s: float
    status: Status
    arrived: Arrived | None
    lossless: bool


class Edge(LinkWorld):
    """A node at the other end that takes 8 ms for a look, one image after the other."""

    def __init__(self, seed: int, link: str = CALM) -> None:
        super().__init__([(link, link)], seed, RECEIVE_TIMEOUTS)
        self.arrived: dict[bytes, Arrived] = {}
        self.coded: list[Coded] = []
        self._free_at = self.now

    def ask(
        self, coded: Coded, deadline_s: float | None = None, *, template: int = 0, late_s: float = 0.0
    ) -> int | None:
        self.coded.append(coded)
        return super().ask(coded, deadline_s, template=template, late_s=late_s)

    def _handed(self, image: ReceivedImage) -> None:
        if image.final:
            self._free_at = max(self._free_at, self.now) + 0.008
            self.arrived[b"answer %d" % image.number] = image.arrived
            self.at(self._free_at, lambda: self._answer(image.number))

    async def caller(self, link: DatagramLink, after_s: float, *, accept_late: bool = True) -> Answered:
        """One image, sent as clients send it."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(after_s)
        at, lossless = loop.time(), link.fits_lossless(IMAGE, DEADLINE_S, strict=not accept_late)
        status, answer = await link.ask(
            b"", IMAGE, deadline_s=DEADLINE_S, timeout_s=10.0, lossless=lossless, accept_late=accept_late
        )
        return Answered(at, loop.time() - at, status, self.arrived.get(answer), lossless)


def callers(world: Edge, seconds: float) -> list[Answered]:
    """What became of images that are sent at random."""
    rng, after_s, due = random.Random(world.seed), 0.5, list[float]()
    while after_s < seconds:
        due.append(after_s)
        after_s += rng.expovariate(RATE)

    async def main(link: DatagramLink) -> list[Answered]:
        return await asyncio.gather(*(world.caller(link, each) for each in due))

    return world.play(main)


@pytest.mark.parametrize(("name", "in_time"), [("wifi-busy", 0.85), ("lte-drive", 0.6)])
@pytest.mark.parametrize("seed", range(2))
def test_over_a_volatile_link_everybody_is_answered_and_most_are_in_time(name: str, in_time: float, seed: int) -> None:
    world = Edge(seed)
    world.over(load_profile(name), 2 * seed)
    answered = callers(world, 20.0)
    assert {each.status for each in answered} == {Status.OK}
    latencies = [each.after_s for each in answered]
    assert quantile(latencies, in_time) <= DEADLINE_S
    assert quantile(latencies, 0.98) <= 1.0


def test_over_a_link_that_is_mostly_good_most_images_arrive_as_they_were_sent() -> None:
    """Sent whole is what guarantees are made of; what was lost a while ago is no reason to send less."""
    world = Edge(0)
    world.over(load_profile("wifi-busy"), 0)
    later = [each for each in callers(world, 40.0) if each.at > 104.0]
    whole = [each for each in later if isinstance(each.arrived, Complete) and each.arrived.body == IMAGE]
    assert len(whole) > 0.6 * len(later)
    assert len(whole) > 0.95 * sum(each.lossless for each in later)


@pytest.mark.parametrize("seed", [1, 2])
def test_soon_after_a_crowded_spell_images_travel_as_they_were_sent(seed: int) -> None:
    """The crowd's rate and round trip tell nothing of the link without it."""
    world = Edge(seed)
    quiet, crowded = TraceStep(4.0, 4e7, 1.5, 0.0), TraceStep(1.5, 4e6, 40.0, 0.0)
    spell = LinkSpec(
        jitter_ms=3.0, queue_bytes=250_000, trace=LinkTrace((quiet, crowded, quiet), loop=False), seed=seed
    )
    world.routes[0].up, world.routes[0].down = LinkPipe(spell, "up0"), LinkPipe(spell, "down0")
    began = world.now
    since = [each for each in callers(world, 6.8) if each.at - began > 5.75]
    whole = sum(isinstance(each.arrived, Complete) and each.arrived.body == IMAGE for each in since)
    assert whole > 0.8 * len(since)


def test_an_image_whose_link_is_held_is_answered_when_it_is_let_go() -> None:
    world = Edge(1)

    async def main(link: DatagramLink) -> Answered:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.1) for n in range(20)))
        world.routes[0].cut(True)
        world.at(world.now + 0.4, lambda: world.routes[0].cut(False))
        return await world.caller(link, 0.0)

    late = world.play(main)
    assert late.status is Status.OK
    assert 0.4 < late.after_s < 1.2


def test_after_an_outage_so_many_late_answers_are_waited_for_and_no_more() -> None:
    world = Edge(1)

    async def main(link: DatagramLink) -> list[Answered | BaseException]:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.1) for n in range(20)))
        world.routes[0].cut(True)
        world.at(world.now + 2.0, lambda: world.routes[0].cut(False))
        asking = (world.caller(link, n * 0.02) for n in range(MAX_LATE + 6))
        return await asyncio.gather(*asking, return_exceptions=True)

    came = world.play(main)
    missed = [each for each in came if isinstance(each, DeadlineMissed)]
    assert len(missed) == 6
    assert {each.status for each in came if isinstance(each, Answered)} == {Status.OK}
    assert len(missed) + sum(isinstance(each, Answered) for each in came) == len(came)


def test_without_accept_late_no_late_response_comes() -> None:
    world = Edge(1)

    async def main(link: DatagramLink) -> Answered:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.1) for n in range(20)))
        world.routes[0].cut(True)
        return await world.caller(link, 0.0, accept_late=False)

    with pytest.raises(TimeoutError):
        world.play(main)


def test_an_image_that_meets_a_slow_spell_is_answered_late_as_it_was_sent() -> None:
    """It is under way already; a small one behind it would come no sooner."""
    world = Edge(1)

    async def main(link: DatagramLink) -> Answered:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.1) for n in range(20)))
        world.routes[0].up = LinkPipe(seeded("rate=2mbit,delay=30ms", 1), "slow")
        return await world.caller(link, 0.0)

    late = world.play(main)
    assert late.status is Status.OK
    assert late.lossless
    assert isinstance(late.arrived, Complete)
    assert late.arrived.body == IMAGE
    assert DEADLINE_S < late.after_s < 0.2


def test_small_images_are_sent_twice_but_not_in_one_another_s_way() -> None:
    """Over a crowded link a burst of loss may take all of one; where several are asked, the second halves queue."""
    world = Edge(1, "rate=8mbit,delay=5ms")

    async def main(link: DatagramLink) -> list[float]:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.25) for n in range(20)))
        world.routes[0].up = LinkPipe(seeded("rate=8mbit,delay=75ms", 1), "far")
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.25) for n in range(8)))
        before = len(world.coded)
        await world.caller(link, 0.5)
        await asyncio.gather(*(world.caller(link, 0.5) for _ in range(6)))
        return [len(each.symbols) / each.format.k for each in world.coded[before : before + 7]]

    alone, *together = world.play(main)
    assert alone >= 2.0
    assert together[0] >= 2.0
    assert max(together[MAX_DOUBLED:]) < 2.0


def test_an_image_of_which_too_little_came_is_asked_again_small() -> None:
    """The first is sent whole, loses more than it has parity for, and cannot be repaired in time."""
    world = Edge(1)

    async def main(link: DatagramLink) -> Answered:
        await asyncio.gather(*(world.caller(link, 0.5 + n * 0.1) for n in range(20)))
        sent = asyncio.ensure_future(world.caller(link, 0.0))
        await asyncio.sleep(0.0)
        up = world.routes[0].up
        up.dead = True  # what is under way is lost, and what follows within 40 ms
        world.at(world.now + 0.04, lambda: setattr(up, "dead", False))
        return await sent

    again = world.play(main)
    assert again.status is Status.OK
    assert again.lossless
    assert isinstance(again.arrived, Complete | Partial)
    assert again.after_s < 0.4
