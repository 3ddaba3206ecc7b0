"""Server and clients over real sockets: requests, answers, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from hawkvision.core.errors import ConfigError, Overloaded
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.image_coding import Complete
from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.protocol.packet_protection import MAX_SEALED
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import MAX_UNACKNOWLEDGED, Incoming
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.congestion.controllers import CONTROLLERS
from tests.hawkvision.transport.peers import IDENTITY, connected, echo, serving
from tests.hawkvision.transport.session import coded
from tests.waiting import until

IMAGE = coded(k=4, n=6)


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
            connected(relay.address[1], congestion=controller) as client,
        ):
            answers = await asyncio.gather(*(client.ask(b"cats", image) for _ in range(20)))
            assert answers == [(Status.OK, b"".join(image.symbols[:20]))] * 20
            (session,) = server.sessions.values()
            for channel in (client.sender.channel, session.receiver.channel):
                assert isinstance(channel.paths[0].rate.congestion, controller)

    asyncio.run(scenario())


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
