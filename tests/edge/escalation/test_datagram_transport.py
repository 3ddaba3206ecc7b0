"""The datacenter client with the datagram transport: real sockets, a test peer, and a relay as the link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec
import pytest

from edge.escalation.client import DatacenterClient
from edge.escalation.transport import Escalation, Ingress, ReplyLate
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import BadImage, EscalationFailed, HawkVisionError
from hawkvision.core.escalation_api import EscalationReply, EscalationRequest, IntermediateOffer
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.trace_context import start_trace
from hawkvision.core.types import AccuracyStatus, Answer, MaxAccuracyDrop, Tier
from hawkvision.network.transport_choice import SLOW_AMONG, Transport
from hawkvision.tasks.class_scores import Score
from hawkvision.transport.congestion.loss_tolerant import LossTolerant
from hawkvision.transport.congestion.path_measurement import PathMeasurement
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.edge.bench import Bench, bench, known, misses, outcomes
from tests.edge.peer import ANSWER_CLASS, INTERMEDIATE_CLASS, Peer, running_peer
from tests.hawkvision.cascade.synthetic import SHA
from tests.hawkvision.tasks.classes import TEN, top_k
from tests.images import encoded
from tests.waiting import WAIT_LIMIT_S, until

IMAGE = encoded(height=128, width=128)
LARGE = encoded(height=600, width=600)
HUGE = encoded(".png", height=700, width=700)
"""More than fits datagrams as it is."""
EDGE_CLASS, BARELY = 3, 0.5
"""What the bench's edge stage says, and a lead by which it is not sure of it."""
HURRIED = EscalationRequest(variant="reference", deadline_ms=2_000.0)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with running_peer(datagram=True) as peer:
        yield peer


@asynccontextmanager
async def linked(
    peer: Peer, transport: Literal["tcp", "datagram", "auto"] = "datagram", metrics: EdgeMetrics | None = None
) -> AsyncIterator[DatacenterClient]:
    link = None if metrics is None else metrics.link("digits")
    datacenter = DatacenterClient(Ingress(peer.url), TEN, MonotonicClock(), transport=transport, metrics=link)
    try:
        if transport == "datagram" and peer.offer is not None:
            await until(lambda: datacenter.transport is Transport.DATAGRAM)
        yield datacenter
    finally:
        await datacenter.close()


def infer(
    peer: Peer, request: EscalationRequest = HURRIED, body: bytes = IMAGE, *, lossless: bool = False
) -> EscalationReply:
    async def ask() -> EscalationReply:
        async with linked(peer) as datacenter:
            return (await datacenter.infer(Escalation(body, request, start_trace(), 10.0, lossless=lossless))).reply

    return asyncio.run(ask())


def test_images_travel_as_datagrams_if_the_datacenter_offers_them(peer: Peer) -> None:
    assert top_k(infer(peer))[0].index == ANSWER_CLASS
    assert (len(peer.datagrams), peer.bodies) == (1, [])
    assert peer.datagrams[0][0] == msgspec.structs.replace(HURRIED, deadline_ms=None)


def test_datagrams_use_the_configured_congestion_controller(peer: Peer) -> None:
    made = list[LossTolerant]()

    class Noted(LossTolerant):
        def __init__(self, path: PathMeasurement, now: float) -> None:
            made.append(self)
            super().__init__(path, now)

    async def scenario() -> None:
        datacenter = DatacenterClient(Ingress(peer.url), TEN, MonotonicClock(), transport="datagram", congestion=Noted)
        try:
            await until(lambda: datacenter.transport is Transport.DATAGRAM)
        finally:
            await datacenter.close()

    asyncio.run(scenario())
    assert made


def test_the_key_is_sent_with_images_and_not_with_the_request_for_the_datagram_address(peer: Peer) -> None:
    async def scenario() -> None:
        datacenter = DatacenterClient(
            Ingress(peer.url, "a-key-of-some-length"), TEN, MonotonicClock(), transport="auto"
        )
        try:
            await until(lambda: bool(peer.transport_keys))
            await datacenter.infer(
                Escalation(HUGE, EscalationRequest(variant="reference"), start_trace(), 10.0, lossless=True)
            )
        finally:
            await datacenter.close()

    asyncio.run(scenario())
    assert set(peer.transport_keys) == {None}
    assert [headers["authorization"] for headers in peer.headers] == ["Bearer a-key-of-some-length"]


def test_an_intermediate_stage_is_asked_over_datagrams_too(peer: Peer) -> None:
    peer.intermediate, peer.intermediate_score = "medium", 0.8
    request = EscalationRequest(variant="medium", intermediate=IntermediateOffer(Score.TOP1, 0.75, "reference"))
    assert top_k(infer(peer, request))[0].index == INTERMEDIATE_CLASS


