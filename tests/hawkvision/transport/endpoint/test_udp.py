"""Server and clients over real sockets: who gets in, who does not, and what neither can do to the others."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from hawkvision.core.errors import ConfigError, Overloaded
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.image_coding import Complete, Partial
from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.registry import CONTROLLERS
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import Fragment, Ping, encode
from hawkvision.transport.protocol.handshake_limits import network_of
from hawkvision.transport.protocol.packet_protection import MAX_SEALED, Sealer, peek
from hawkvision.transport.protocol.status import Status
from hawkvision.transport.protocol.wire import Drop, WireError
from hawkvision.transport.server.listener import MAX_HALF_OPEN, MAX_HALF_OPEN_EACH, DatagramListener
from hawkvision.transport.server.session import MAX_UNACKNOWLEDGED, Incoming
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.peers import IDENTITY, connected, echo, serving
from tests.hawkvision.transport.session import coded
from tests.waiting import until

IMAGE = coded(k=4, n=6)


def test_an_image_is_asked_and_answered() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            assert await client.ask(b"cats", IMAGE, meta=b"7") == (Status.OK, b"cats 7")
            assert client.useful_side == 256
            assert client.loss().ratio == 0.0

    asyncio.run(scenario())


@pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)
def test_every_congestion_controller_carries_images_both_ways_over_sockets(
    controller: type[CongestionController],
) -> None:
    async def answer(incoming: Incoming) -> tuple[Status, bytes]:
        assert isinstance(incoming.arrived, Complete)
        return Status.OK, incoming.arrived.body

    async def scenario() -> None:
        link = LinkSpec.parse("rate=20mbit,delay=5ms,loss=5%,seed=1")
        image = coded(k=20, n=30, size=1_000)
        async with (
            serving(answer, congestion=controller) as server,
            UdpRelay(("127.0.0.1", server.port), link) as relay,
            connected(relay.address[1], congestion=controller, timeout_s=20.0) as client,
        ):
            answers = await asyncio.gather(*(client.ask(b"cats", image) for _ in range(20)))
            assert answers == [(Status.OK, b"".join(image.symbols[:20]))] * 20
            (session,) = server.sessions.values()
            for channel in (client.sender.channel, session.receiver.channel):
                assert isinstance(channel.paths[0].rate.congestion, controller)

    asyncio.run(scenario())


def test_what_arrives_is_what_was_sent() -> None:
    seen = list[Incoming]()

    async def handler(incoming: Incoming) -> tuple[Status, bytes]:
        seen.append(incoming)
        return Status.OK, b""

    async def scenario() -> None:
        async with serving(handler) as server, connected(server.port) as client:
            await client.ask(b"cats", IMAGE, deadline_s=2.0)

    asyncio.run(scenario())
    assert [incoming.arrived for incoming in seen] == [Complete(b"".join(IMAGE.symbols[:4]), None)]
    assert seen[0].deadline is not None
    assert 1.5 < seen[0].deadline.remaining_s(seen[0].started) <= 2.0


def test_many_clients_ask_many_images_at_once() -> None:
    async def scenario() -> None:
        async with serving() as server, contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(server.port)) for _ in range(8)]
            pairs = [(n, m) for n in range(8) for m in range(20)]
            answers = await asyncio.gather(*(clients[n].ask(b"c%d" % n, IMAGE, meta=b"%d" % m) for n, m in pairs))
            assert answers == [(Status.OK, b"c%d %d" % pair) for pair in pairs]
            assert len(server.sessions) == 8
            for client in clients:
                await client.close()
            await until(lambda: not server.sessions and server.budget.used == 0)

    asyncio.run(scenario())


def test_a_handlers_error_reaches_its_caller_only() -> None:
    async def handler(incoming: Incoming) -> tuple[Status, bytes]:
        if incoming.template == b"full":
            raise Overloaded("no room", retry_after_s=1.0)
        if incoming.template == b"defect":
            raise ZeroDivisionError
        return Status.OK, b"fine"

    async def scenario() -> None:
        async with serving(handler) as server, connected(server.port) as client:
            status, body = await client.ask(b"full", IMAGE)
            assert (status, b"no room" in body) == (Status.REFUSED, True)
            status, body = await client.ask(b"defect", IMAGE)
            assert (status, b"ZeroDivision" in body) == (Status.REFUSED, False)
            assert await client.ask(b"other", IMAGE) == (Status.OK, b"fine")

    asyncio.run(scenario())


def test_a_handshake_gets_through_a_fifth_of_loss() -> None:
    async def scenario() -> None:
        for seed in range(3):
            link = LinkSpec.parse(f"delay=5ms,loss=20%,seed={seed}")
            async with (
                serving() as server,
                UdpRelay(("127.0.0.1", server.port), link) as relay,
                connected(relay.address[1], timeout_s=20.0) as client,
            ):
                assert (await client.ask(b"cats", IMAGE))[0] is Status.OK

    asyncio.run(scenario())


def test_a_port_without_a_server_is_a_lost_connection_in_time() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))

        async def scenario() -> None:
            with pytest.raises(ConnectionLost, match=r"within 0\.3 s"):
                async with connected(silent.getsockname()[1], timeout_s=0.3):
                    pass

        asyncio.run(scenario())


def test_a_port_in_use_is_named_in_the_error() -> None:
    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(ConfigError, match=str(server.port)):
                await DatagramListener.start("127.0.0.1", server.port, IDENTITY, echo)

    asyncio.run(scenario())


def test_pending_requests_fail_when_the_server_stops() -> None:
    async def never(_: Incoming) -> tuple[Status, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with serving(never) as server, connected(server.port) as client:
            asked = [asyncio.create_task(client.ask(b"cats", IMAGE)) for _ in range(70)]  # six wait for room
            await until(lambda: sum(len(s._tasks) for s in server.sessions.values()) > 0)
            await server.close()
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert {type(result) for result in results} == {ConnectionLost}

    asyncio.run(scenario())


def test_a_restarted_server_accepts_reconnecting_clients() -> None:
    async def scenario() -> None:
        async with serving() as first:
            port = first.port
            async with connected(port) as client:
                assert (await client.ask(b"cats", IMAGE))[0] is Status.OK
        async with serving(port=port), connected(port) as again:
            assert await again.ask(b"cats", IMAGE) == (Status.OK, b"cats ")

    asyncio.run(scenario())


def test_an_interim_response_arrives_before_the_response() -> None:
    go_on = asyncio.Event()
    interim = list[bytes]()

    async def handler(incoming: Incoming) -> tuple[Status, bytes]:
        incoming.send_interim(b"cat?")
        await go_on.wait()
        return Status.OK, b"cat"

    async def scenario() -> tuple[Status, bytes]:
        async with serving(handler) as server, connected(server.port) as client:
            asking = asyncio.create_task(client.ask(b"cats", IMAGE, on_interim=interim.append))
            await until(lambda: bool(interim))
            assert not asking.done()
            go_on.set()
            return await asking

    assert asyncio.run(scenario()) == (Status.OK, b"cat")
    assert interim == [b"cat?"]


def test_a_cancelled_request_cancels_the_handler() -> None:
    cancelled = asyncio.Event()

    async def slow(_: Incoming) -> tuple[Status, bytes]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def scenario() -> None:
        async with serving(slow) as server, connected(server.port) as client:
            with pytest.raises(TimeoutError):
                await client.ask(b"cats", IMAGE, timeout_s=0.2)
            await asyncio.wait_for(cancelled.wait(), 60.0)
            (session,) = server.sessions.values()
            assert not session._tasks
            assert not session.receiver._assembling

    asyncio.run(scenario())


def test_a_part_is_offered_first_and_the_whole_once_it_is_repaired() -> None:
    from tests.sim.test_transport import SEGMENTS

    parts = list[tuple[type, type]]()

    async def handler(incoming: Incoming) -> tuple[Status, bytes]:
        if incoming.better is not None:
            better = await incoming.better
            parts.append((type(incoming.arrived), type(better.arrived)))
        return Status.OK, b""

    async def scenario() -> None:
        link = LinkSpec.parse("delay=5ms,loss=40%,seed=3")
        async with (
            serving(handler) as server,
            UdpRelay(("127.0.0.1", server.port), LinkSpec()) as relay,
            connected(relay.address[1], timeout_s=20.0) as client,
        ):
            relay.up = link  # not before: the server gives a handshake five seconds
            for _ in range(30):
                await client.ask(b"cats", SEGMENTS)

    asyncio.run(scenario())
    assert (Partial, Complete) in parts


def test_an_exhausted_key_ends_the_connection_with_the_reason() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            client.sender.channel._sealer.sealed = MAX_SEALED - 1000
            with pytest.raises(ConnectionLost, match="protected as many datagrams as it may"):
                await client.ask(b"cats", IMAGE)
            await until(lambda: not server.sessions, 20.0)  # QUIC would be idle for longer
        async with serving() as server, connected(server.port) as client:
            (session,) = server.sessions.values()
            session.receiver.channel._sealer.sealed = MAX_SEALED - 1000
            with contextlib.suppress(ConnectionLost):
                await client.ask(b"cats", IMAGE)
            await until(lambda: client.lost == "the key has protected as many datagrams as it may")

    asyncio.run(scenario())


def test_symbols_too_long_for_a_datagram_are_refused_before_anything_is_sent() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            with pytest.raises(WireError, match="expected at most"):
                await client.ask(b"cats", coded(size=1150), meta=bytes(40))
            assert (await client.ask(b"cats", IMAGE))[0] is Status.OK

    asyncio.run(scenario())


def garbage(rng: random.Random, session: int) -> bytes:
    """Random bytes, half of them with the beginning of something known."""
    data = rng.randbytes(rng.choice([0, 1, 5, 20, 27, 28, 29, 100, 1200, 1500]))
    begin = rng.choice([b"", b"\x11", b"\x11" + session.to_bytes(4) + b"\0", b"\xc0\0\0\0\x01\x08", b"\x40"])
    return begin + data


def test_garbage_from_many_addresses_does_no_harm() -> None:
    rng = random.Random(5)

    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            (session,) = server.sessions
            sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(50)]
            for _ in range(20):
                for each in sockets:
                    each.sendto(garbage(rng, session), ("127.0.0.1", server.port))
                assert await client.ask(b"cats", IMAGE) == (Status.OK, b"cats ")
            for each in sockets:
                each.close()
            assert len(server.sessions) == 1
            assert server.half_open == 0

    asyncio.run(scenario())


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
                    await until(lambda: sum(server.traffic().drops.values()) > 0)
                    answer = b""
                assert (server.half_open, len(server.sessions)) == (0, 0)
                return {why: n for why, n in server.traffic().drops.items() if n}, len(answer)

    drops, answered = asyncio.run(scenario())
    assert drops == ({} if reason is None else {reason: 1})
    assert answered <= answer_bytes < len(stranger) or answered == answer_bytes == 0


def test_any_bytes_of_a_stranger_are_dropped_for_a_reason_or_answered_without_a_connection() -> None:
    """The parser that decides is given bytes of any kind, and what looks like QUIC's first datagram, bent."""
    parts = st.lists(st.one_of(st.binary(max_size=40), st.just(initial()), st.just(bytes(1200))), max_size=4)

    async def scenario() -> None:
        async with serving() as server:
            assert server._endpoint is not None
            decide = server._endpoint._stranger

            @given(
                st.sampled_from([b"", b"\xc0\0\0\0\1\x08", b"\x40", b"\xe0\0\0\0\1", b"\xd0\x6b\x33\x43\xcf"]), parts
            )
            @settings(max_examples=300, deadline=None)
            def check(begin: bytes, rest: list[bytes]) -> None:
                data = begin + b"".join(rest)
                drop = decide(data, ("127.0.0.1", 9))
                assert drop is not None or len(data) >= 1200

            check()
            assert (server.half_open, len(server.sessions)) == (0, 0)

    asyncio.run(scenario())


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
                await until(lambda: server.traffic().drops[Drop.NO_SESSION] > 50)
                for _ in range(20):
                    assert (await inside.ask(b"cats", IMAGE))[0] is Status.OK
                async with connected(server.port, timeout_s=20.0) as new:
                    assert (await new.ask(b"cats", IMAGE))[0] is Status.OK
                assert server.half_open == 0
            finally:
                stop.set()
                flooding.join()
            return dict(server.traffic().drops)

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
            assert server.traffic().drops[Drop.CROWDED] > 0

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


