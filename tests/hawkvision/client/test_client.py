"""The client against a real HTTP server on a real socket: what is sent, what is understood, what is refused."""

import asyncio
import json
import math
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.blocking import Client
from hawkvision.client.http import KEEPALIVE_S
from hawkvision.client.response import BadReply, Unreachable, error_from_reply
from hawkvision.core import errors
from hawkvision.core.errors import (
    BadField,
    ConfigError,
    HawkVisionError,
    NotReady,
    Overloaded,
    TargetUnreachable,
    Unauthorized,
)
from hawkvision.core.types import (
    Answer,
    Quality,
)
from hawkvision.servers.connections import KEEP_ALIVE_S
from tests.hawkvision.client.client_node import ANSWER, Start, ok, refusal
from tests.images import encoded


def test_image_bytes_and_fields_travel_unchanged(start: Start) -> None:
    node = start()
    with Client(node.url, api_key="k") as client:
        answer = client.classify(b"\xff\xd8anything", max_accuracy_drop=0.01, deadline_ms=80, stream="cam 1/é", top_k=2)
    assert answer == ANSWER
    assert node.bodies == [b"\xff\xd8anything"]
    assert node.queries == [{"max_accuracy_drop": "0.01", "deadline_ms": "80", "stream": "cam 1/é", "top_k": "2"}]
    assert node.keys == ["Bearer k"]


def test_who_is_asked_for_datagrams_is_sent_no_key(start: Start) -> None:
    node = start((200, {}, b'{"datagram": null}'))
    with Client(node.url, api_key="k", transport="datagram") as client, pytest.raises(ConfigError):
        client.classify(encoded())
    assert node.keys == [None]


def test_paths_and_buffers_are_sent_as_they_are_and_words_stand_for_enums(start: Start, tmp_path: Path) -> None:
    node = start()
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"image")
    with Client(node.url) as client:
        for image in (path, str(path), b"image", bytearray(b"image"), memoryview(b"an image")[3:]):
            client.classify(image, quality="fast")
        client.classify(b"image", quality=Quality.FAST)
    assert node.bodies == [b"image"] * 6
    assert node.queries == [{"quality": "fast"}] * 6


@pytest.mark.parametrize("color", ["rgb", "bgr", None])
@pytest.mark.parametrize("encoding", ["png", "jpeg"])
def test_pixels_arrive_in_the_colours_and_the_encoding_that_were_named(
    start: Start, encoding: Literal["png", "jpeg"], color: Literal["rgb", "bgr"] | None
) -> None:
    node = start()
    red = np.zeros((32, 48, 3), np.uint8)
    red[..., 2 if color == "bgr" else 0] = 250
    with Client(node.url) as client:
        assert list(client.classify_batch([red], encoding=encoding, color=color)) == [ANSWER]
    assert node.bodies[0].startswith(b"\xff\xd8" if encoding == "jpeg" else b"\x89PNG")
    sent = cv2.imdecode(np.frombuffer(node.bodies[0], np.uint8), cv2.IMREAD_COLOR)
    assert sent is not None
    blue_green_red = sent.mean(axis=(0, 1))
    assert np.allclose(blue_green_red, (0, 0, 250), atol=6.0 if encoding == "jpeg" else 0.0)