def test_a_progressive_request_gets_interim_answers_over_datagrams_too(peer: Peer) -> None:
    peer.parts, peer.breaks_off = [INTERMEDIATE_CLASS], True
    request = msgspec.structs.replace(HURRIED, progressive=True)
    reply = infer(peer, request)
    assert (top_k(reply)[0].index, reply.complete, reply.comparable) == (INTERMEDIATE_CLASS, False, False)
    assert infer(peer).complete


def test_an_interim_answer_is_returned_at_once_if_the_final_one_is_hardly_ever_on_time(peer: Peer) -> None:
    peer.parts, peer.delay_s = [INTERMEDIATE_CLASS], 60.0
    hurried = msgspec.structs.replace(HURRIED, progressive=True, deadline_ms=50_000.0)

    async def scenario() -> EscalationReply:
        async with linked(peer) as datacenter:
            misses(datacenter._selector.carrier.rest, 60_000.0, datacenter._clock.now())
            asking = datacenter.infer(Escalation(IMAGE, hurried, start_trace(), 50.0), wait_full_deadline=False)
            return (await asyncio.wait_for(asking, 20.0)).reply

    reply = asyncio.run(scenario())
    assert (top_k(reply)[0].index, reply.complete) == (INTERMEDIATE_CLASS, False)


def test_round_trips_are_recorded_for_each_transport(peer: Peer) -> None:
    async def scenario() -> tuple[int, int]:
        async with linked(peer) as datacenter:
            for body in (IMAGE, IMAGE, HUGE):
                await datacenter.infer(Escalation(body, HURRIED, start_trace(), 10.0, lossless=True))
            return len(datacenter._selector.carrier.breaker.times._observations), len(
                datacenter.link.times._observations
            )

    assert asyncio.run(scenario()) == (2, 1)
    assert peer.bodies == [HUGE]


def test_a_large_image_with_a_deadline_is_encoded_anew_and_the_reply_says_so(peer: Peer) -> None:
    reply = infer(peer, body=LARGE)
    assert reply.quality is not None
    assert not reply.whole
    assert len(peer.datagrams[0][1]) < len(LARGE)


@pytest.mark.parametrize(("request_", "lossless"), [(HURRIED, True), (EscalationRequest(variant="reference"), False)])
def test_images_arrive_unchanged_if_lossless_or_without_a_deadline(
    peer: Peer, request_: EscalationRequest, lossless: bool
) -> None:
    assert infer(peer, request_, LARGE, lossless=lossless).whole
    assert peer.datagrams[0][1] == LARGE


def test_an_image_that_does_not_fit_datagrams_goes_over_tcp(peer: Peer) -> None:
    assert len(HUGE) > 300_000
    assert infer(peer, body=HUGE, lossless=True).whole
    assert (peer.datagrams, peer.bodies) == ([], [HUGE])


@pytest.mark.parametrize(
    ("behaviour", "body", "error", "says"),
    [
        ({"status": 429}, IMAGE, EscalationFailed, "refused with HTTP 429"),
        ({"garbage": True}, IMAGE, EscalationFailed, "sent a malformed reply"),
        ({"model": "another"}, IMAGE, EscalationFailed, "sent an impossible reply"),
        ({"delay_s": 10.0}, IMAGE, EscalationFailed, "had not answered"),
        ({}, IMAGE[:20], BadImage, "JPEG"),
    ],
)
def test_errors_over_datagrams_are_those_over_http(
    peer: Peer, behaviour: dict[str, object], body: bytes, error: type[HawkVisionError], says: str
) -> None:
    for name, value in behaviour.items():
        setattr(peer, name, value)
    with pytest.raises(error, match=says):
        infer(peer, EscalationRequest(variant="reference", deadline_ms=300.0), body)


def test_a_datacenter_without_datagrams_is_asked_over_tcp_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(peer: Peer) -> None:
        async with linked(peer) as datacenter:
            await until(lambda: bool(caplog.records))
            for _ in range(3):
                await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 10.0))
            assert datacenter.transport is Transport.TCP

    with caplog.at_level(logging.WARNING), running_peer() as peer:
        asyncio.run(ask(peer))
    assert len(peer.bodies) == 3
    assert [r.message for r in caplog.records if "does not offer the datagram transport" in r.message]
    assert len(caplog.records) == 1


def test_a_datagram_peer_that_falls_silent_leaves_images_to_tcp_until_it_is_back(peer: Peer) -> None:
    async def scenario() -> None:
        assert peer.offer is not None
        async with UdpRelay(("127.0.0.1", peer.offer.port), LinkSpec()) as relay:
            peer.offer = msgspec.structs.replace(peer.offer, port=relay.address[1])
            async with linked(peer) as datacenter:
                relay.blackhole(True)
                await until(lambda: datacenter.transport is Transport.TCP)
                escalated = await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 10.0))
                assert top_k(escalated.reply)[0].index == ANSWER_CLASS
                relay.blackhole(False)
                await until(lambda: datacenter.transport is Transport.DATAGRAM)

    asyncio.run(scenario())
    assert len(peer.bodies) == 1


