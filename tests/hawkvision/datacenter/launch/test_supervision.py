"""What callers notice when parts of a tier die: real processes, killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from hawkvision.core.escalation_api import INFER_PATH
from hawkvision.datacenter.launch.isolation import family, listeners, network_of
from hawkvision.datacenter.launch.public_sockets import StandbyListener
from hawkvision.datacenter.launch.supervisor import MAX_PAUSE_S, MAX_RESTARTS, WITHIN_S, Restarts
from tests.bench.robustness.exposure import attack, vital
from tests.hawkvision.datacenter.conftest import (
    START_LIMIT_S,
    Running,
    can_forbid_namespaces,
    image,
    launch,
    marked_processes,
)
from tests.hawkvision.datacenter.launch.test_stopping import ready, until
from tests.hawkvision.datacenter.servers.test_service import Reply, ask

INGRESS: Final = "ServeReplica:hawkvision:ingress"
STAGE: Final = "ServeReplica:hawkvision:medium"


class Callers(threading.Thread):
    """One caller after the other until stopped; knows how each was answered."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running
        self._reported = threading.Event()
        self.statuses: set[int] = set()
        self.failures: list[str] = []

    def run(self) -> None:
        body = image()
        while not self._reported.wait(0.02):  # else it takes the processor from what it waits for
            try:
                self.statuses.add(ask(self._running, body).status)
            except OSError as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._reported.set()
        self.join()

    def were_reported(self, at_most_lost: int = 0) -> None:
        """Nobody was left waiting for what died: some were told so, and all others were answered.

        Args:
            at_most_lost: the processes that answer callers and died; each had at most one request inside.
        """
        assert len(self.failures) <= at_most_lost, self.failures
        assert 503 in self.statuses
        assert self.statuses <= {200, 503}


@contextmanager
def calling(running: Running) -> Iterator[Callers]:
    callers = Callers(running)
    callers.start()
    try:
        yield callers
    finally:
        callers.stop()


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def status(running: Running, path: str) -> int:
    return ask(running, path=path).status


@pytest.mark.slow
def test_where_it_shares_the_machines_network_only_ports_that_ask_for_a_token_leave_loopback(medium: Running) -> None:
    if not can_forbid_namespaces():
        pytest.skip("no user namespaces here, or no limit can be set in one: the tier has a network of its own")
    pid = medium.process.pid
    found = listeners(pid)
    assert {each.network for each in found} == {network_of(pid)}
    beyond = [each for each in found if each.beyond_loopback]
    assert {each.command for each in beyond} <= {"ray::ServeRepli"}
    attempts = attack(["127.0.0.1"], beyond, None, joining=False)
    assert [each for each in attempts if each.succeeded] == []
    assert medium.log is not None
    assert "reachable from outside this machine unless something forbids it" in medium.log.read_text()


@pytest.mark.slow
def test_after_a_death_in_ray_the_tier_replies_503_at_once_and_returns_at_the_same_address(medium: Running) -> None:
    before = restarts(medium)
    with calling(medium) as callers:
        os.kill(vital(medium.process.pid)["raylet"], signal.SIGKILL)
        until(lambda: ready(medium) == 503)
        until(lambda: ready(medium) == 200)
    callers.were_reported(at_most_lost=1)  # the ingress ends with the raylet
    assert ask(medium, image()).status == 200
    assert restarts(medium) - before == 1


@pytest.mark.slow
def test_a_dead_ingress_is_replaced_and_its_callers_get_503_meanwhile(medium: Running) -> None:
    before, dead = restarts(medium), part(medium, INGRESS)
    with calling(medium) as callers, suspended(part(medium, "ServeController")):  # else it is replaced too soon
        os.kill(dead, signal.SIGKILL)
        until(lambda: ready(medium) == 503)
        until(lambda: 503 in callers.statuses)
    until(lambda: ready(medium) == 200)
    callers.were_reported(at_most_lost=1)
    assert part(medium, INGRESS) != dead
    assert restarts(medium) == before


def restarts(tier: Running) -> int:
    found = re.search(rb"(?m)^hawkvision_datacenter_restarts (\d+)\.0$", ask(tier, path="/metrics").body)
    assert found
    return int(found[1])


def part(medium: Running, words: str) -> int:
    """The process of a tier whose command line has these words."""
    (found,) = [pid for pid in family(medium.process.pid) if words in command_line(pid)]
    return found


