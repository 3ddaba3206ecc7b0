"""Two paths through two relays: fragments on both, and what happens when one dies or moves, QUIC's own first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.peers import connected, serving
from tests.hawkvision.transport.session import coded
from tests.waiting import until

IMAGE = coded(k=4, n=8)
DELAY = LinkSpec.parse("delay=5ms")


@contextlib.asynccontextmanager
async def two_paths(link: LinkSpec = DELAY) -> AsyncIterator[tuple[DatagramListener, ClientConnection, list[UdpRelay]]]:
    """A client that reaches its server through a relay on each of two addresses; QUIC begins on the first."""
    async with (
        serving() as server,
        UdpRelay(("127.0.0.1", server.port), link) as first,
        UdpRelay(("127.0.0.1", server.port), link, listen=("127.0.0.2", first.address[1])) as second,
        connected(first.address[1], routes=[UdpRoute(None, "127.0.0.1"), UdpRoute(None, "127.0.0.2")]) as client,
    ):
        yield server, client, [first, second]


def passed(relay: UdpRelay) -> int:
    return relay.counts[0].delivered


def test_each_of_them_may_die_and_return_and_no_answer_is_lost() -> None:
    async def scenario() -> None:
        async with two_paths() as (_, client, relays):
            paths = client.sender.channel.paths
            loop = asyncio.get_running_loop()
            for relay, path in ((relays[0], paths[0]), (relays[1], paths[1])):
                relay.blackhole(True)
                answers = [await client.ask(b"cats", IMAGE) for _ in range(20)]
                assert {status for status, _ in answers} == {Status.OK}
                assert path.dead(loop.time())
                relay.blackhole(False)
                await until(lambda path=path: not path.dead(loop.time()))  # type: ignore[misc]
                before = path.next_sequence
                assert (await client.ask(b"cats", IMAGE))[0] is Status.OK
                assert path.next_sequence - before >= 3

    asyncio.run(scenario())


def test_quic_moves_to_the_living_path_and_new_requests_are_understood() -> None:
    async def scenario() -> None:
        async with two_paths() as (_, client, relays):
            await client.ask(b"cats", IMAGE)
            relays[0].blackhole(True)
            for number in range(20):  # each a template of its own, which only the stream carries
                assert await client.ask(b"kind %d" % number, IMAGE) == (Status.OK, b"kind %d " % number)

    asyncio.run(scenario())


def test_the_connection_outlives_the_path_it_was_made_over() -> None:
    async def scenario() -> None:
        async with two_paths() as (server, client, relays):
            await client.ask(b"cats", IMAGE)
            relays[0].blackhole(True)
            assert client._protocol is not None
            await asyncio.gather(*(client.ask(b"cats", IMAGE) for _ in range(5)))
            await asyncio.wait_for(client._protocol.ping(), 60.0)
            assert client.lost is None
            assert len(server.sessions) == 1

    asyncio.run(scenario())


def test_paths_whose_nat_forgets_them_go_on_from_another_port() -> None:
    async def scenario() -> None:
        async with two_paths() as (server, client, relays):
            await client.ask(b"cats", IMAGE)
            (session,) = server.sessions.values()
            paths = session.receiver.channel.paths
            await until(lambda: len(paths) == 2 and all(path.proven for path in paths.values()))
            for relay, path in zip(relays, (paths[0], paths[1]), strict=True):
                before = path.where.used.address
                relay.forget()
                answers = [await client.ask(b"kind of %d" % n, IMAGE) for n in range(5)]
                assert {status for status, _ in answers} == {Status.OK}
                await until(lambda path=path, before=before: path.where.used.address != before)  # type: ignore[misc]
                assert (path.where.used.address[0], path.proven, path.where.claim) == (before[0], True, None)
            assert client.lost is None

    asyncio.run(scenario())