@pytest.mark.slow
def test_images_move_to_datagrams_when_the_link_begins_to_lose(peer: Peer) -> None:
    metrics = EdgeMetrics()

    def sample(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": "digits", **labels}) or 0.0

    async def scenario() -> None:
        assert peer.offer is not None
        async with UdpRelay(("127.0.0.1", peer.offer.port), LinkSpec.parse("delay=5ms,seed=1")) as relay:
            peer.offer = msgspec.structs.replace(peer.offer, port=relay.address[1])
            async with linked(peer, "auto", metrics) as datacenter:
                await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 10.0))
                # A machine that stands still for a moment looks like a link that loses.
                await until(lambda: datacenter.loss == 0.0 and datacenter.transport is Transport.TCP)
                assert sample("uplink_transport", transport="tcp") == 1.0
                relay.up = LinkSpec.parse("delay=5ms,loss=8%,seed=1")
                await until(lambda: datacenter.transport is Transport.DATAGRAM)
                await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 10.0))

    asyncio.run(scenario())
    assert (len(peer.bodies), len(peer.datagrams)) == (1, 1)
    assert sample("uplink_loss_ratio") != 0.0


def test_images_move_to_datagrams_where_tcp_is_always_too_slow_for_their_deadlines(peer: Peer) -> None:
    async def scenario() -> int:
        assert peer.offer is not None
        async with UdpRelay(("127.0.0.1", peer.offer.port), LinkSpec()) as relay:
            peer.offer = msgspec.structs.replace(peer.offer, port=relay.address[1])
            async with linked(peer, "auto") as datacenter:
                await until(lambda: datacenter.rtt_s is not None)
                peer.delay_s = 0.4  # of which the tier says nothing
                await datacenter.infer(Escalation(IMAGE, EscalationRequest(variant="reference"), start_trace(), 10.0))
                relay.up = LinkSpec.parse("delay=300ms")  # behind the images that are on their way
                await until(lambda: datacenter.rtt_s is not None and datacenter.rtt_s > 0.2)
                asked = 0
                while datacenter.transport is Transport.TCP:
                    with suppress(ReplyLate):
                        await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 0.2))
                    asked += 1
                peer.delay_s, relay.up = 0.0, LinkSpec()
                await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 10.0))
                return asked

    assert SLOW_AMONG <= asyncio.run(scenario()) <= 2 * SLOW_AMONG
    assert len(peer.datagrams) == 1


def test_images_stay_with_tcp_where_no_transport_could_be_in_time(peer: Peer) -> None:
    async def scenario() -> Transport:
        assert peer.offer is not None
        async with UdpRelay(("127.0.0.1", peer.offer.port), LinkSpec.parse("delay=150ms")) as relay:
            peer.offer = msgspec.structs.replace(peer.offer, port=relay.address[1])
            async with linked(peer, "auto") as datacenter:
                await until(lambda: datacenter.rtt_s is not None and datacenter.rtt_s > 0.1)
                peer.delay_s = 0.4
                for _ in range(2 * SLOW_AMONG):
                    with suppress(ReplyLate):
                        await datacenter.infer(Escalation(IMAGE, HURRIED, start_trace(), 0.1))
                return datacenter.transport

    assert asyncio.run(scenario()) is Transport.TCP


@asynccontextmanager
async def node(peer: Peer, *, conditions: bool, intermediate: bool = False) -> AsyncIterator[Bench]:
    """A node that is sure of nothing, over a lossy link of which it knows that it is quick and loses nothing."""
    peer.model, peer.fingerprint, peer.top_k = "large", SHA, [(EDGE_CLASS, 0.99)]
    async with bench(
        peer, BARELY, transport="datagram", conditions=conditions, intermediate=intermediate, audit_share=1.0
    ) as it:
        await known(it.node)
        datacenter = it.node.datacenter
        assert datacenter is not None
        for _ in range(16):  # fifty datagrams tell what the link loses; and now probes come often
            await datacenter.infer(Escalation(IMAGE, EscalationRequest(variant="large"), start_trace(), 10.0))
        await until(lambda: datacenter.loss == 0.0 and datacenter.transport is Transport.DATAGRAM)
        async with asyncio.timeout(WAIT_LIMIT_S):  # a machine that stood still is remembered as loss, or as a slow link
            while not datacenter.fits_lossless(LARGE, 2.0):
                await datacenter.infer(Escalation(IMAGE, EscalationRequest(variant="large"), start_trace(), 10.0))
        yield it