@pytest.mark.slow
def test_a_stage_without_a_replica_makes_the_tier_unready_and_a_new_replica_ready_again(medium: Running) -> None:
    with calling(medium) as callers, suspended(part(medium, "ServeController")):  # else it is replaced too soon
        os.kill(part(medium, STAGE), signal.SIGKILL)
        until(lambda: status(medium, "/readyz") == 503)
        stages, metrics = ask(medium, path="/v1/stages"), ask(medium, path="/metrics").body
    until(lambda: status(medium, "/readyz") == 200)
    assert_gone(stages, metrics)
    callers.were_reported()
    assert b'hawkvision_datacenter_live_replicas{group="medium"} 1.0' in ask(medium, path="/metrics").body


@pytest.mark.slow
@pytest.mark.parametrize("words", [STAGE, INGRESS])
def test_a_suspended_process_makes_the_tier_unready_until_it_resumes(medium: Running, words: str) -> None:
    stopped = part(medium, words)
    with suspended(stopped):
        until(lambda: ready(medium) == 503)
        assert ask(medium, image()).status == 503
    until(lambda: ready(medium) == 200)
    until(lambda: ask(medium, image()).status == 200)  # the launcher may take a last caller before it leaves the socket
    assert part(medium, words) == stopped


@pytest.mark.slow
def test_a_request_inside_is_answered_before_the_tier_stops(medium: Running) -> None:
    """Whatever it has been through, the tier ends well; its fixture sees that nothing is left."""
    body = image()
    head = f"POST {INFER_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(medium.url.rpartition(":")[2])), START_LIMIT_S) as caller:
        caller.sendall(head.encode())
        assert caller.recv(100).startswith(b"HTTP/1.1 100 ")  # it is inside
        medium.process.terminate()
        until(lambda: ready(medium) == 503)
        caller.sendall(body)
        answer = caller.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert medium.process.wait(60) == 0


def assert_gone(stages: Reply, metrics: bytes) -> None:
    assert (stages.status, stages.headers["retry-after"]) == (503, "1")
    assert b'hawkvision_datacenter_live_replicas{group="medium"} 0.0' in metrics


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_tier_process_killed_before_it_was_ready_ends_the_launcher_with_the_reason(models: Path) -> None:
    running = launch(models, "--variants", "medium")
    child: list[int] = []

    def started() -> bool:
        child[:] = [pid for pid in family(running.process.pid) if "launch.child" in command_line(pid)]
        return bool(child)

    until(started)
    os.kill(child[0], signal.SIGKILL)
    assert running.process.wait(60) == 1
    assert running.process.stdout is not None
    running.process.stdout.close()
    assert marked_processes(running.mark) == []


def test_restarts_come_slower_and_slower_and_end() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(now=float(second)) for second in range(MAX_RESTARTS + 1)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, MAX_PAUSE_S, None]


def test_restarts_of_long_ago_do_not_count() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(now=2.0 * WITHIN_S * turn) for turn in range(3 * MAX_RESTARTS)] == [0.0] * 3 * MAX_RESTARTS


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize(
    ("sent", "begins"),
    [
        (b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 503 "),
        (b"POST /v1/infer HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000), b"HTTP/1.1 503 "),
        (b"\x16\x03\x01 a handshake of TLS", b""),
        (b"", b""),
    ],
)
def test_callers_get_503_while_there_is_no_tier_process(sent: bytes, begins: bytes) -> None:
    async def scenario() -> bytes:
        with listening() as listener:
            gap = StandbyListener(listener)
            gap.open()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(sent)
            if not sent:
                writer.write_eof()
            said = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            gap.close()
            return said

    said = asyncio.run(scenario())
    assert said.startswith(begins)
    assert (b"retry-after: 1" in said) == bool(begins)


def test_a_connection_during_a_takeover_goes_to_the_next_process() -> None:
    async def scenario() -> bytes:
        with listening() as listener:
            gap = StandbyListener(listener)
            gap.open()
            await asyncio.sleep(0)
            gap.close()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            taken, _ = await asyncio.get_running_loop().sock_accept(listener)
            with taken:
                taken.send(b"of the next")
            said = await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
            return said

    assert asyncio.run(scenario()) == b"of the next"
