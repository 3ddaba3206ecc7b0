"""Askers: what goes out, and what is made of whatever comes back."""

from __future__ import annotations

import asyncio
import json
import struct
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import Overloaded, TargetUnreachable
from hawkvision.core.types import AccuracyStatus
from hawkvision.system.child_server import ServerProcess
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import HttpReply
from loadgen.clients.engine import ServerAddress, client_for
from loadgen.clients.http import read_answer
from loadgen.clients.oip import JSON_LENGTH, read_reply
from loadgen.workload.record import UNANSWERED
from tests.loadgen.oracle import answer
from tests.loadgen.scripted import RecordedRequest, Say, reply, scripted

ANSWER = json.dumps(answer(3, escalated=True, max_drop=0.02, degraded=True).to_json()).encode()


def asked(
    say: Say, fields: dict[str, str], protocol: str = "http", image: bytes = b"jpeg"
) -> tuple[RecordedRequest, ClientReply]:
    """The last request of one question, and what was made of the reply."""

    async def scenario() -> tuple[RecordedRequest, ClientReply]:
        async with scripted(say) as server:
            asker = client_for(ServerAddress(server.url, protocol, "birds", timeout_s=60.0), 4)  # type: ignore[arg-type]
            await asker.open()
            replied = await asker.ask(image, fields, RequestTimes())
            await asker.close()
            return server.asked[-1], replied

    return asyncio.run(scenario())


def saying(body: bytes, status: int = 200, headers: str = "") -> Say:
    async def say(_: RecordedRequest) -> bytes:
        return reply(body, status, headers)

    return say


def test_http_sends_the_very_bytes_and_the_fields_as_query() -> None:
    fields = {"max_accuracy_drop": "0.01", "deadline_ms": "100"}
    request, _ = asked(saying(ANSWER), fields, image=b"\x00\xff\r\n\r\n")
    target = urlsplit(request.line.split()[1])
    assert (request.line.split()[0], target.path, request.body) == ("POST", "/v1/classify", b"\x00\xff\r\n\r\n")
    assert parse_qs(target.query) == {"task": ["birds"], "max_accuracy_drop": ["0.01"], "deadline_ms": ["100"]}


def test_answer_is_read_with_its_guarantee() -> None:
    _, replied = asked(saying(ANSWER), {})
    assert replied == ClientReply(
        200, index=3, confidence=0.9, tier="edge", model="m", escalated=True, degraded=True,
        guarantee=AccuracyStatus.CERTIFIED, max_drop=0.02, received_fraction=1.0, sent_bytes=4,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["http", "oip"])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (json.dumps(Overloaded("full", 1.0).body()).encode(), 429, "overloaded"),
        (json.dumps(TargetUnreachable("too much", 0.9).body()).encode(), 422, "target_unreachable"),
        (b"<html>", 502, "http_502"),
        (b'{"error": "x"}', 503, "http_503"),
    ],
)
def test_refusals_keep_their_status_and_code(protocol: str, body: bytes, status: int, code: str) -> None:
    _, replied = asked(saying(body, status), {}, protocol)
    assert (replied.status, replied.error, replied.index) == (status, code, None)


def test_silence_and_hanging_up_have_codes_of_their_own() -> None:
    async def hang_up(_: RecordedRequest) -> None:
        return None

    async def silent(_: RecordedRequest) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def scenario() -> ClientReply:
        async with scripted(silent) as server:
            return await client_for(ServerAddress(server.url, timeout_s=0.05), 1).ask(b"x", {}, RequestTimes())

    assert asked(hang_up, {})[1].error == "broken_off"
    assert asyncio.run(scenario()) == ClientReply(UNANSWERED, "timeout")


def test_oip_sends_a_binary_tensor_and_the_fields_as_parameters() -> None:
    fields = {"quality": "fast", "deadline_ms": "100", "on_miss": "fail"}
    request, _ = asked(
        saying(b'{"outputs":[{"name":"index","datatype":"INT64","shape":[1],"data":[1]}]}'), fields, "oip"
    )
    length = int(request.head.lower().partition("inference-header-content-length: ")[2].split()[0])
    header = json.loads(request.body[:length])
    (tensor,) = header["inputs"]
    assert request.line.split()[1] == "/v2/models/birds/infer"
    assert request.body[length:] == struct.pack("<I", 4) + b"jpeg"
    assert (tensor["shape"], tensor["datatype"], tensor["parameters"]) == ([1, 1], "BYTES", {"binary_data_size": 8})
    assert header["parameters"] == {
        "quality": "fast", "deadline_ms": 100.0, "on_miss": "fail", "binary_data_output": True
    }  # fmt: skip