def escalated(peer: Peer, body: bytes, *, conditions: bool, deadline_ms: float | None) -> tuple[Answer, bool]:
    """The answer to an image, and whether it was compared with the edge's own."""

    async def scenario() -> tuple[Answer, bool]:
        async with node(peer, conditions=conditions) as it:
            target = MaxAccuracyDrop(0.05)
            answer = await it.ask(body=body, target=target, deadline_ms=deadline_ms)
            return answer, outcomes(it) > 0

    return asyncio.run(scenario())


@pytest.mark.slow
def test_an_answer_to_a_coarser_image_than_the_edge_saw_claims_nothing(peer: Peer) -> None:
    answer, compared = escalated(peer, HUGE, conditions=True, deadline_ms=5_000.0)
    assert not compared, "the edge looked at another image"
    assert (answer.tier, answer.degraded) == (Tier.DATACENTER, False)
    assert (answer.accuracy.status, answer.accuracy.max_drop) == (AccuracyStatus.BEST_EFFORT, None)


def test_an_answer_to_a_coarser_image_is_degraded_where_its_condition_was_not_measured(peer: Peer) -> None:
    answer, _ = escalated(peer, HUGE, conditions=False, deadline_ms=5_000.0)
    assert (answer.tier, answer.accuracy.status, answer.degraded) == (Tier.DATACENTER, AccuracyStatus.BEST_EFFORT, True)


def test_an_answer_to_an_unchanged_image_is_certified_as_over_http(peer: Peer) -> None:
    answer, compared = escalated(peer, LARGE, conditions=False, deadline_ms=None)
    assert compared
    assert (answer.tier, answer.accuracy.status, answer.degraded) == (Tier.DATACENTER, AccuracyStatus.CERTIFIED, False)


def test_over_a_fast_link_images_travel_unchanged_and_an_intermediate_stage_may_answer(peer: Peer) -> None:
    peer.intermediate, peer.intermediate_fingerprint, peer.intermediate_score = "medium", SHA, 0.99

    async def scenario() -> Answer:
        async with node(peer, conditions=False, intermediate=True) as it:
            return await it.ask(body=LARGE, target=MaxAccuracyDrop(0.05), deadline_ms=5_000.0)

    answer = asyncio.run(scenario())
    assert (answer.model, answer.index, answer.accuracy.status) == (
        "medium",
        INTERMEDIATE_CLASS,
        AccuracyStatus.CERTIFIED,
    )
    assert peer.datagrams[-1][1] == LARGE


def test_over_a_fast_link_images_to_the_reference_stage_travel_unchanged_and_are_certified_as_over_http(
    peer: Peer,
) -> None:
    answer, compared = escalated(peer, LARGE, conditions=False, deadline_ms=5_000.0)
    assert compared
    assert (answer.tier, answer.accuracy.status, answer.degraded) == (Tier.DATACENTER, AccuracyStatus.CERTIFIED, False)
    assert peer.datagrams[-1][1] == LARGE


@pytest.mark.parametrize(
    ("body", "deadline_s", "whole"),
    [(LARGE, 2.0, True), (LARGE, 0.03, False), (HUGE, 2.0, False)],
    ids=["quick", "no time left for the peer", "too large"],
)
def test_an_image_that_the_link_cannot_carry_unchanged_in_time_is_encoded_anew(
    peer: Peer, body: bytes, deadline_s: float, whole: bool
) -> None:
    async def scenario() -> bool:
        async with node(peer, conditions=False) as it:
            assert it.node.datacenter is not None
            return it.node.datacenter.fits_lossless(body, deadline_s)

    assert asyncio.run(scenario()) is whole


def test_over_an_unmeasured_link_images_do_not_travel_unchanged(peer: Peer) -> None:
    async def scenario() -> bool:
        async with linked(peer) as datacenter:
            return datacenter.fits_lossless(LARGE, 2.0)

    assert asyncio.run(scenario()) is False


def test_after_an_unchanged_image_was_lost_others_are_encoded_anew(peer: Peer) -> None:
    async def scenario() -> list[bool]:
        assert peer.offer is not None
        async with UdpRelay(("127.0.0.1", peer.offer.port), LinkSpec.parse("delay=2ms,seed=1")) as relay:
            peer.offer = msgspec.structs.replace(peer.offer, port=relay.address[1])
            async with node(peer, conditions=False) as it:
                datacenter = it.node.datacenter
                assert datacenter is not None
                before = datacenter.fits_lossless(LARGE, 2.0)
                relay.up = LinkSpec.parse("delay=2ms,rate=200kbit,seed=1")  # two seconds of it
                hurried = EscalationRequest(variant="large", deadline_ms=500.0)
                with pytest.raises(EscalationFailed, match="504"):
                    await datacenter.infer(Escalation(LARGE, hurried, start_trace(), 10.0, lossless=True))
                return [before, datacenter.fits_lossless(LARGE, 1_000.0)]

    assert asyncio.run(scenario()) == [True, False]
