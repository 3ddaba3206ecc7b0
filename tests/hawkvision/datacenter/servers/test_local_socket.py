"""The short way from the server to a replica, over a real socket."""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import os
import pickle
import re
import signal
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import BadImage, DeadlineMissed, NotReady, Overloaded, TargetUnreachable
from hawkvision.core.escalation_api import INFER_PATH
from hawkvision.core.logs import RequestIds, TextFormatter
from hawkvision.datacenter.execution.ensemble import VariantAnswer, Views
from hawkvision.datacenter.launch.listening import family
from hawkvision.datacenter.servers.local_socket import Part, Question, Replicas, Reported, _Frames, report
from tests.hawkvision.datacenter.conftest import MARK, START_LIMIT_S, Running, image, start, stop
from tests.hawkvision.datacenter.launch.test_stopping import until

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]
LIMIT_S = 60.0
GROUP = "small"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


def part(number: int) -> Part:
    row = np.full((1, 3), number, np.float32)
    return (VariantAnswer("small", Views.UPRIGHT, row, 0.1, 0.2, 0.3, number),)


def question(image: bytes = b"", *, piecemeal: bool = True) -> Question:
    return Question(image, (), 0.0, piecemeal)


async def numbers(asked: Question) -> AsyncGenerator[Part]:
    """As many parts as the image has bytes."""
    for number in range(len(asked.image)):
        await asyncio.sleep(0)
        yield part(number)


async def connected(
    answering: Callable[[Question], AsyncGenerator[Part]], *, max_ongoing: int = 8, max_queued: int = 8
) -> Replicas:
    """The server's end of a replica that answers like that."""
    replicas = Replicas([GROUP], max_ongoing=max_ongoing, max_queued=max_queued, retry_after_s=2.5)
    await replicas.listen()
    await joined(replicas, answering)
    return replicas


async def joined(replicas: Replicas, answering: Callable[[Question], AsyncGenerator[Part]]) -> Reported:
    before = replicas.live(GROUP)
    reported = await report(replicas.address, GROUP, "", answering)
    async with asyncio.timeout(LIMIT_S):
        while replicas.live(GROUP) == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return reported


async def told(direct: Replicas, asked: Question) -> list[int]:
    async with aclosing(direct.ask(GROUP, asked)) as parts:
        return [its[0].batch_size async for its in parts]


class Held:
    """Questions that a replica does not answer until it is told to; tells of those that it was made to give up."""

    def __init__(self) -> None:
        self.begun, self.go, self.given_up = asyncio.Semaphore(0), asyncio.Event(), asyncio.Semaphore(0)

    async def __call__(self, asked: Question) -> AsyncGenerator[Part]:
        self.begun.release()
        try:
            yield part(0)
            await self.go.wait()
            yield part(1)
        except asyncio.CancelledError:
            self.given_up.release()
            raise


