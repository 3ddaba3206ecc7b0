"""The datagram server in front of a real node: answers to partial images, and their guarantees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Final

import numpy as np
import pytest

from edge.servers.datagram import DatagramServer
from edge.servers.shared.frontend import Frontend
from edge.serving.tasks import ServedTasks
from hawkvision.core.clock import Deadline
from hawkvision.core.errors import ConfigError
from hawkvision.core.escalation_api import DatagramEndpoint
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.types import OnMiss
from hawkvision.servers.keys import Keys
from hawkvision.transport.client.datagram_client import DatagramLink
from hawkvision.transport.coding.image_coding import Complete, Partial
from hawkvision.transport.congestion.registry import DEFAULT
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.session import Incoming
from hawkvision.transport.settings import DatagramSettings
from tests.edge.bench import SURE, UNSURE, Bench, bench, known, run
from tests.edge.peer import ANSWER_CLASS, Peer
from tests.images import encoded, flat_png
from tests.waiting import until

IMAGE = encoded()
OTHER = encoded(seed=1)
TINY = 1e-9
MASK = np.ones((4, 5), np.bool_)


@dataclass
class HttpServer:
    """A server and what is behind it; `ask` is what the transport does with an image."""

    bench: Bench
    datagram: DatagramServer

    async def ask(self, incoming: Incoming) -> tuple[Status, dict[str, Any]]:
        status, body = await self.datagram.answer(incoming)
        return status, json.loads(body)

    def count(self, outcome: str) -> float:
        return (
            self.bench.node.metrics.registry.get_sample_value("hawkvision_datagram_images_total", {"outcome": outcome})
            or 0.0
        )


@asynccontextmanager
async def server(
    peer: Peer | None,
    lead: float,
    max_body_bytes: int = 100_000,
    max_pixels: int = 1_000_000,
    congestion: str = DEFAULT,
) -> AsyncIterator[HttpServer]:
    async with bench(peer, lead, conditions=True, max_pixels=max_pixels) as it:
        if peer is not None:
            await known(it.node)
        config = EdgeConfig(max_body_bytes=max_body_bytes, features=(DatagramSettings(congestion_control=congestion),))
        frontend = Frontend(it.node.metrics, it.clock, Keys(config.api_key), max_body_bytes)
        frontend.mark_ready(ServedTasks([it.node]))
        datagram = await DatagramServer.open(config, 0, frontend, 64)
        try:
            yield HttpServer(it, datagram)
        finally:
            await datagram.close(5.0)


def test_a_congestion_controller_that_there_is_not_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="datagram_congestion_control"):
            async with server(None, 0.5, congestion="none"):
                pass

    asyncio.run(scenario())


def incoming(
    arrived: Complete | Partial,
    template: bytes = b"",
    *,
    meta: bytes = b"",
    deadline_s: float | None = None,
    better: asyncio.Future[Incoming] | None = None,
) -> Incoming:
    now = monotonic()
    deadline = None if deadline_s is None else Deadline.after_s(deadline_s, now)
    return Incoming(template, meta, arrived, now, deadline, better)


LOOSE: Final = b"max_accuracy_drop=0.06"
"""A target at which the edge may answer partial images."""


def part(fraction: float, quality: int | None = 80) -> Partial:
    return Partial(IMAGE, quality, fraction, MASK)


def asked(
    peer: Peer | None, lead: float, scenario: Callable[[HttpServer], Awaitable[tuple[Status, dict[str, Any]]]]
) -> dict[str, Any]:
    """The answer that the scenario ends with."""

    async def play() -> tuple[Status, dict[str, Any]]:
        async with server(peer, lead) as it:
            return await scenario(it)

    status, answer = run(play)
    assert status is Status.OK, answer
    return answer


def test_a_complete_image_has_the_guarantee_of_http(large: Peer) -> None:
    answer = asked(large, SURE, lambda it: it.ask(incoming(Complete(IMAGE, None), LOOSE)))
    assert (answer["index"], answer["received_fraction"], answer["degraded"]) == (3, 1.0, False)
    assert (answer["accuracy"]["status"], answer["accuracy"]["max_drop"]) == ("certified", 0.06)


def test_a_coarser_image_is_answered_at_its_own_temperature_and_not_certified(large: Peer) -> None:
    answer = asked(large, SURE, lambda it: it.ask(incoming(Complete(IMAGE, 80))))
    assert (answer["received_fraction"], answer["degraded"]) == (1.0, False)
    assert (answer["accuracy"]["status"], answer["accuracy"]["max_drop"]) == ("best_effort", None)
    assert answer["confidence"] < 1 - TINY, "cooled down by the temperature of that condition"


def test_a_partial_image_is_answered_at_once_where_its_threshold_accepts_it(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        never: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        return await it.ask(incoming(part(0.80009), LOOSE, better=never))

    answer = asked(large, SURE, scenario)
    assert (answer["tier"], answer["received_fraction"]) == ("edge", 0.8)
    assert (answer["degraded"], answer["accuracy"]["status"], answer["accuracy"]["max_drop"]) == (
        False,
        "best_effort",
        None,
    )


def test_an_uncertain_partial_image_waits_for_the_rest_and_the_second_look_claims_nothing(large: Peer) -> None:
    """Two looks have two chances to accept a wrong answer, and each certificate allows for one."""

    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        rest: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(it.ask(incoming(part(0.8), LOOSE, better=rest)))
        await until(lambda: it.bench.backend.inferred == 1)
        assert not asking.done()
        it.bench.backend.lead = SURE
        rest.set_result(incoming(Complete(IMAGE, None), LOOSE))
        answer = await asking
        assert it.bench.backend.inferred == 2
        return answer

    answer = asked(large, UNSURE, scenario)
    assert (answer["tier"], answer["received_fraction"], answer["degraded"]) == ("edge", 1.0, False)
    assert (answer["accuracy"]["status"], answer["accuracy"]["max_drop"]) == ("best_effort", None)


def test_if_no_partial_answer_can_be_accepted_the_rest_is_awaited_without_inference(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        rest: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(it.ask(incoming(part(0.3), b"quality=fast", better=rest)))
        await asyncio.sleep(0)
        rest.set_result(incoming(Complete(IMAGE, None), b"quality=fast"))
        answer = await asking
        assert it.bench.backend.inferred == 1
        return answer

    answer = asked(large, SURE, scenario)
    assert (answer["received_fraction"], answer["accuracy"]["status"]) == (1.0, "certified")


def test_uncertain_partial_images_are_escalated_as_received(large: Peer) -> None:
    arrived = Partial(OTHER, 80, 0.8, MASK)
    answer = asked(large, UNSURE, lambda it: it.ask(incoming(arrived, LOOSE)))
    assert (answer["tier"], answer["index"], answer["received_fraction"]) == ("datacenter", ANSWER_CLASS, 0.8)
    assert large.bodies[-1] == OTHER
    assert (answer["accuracy"]["status"], answer["degraded"]) == ("best_effort", False)


@pytest.mark.parametrize("template", [b"", b"quality=best", b"max_accuracy_drop=0.06"])
def test_without_a_threshold_of_its_condition_an_image_is_degraded_even_by_the_datacenter(
    large: Peer, template: bytes
) -> None:
    answer = asked(large, SURE, lambda it: it.ask(incoming(part(0.3), template)))
    assert (answer["tier"], answer["degraded"], answer["received_fraction"]) == ("datacenter", True, 0.3)
    assert (answer["accuracy"]["status"], answer["accuracy"]["max_drop"]) == ("best_effort", None)


def test_a_node_alone_answers_uncertain_partial_images_as_degraded() -> None:
    answer = asked(None, SURE, lambda it: it.ask(incoming(part(0.2, 27))))
    assert (answer["tier"], answer["degraded_reason"]) == ("edge", "partial_image")
    assert answer["accuracy"]["status"] == "best_effort"


def test_on_miss_fail_refuses_a_partial_image_below_target_and_not_a_coarse_complete_one() -> None:
    async def scenario() -> tuple[tuple[Status, dict[str, Any]], ...]:
        async with server(None, SURE) as it:
            fail = b"on_miss=fail&quality=best"
            cut = await it.ask(incoming(part(0.3), fail, deadline_s=5.0))
            coarse = await it.ask(incoming(Complete(IMAGE, 80), b"on_miss=fail", deadline_s=5.0))
            return cut, coarse

    (cut_status, cut), (coarse_status, coarse) = run(scenario)
    assert (cut_status, cut["code"], cut["status"]) == (Status.REFUSED, "deadline_missed", 504)
    assert (coarse_status, coarse["deadline_met"]) == (Status.OK, True)


def test_the_deadline_of_the_fragments_is_the_requests(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        large.delay_s = 30.0
        return await it.ask(incoming(Complete(IMAGE, None), deadline_s=0.4))

    answer = asked(large, UNSURE, scenario)
    assert (answer["tier"], answer["degraded"]) == ("edge", True)
    assert answer["timing_ms"]["total"] < 30_000


def test_a_deadline_that_passed_in_transit_gets_the_fastest_answer(large: Peer) -> None:
    answer = asked(large, UNSURE, lambda it: it.ask(incoming(Complete(IMAGE, None), deadline_s=-1.0)))
    assert (answer["tier"], answer["degraded"], answer["deadline_met"]) == ("edge", True, False)


def test_meta_names_the_stream(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        before = it.bench.counted("streams")
        answer = await it.ask(incoming(Complete(IMAGE, None), meta="Tür 3".encode()))
        assert it.bench.counted("streams") == before + 2, "the stream and its caller"
        return answer

    asked(large, SURE, scenario)


@pytest.mark.parametrize(
    ("image", "template", "meta", "code", "status"),
    [
        (IMAGE, b"quality=nonsense", b"", "bad_field", 400),
        (IMAGE, b"\xff", b"", "bad_field", 400),
        (IMAGE, b"", b"\xff", "bad_field", 400),
        (IMAGE, b"stream=a", b"b", "bad_field", 400),
        (IMAGE, b"task=other", b"", "not_found", 404),
        (b"%PDF-1.7, no more", b"", b"", "unsupported_media", 415),
        (IMAGE[: len(IMAGE) // 2], b"quality=fast", b"", "bad_image", 400),
        (b"\xff\xd8" + bytes(100_000), b"", b"", "too_large", 413),
    ],
)
def test_refusals_are_those_of_http(image: bytes, template: bytes, meta: bytes, code: str, status: int) -> None:
    async def scenario() -> tuple[tuple[Status, dict[str, Any]], tuple[Status, dict[str, Any]]]:
        async with server(None, SURE) as it:
            refused = await it.ask(incoming(Complete(image, None), template, meta=meta))
            return refused, await it.ask(incoming(Complete(IMAGE, None)))

    (refused, body), (after, _) = run(scenario)
    assert (refused, body["code"], body["status"]) == (Status.REFUSED, code, status)
    assert after is Status.OK, "a bad image does not harm the next one"


def test_a_full_queue_says_when_to_retry() -> None:
    async def scenario() -> list[tuple[Status, dict[str, Any]]]:
        async with server(None, SURE) as it:
            it.bench.backend.gate.clear()
            asking = [asyncio.create_task(it.ask(incoming(Complete(IMAGE, None)))) for _ in range(80)]
            await until(lambda: any(task.done() for task in asking))
            it.bench.backend.gate.set()
            return await asyncio.gather(*asking)

    replies = run(scenario)
    refused = [body for status, body in replies if status is Status.REFUSED]
    assert 0 < len(refused) < len(replies)
    assert {(body["code"], body["status"]) for body in refused} == {("overloaded", 429)}
    assert all(body["retry_after_s"] > 0 for body in refused)


def test_a_stopping_server_refuses_new_images_and_answers_accepted_ones() -> None:
    async def scenario() -> tuple[tuple[Status, dict[str, Any]], ...]:
        async with server(None, SURE) as it:
            it.bench.backend.gate.clear()
            inside = asyncio.create_task(it.ask(incoming(Complete(IMAGE, None))))
            read = it.bench.node.metrics.registry.get_sample_value
            await until(lambda: read("hawkvision_requests_in_flight") == 1.0)
            it.datagram.stop()
            late = await it.ask(incoming(Complete(IMAGE, None)))
            it.bench.backend.gate.set()
            return late, await inside

    (late, body), (inside, _) = run(scenario)
    assert (late, body["code"], inside) == (Status.REFUSED, "not_ready", Status.OK)


def test_outcomes_of_images_are_counted() -> None:
    async def scenario() -> tuple[float, ...]:
        async with server(None, SURE) as it:
            await it.ask(incoming(Complete(IMAGE, 80)))
            await it.ask(incoming(part(0.8)))
            await it.ask(incoming(part(0.3)))
            page = it.bench.node.metrics.exposition().decode()
            assert "hawkvision_datagram_sessions 0.0" in page
            assert 'hawkvision_datagram_dropped_datagrams_total{reason="no_session"} 0.0' in page
            assert 'hawkvision_datagram_received_fraction_bucket{le="0.75"} 1.0' in page
            return it.count("complete"), it.count("partial"), it.count("expired")

    assert run(scenario) == (1, 2, 0)


def test_a_caller_that_cancels_loses_only_its_own_image() -> None:
    async def scenario() -> tuple[float, float]:
        async with server(None, SURE) as it:
            it.bench.backend.gate.clear()
            link = DatagramLink("127.0.0.1", lambda: offered(it.datagram.offer))
            with pytest.raises(TimeoutError):
                await link.ask(b"", IMAGE, timeout_s=0.5)
            await until(lambda: it.count("cancelled") == 1)
            it.bench.backend.gate.set()
            status, _ = await link.ask(b"", IMAGE)
            assert status is Status.OK
            await link.close()
            return it.count("complete"), it.count("cancelled")

    assert run(scenario) == (1, 1)


def test_the_rest_of_a_late_image_is_awaited_within_its_bound(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        rest: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        # As if its first fragment came a minute from now, so that no busy machine is too slow for this.
        begun = replace(incoming(part(0.3), deadline_s=-1.0, better=rest), started=monotonic() + 60.0)
        asking = asyncio.ensure_future(it.ask(begun))
        done, _ = await asyncio.wait((asking,), timeout=0.1)
        assert not done
        rest.set_result(incoming(Complete(IMAGE, None), deadline_s=-1.0))
        return await asking

    assert asked(large, SURE, scenario)["received_fraction"] == 1.0


async def offered(offer: DatagramEndpoint) -> DatagramEndpoint:
    return offer


def test_on_miss_wait_sends_no_deadline_over_the_link(large: Peer) -> None:
    async def scenario(it: HttpServer) -> tuple[Status, dict[str, Any]]:
        large.delay_s = 0.3
        return await it.ask(incoming(Complete(IMAGE, None), f"on_miss={OnMiss.WAIT}&deadline_ms=50".encode()))

    answer = asked(large, UNSURE, scenario)
    assert (answer["tier"], answer["deadline_met"]) == ("datacenter", False)


def test_an_image_with_too_many_pixels_is_not_decoded() -> None:
    async def play() -> tuple[tuple[Status, dict[str, Any]], int]:
        async with server(None, SURE, 1_000_000, max_pixels=20_000_000) as it:
            body = flat_png(3200, 3200, 6, 16)
            return await it.ask(incoming(Complete(body, None), deadline_s=0.015)), it.bench.backend.begun

    (status, answer), begun = run(play)
    assert (status, answer["status"], begun) == (Status.REFUSED, 413, 0)
