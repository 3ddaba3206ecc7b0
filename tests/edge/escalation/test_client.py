"""The datacenter client: replies to a request that names an intermediate stage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from edge.escalation.client import DatacenterClient
from edge.escalation.reply_validation import Escalated
from edge.escalation.transport import Escalation, Ingress
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.errors import EscalationFailed, RequestError
from hawkvision.core.escalation_api import EscalationRequest, IntermediateOffer, IntermediateResult
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.trace_context import start_trace
from hawkvision.network.circuit_breaker import BreakerState
from hawkvision.network.response_time import MIN_ON_TIME_PROBABILITY
from hawkvision.tasks.class_scores import Score
from tests.edge.peer import ANSWER_CLASS, INTERMEDIATE_CLASS, Peer, running_peer
from tests.hawkvision.tasks.classes import TEN, predicted, top_k

REQUEST = EscalationRequest(variant="medium", intermediate=IntermediateOffer(Score.TOP1, 0.75, "reference"))


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with running_peer(intermediate="medium") as peer:
        yield peer


def infer(peer: Peer, behaviour: Mapping[str, object], request: EscalationRequest = REQUEST) -> Escalated:
    async def ask() -> Escalated:
        datacenter = DatacenterClient(Ingress(peer.url, connections=1), TEN, MonotonicClock())
        try:
            return await datacenter.infer(Escalation(b"image", request, start_trace(), timeout_s=60.0))
        finally:
            await datacenter.close()

    peer.intermediate, peer.model, peer.intermediate_score, peer.knows_intermediate = "medium", "reference", 0.5, True
    for name, value in behaviour.items():
        setattr(peer, name, value)
    return asyncio.run(ask())


def test_a_confident_intermediate_stage_answers(peer: Peer) -> None:
    reply = infer(peer, {"intermediate_score": 0.75}).reply
    assert (reply.model, reply.score, top_k(reply)[0].index) == ("medium", 0.75, INTERMEDIATE_CLASS)


def test_the_reference_stage_answers_if_the_intermediate_one_is_not_confident(peer: Peer) -> None:
    reply = infer(peer, {"intermediate_score": 0.7499}).reply
    assert (reply.model, reply.score, top_k(reply)[0].index) == ("reference", 0.99, ANSWER_CLASS)
    assert reply.passed_over == IntermediateResult(predicted((INTERMEDIATE_CLASS, 0.0)), 0.7499)


@pytest.mark.parametrize(
    "behaviour",
    [
        {"knows_intermediate": False},
        {"knows_intermediate": False, "model": "medium"},
        {"intermediate_score": 0.9, "intermediate": "another"},
        {"model": "another"},
        {"intermediate_score": 1.5},
        {"intermediate_score": -0.5},
    ],
)
def test_a_reply_that_the_certificate_does_not_cover_is_rejected(peer: Peer, behaviour: dict[str, object]) -> None:
    with pytest.raises(EscalationFailed, match=r"sent an? (impossible|malformed) reply"):
        infer(peer, behaviour)


def test_an_intermediate_answer_to_a_request_for_the_reference_stage_is_rejected(peer: Peer) -> None:
    with pytest.raises(EscalationFailed, match="sent an impossible reply"):
        infer(peer, {"model": "medium"}, EscalationRequest(variant="reference"))


def test_the_default_setting_is_the_default_of_the_response_time_model() -> None:
    assert EdgeConfig().min_on_time_probability == MIN_ON_TIME_PROBABILITY


BEST = EscalationRequest(variant="reference")
"""Without a deadline."""


def test_a_reply_without_a_deadline_closes_the_breaker_and_is_a_sample_of_the_response_time(peer: Peer) -> None:
    async def scenario() -> None:
        clock = MonotonicClock()
        datacenter = DatacenterClient(Ingress(peer.url, connections=1), TEN, clock)
        try:
            times = datacenter.link.times
            while datacenter.admits(100.0):  # as after some outage
                times.given_up(times.sent(clock.now() - 0.1), 100.0, clock.now())
            datacenter.link.failed(clock.now())
            before = datacenter.up
            reply = await datacenter.infer(Escalation(b"image", BEST, start_trace(), timeout_s=60.0))
            assert (before, datacenter.up) == (False, True)
            assert datacenter.state is BreakerState.CLOSED
            assert datacenter.admits(2.0 * reply.round_trip_ms + 100.0)
            assert datacenter.link.times.mean_ms is not None
        finally:
            await datacenter.close()

    peer.model = "reference"
    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (400, "bad_image")])
def test_a_refusal_that_blames_the_load_or_the_image_shows_that_the_link_works(
    peer: Peer, status: int, code: str
) -> None:
    async def scenario() -> None:
        clock = MonotonicClock()
        datacenter = DatacenterClient(Ingress(peer.url, connections=1), TEN, clock)
        try:
            datacenter.link.failed(clock.now())
            with pytest.raises((EscalationFailed, RequestError)):
                await datacenter.infer(Escalation(b"image", BEST, start_trace(), timeout_s=60.0))
            assert datacenter.up
        finally:
            await datacenter.close()

    peer.status, peer.error_code = status, code
    try:
        asyncio.run(scenario())
    finally:
        peer.status = 200