class Silent:
    """Questions that are never answered."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, asked: Question) -> AsyncGenerator[Part]:
        self.begun.release()
        await asyncio.Event().wait()
        yield part(0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_parts_come_one_by_one_and_as_they_were(run: Run[None]) -> None:
    async def scenario() -> None:
        direct = await connected(numbers)
        async with aclosing(direct.ask(GROUP, question(b"four"))) as parts:
            found = [its async for its in parts]
        assert [its[0].batch_size for its in found] == [0, 1, 2, 3]
        (last,) = found[-1]
        assert (last.variant, last.views, last.probabilities.tolist()) == ("small", Views.UPRIGHT, [[3.0, 3.0, 3.0]])

    run(scenario())


def test_many_ask_at_once_and_get_each_its_own_answer() -> None:
    async def scenario() -> list[list[int]]:
        direct = await connected(numbers, max_ongoing=3, max_queued=100)
        return await asyncio.gather(*(told(direct, question(bytes(n))) for n in range(40)))

    assert asyncio.run(scenario()) == [list(range(n)) for n in range(40)]


@pytest.mark.parametrize(
    "error", [BadImage("no image"), DeadlineMissed("too late"), TargetUnreachable("too much", 0.9)]
)
def test_what_the_replica_refuses_is_raised_as_it_was_and_the_next_is_unharmed(error: Exception) -> None:
    async def answering(asked: Question) -> AsyncGenerator[Part]:
        if not asked.piecemeal:
            raise error
        yield part(1)

    async def scenario() -> list[int]:
        direct = await connected(answering)
        with pytest.raises(type(error)) as raised:
            await told(direct, question(piecemeal=False))
        assert vars(raised.value) == vars(error)
        return await told(direct, question())

    assert asyncio.run(scenario()) == [1]


def test_a_defect_of_the_replica_is_told_in_words_and_the_next_is_unharmed(caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable(Exception):
        def __reduce__(self) -> str:
            raise TypeError("cannot be pickled")

    async def answering(asked: Question) -> AsyncGenerator[Part]:
        yield part(1)
        if not asked.piecemeal:
            raise Unspeakable("at line 7")

    async def scenario() -> list[int]:
        direct = await connected(answering)
        with pytest.raises(RuntimeError, match="small: Unspeakable: at line 7"):
            await told(direct, question(piecemeal=False))
        return await told(direct, question())

    assert asyncio.run(scenario()) == [1]
    assert "could not be looked at" in caplog.text


def test_what_a_replica_logs_about_an_image_names_the_request_that_it_is_of() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(TextFormatter())

    async def answering(asked: Question) -> AsyncGenerator[Part]:
        yield part(1)
        raise ValueError("at line 7")

    async def scenario() -> None:
        direct = await connected(answering)
        for name in ("one", "two"):
            asked = replace(question(), request=RequestIds(name, "0" * 32))
            with pytest.raises(RuntimeError, match="at line 7"):
                await told(direct, asked)

    logger = logging.getLogger("hawkvision.datacenter")
    logger.addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        logger.removeHandler(handler)
    assert re.findall(r"\[(\w+) trace=0{32}\] an image could not be looked at", written.getvalue()) == ["one", "two"]


def test_who_stops_listening_ends_the_work() -> None:
    async def scenario() -> None:
        held = Held()
        direct = await connected(held)
        async with aclosing(direct.ask(GROUP, question())) as parts:
            await anext(parts)
        await asyncio.wait_for(held.given_up.acquire(), LIMIT_S)

    asyncio.run(scenario())


def test_a_server_that_hangs_up_ends_all_its_work() -> None:
    async def scenario() -> None:
        held = Held()
        direct = await connected(held)
        asking = [asyncio.create_task(told(direct, question())) for _ in range(2)]
        for _ in asking:
            await asyncio.wait_for(held.begun.acquire(), LIMIT_S)
        direct.close()
        for _ in asking:
            await asyncio.wait_for(held.given_up.acquire(), LIMIT_S)
        for task in asking:
            with pytest.raises(NotReady, match="is gone"):
                await asyncio.wait_for(task, LIMIT_S)
        assert direct.absent == (GROUP,)
        with pytest.raises(NotReady, match="no live replica"):
            await told(direct, question())

    asyncio.run(scenario())


def test_as_many_as_allowed_are_at_the_replica_others_wait_and_more_are_shed() -> None:
    async def scenario() -> None:
        held = Held()
        direct = await connected(held, max_ongoing=1, max_queued=1)
        first = asyncio.create_task(told(direct, question()))
        await asyncio.wait_for(held.begun.acquire(), LIMIT_S)
        second = asyncio.create_task(told(direct, question()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as shed:
            await told(direct, question())
        assert shed.value.retry_after_s == 2.5
        assert held.begun.locked()  # the second waits at the server
        held.go.set()
        assert [await asyncio.wait_for(task, LIMIT_S) for task in (first, second)] == [[0, 1], [0, 1]]

    asyncio.run(scenario())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_users_process_is_hung_up_on() -> None:
    stranger = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect('\\0' + sys.argv[1]); sys.exit(len(s.recv(1)))"
    )

    async def scenario() -> tuple[int | None, list[int]]:
        server = await connected(numbers)
        name = server.address.name.removeprefix("\0")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", stranger, name)
        code = await asyncio.wait_for(process.wait(), LIMIT_S)
        return code, await told(server, question(b"ab"))

    assert asyncio.run(scenario()) == (0, [0, 1])


@pytest.mark.parametrize("given_key", [b"", bytes(32), bytes(7)])
def test_who_does_not_have_the_key_is_hung_up_on_before_anything_is_unpickled(given_key: bytes, tmp_path: Path) -> None:
    harm = tmp_path / "harm"

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (harm,)

    async def scenario() -> tuple[bytes, list[int]]:
        server = await connected(numbers)
        reader, writer = await asyncio.open_unix_connection(server.address.name)
        body = pickle.dumps(Harmful())
        writer.write(given_key + struct.pack(">II", len(body), 0) + body + bytes(32))
        heard = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        return heard, await told(server, question(b"ab"))

    assert asyncio.run(scenario()) == (b"", [0, 1])
    assert not harm.exists()


def test_a_dead_replicas_questions_go_to_the_next_one() -> None:
    async def scenario() -> list[int]:
        silent = Silent()
        server = Replicas([GROUP], max_ongoing=8, max_queued=8)
        await server.listen()
        dying = await joined(server, silent)
        asking = asyncio.create_task(told(server, question(b"ab")))
        await asyncio.wait_for(silent.begun.acquire(), LIMIT_S)
        await joined(server, numbers)
        dying.close()
        return await asyncio.wait_for(asking, LIMIT_S)

    assert asyncio.run(scenario()) == [0, 1]


def test_changes_are_told_as_they_happen() -> None:
    async def scenario() -> list[tuple[str, int]]:
        changes: list[tuple[str, int]] = []
        server = Replicas([GROUP], max_ongoing=1, max_queued=1, changed=lambda *its: changes.append(its))
        await server.listen()
        for _ in range(2):
            reported = await joined(server, numbers)
            reported.close()
            await asyncio.wait_for(server.gone(GROUP), LIMIT_S)
        return changes

    assert asyncio.run(scenario()) == [(GROUP, 1), (GROUP, 0)] * 2


STOPPING = """
import asyncio, os, signal, sys
from hawkvision.datacenter.servers.local_socket import Address, report

