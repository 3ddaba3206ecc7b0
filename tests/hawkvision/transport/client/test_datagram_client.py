"""ConnectionManager of a peer over the datagram transport, that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from hawkvision.core.errors import BadField, BadImage, ConfigError, HawkVisionError, Unauthorized, UnsupportedMedia
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.servers.keys import Keys
from hawkvision.transport.client.connection_manager import is_gone
from hawkvision.transport.client.datagram_client import DatagramLink, LinkView, first_response
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.image_coding import Complete, Partial
from hawkvision.transport.coding.rate_fec_control import choose
from hawkvision.transport.congestion.loss_meter import LossEstimate
from hawkvision.transport.endpoint.quic import MAX_CLIENT_TEMPLATES
from hawkvision.transport.protocol.control import MAX_TEMPLATE, VERSION
from hawkvision.transport.protocol.server_certificate import Identity, own_identity
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Incoming
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.images import encoded, with_restarts
from tests.waiting import until

T = TypeVar("T")
SECRET = "a-key-of-some-length"
LARGE = encoded(height=300, width=400)
SMALL = encoded(".jpg", 32, 32)
QUIET = LossEstimate(0.0, 1.0, known=True)


class Server:
    """A server whose answers say what it received, and that can be started anew at another port."""

    def __init__(self) -> None:
        self.identity: Identity
        self.udp: DatagramListener
        self.arrived: list[Incoming] = []
        self.discovered = 0
        self.port: int | None = None
        """What discovery says, in the place of the true one."""
        self.now = asyncio.Event()
        """Lets what is asked as `later` be answered."""

    async def start(self, port: int = 0, api_key: str | None = None) -> None:
        self.identity = own_identity()
        self.udp = await DatagramListener.start(
            "127.0.0.1", port, self.identity, self.answer, keys=Keys(api_key), useful_side=256
        )

    async def answer(self, incoming: Incoming) -> tuple[Status, bytes]:
        if incoming.template == b"never":
            await asyncio.Event().wait()
        if incoming.template == b"later":
            await self.now.wait()
        self.arrived.append(incoming)
        return Status.OK, incoming.template + incoming.meta

    async def discover(self) -> DatagramEndpoint:
        self.discovered += 1
        return DatagramEndpoint(self.port or self.udp.port, self.identity.pem, self.identity.name, VERSION)

    def quality(self) -> int | None:
        """Of the last image."""
        arrived = self.arrived[-1].arrived
        assert isinstance(arrived, Complete | Partial)
        return arrived.quality


@asynccontextmanager
async def serving(api_key: str | None = None) -> AsyncIterator[Server]:
    server = Server()
    await server.start(api_key=api_key)
    try:
        yield server
    finally:
        await server.udp.close()


@asynccontextmanager
async def linked(**options: Any) -> AsyncIterator[tuple[Server, DatagramLink]]:
    async with serving(SECRET) as server:
        link = DatagramLink("127.0.0.1", server.discover, api_key=SECRET, **options)
        try:
            yield server, link
        finally:
            await link.close()


def run(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(scenario())


def test_asking_connects_once_and_tells_template_meta_and_deadline() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            assert link.state() == LinkView(False, 0.0, 1.0, False, None, None)
            replies = [await link.ask(b"quality=fast", LARGE, meta=b"cam", deadline_s=5.0) for _ in range(3)]
            assert replies == [(Status.OK, b"quality=fastcam")] * 3
            assert (server.discovered, link.state().connected) == (1, True)
            assert all(i.deadline is not None and i.deadline.remaining_s(i.started) < 5.1 for i in server.arrived)

    run(scenario)


def test_two_local_addresses_are_two_paths() -> None:
    async def scenario() -> int:
        async with linked(local=("127.0.0.1", "127.0.0.2")) as (server, link):
            for _ in range(3):
                await link.ask(b"", LARGE)
            (session,) = server.udp.sessions.values()
            return len(session.receiver.channel.paths)

    assert run(scenario) == 2


def test_a_cameras_own_header_is_used_from_its_second_image_on() -> None:
    body = bytearray(with_restarts(70))
    body[body.index(b"\xff\xdb\x00\x43\x00") + 6] += 1  # no quality of libjpeg's has this table

    async def scenario() -> None:
        async with linked() as (server, link):
            await link.ask(b"", bytes(body))
            assert server.quality() is not None
            async with asyncio.timeout(
                30.0
            ):  # a machine that stood still is remembered as a slow link, with small images
                while server.quality() is not None:
                    await link.ask(b"", bytes(body))

    run(scenario)


def test_an_image_may_go_as_it_is_once_the_link_is_known_to_be_quick() -> None:
    pixels = np.zeros((300, 400, 3), np.uint8)

    async def scenario() -> None:
        async with linked() as (server, link):
            assert not link.fits_lossless(LARGE, 2.0), "nothing is known of the link"
            async with asyncio.timeout(30.0):  # a machine that stood still is remembered as loss, or as a slow link
                while not link.fits_lossless(LARGE, 2.0):
                    await link.ask(b"", LARGE, lossless=True)
            assert not link.fits_lossless(LARGE, 0.03), "no time is left for the peer"
            assert not link.fits_lossless(pixels, 2.0)
            assert await link.ask(b"", LARGE, lossless=True, deadline_s=2.0) == (Status.OK, b"")
            assert server.arrived[-1].arrived == Complete(LARGE, None)

    run(scenario)


def test_over_a_quick_bursty_link_images_travel_unchanged_and_losses_are_repaired() -> None:
    async def scenario() -> tuple[int, int]:
        async with serving() as server:
            spec = LinkSpec.parse("rate=40mbit,delay=1ms,loss=3%,burst=20,queue=400kB,seed=11")
            async with UdpRelay(("127.0.0.1", server.udp.port), spec) as relay:
                server.port = relay.address[1]
                link = DatagramLink("127.0.0.1", server.discover)
                try:
                    async with asyncio.timeout(30.0):
                        while link.state().loss == 0.0 or not link.fits_lossless(LARGE, 5.0):
                            await link.ask(b"", LARGE, deadline_s=5.0, lossless=True)
                    before = link.sent_bytes
                    replies = [await link.ask(b"", LARGE, deadline_s=5.0, lossless=True) for _ in range(20)]
                    assert all(status is Status.OK for status, _ in replies)
                    assert all(each.arrived == Complete(LARGE, None) for each in server.arrived)
                    return link.sent_bytes - before, 20 * len(LARGE)
                finally:
                    await link.close()

    sent, asked = run(scenario)
    assert sent < 1.6 * asked, "plans for such bursts have as much parity as image, and more"


@pytest.mark.parametrize("body", [b"", b"GIF89a", b"\xff\xd8\xff\xe0"])
def test_a_body_that_is_not_an_image_is_refused_before_anything_is_sent(body: bytes) -> None:
    async def scenario() -> int:
        async with linked() as (server, link):
            with pytest.raises((BadImage, UnsupportedMedia)):
                await link.ask(b"", body)
            return server.discovered

    assert run(scenario) == 0


def test_a_wrong_key_is_said_to_be_one_and_not_tried_again() -> None:
    async def scenario() -> int:
        async with linked() as (server, _):
            link = DatagramLink("127.0.0.1", server.discover, api_key="wrong")
            with pytest.raises(Unauthorized):
                await link.ask(b"", LARGE)
            await link.close()
            return server.discovered

    assert run(scenario) == 1


def test_a_server_whose_callers_send_their_key_is_not_spoken_to() -> None:
    async def scenario() -> str:
        async with serving(SECRET) as server:

            async def discover() -> DatagramEndpoint:
                return replace(await server.discover(), version=1)

            link = DatagramLink("127.0.0.1", discover, api_key=SECRET)
            with pytest.raises(ConfigError, match="update it first") as caught:
                await link.ask(b"", LARGE)
            await link.close()
            assert server.udp.received_bytes == 0
            return str(caught.value)

    assert SECRET not in run(scenario)


def test_a_certificate_that_was_renewed_is_learned_by_asking_again() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            await link.ask(b"1", LARGE)
            server.identity = own_identity()
            server.udp.renew(server.identity)
            assert await link.ask(b"2", LARGE) == (Status.OK, b"2"), "what is open goes on"
            for session in list(server.udp.sessions.values()):
                session._protocol.close(0)
            assert await link.ask(b"3", LARGE) == (Status.OK, b"3")
            assert server.discovered == 2

    run(scenario)


def test_a_restarted_server_is_discovered_and_asked_again() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            await link.ask(b"1", LARGE)
            pending = asyncio.create_task(link.ask(b"never", LARGE, timeout_s=20.0))
            await until(lambda: not server.udp.idle)
            await server.udp.close()
            await server.start(api_key=SECRET)
            assert await link.ask(b"2", LARGE) == (Status.OK, b"2")
            assert server.discovered >= 2
            assert not pending.done(), "it is asked again, and again not answered"
            pending.cancel()

    run(scenario)


def test_a_dead_port_is_given_up_within_the_callers_time() -> None:
    async def scenario() -> str:
        async with linked() as (server, link):
            server.port = 9
            started = asyncio.get_running_loop().time()
            with pytest.raises(ConnectionLost) as caught:
                await link.ask(b"", LARGE, timeout_s=0.7)
            assert asyncio.get_running_loop().time() - started < 5.0
            return str(caught.value)

    assert "no connection to 127.0.0.1" in run(scenario)


def test_a_peer_that_offers_nothing_is_not_asked_again_and_again() -> None:
    asked = []

    async def discover() -> DatagramEndpoint:
        asked.append(1)
        raise ConfigError("no datagram transport here")

    async def scenario() -> None:
        link = DatagramLink("127.0.0.1", discover)
        with pytest.raises(ConfigError, match="no datagram transport"):
            await link.ask(b"", LARGE)
        await link.close()
        with pytest.raises(HawkVisionError):
            await link.ask(b"", LARGE)

    run(scenario)
    assert len(asked) == 1


def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    async def scenario() -> None:
        async with linked() as (_, link):
            with pytest.raises(TimeoutError):
                await link.ask(b"never", LARGE, timeout_s=0.5)
            with pytest.raises(TimeoutError):
                await link.ask(b"never", LARGE, deadline_s=0.05)

    run(scenario)


def test_every_image_is_answered_at_20_percent_loss() -> None:
    async def scenario() -> tuple[list[tuple[Status, bytes]], LinkView]:
        async with linked() as (server, link):
            spec = LinkSpec.parse("rate=50mbit,delay=5ms,loss=20%,queue=100kB,seed=3")
            async with UdpRelay(("127.0.0.1", server.udp.port), spec) as relay:
                server.port = relay.address[1]
                return [await link.ask(b"ok", LARGE) for _ in range(25)], link.state()

    replies, state = run(scenario)
    assert replies == [(Status.OK, b"ok")] * 25
    assert state.known
    assert state.plan is not None
    assert state.plan.parity > choose(QUIET, None).parity


def test_a_link_that_went_dead_is_left_for_one_that_lives() -> None:
    async def scenario() -> tuple[Status, bytes]:
        async with linked() as (server, link), UdpRelay(("127.0.0.1", server.udp.port), LinkSpec()) as relay:
            server.port = relay.address[1]
            await link.ask(b"1", LARGE)
            relay.blackhole(True)
            server.port = None
            return await link.ask(b"2", LARGE, timeout_s=30.0)

    assert run(scenario) == (Status.OK, b"2")


def test_more_kinds_of_requests_than_one_connection_takes_use_the_next() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            slow = asyncio.create_task(link.ask(b"later", SMALL, timeout_s=60.0))
            kinds = [b"%d" % number for number in range(MAX_CLIENT_TEMPLATES + 10)]
            for kind in kinds:
                assert await link.ask(kind, SMALL) == (Status.OK, kind)
            assert len(server.udp.sessions) == 2
            assert not slow.done()
            sent_bytes = link.sent_bytes
            server.now.set()
            assert await slow == (Status.OK, b"later")
            await until(lambda: len(server.udp.sessions) == 1)
            assert link.sent_bytes >= sent_bytes
            assert sum(each.template == b"later" for each in server.arrived) == 1, "nobody was asked again"

    run(scenario)


def test_a_request_too_long_for_datagrams_is_refused_and_others_go_on() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            slow = asyncio.create_task(link.ask(b"later", SMALL, timeout_s=60.0))
            await until(lambda: bool(server.udp.sessions))
            with pytest.raises(BadField, match=f"at most {MAX_TEMPLATE}"):
                await link.ask(b"x" * (MAX_TEMPLATE + 1), SMALL)
            assert (await link.ask(b"x" * MAX_TEMPLATE, SMALL))[0] is Status.OK
            server.now.set()
            assert await slow == (Status.OK, b"later")
            assert server.discovered == 1

    run(scenario)


def test_of_tasks_that_end_together_a_response_counts_before_a_failure() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def ended(outcome: tuple[Status, bytes] | Exception) -> asyncio.Future[tuple[Status, bytes]]:
            future: asyncio.Future[tuple[Status, bytes]] = loop.create_future()
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
            return future

        good, refused = (Status.OK, b"it"), (Status.REFUSED, b"no")
        nothing, lost = (Status.EXPIRED, b""), ConnectionLost("gone")
        cases: list[tuple[list[tuple[Status, bytes] | Exception], tuple[Status, bytes] | None]] = [
            ([nothing, good], good),
            ([good, lost], good),
            ([refused, good], good),
            ([refused, nothing], refused),
            ([nothing, (Status.NO_TEMPLATE, b"")], None),
        ]
        for outcomes, expected in cases:
            for order in (outcomes, outcomes[::-1]):
                assert first_response([ended(each) for each in order]) == expected
        with pytest.raises(ConnectionLost):
            first_response([ended(nothing), ended(lost)])

    run(scenario)


@pytest.mark.parametrize(
    ("silent_s", "rtt_s", "gone"), [(1.1, None, True), (0.9, 0.01, False), (1.1, 0.01, True), (1.7, 0.6, False)]
)
def test_a_peer_is_gone_after_a_second_but_not_before_it_can_have_answered(
    silent_s: float, rtt_s: float | None, gone: bool
) -> None:
    assert is_gone(silent_s, rtt_s) == gone


def test_closing_fails_pending_requests() -> None:
    async def scenario() -> None:
        async with linked() as (server, link):
            waiting = asyncio.create_task(link.ask(b"never", LARGE))
            await until(lambda: bool(server.udp.sessions))
            await link.close()
            with pytest.raises(ConnectionLost):
                await waiting
            await link.close()

    run(scenario)
