"""What strangers can do to a server and to those who have a session: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Sequence

import pytest

from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import Fragment, encode
from hawkvision.transport.protocol.handshake_limits import network_of
from hawkvision.transport.protocol.packet_protection import Sealer
from hawkvision.transport.protocol.wire import Drop, Status
from hawkvision.transport.server.listener import MAX_HALF_OPEN, MAX_HALF_OPEN_EACH, DatagramListener
from hawkvision.transport.server.server_quic import HELLO_TIMEOUT_S
from tests.hawkvision.transport.peers import connected, serving
from tests.hawkvision.transport.session import coded
from tests.waiting import until

IMAGE = coded(k=4, n=6)
TRIES = 5
TOGETHER = 32
"""Connections of a flood that begin together: their tokens must not be old on a busy machine."""


def garbage(rng: random.Random, session: int) -> bytes:
    """Random bytes, half of them with the beginning of something known."""
    data = rng.randbytes(rng.choice([0, 1, 5, 20, 27, 28, 29, 100, 1200, 1500]))
    begin = rng.choice([b"", b"\x11", b"\x11" + session.to_bytes(4) + b"\0", b"\xc0\0\0\0\x01\x08", b"\x40"])
    return begin + data


def initial(token: bytes = b"", version: bytes = b"\0\0\0\1", size: int = 1200) -> bytes:
    """What looks like the first datagram of a QUIC connection."""
    ids = b"\x08" + bytes(range(8)) + b"\x08" + bytes(range(8, 16))
    head = b"\xc0" + version + ids + (0x4000 | len(token)).to_bytes(2) + token
    return head + (0x4000 | size - len(head) - 2).to_bytes(2) + bytes(size - len(head) - 2)


@pytest.mark.parametrize(
    ("stranger", "reason", "answer_bytes"),
    [
        (b"", Drop.MALFORMED, 0),
        (b"\x11" + bytes(20), Drop.MALFORMED, 0),
        (b"\x11" + bytes(1300), Drop.MALFORMED, 0),
        (b"\x11" + b"none" + bytes(60), Drop.NO_SESSION, 0),
        (b"\x20" + bytes(1199), Drop.MALFORMED, 0),
        (b"\x40" + bytes(1199), Drop.NO_CONNECTION, 0),
        (b"\x40" + bytes(10), Drop.MALFORMED, 0),
        (b"\xe0\0\0\0\1\x08" + bytes(8) + b"\0\x40\x20" + bytes(32), Drop.NO_CONNECTION, 0),
        (b"\xc0\0\0\0\1\xff" + bytes(1200), Drop.MALFORMED, 0),
        (initial(size=1199), Drop.MALFORMED, 0),
        (initial(version=b"\0\0\0\0"), Drop.MALFORMED, 0),
        (initial(version=b"\0\0\0\x09", size=60), Drop.MALFORMED, 0),
        (initial(version=b"\0\0\0\x09"), None, 100),
        (initial(), None, 200),
        (initial(b"forged token"), Drop.BAD_TOKEN, 100),
    ],
)
def test_datagrams_of_strangers_are_counted_by_reason_and_get_shorter_replies(
    stranger: bytes, reason: Drop | None, answer_bytes: int
) -> None:
    async def scenario() -> tuple[dict[Drop, int], int]:
        async with serving() as server:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect(("127.0.0.1", server.port))
                sender.send(stranger)
                if answer_bytes:
                    answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sender, 2000), 60.0)
                else:
                    await until(lambda: sum(server.dropped().values()) > 0)
                    answer = b""
                assert (server.half_open, len(server.sessions)) == (0, 0)
                return {why: n for why, n in server.dropped().items() if n}, len(answer)

    drops, answered = asyncio.run(scenario())
    assert drops == ({} if reason is None else {reason: 1})
    assert answered <= answer_bytes < len(stranger) or answered == answer_bytes == 0


def test_while_strangers_flood_those_inside_are_answered_and_new_ones_get_in() -> None:
    """From a thread, as fast as it can: first datagrams without a token, with a forged one, sealed ones, and noise."""
    stop = threading.Event()

    def flood_port(port: int) -> None:
        kinds = [initial(), initial(b"forged token"), b"\x11" + os.urandom(4) + bytes(1100), b"\x40" + os.urandom(600)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not stop.is_set():
                for kind in kinds:
                    sender.sendto(kind, ("127.0.0.1", port))
                stop.wait(0.001)

    async def scenario() -> dict[Drop, int]:
        async with serving() as server, connected(server.port) as inside:
            flooding = threading.Thread(target=flood_port, args=(server.port,))
            flooding.start()
            try:
                await until(lambda: server.dropped()[Drop.NO_SESSION] > 50)
                for _ in range(20):
                    assert (await inside.ask(b"cats", IMAGE))[0] is Status.OK
                async with connected(server.port) as new:
                    assert (await new.ask(b"cats", IMAGE))[0] is Status.OK
                assert server.half_open == 0
            finally:
                stop.set()
                flooding.join()
            return dict(server.dropped())

    drops = asyncio.run(scenario())
    assert all(drops[why] for why in (Drop.BAD_TOKEN, Drop.NO_SESSION, Drop.NO_CONNECTION))


def test_handshakes_of_one_network_beyond_its_share_wait_and_others_do_not() -> None:
    async def scenario() -> None:
        async with serving() as server:
            assert server._endpoint is not None
            gate, loop = server._endpoint._handshakes, asyncio.get_running_loop()
            while gate.may_begin("127.0.0.1", loop.time() + 0.5):
                pass
            async with connected(server.port, routes=[UdpRoute("127.0.0.3", "127.0.0.1")]) as other:
                assert (await other.ask(b"cats", IMAGE))[0] is Status.OK
            while gate.may_begin("127.0.0.1", loop.time() + 0.5):
                pass
            async with connected(server.port) as late:
                assert (await late.ask(b"cats", IMAGE))[0] is Status.OK
            assert server.dropped()[Drop.CROWDED] > 0

    asyncio.run(scenario())


def test_forged_and_replayed_datagrams_of_a_session_change_nothing_of_it() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            await client.ask(b"cats", IMAGE)
            (session,) = server.sessions.values()
            before = session.receiver.channel.paths[0].where.used.address
            forger = Sealer(session.number, type(session.secrets[0]).random())
            fragment = encode(Fragment(99, 0, IMAGE.format, 0, 0, 0, b"", IMAGE.symbols[0]))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                for sequence in range(100):
                    stranger.sendto(forger.seal(0, 1000 + sequence, fragment), ("127.0.0.1", server.port))
                await until(lambda: session.receiver.channel.drops[Drop.BAD_SEAL] >= 100)
            assert session.receiver.channel.paths[0].where.used.address == before
            assert session.receiver.channel.paths[0].where.claim is None
            assert not session.receiver._assembling

    asyncio.run(scenario())


def test_an_unproven_address_gets_at_most_three_times_what_it_sent() -> None:
    """Someone inside moves a path to a third party's address, which never answers challenges."""

    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            await client.ask(b"cats", IMAGE)
            (session,) = server.sessions.values()
            sent = received = 0
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as victim:
                victim.setblocking(False)
                for number in range(40):
                    for index in range(2):
                        fragment = Fragment(1000 + number, 0, IMAGE.format, index, 60, 0, b"", IMAGE.symbols[index])
                        channel = client.sender.channel
                        datagram = channel.send(channel.paths[0], encode(fragment), time.monotonic())
                        sent += victim.sendto(datagram, ("127.0.0.1", server.port))
                    await asyncio.sleep(0)
                where = session.receiver.channel.paths[0].where
                await until(lambda: where.claim is not None and where.claim.address[1] == victim.getsockname()[1])
                deadline = time.monotonic() + 1.0
                while time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            received += len(victim.recv(2000))
            assert 0 < received <= 3 * sent
            assert where.used.address[1] == client._sockets[0].transport.get_extra_info("sockname")[1]
            assert await client.ask(b"cats", IMAGE) == (Status.OK, b"cats ")

    asyncio.run(scenario())