def test_an_overtaken_datagram_from_elsewhere_does_not_move_the_session() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            await client.ask(b"cats", IMAGE)
            (session,) = server.sessions.values()
            channel, where = session.receiver.channel, session.receiver.channel.paths[0].where
            await until(lambda: where.used.proven)
            late = client.sender.channel.send_unreported(client.sender.channel.paths[0], encode(Ping()))
            await client.ask(b"cats", IMAGE)  # overtakes it
            received = channel.paths[0].received
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
                elsewhere.sendto(late, ("127.0.0.1", server.port))
                await until(lambda: peek(late).sequence in received)
            assert where.claim is None
            assert where.used.address[1] == client._sockets[0].transport.get_extra_info("sockname")[1]

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
    floods = []
    for address in addresses:
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
        assert (await client.ask(b"cats", IMAGE))[0] is Status.OK
    return [way for _, way in floods]


def test_a_flood_of_half_open_connections_is_bounded_and_those_inside_go_on() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            addresses = [f"127.0.1.{1 + number % 20}" for number in range(MAX_HALF_OPEN + 40)]
            ways = await flood(server, addresses, client)
            assert MAX_HALF_OPEN // 2 < server.half_open <= MAX_HALF_OPEN
            for way in ways:
                way.close()
            await until(lambda: server.half_open == 0, 30.0)
            async with connected(server.port) as later:
                assert (await later.ask(b"cats", IMAGE))[0] is Status.OK

    asyncio.run(scenario())