PIXELS = np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("image", "fields", "error", "says"),
    [
        (b"encoded", {"encoding": "jpeg"}, BadField, "encoding: only for arrays of pixels; got bytes"),
        ("cat.jpg", {"color": "bgr"}, BadField, "color: only for arrays of pixels; got str"),
        (PIXELS, {"color": "yuv"}, BadField, "color: expected one of rgb, bgr, got 'yuv'"),
        (PIXELS, {"encoding": "gif"}, BadField, "encoding: expected one of png, jpeg, got 'gif'"),
        *((np.zeros(shape, np.uint8), {}, BadField, "height, width, 3") for shape in ((5, 5), (5, 5, 4), (0, 5, 3))),
        *((image, {}, BadField, "image: ") for image in (None, 5, [[0]], {"a": 1}, np.uint8(3), "a\0b")),
        ("none/of/these.jpg", {}, FileNotFoundError, "none"),
        (b"x", {"min_accuracy": 0.8, "quality": "best"}, BadField, "min_accuracy and quality"),
        *(
            (b"x", {"deadline_ms": wrong}, BadField, "deadline_ms: expected milliseconds, a number above 0")
            for wrong in (0, -1, math.nan, math.inf, -math.inf, "80", True, [80])
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_sent(
    start: Start, image: Any, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    node = start()
    with Client(node.url) as client, pytest.raises(error, match=says):
        client.classify(image, **fields)
    assert node.bodies == []


def test_an_option_that_no_client_has_and_what_is_no_url_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected http"):
        Client("127.0.0.1:8080")
    with pytest.raises(TypeError, match="unknown options timeout"):
        Client("http://127.0.0.1:1", timeout=3.0)  # type: ignore[call-arg]


def test_waiting_for_a_node_ends_within_its_bound_and_says_why(start: Start) -> None:
    node = start(refusal(NotReady("loading")))
    with Client(node.url) as client, pytest.raises(NotReady, match=r"still starting after 0\.2 s"):
        client.wait_ready(0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    says = rf":{port} cannot be reached: nothing listens there; `hawkvision up` starts a node \(waited 0\.2 s\)"
    with Client(f"http://127.0.0.1:{port}") as client, pytest.raises(Unreachable, match=says):
        client.wait_ready(0.2)


def test_waiting_does_not_mend_a_wrong_key(start: Start) -> None:
    node = start(refusal(Unauthorized("wrong key")))
    with Client(node.url) as client, pytest.raises(Unauthorized):
        client.wait_ready(60.0)


REFUSALS = [
    errors.BadImage("no image"),
    errors.BadField("unknown field"),
    errors.Unauthorized("key"),
    errors.NotFound("no task"),
    errors.TooLarge("too big"),
    errors.UnsupportedMedia("video"),
    TargetUnreachable("at most 0.87", 0.87),
    Overloaded("full", 3.0),
    errors.InternalError("ours"),
    NotReady("loading"),
    errors.DeadlineMissed("late"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
def test_refusal_comes_back_as_the_error_the_node_raised(start: Start, error: HawkVisionError) -> None:
    node = start(refusal(error, Retry_After="3"))
    with Client(node.url) as client, pytest.raises(type(error)) as caught:
        client.classify(b"x")
    assert vars(caught.value) == vars(error)
    assert caught.value.status == error.status


@given(st.integers(400, 599), st.binary(max_size=80), st.none() | st.floats(0, 100))
def test_any_other_reply_becomes_an_error_too(status: int, payload: bytes, retry_after_s: float | None) -> None:
    error = error_from_reply(status, payload, retry_after_s, "http://node/x")
    expected = {401: errors.Unauthorized, 429: Overloaded, 503: NotReady}.get(status, BadReply)
    assert type(error) is expected
    assert str(status) in error.message


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"{}", b"\xff"])
def test_a_page_that_is_no_answer_is_a_bad_reply(start: Start, body: bytes) -> None:
    node = start((200, {}, body))
    with Client(node.url) as client, pytest.raises(BadReply):
        client.classify(b"x")


def test_endless_reply_is_cut_off(start: Start) -> None:
    node = start((200, {}, b" " * (5 * 1024 * 1024)))
    with Client(node.url) as client, pytest.raises(BadReply, match="more than"):
        client.classify(b"x")


def test_idle_connections_outlast_a_slow_camera_and_end_before_the_node_ends_them() -> None:
    assert 30 < KEEPALIVE_S < KEEP_ALIVE_S


def test_retry_within_the_budget_sends_the_same_again(start: Start) -> None:
    busy = refusal(Overloaded("full", 0.0), Retry_After="0")
    node = start(busy, refusal(NotReady("draining"), Retry_After="0"), ok())
    with Client(node.url, retry_budget_s=1.0) as client:
        assert client.classify(b"x", quality="fast") == ANSWER
    assert node.bodies == [b"x"] * 3
    assert node.queries == [{"quality": "fast"}] * 3


@pytest.mark.parametrize(
    ("error", "retry_after", "budget_s", "deadline_ms", "attempts"),
    [
        (Overloaded("no budget", 0.0), 0, 0.0, None, 1),
        (Overloaded("longer than the budget", 60.0), 60, 1.0, None, 1),
        (Overloaded("longer than the deadline", 1.0), 1, 60.0, 200.0, 1),
        (Overloaded("again and again, after 0.1, 0.2 and 0.4 s", 0.0), 0, 0.8, None, 4),
        (errors.BadImage("never to be repeated"), 0, 60.0, None, 1),
    ],
)
def test_a_refusal_is_raised_after_as_many_attempts_as_budget_and_deadline_allow(
    start: Start, error: HawkVisionError, retry_after: int, budget_s: float, deadline_ms: float | None, attempts: int
) -> None:
    node = start(refusal(error, Retry_After=str(retry_after)))
    with Client(node.url, retry_budget_s=budget_s) as client, pytest.raises(type(error)) as caught:
        client.classify(b"x", deadline_ms=deadline_ms)
    assert vars(caught.value) == vars(error)
    assert len(node.bodies) == attempts


@pytest.mark.parametrize(
    "half", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"], ids=["no reply", "half a reply"]
)
def test_a_call_with_a_budget_survives_a_restart_of_its_node(half: bytes) -> None:
    """The node breaks a connection, then refuses them, and then answers."""
    ended = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps(ANSWER.to_json()).encode()

    async def scenario() -> Answer:
        again = asyncio.get_running_loop().create_future()

        async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            server.close()
            writer.write(half)
            await writer.drain()
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            asyncio.get_running_loop().call_later(0.25, again.set_result, None)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ended)
            writer.close()

        server = await asyncio.start_server(break_off, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}", retry_budget_s=30.0) as client:
            call = asyncio.create_task(client.classify(b"x", deadline_ms=30_000.0))
            await again
            async with AsyncClient(client.url) as hasty:
                with pytest.raises(Unreachable):
                    await hasty.classify(b"x")
            async with await asyncio.start_server(answer, "127.0.0.1", port):
                return await call

    assert asyncio.run(scenario()) == ANSWER


def test_many_threads_share_a_client_within_its_connections(start: Start) -> None:
    node = start()
    with Client(node.url, connections=3) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(client.classify, [b"%d" % i for i in range(40)]))
    assert answers == [ANSWER] * 40
    assert sorted(node.bodies) == sorted(b"%d" % i for i in range(40))
    assert len(node.peers) <= 3


def test_connection_closed_by_the_server_is_replaced() -> None:
    """A server that answers once per connection and then hangs up without saying so."""
    body = json.dumps(ANSWER.to_json()).encode()

    async def scenario() -> list[Answer]:
        async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await reader.read(1)  # the second request's first byte
            writer.close()

        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            return [await client.classify(b"x") for _ in range(3)]

    assert asyncio.run(scenario()) == [ANSWER] * 3


def test_connecting_beforehand_opens_the_connection_that_images_use(start: Start) -> None:
    node = start((200, {}, b'{"status": "ready"}'), ok())

    async def scenario() -> None:
        async with AsyncClient(node.url) as client:
            await client.connect()
            await client.classify(b"x")
            assert client.sent_bytes == 0  # of datagrams
        async with AsyncClient("http://127.0.0.1:1") as client:
            with pytest.raises(Unreachable):
                await client.connect()

    asyncio.run(scenario())
    assert len(node.peers) == 1


def test_closed_client_says_so(start: Start) -> None:
    client = Client(start().url)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.classify(b"x")


def test_closing_ends_a_call_under_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        call = threads.submit(client.classify, b"x")
        with silent.accept()[0]:
            client.close()
            with pytest.raises((RuntimeError, Unreachable)):
                call.result(timeout=60)