async def answering(question):
    os.kill(os.getpid(), signal.SIGSTOP)
    yield ()

async def main():
    await report(Address("\\0" + sys.argv[1], bytes.fromhex(sys.argv[2])), "small", "", answering)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_stopped_replica_is_absent_until_it_goes_on_and_its_questions_are_given_back() -> None:
    async def scenario() -> None:
        server = Replicas([GROUP], max_ongoing=2, max_queued=2)
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
                    await told(server, question())
                assert server.absent == (GROUP,)
                process.send_signal(signal.SIGCONT)
                while server.live(GROUP) == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            await process.wait()

    asyncio.run(scenario())


@given(bodies=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50))), data=st.data())
def test_frames_may_be_cut_anywhere_on_the_way(bodies: list[tuple[int, bytes]], data: st.DataObject) -> None:
    class Wire(asyncio.Transport):
        sent = b""

        def write(self, data: Any) -> None:
            self.sent += data

        def is_closing(self) -> bool:
            return False

    class End(_Frames):
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


# ── In a real tier ─────────────────────────────────────────────────────────────────────────────────────────────────


def ask(running: Running, limit_s: float = LIMIT_S) -> int:
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=limit_s)
    try:
        connection.request("POST", INFER_PATH, image())
        return connection.getresponse().status
    finally:
        connection.close()


def replicas(running: Running) -> list[int]:
    """The process ids of its replicas."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={running.mark}".encode() in (entry / "environ").read_bytes():
                found += [int(entry.name)] * ("ServeReplica" in (entry / "cmdline").read_text())
    return found


def ways(running: Running) -> int:
    """The server's connections to replicas, by the kernel's account (proc(5): state 3 is connected)."""
    server = next(pid for pid in family(running.process.pid) if "launch.child" in command_line(pid))
    lines = [
        line.split() for line in Path(f"/proc/{server}/net/unix").read_text().splitlines() if "@hawkvision-" in line
    ]
    return sum(state == "03" for _, _, _, _, _, state, _, _ in lines)


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.slow
def test_a_tier_asks_its_only_replica_directly(medium: Running) -> None:
    until(lambda: ways(medium) == 1)  # not at once: the replica takes the connection after the server has it
    assert ask(medium) == 200


@pytest.mark.slow
def test_a_replica_that_dies_is_replaced_and_asked_directly_again(medium: Running) -> None:
    (dead,) = replicas(medium)
    with ThreadPoolExecutor(8) as callers:
        answers = [callers.submit(ask, medium, START_LIMIT_S) for _ in range(64)]
        assert answers[0].result() == 200
        os.kill(dead, signal.SIGKILL)
        assert {answer.result() for answer in answers} <= {200, 503}
    until(lambda: ask(medium) == 200)
    until(lambda: ways(medium) == 1)
    assert ask(medium) == 200
    assert replicas(medium) != [dead]


@pytest.mark.slow
def test_of_several_replicas_another_answers_for_one_that_dies(models: Path) -> None:
    running = start(models, "--variants", "medium", "--min-replicas", "2", "--max-replicas", "2", "--num-cpus", "0.1")
    try:
        until(lambda: ways(running) == 2)
        with ThreadPoolExecutor(8) as callers:
            answers = [callers.submit(ask, running, LIMIT_S) for _ in range(64)]
            assert answers[0].result() == 200
            os.kill(replicas(running)[0], signal.SIGKILL)
            assert {answer.result() for answer in answers} == {200}
    finally:
        stop(running)
