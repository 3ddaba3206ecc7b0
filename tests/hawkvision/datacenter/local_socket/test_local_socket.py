"""The local socket between the server and a replica: real sockets and processes."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import re
import signal
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import BadImage, DeadlineMissed, NotReady, Overloaded, TargetUnreachable
from hawkvision.core.logs import RequestIds, TextFormatter
from hawkvision.datacenter.local_socket.protocol import FrameProtocol, Part, ReplicaRequest
from hawkvision.datacenter.local_socket.registry import QueueBounds, ReplicaRegistry
from hawkvision.datacenter.local_socket.replica_end import Registration, register
from hawkvision.datacenter.stages.ensemble import Augmentation, VariantAnswer
from tests.hawkvision.datacenter.conftest import START_LIMIT_S

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
LIMIT_S = 60.0
GROUP = "small"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets exist on Linux only")


def part(number: int) -> Part:
    row = np.full((1, 3), number, np.float32)
    return (VariantAnswer("small", Augmentation.UPRIGHT, row, 0.1, 0.2, 0.3, number),)


def replica_request(image: bytes = b"", *, streaming: bool = True) -> ReplicaRequest:
    return ReplicaRequest(image, (), None, streaming)


async def numbers(request: ReplicaRequest) -> AsyncGenerator[Part]:
    """As many parts as the image has bytes."""
    for number in range(len(request.image)):
        await asyncio.sleep(0)
        yield part(number)


async def connected(
    answering: Callable[[ReplicaRequest], AsyncGenerator[Part]], *, max_ongoing: int = 8, max_queued: int = 8
) -> ReplicaRegistry:
    """A registry with one replica that has this handler."""
    replicas = ReplicaRegistry([GROUP], QueueBounds(max_ongoing, max_queued, retry_after_s=2.5))
    await replicas.listen()
    await joined(replicas, answering)
    return replicas


async def joined(
    replicas: ReplicaRegistry, answering: Callable[[ReplicaRequest], AsyncGenerator[Part]]
) -> Registration:
    before = replicas.live(GROUP)
    reported = await register(replicas.address, GROUP, "", answering)
    async with asyncio.timeout(LIMIT_S):
        while replicas.live(GROUP) == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return reported


async def answer(registry: ReplicaRegistry, request: ReplicaRequest) -> list[int]:
    async with aclosing(registry.ask(GROUP, request)) as parts:
        return [part[0].batch_size async for part in parts]


class Held:
    """A handler that finishes requests when `go` is set, and counts those that were cancelled."""

    def __init__(self) -> None:
        self.begun, self.go, self.given_up = asyncio.Semaphore(0), asyncio.Event(), asyncio.Semaphore(0)

    async def __call__(self, request: ReplicaRequest) -> AsyncGenerator[Part]:
        self.begun.release()
        try:
            yield part(0)
            await self.go.wait()
            yield part(1)
        except asyncio.CancelledError:
            self.given_up.release()
            raise


class Silent:
    """A handler that never answers."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, request: ReplicaRequest) -> AsyncGenerator[Part]:
        self.begun.release()
        await asyncio.Event().wait()
        yield part(0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_parts_arrive_one_by_one_and_unchanged(run: Run[None]) -> None:
    async def scenario() -> None:
        registry = await connected(numbers)
        async with aclosing(registry.ask(GROUP, replica_request(b"four"))) as parts:
            found = [its async for its in parts]
        assert [its[0].batch_size for its in found] == [0, 1, 2, 3]
        (last,) = found[-1]
        assert (last.variant, last.augmentation, last.probabilities.tolist()) == (
            "small",
            Augmentation.UPRIGHT,
            [[3.0, 3.0, 3.0]],
        )

    run(scenario())


def test_concurrent_requests_get_their_own_answers() -> None:
    async def scenario() -> list[list[int]]:
        registry = await connected(numbers, max_ongoing=3, max_queued=100)
        return await asyncio.gather(*(answer(registry, replica_request(bytes(n))) for n in range(40)))

    assert asyncio.run(scenario()) == [list(range(n)) for n in range(40)]


@pytest.mark.parametrize(
    "error", [BadImage("no image"), DeadlineMissed("too late"), TargetUnreachable("too much", 0.9)]
)
def test_an_error_of_the_replica_is_raised_unchanged_and_the_next_request_succeeds(error: Exception) -> None:
    async def answering(request: ReplicaRequest) -> AsyncGenerator[Part]:
        if not request.streaming:
            raise error
        yield part(1)

    async def scenario() -> list[int]:
        registry = await connected(answering)
        with pytest.raises(type(error)) as raised:
            await answer(registry, replica_request(streaming=False))
        assert vars(raised.value) == vars(error)
        return await answer(registry, replica_request())

    assert asyncio.run(scenario()) == [1]


def test_an_unexpected_exception_arrives_as_text_and_the_next_request_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unpicklable(Exception):
        def __reduce__(self) -> str:
            raise TypeError("cannot be pickled")

    async def answering(request: ReplicaRequest) -> AsyncGenerator[Part]:
        yield part(1)
        if not request.streaming:
            raise Unpicklable("at line 7")

    async def scenario() -> list[int]:
        registry = await connected(answering)
        with pytest.raises(RuntimeError, match="small: Unpicklable: at line 7"):
            await answer(registry, replica_request(streaming=False))
        return await answer(registry, replica_request())

    assert asyncio.run(scenario()) == [1]
    assert "could not be evaluated" in caplog.text


def test_a_replicas_log_lines_name_the_request() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(TextFormatter())

    async def answering(request: ReplicaRequest) -> AsyncGenerator[Part]:
        yield part(1)
        raise ValueError("at line 7")

    async def scenario() -> None:
        registry = await connected(answering)
        for name in ("one", "two"):
            request = replace(replica_request(), request=RequestIds(name, "0" * 32))
            with pytest.raises(RuntimeError, match="at line 7"):
                await answer(registry, request)

    logger = logging.getLogger("hawkvision.datacenter")
    logger.addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(handler)
    assert re.findall(r"\[(\w+) trace=0{32}\] an image could not be evaluated", written.getvalue()) == ["one", "two"]


def test_closing_the_generator_cancels_the_request() -> None:
    async def scenario() -> None:
        held = Held()
        registry = await connected(held)
        async with aclosing(registry.ask(GROUP, replica_request())) as parts:
            await anext(parts)
        await asyncio.wait_for(held.given_up.acquire(), LIMIT_S)

    asyncio.run(scenario())


def test_closing_the_registry_cancels_all_requests() -> None:
    async def scenario() -> None:
        held = Held()
        registry = await connected(held)
        asking = [asyncio.create_task(answer(registry, replica_request())) for _ in range(2)]
        for _ in asking:
            await asyncio.wait_for(held.begun.acquire(), LIMIT_S)
        registry.close()
        for _ in asking:
            await asyncio.wait_for(held.given_up.acquire(), LIMIT_S)
        for task in asking:
            with pytest.raises(NotReady, match="is gone"):
                await asyncio.wait_for(task, LIMIT_S)
        assert registry.absent == (GROUP,)
        with pytest.raises(NotReady, match="no live replica"):
            await answer(registry, replica_request())

    asyncio.run(scenario())


def test_requests_above_the_places_wait_and_those_above_the_queue_are_shed() -> None:
    async def scenario() -> None:
        held = Held()
        registry = await connected(held, max_ongoing=1, max_queued=1)
        first = asyncio.create_task(answer(registry, replica_request()))
        await asyncio.wait_for(held.begun.acquire(), LIMIT_S)
        second = asyncio.create_task(answer(registry, replica_request()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as shed:
            await answer(registry, replica_request())
        assert shed.value.retry_after_s == 2.5
        assert held.begun.locked()  # the second request waits at the server
        held.go.set()
        assert [await asyncio.wait_for(task, LIMIT_S) for task in (first, second)] == [[0, 1], [0, 1]]

    asyncio.run(scenario())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_disconnected() -> None:
    stranger = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect('\\0' + sys.argv[1]); sys.exit(len(s.recv(1)))"
    )

    async def scenario() -> tuple[int | None, list[int]]:
        server = await connected(numbers)
        name = server.address.name.removeprefix("\0")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", stranger, name)
        code = await asyncio.wait_for(process.wait(), LIMIT_S)
        return code, await answer(server, replica_request(b"ab"))

    assert asyncio.run(scenario()) == (0, [0, 1])


@pytest.mark.parametrize("given_key", [b"", bytes(32), bytes(7)])
def test_a_process_without_the_key_is_disconnected_before_anything_is_unpickled(
    given_key: bytes, tmp_path: Path
) -> None:
    harm = tmp_path / "harm"

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (harm,)

    async def scenario() -> tuple[bytes, list[int]]:
        server = await connected(numbers)
        reader, writer = await asyncio.open_unix_connection(server.address.name)
        body = pickle.dumps(Harmful())
        writer.write(given_key + struct.pack(">II", len(body), 0) + body + bytes(32))
        received = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return received, await answer(server, replica_request(b"ab"))

    assert asyncio.run(scenario()) == (b"", [0, 1])
    assert not harm.exists()


def test_the_requests_of_a_dead_replica_go_to_the_next_one() -> None:
    async def scenario() -> list[int]:
        silent = Silent()
        server = ReplicaRegistry([GROUP], QueueBounds(8, 8))
        await server.listen()
        dying = await joined(server, silent)
        asking = asyncio.create_task(answer(server, replica_request(b"ab")))
        await asyncio.wait_for(silent.begun.acquire(), LIMIT_S)
        await joined(server, numbers)
        dying.close()
        return await asyncio.wait_for(asking, LIMIT_S)

    assert asyncio.run(scenario()) == [0, 1]


def test_each_change_of_the_number_of_live_replicas_is_reported() -> None:
    async def scenario() -> list[tuple[str, int]]:
        changes: list[tuple[str, int]] = []
        server = ReplicaRegistry([GROUP], QueueBounds(1, 1), on_change=lambda *change: changes.append(change))
        await server.listen()
        for _ in range(2):
            reported = await joined(server, numbers)
            reported.close()
            await asyncio.wait_for(server.wait_until_absent(GROUP), LIMIT_S)
        return changes

    assert asyncio.run(scenario()) == [(GROUP, 1), (GROUP, 0)] * 2


STOPPING = """
import asyncio, os, signal, sys
from hawkvision.datacenter.local_socket.protocol import Address
from hawkvision.datacenter.local_socket.replica_end import register

async def answering(request):
    os.kill(os.getpid(), signal.SIGSTOP)
    yield ()

async def main():
    await register(Address("\\0" + sys.argv[1], bytes.fromhex(sys.argv[2])), "small", "", answering)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_suspended_replica_is_absent_until_it_resumes_and_its_requests_fail_over() -> None:
    async def scenario() -> None:
        server = ReplicaRegistry([GROUP], QueueBounds(2, 2))
        await server.listen()
        its = server.address
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPING, its.name.removeprefix("\0"), its.key.hex()
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while server.live(GROUP) == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                with pytest.raises(NotReady, match="no live replica"):
                    await answer(server, replica_request())
                assert server.absent == (GROUP,)
                process.send_signal(signal.SIGCONT)
                while server.live(GROUP) == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            await process.wait()

    asyncio.run(scenario())


@given(bodies=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50))), data=st.data())
def test_frames_may_be_split_anywhere(bodies: list[tuple[int, bytes]], data: st.DataObject) -> None:
    class Wire(asyncio.Transport):
        sent = b""

        def write(self, data: Any) -> None:
            self.sent += data

        def is_closing(self) -> bool:
            return False

    class End(FrameProtocol):
        def __init__(self) -> None:
            super().__init__()
            self._transport = self.wire = Wire()
            self.found: list[tuple[int, object]] = []

        def frame(self, number: int, body: object) -> None:
            self.found.append((number, body))

    sender, receiver = End(), End()
    for number, body in bodies:
        sender.send(number, body)
    sent = sender.wire.sent
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)))))
    for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        receiver.data_received(sent[begin:end])
    assert receiver.found == bodies
