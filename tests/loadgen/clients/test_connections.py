"""Kept-alive connections: what is reused, what is tried again, and what servers may do wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from hawkvision.client.response import Unreachable
from loadgen.clients.base import RequestTimes
from loadgen.clients.connections import MAX_REPLY_BYTES, ConnectionBroken, ConnectionPool, HttpReply
from tests.loadgen.scripted import RecordedRequest, Say, Scripted, reply, scripted


def against(
    say: Say, act: Callable[[ConnectionPool], Awaitable[object]], limit: int = 8, timeout_s: float = 10.0
) -> Scripted:
    """What a server saw of what a test did."""

    async def scenario() -> Scripted:
        async with scripted(say) as server:
            connections = ConnectionPool(server.url, limit=limit, timeout_s=timeout_s, api_key="k")
            await act(connections)
            await connections.close()
        return server

    return asyncio.run(scenario())


async def ask(connections: ConnectionPool, body: bytes = b"x") -> HttpReply:
    return await connections.exchange(connections.head("POST", "/p?a=1"), body)


async def fine(asked: RecordedRequest) -> bytes:
    return reply(asked.body)


def refused(said: bytes | None, code: str) -> None:
    async def say(_: RecordedRequest) -> bytes | None:
        return said

    async def act(connections: ConnectionPool) -> None:
        with pytest.raises(ConnectionBroken, match=code):
            await ask(connections)

    against(say, act)


def test_requests_one_after_another_share_a_connection() -> None:
    async def act(connections: ConnectionPool) -> None:
        for number in range(3):
            answer = await ask(connections, b"%d" % number)
            assert (answer.status, answer.body) == (200, b"%d" % number)

    server = against(fine, act)
    assert {each.connection for each in server.asked} == {0}
    assert server.asked[0].line == "POST /p?a=1 HTTP/1.1"
    assert "Authorization: Bearer k\r\n" in server.asked[0].head


def test_a_request_leaves_when_it_is_due_and_both_ends_of_the_exchange_are_noted() -> None:
    came: list[float] = []

    async def say(asked: RecordedRequest) -> bytes:
        came.append(time.monotonic())
        return reply(asked.body)

    async def act(connections: ConnectionPool) -> None:
        times = RequestTimes(time.monotonic() + 0.01)
        await connections.exchange(connections.head("POST", "/"), b"x", times)
        assert times.sent is not None
        assert times.done is not None
        assert times.due <= times.sent <= came[0] <= times.done <= time.monotonic()

    against(say, act)


def test_no_more_connections_than_the_limit() -> None:
    async def act(connections: ConnectionPool) -> None:
        await asyncio.gather(*(ask(connections) for _ in range(12)))

    server = against(fine, act, limit=3)
    assert len(server.asked) == 12
    assert server.at_once <= 3
    assert {each.connection for each in server.asked} <= {0, 1, 2}


def test_connection_that_closed_while_idle_is_replaced() -> None:
    async def say(asked: RecordedRequest) -> bytes | None:
        return None if asked.connection == 0 and asked.body == b"second" else reply(asked.body)

    async def act(connections: ConnectionPool) -> None:
        await ask(connections, b"first")
        assert (await ask(connections, b"second")).body == b"second"

    assert [each.connection for each in against(say, act).asked] == [0, 0, 1]


def test_server_that_says_close_is_obeyed() -> None:
    async def say(asked: RecordedRequest) -> bytes:
        return reply(asked.body, headers="Connection: close\r\n")

    async def act(connections: ConnectionPool) -> None:
        for _ in range(2):
            await ask(connections)

    assert [each.connection for each in against(say, act).asked] == [0, 1]


def test_late_reply_is_not_taken_for_the_next_ones() -> None:
    async def say(asked: RecordedRequest) -> bytes:
        if asked.body == b"slow":
            await asyncio.Event().wait()
        return reply(asked.body)

    async def act(connections: ConnectionPool) -> None:
        with pytest.raises(TimeoutError):
            await ask(connections, b"slow")
        connections.timeout_s = 10.0
        assert (await ask(connections, b"quick")).body == b"quick"

    assert [each.connection for each in against(say, act, timeout_s=0.05).asked] == [0, 1]


def test_chunked_replies_and_interim_ones_are_read() -> None:
    async def say(_: RecordedRequest) -> bytes:
        return (
            b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nX-A: B\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
        )

    async def act(connections: ConnectionPool) -> None:
        answer = await ask(connections)
        assert (answer.status, answer.body, answer.headers[b"x-a"]) == (200, b"abc", b"B")

    against(say, act)


def test_reply_that_breaks_off_says_so() -> None:
    async def say(asked: RecordedRequest) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nabc"

    async def act(connections: ConnectionPool) -> None:
        with pytest.raises(TimeoutError):
            await ask(connections)

    against(say, act, timeout_s=0.05)
    refused(None, "broken_off")


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", reply(b"x" * (MAX_REPLY_BYTES + 1))]
)
def test_what_is_no_reply_is_a_bad_one(said: bytes) -> None:
    refused(said, "bad_reply")


def test_nobody_there() -> None:
    async def scenario() -> None:
        connections = ConnectionPool("http://127.0.0.1:1", limit=1, timeout_s=5.0)
        with pytest.raises(Unreachable, match="127"):
            await connections.open(1)
        with pytest.raises(ConnectionBroken, match="unreachable"):
            await ask(connections)

    asyncio.run(scenario())
