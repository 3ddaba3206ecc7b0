"""The datacenter tier as its callers meet it: one real process, Ray and all, on the no-op backend."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from hawkvision.core.escalation_api import EscalationRequest, Transports
from hawkvision.core.trace_context import start_trace
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.coding.image_coding import opaque
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.wire import Status
from tests.hawkvision.datacenter.conftest import KEY, Running, image
from tests.hawkvision.tasks.classes import read_reply, top_k

pytestmark = pytest.mark.slow
INTERMEDIATE = {"variant": "medium", "accept_score": "1", "score": "top1", "otherwise": "reference"}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(service: Running | str, body: bytes | None = None, path: str = "/v1/infer", **headers: str) -> Reply:
    """One request on a connection of its own; `variant="x"` is the header X-HawkVision-Variant."""
    short = {"variant", "task", "deadline_ms", "top_k", "accept_score", "score", "otherwise", "progressive"}
    named = {(f"X-HawkVision-{k}" if k in short else k).replace("_", "-"): v for k, v in headers.items()}
    url = service if isinstance(service, str) else service.url
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        sent = {"Authorization": f"Bearer {KEY}", **named}
        connection.request("GET" if body is None else "POST", path, body, sent)
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def test_the_best_stage_answers_when_none_is_named(service: Running) -> None:
    reply = ask(service, image(), top_k="3")
    answer = read_reply(reply.body)
    assert (reply.status, answer.model, len(top_k(answer))) == (200, "reference", 3)
    assert answer.timing_ms.total >= answer.timing_ms.infer
    assert answer.batch_size >= 1


@pytest.mark.parametrize("headers", [{}, {**INTERMEDIATE, "accept_score": "inf"}])
def test_a_progressive_reply_ends_with_the_answer_that_a_plain_one_is(
    service: Running, headers: dict[str, str]
) -> None:
    body = image()
    plain = read_reply(ask(service, body, **headers).body)
    reply = ask(service, body, progressive="1", **headers)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/jsonl")
    lines = [read_reply(line) for line in reply.body.splitlines()]
    assert [line.complete for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) >= 2
    for each in (plain, *lines):
        timing = each.timing_ms
        assert timing.decode + timing.queue + timing.infer <= timing.total
    assert lines[-1].model == plain.model
    assert [c.index for c in top_k(lines[-1])] == [c.index for c in top_k(plain)]
    assert [c.confidence for c in top_k(lines[-1])] == pytest.approx([c.confidence for c in top_k(plain)], rel=1e-5)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (image()[:600], {}, 400),
        (image(), {"progressive": "perhaps"}, 400),
        (image(), {"deadline_ms": "0.001"}, 504),
        (b"x" * 200_001, {}, 413),
    ],
)
def test_an_error_of_a_progressive_request_has_its_status(
    service: Running, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert ask(service, body, **{"progressive": "1", **headers}).status == status
    assert ask(service, image(), progressive="1").status == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (image()[:600], {}, 400, "bad_image"),
        (b"not an image", {}, 415, "unsupported_media"),
        (image(), {"top_k": "many"}, 400, "bad_field"),
        (image(), {"deadline_ms": "soon"}, 400, "bad_field"),
        (image(), {"Authorization": "Bearer wrong"}, 401, "unauthorized"),
        (image(), {"variant": "huge"}, 404, "not_found"),
        (image(), {"task": "letters"}, 404, "not_found"),
        (image(), {**INTERMEDIATE, "otherwise": "huge"}, 404, "not_found"),
        (image(), {**INTERMEDIATE, "variant": "huge"}, 404, "not_found"),
        (image(), {**INTERMEDIATE, "accept_score": "1.5"}, 400, "bad_field"),
        (image(), {"variant": "medium", "accept_score": "0.5"}, 400, "bad_field"),
        (image(), {"path": "/v1/elsewhere"}, 404, "not_found"),
        (None, {}, 405, "method_not_allowed"),
        (b"x" * 200_001, {}, 413, "too_large"),
        (image(), {"Content-Type": "text/html"}, 415, "unsupported_media"),
        (image(), {"deadline_ms": "0"}, 504, "deadline_missed"),
        (image(), {"deadline_ms": "0.001"}, 504, "deadline_missed"),
    ],
)
def test_each_documented_error_has_its_status_and_code(
    service: Running, body: bytes | None, headers: dict[str, str], status: int, code: str
) -> None:
    reply = ask(service, body, **headers)
    assert (reply.status, reply.json["code"]) == (status, code)
    assert reply.json["error"]


def test_a_body_without_a_length_is_cut_off_at_the_limit(service: Running) -> None:
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=30)
    chunks = iter([b"x" * 150_000, b"x" * 150_000])
    connection.request("POST", "/v1/infer", chunks, {"Authorization": f"Bearer {KEY}"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_full_queue_is_answered_with_429_and_when_to_come_back(service: Running) -> None:
    with ThreadPoolExecutor(96) as crowd:
        replies = list(crowd.map(lambda _: ask(service, image(400), variant="medium"), range(192)))
    shed = [r for r in replies if r.status == 429]
    assert {r.status for r in replies} == {200, 429}
    assert all(r.json["code"] == "overloaded" and int(r.headers["retry-after"]) >= 1 for r in shed)


def test_the_trace_goes_on_in_a_new_span(service: Running) -> None:
    returned = ask(service, image(), traceparent=TRACE).headers["traceparent"].split("-")
    assert returned[1] == TRACE.split("-")[1]
    assert returned[2] != TRACE.split("-")[2]


def test_a_caller_that_disconnects_does_not_harm_the_service(service: Running) -> None:
    for _ in range(8):
        connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=30)
        connection.request("POST", "/v1/infer", image(400), {"Authorization": f"Bearer {KEY}"})
        connection.close()
    assert ask(service, image()).status == 200


def series(service: Running) -> dict[str, float]:
    """The metrics page by series name."""
    page = ask(service, path="/metrics").body.decode()
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_count_an_answer_by_stage_and_its_members_by_variant(service: Running) -> None:
    before = series(service)
    ask(service, image())
    after = series(service)
    grown = {name for name, value in after.items() if value > before.get(name, 0.0)}
    assert {
        'hawkvision_datacenter_requests_total{code="200",path="/v1/infer",stage="reference",task="shapes"}',
        'hawkvision_datacenter_request_duration_seconds_count{stage="reference",task="shapes"}',
        *(
            f'hawkvision_datacenter_{name}_count{{task="shapes",variant="{variant}"}}'
            for name in ("batch_size", "queue_duration_seconds", "inference_duration_seconds")
            for variant in ("small", "medium")
        ),
    } <= grown
    assert after['hawkvision_datacenter_requests_in_flight{task="shapes"}'] == 0.0


def test_metrics_count_ensemble_runs_and_answers_by_stage(service: Running) -> None:
    before = series(service)
    for accept_score in ("0", "1", "1"):
        ask(service, image(), **{**INTERMEDIATE, "accept_score": accept_score})
    after = series(service)
    names = [
        'answers_total{stage="medium",task="shapes"}',
        'answers_total{stage="reference",task="shapes"}',
        'ensemble_runs_total{stage="medium",task="shapes"}',
    ]
    grown = [after[f"hawkvision_datacenter_{n}"] - before.get(f"hawkvision_datacenter_{n}", 0.0) for n in names]
    assert grown == [1.0, 2.0, 2.0]


def test_no_callers_text_becomes_a_label(service: Running) -> None:
    ask(service, image(), variant="invented")
    ask(service, path="/invented")
    ask(service, path="/v1/infer")
    after = series(service)
    assert not [name for name in after if "invented" in name]
    assert after['hawkvision_datacenter_requests_total{code="404",path="/v1/infer",stage="none",task="shapes"}'] >= 1.0
    assert after['hawkvision_datacenter_requests_total{code="404",path="other",stage="none",task="none"}'] >= 1.0


def test_the_tier_accepts_images_as_datagrams_at_its_advertised_port(service: Running) -> None:
    offer = msgspec.json.decode(ask(service, path="/v1/transport").body, type=Transports).datagram
    assert offer is not None
    request, trace = EscalationRequest(variant="medium"), start_trace()

    async def scenario() -> tuple[Status, bytes]:
        to = [UdpRoute(None, "127.0.0.1")]
        client = await ClientConnection.connect(offer.port, offer.certificate, offer.name, routes=to, api_key=KEY)
        coded = opaque(image(), 0.5, fragment_room(request.meta(trace)))
        assert coded is not None
        try:
            return await client.ask(request.template(), coded, meta=request.meta(trace), timeout_s=20.0)
        finally:
            await client.close()

    status, body = asyncio.run(scenario())
    assert (status, read_reply(body).model) == (Status.OK, "medium")
    assert (
        series(service)['hawkvision_datacenter_requests_total{code="200",path="datagram",stage="medium",task="shapes"}']
        >= 1.0
    )