def oip(outputs: list[tuple[str, str, object]], parameters: dict[str, object] | None = None) -> HttpReply:
    """A reply whose outputs are JSON data, or binary where they are given as bytes."""
    described, tail = [], b""
    for name, datatype, data in outputs:
        entry: dict[str, object] = {"name": name, "datatype": datatype, "shape": [1]}
        if isinstance(data, bytes):
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            entry["data"] = data
        described.append(entry)
    header = json.dumps({"model_name": "m", "outputs": described, "parameters": parameters or {}}).encode()
    return HttpReply(200, {JSON_LENGTH: b"%d" % len(header)}, header + tail)


def text(*words: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(word)) + word for word in words)


@pytest.mark.parametrize(
    "outputs",
    [
        [
            ("label", "BYTES", text(b"cat")),
            ("index", "INT64", struct.pack("<q", 4)),
            ("confidence", "FP32", struct.pack("<f", 0.5)),
        ],
        [("index", "INT32", [4]), ("confidence", "FP32", [0.5])],
        [("scores", "BYTES", text(b"0.5:4:cat", b"0.1:2:dog"))],
        [("scores", "BYTES", ["0.5:4"])],
        [("class", "INT64", [4]), ("confidence", "FP32", [0.5])],
        [("confidence", "FP32", [0.5]), ("class", "UINT16", struct.pack("<H", 4)), ("logits", "FP32", [9.0, 1.0])],
        [("confidence", "FP32", [0.5]), ("logits", "FP32", [0, -1.5, 0.5, 1, 1.25])],
        [("logits", "FP32", [[0, 0, 0, 0, 1]]), ("confidence", "FP64", struct.pack("<d", 0.5))],
    ],
)  # fmt: skip
def test_oip_answers_are_read_in_every_form(outputs: list[tuple[str, str, object]]) -> None:
    replied = read_reply(oip(outputs), 10)
    assert (replied.status, replied.index, replied.confidence, replied.sent_bytes) == (200, 4, 0.5, 10)


@pytest.mark.parametrize(
    "outputs",
    [
        [("confidence", "FP32", [0.5])],
        [("top", "INT64", [4, 2, 1])],
        [("class", "INT64", [])],
        [("logits", "FP32", [None, 1.5])],
        [("flag", "BOOL", [True])],
    ],
)
def test_oip_outputs_that_tell_no_class_count_as_no_answer(outputs: list[tuple[str, str, object]]) -> None:
    assert read_reply(oip(outputs), 1).error == "bad_reply"


def test_oip_parameters_tell_of_the_guarantee() -> None:
    said: dict[str, object] = {
        "tier": "datacenter", "model": "b", "escalated": True, "degraded": False, "status": "certified",
        "max_drop": 0.01,
        "received_fraction": 0.9,
    }  # fmt: skip
    replied = read_reply(oip([("index", "INT64", [1])], said), 1)
    assert (replied.tier, replied.model, replied.escalated, replied.guarantee) == (
        "datacenter",
        "b",
        True,
        AccuracyStatus.CERTIFIED,
    )
    assert (replied.max_drop, replied.received_fraction) == (0.01, 0.9)


@given(st.binary(max_size=100), st.integers(-5, 120))
def test_no_bytes_break_the_readers(body: bytes, split: int) -> None:
    for replied in (
        read_answer(HttpReply(200, {}, body), 1),
        read_reply(HttpReply(200, {JSON_LENGTH: b"%d" % split}, body), 1),
        read_reply(HttpReply(500, {}, body), 1),
    ):
        assert replied.status in (UNANSWERED, 200, 500)
        assert replied.status != UNANSWERED or replied.error == "bad_reply"


def test_datagram_images_are_answered_and_their_bytes_counted(null: ServerProcess) -> None:
    from loadgen.workload.dataset import generated

    async def scenario() -> list[ClientReply]:
        asker = client_for(ServerAddress(null.url, "datagram", timeout_s=60.0), 4)
        await asker.open()
        found = [
            await asker.ask(generated(seed), {"quality": "fast", "deadline_ms": "5000"}, RequestTimes())
            for seed in (1, 2)
        ]
        await asker.close()
        return found

    for replied in asyncio.run(scenario()):
        assert (replied.status, replied.index, replied.tier) == (200, 0, "edge")
        assert replied.sent_bytes > 1000
