"""The relay of an emulated link: it carries, delays, loses and stops as its specs say, for many clients at once."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hawkvision.core.errors import ConfigError
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UDP_OVERHEAD_BYTES, UdpRelay
from tests.waiting import until

ANSWER_S = 30.0
"""A bound on waiting for what must come, not on how fast it does."""


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.setblocking(False)
    return made


async def send(sender: socket.socket, data: bytes, to: tuple[str, int]) -> None:
    await asyncio.get_running_loop().sock_sendto(sender, data, to)


async def receive(receiver: socket.socket) -> tuple[bytes, tuple[str, int]]:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recvfrom(receiver, 65_535), ANSWER_S)


@asynccontextmanager
async def relayed(
    up: str = "", down: str | None = None, max_clients: int = 64, idle_s: float = 60.0
) -> AsyncIterator[tuple[socket.socket, UdpRelay, socket.socket]]:
    """(a client's socket, the relay, the upstream's socket)."""
    specs = LinkSpec.parse(up), None if down is None else LinkSpec.parse(down)
    with udp() as client, udp() as upstream:
        async with UdpRelay(upstream.getsockname(), *specs, max_clients=max_clients, idle_s=idle_s) as relay:
            yield client, relay, upstream


def test_relay_carries_both_ways_with_the_delay_of_each() -> None:
    async def scene() -> None:
        async with relayed("delay=30ms", "delay=20ms") as (client, relay, upstream):
            begun_at = time.monotonic()
            await send(client, b"question", relay.address)
            data, behind = await receive(upstream)
            await send(upstream, data + b", answer", behind)
            assert await receive(client) == (b"question, answer", relay.address)
            assert time.monotonic() - begun_at >= 0.050
            assert [way.offered_bytes for way in relay.counts] == [8 + UDP_OVERHEAD_BYTES, 16 + UDP_OVERHEAD_BYTES]

    asyncio.run(scene())


def test_each_client_gets_its_own_answers() -> None:
    async def scene() -> None:
        async with relayed() as (client, relay, upstream):
            with udp() as other:
                await send(client, b"a", relay.address)
                await send(other, b"b", relay.address)
                behind = dict([await receive(upstream), await receive(upstream)])
                assert behind[b"a"] != behind[b"b"]
                await send(upstream, b"to b", behind[b"b"])
                await send(upstream, b"to a", behind[b"a"])
                assert (await receive(client))[0] == b"to a"
                assert (await receive(other))[0] == b"to b"

    asyncio.run(scene())


def test_dead_path_swallows_packets_until_it_is_mended() -> None:
    async def scene() -> None:
        async with relayed() as (client, relay, upstream):
            relay.blackhole(True)
            await send(client, b"lost", relay.address)
            await until(lambda: relay.counts[0].lost_cut == 1)
            relay.blackhole(False)
            await send(client, b"kept", relay.address)
            assert (await receive(upstream))[0] == b"kept"

    asyncio.run(scene())


def test_clients_beyond_the_bound_are_refused_and_others_unharmed() -> None:
    async def scene() -> None:
        async with relayed(max_clients=1) as (client, relay, upstream):
            with udp() as other:
                await send(client, b"first", relay.address)
                await send(other, b"refused", relay.address)
                await send(client, b"second", relay.address)
                assert [(await receive(upstream))[0] for _ in range(2)] == [b"first", b"second"]
                assert (relay.clients, relay.refused) == (1, 1)

    asyncio.run(scene())


def test_silent_client_makes_room_for_another() -> None:
    async def scene() -> None:
        async with relayed(max_clients=1, idle_s=0.05) as (client, relay, upstream):
            await send(client, b"first", relay.address)
            assert (await receive(upstream))[0] == b"first"
            await until(lambda: relay.clients == 0)
            with udp() as other:
                await send(other, b"second", relay.address)
                assert (await receive(upstream))[0] == b"second"

    asyncio.run(scene())


def test_upstream_that_comes_late_gets_the_next_packet() -> None:
    async def scene() -> None:
        with udp() as unused:
            address = unused.getsockname()
        async with UdpRelay(address, LinkSpec()) as relay:
            with udp() as client:
                await send(client, b"to nobody", relay.address)
                await until(lambda: relay.counts[0].delivered == 1)
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as upstream:
                    upstream.bind(address)
                    upstream.setblocking(False)
                    await send(client, b"to somebody", relay.address)
                    assert (await receive(upstream))[0] == b"to somebody"

    asyncio.run(scene())


def test_address_that_is_taken_is_explained() -> None:
    async def scene() -> None:
        with udp() as taken, pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            async with UdpRelay(("127.0.0.1", 9), LinkSpec(), listen=taken.getsockname()):
                pass

    asyncio.run(scene())