def test_many_half_open_connections_of_one_host_do_not_keep_others_out() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            ways = await flood(server, ["127.0.1.1"] * (MAX_HALF_OPEN_EACH + 40), client)
            assert MAX_HALF_OPEN_EACH // 2 < server.half_open <= MAX_HALF_OPEN_EACH
            async with connected(server.port, timeout_s=4.0) as other:
                assert (await other.ask(b"cats", IMAGE))[0] is Status.OK
            for way in ways:
                way.close()
            await until(lambda: not server.is_full("127.0.1.1"), 30.0)

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


def test_answers_that_a_client_does_not_take_do_not_gather() -> None:
    """It grants QUIC no credit, reports nothing, and goes on asking."""
    body = bytes(40_000)

    async def handler(_: Incoming) -> tuple[Status, bytes]:
        return Status.OK, body

    async def scenario() -> None:
        async with serving(handler) as server, connected(server.port) as client:
            assert (await client.ask(b"cats", IMAGE))[0] is Status.OK
            (session,) = server.sessions.values()
            quic = client._protocol._quic  # type: ignore[union-attr]
            quic._write_connection_limits = quic._write_stream_limits = lambda *_, **__: None  # type: ignore[method-assign]
            client.sender.receive = lambda *_: False  # type: ignore[method-assign]
            asking = [asyncio.ensure_future(client.ask(b"cats", IMAGE, timeout_s=60.0)) for _ in range(20)]
            answers = session.receiver._responses._answers
            complete = len(asking)
            await until(
                lambda: sum(answer.by_stream for answer in answers.values()) == complete, 9.0
            )  # none is given up
            held = session._protocol.unacknowledged_bytes
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            assert 0 < held < MAX_UNACKNOWLEDGED + 2 * len(body)

    asyncio.run(scenario())


def test_a_session_that_was_closed_sets_no_timer_again() -> None:
    async def scenario() -> None:
        async with serving() as server, connected(server.port) as client:
            await client.ask(b"cats", IMAGE)
            (session,) = server.sessions.values()
            await server.close()
            session.schedule_flush()
            await asyncio.sleep(0)
            assert session._timer is None or session._timer.cancelled()
            assert server.budget.used == 0

    asyncio.run(scenario())


def test_random_control_bytes_close_the_connection_and_nothing_else() -> None:
    rng = random.Random(1)

    async def scenario() -> None:
        async with serving() as server, connected(server.port) as good:
            for _ in range(10):
                async with connected(server.port) as bad:
                    assert bad._protocol is not None
                    bad._protocol._quic.send_stream_data(0, rng.randbytes(rng.randrange(1, 3000)) + os.urandom(8))
                    bad._protocol.transmit()
                    assert (await good.ask(b"cats", IMAGE))[0] is Status.OK
            await until(lambda: len(server.sessions) == 1)

    asyncio.run(scenario())
