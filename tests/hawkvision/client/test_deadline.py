"""How long a client waits: as its deadline says, else its timeout, counted from when there is a connection for it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.client.blocking import Client
from hawkvision.client.response import Unreachable
from hawkvision.core.errors import DeadlineMissed, Overloaded
from hawkvision.core.types import OnMiss
from tests.hawkvision.client.client_node import ANSWER, Start, ok, refusal
from tests.images import encoded

IMAGE = encoded()


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("on_miss", [None, OnMiss.FAIL])
@pytest.mark.parametrize("transport", ["http", "datagram"])
def test_a_deadline_bounds_the_wait_for_a_silent_server(silent: str, transport: str, on_miss: str | None) -> None:
    began = time.monotonic()
    with (
        Client(silent, late_s=0.1, transport=transport) as client,  # type: ignore[arg-type]
        pytest.raises(DeadlineMissed, match="20 ms"),
    ):
        client.classify(IMAGE, deadline_ms=20.0, on_miss=on_miss)
    assert time.monotonic() - began < 20.0, "far below the timeout of 30 s"


def test_who_waits_whatever_the_deadline_waits_for_the_timeout(silent: str) -> None:
    with Client(silent, timeout_s=0.1, late_s=0.0) as client, pytest.raises(Unreachable, match=r"0\.1 s"):
        client.classify(b"x", deadline_ms=20.0, on_miss="wait")


def test_a_timeout_shorter_than_the_deadline_is_no_missed_deadline(silent: str) -> None:
    with Client(silent, timeout_s=0.05) as client, pytest.raises(Unreachable, match=r"0\.05 s"):
        client.classify(b"x", deadline_ms=5000.0)


def test_an_answer_that_is_a_little_late_is_an_answer(start: Start) -> None:
    node = start(ok())
    node.delay_s = 0.1
    with Client(node.url, late_s=20.0) as client:
        assert client.classify(b"x", deadline_ms=1.0) == ANSWER


def test_who_takes_a_degraded_answer_gets_it_however_late_it_is(start: Start) -> None:
    node = start(ok(), ok())
    node.delay_s = 1.2
    with Client(node.url) as client:
        assert client.classify(b"x", deadline_ms=1.0) == ANSWER
        with pytest.raises(DeadlineMissed):
            client.classify(b"x", deadline_ms=1.0, on_miss="fail")


def test_a_second_attempt_has_what_is_left_of_the_deadline(start: Start) -> None:
    node = start(refusal(Overloaded("full", 0.0), Retry_After="0"), ok())
    node.delay_s = 0.05
    with Client(node.url, retry_budget_s=60.0) as client:
        client.classify(b"x", deadline_ms=30_000.0)
    first, second = (float(query["deadline_ms"]) for query in node.queries)
    assert first == 30_000.0
    assert 0.0 < second <= 30_000.0 - 50.0


def test_no_attempt_is_begun_after_the_deadline(start: Start) -> None:
    node = start(refusal(Overloaded("full", 0.0), Retry_After="0"))
    node.delay_s = 0.05
    with Client(node.url, retry_budget_s=60.0, late_s=60.0) as client, pytest.raises(Overloaded):
        client.classify(b"x", deadline_ms=20.0)
    assert len(node.bodies) == 1


def test_waiting_for_a_connection_is_not_waiting_for_an_answer(start: Start) -> None:
    node = start()
    node.delay_s = 0.2
    with Client(node.url, connections=1, timeout_s=1.0) as client, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(client.classify, [b"x"] * 8))
    assert answers == [ANSWER] * 8, "together they take longer than the timeout of each"


def test_a_client_of_another_loop_says_so(start: Start) -> None:
    client = AsyncClient(start().url)

    async def once() -> None:
        await client.health()

    asyncio.run(once())
    with pytest.raises(RuntimeError, match="one for each loop"):
        asyncio.run(once())