async def flood(server: DatagramListener, addresses: Sequence[str], client: ClientConnection) -> list[socket.socket]:
    """Half-open connections from these addresses, which hold the sockets open; `client` goes on meanwhile."""
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    loop = asyncio.get_running_loop()
    ways = []
    for begin in range(0, len(addresses), TOGETHER):
        floods = []
        for address in addresses[begin : begin + TOGETHER]:
            quic = QuicConnection(configuration=QuicConfiguration(is_client=True, alpn_protocols=["hawkvision/1"]))
            way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            way.setblocking(False)
            way.bind((address, 0))
            way.connect(("127.0.0.1", server.port))
            quic.connect(("127.0.0.1", server.port), now=loop.time())
            floods.append((quic, way))
        for _ in range(2):  # hello, and again with the token of the Retry; then silence
            for quic, way in floods:
                for data, _ in quic.datagrams_to_send(now=loop.time()):
                    way.send(data)
                await asyncio.sleep(0.001)
                with contextlib.suppress(BlockingIOError):
                    quic.receive_datagram(way.recv(2000), ("127.0.0.1", server.port), now=loop.time())
        ways += [way for _, way in floods]
        assert (await client.ask(b"cats", IMAGE))[0] is Status.OK
    return ways


def test_a_flood_of_half_open_connections_is_bounded_and_those_inside_go_on() -> None:
    """How many are open at once depends on how many begin within `HELLO_TIMEOUT_S`, after which the first ones end."""

    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            addresses = [f"127.0.1.{1 + number % 20}" for number in range(MAX_HALF_OPEN + 40)]
            begun = time.monotonic()
            ways = await flood(server, addresses, client)
            assert 0 < server.half_open <= MAX_HALF_OPEN
            assert server.half_open > MAX_HALF_OPEN // 2 or time.monotonic() - begun > HELLO_TIMEOUT_S
            for way in ways:
                way.close()
            await until(lambda: server.half_open == 0)
            async with connected(server.port) as later:
                assert (await later.ask(b"cats", IMAGE))[0] is Status.OK

    asyncio.run(scenario())


def test_many_half_open_connections_of_one_host_do_not_keep_others_out() -> None:
    """Another host gets in while this one is full; on a busy machine it may be full no longer, so it is tried again."""

    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            ways: list[socket.socket] = []
            for _ in range(TRIES):
                ways += await flood(server, ["127.0.1.1"] * (MAX_HALF_OPEN_EACH + 40), client)
                assert server.half_open <= MAX_HALF_OPEN_EACH
                async with connected(server.port) as other:
                    shown = server.is_full("127.0.1.1")
                    assert (await other.ask(b"cats", IMAGE))[0] is Status.OK
                if shown:
                    break
            assert shown
            for way in ways:
                way.close()
            await until(lambda: not server.is_full("127.0.1.1"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_addresses_of_one_host_are_of_one_network(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) == same
