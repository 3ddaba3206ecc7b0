"""`hawkvision status`: one node in full, several on a line each, and those that say nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Final

import msgspec
import pytest

from edge.serving.status import AlarmStatus, GuaranteeStatus, Status
from hawkvision.client import Client
from hawkvision.client.response import BadReply, Unreachable
from hawkvision.core.errors import NotFound
from hawkvision.core.types import AccuracyStatus, StatusReason
from hawkvision.system.child_server import ServerProcess, running
from tests.bench.ports import free_port
from tests.edge.conftest import Caller
from tests.hawkvision.client.client_node import Start, refusal
from tests.hawkvision.command import Ran, invoke
from tests.images import encoded

NODE: Final = ("edge", "--port", "0", "--backend", "noop")
DOWN: Final = "cannot be reached: nothing listens there; `hawkvision up` starts a node"


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with running(*NODE) as node, closing(Caller(node)) as caller:
        for _ in range(3):
            assert caller.classify(encoded(), "quality=fast").status == 200
        yield node


@pytest.fixture
def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


def status(*words: str) -> Ran:
    return invoke("status", *words)


def test_one_node_is_shown_in_full(node: ServerProcess) -> None:
    shown = status(node.url)
    assert (shown.exit_code, shown.stderr) == (0, "")
    said = shown.stdout
    assert said.startswith(f"{node.url}: ready, HawkVision ")
    assert "no datacenter" in said
    assert "0/256" in said
    assert said.count("best_effort") == 1 + 3, "the guarantee and each answer"
    assert said.count("cocker spaniel") == 3
    assert max(map(len, said.splitlines())) <= 80


def test_the_address_may_come_from_the_environment(node: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAWKVISION_URL", node.url)
    assert status().stdout.startswith(f"{node.url}: ready")


def test_several_nodes_get_a_line_each_and_one_that_is_down_says_why(node: ServerProcess, nowhere: str) -> None:
    shown = status(nowhere, node.url)
    assert shown.exit_code == 1
    down, up = shown.stdout.splitlines()
    assert [*down.split(maxsplit=1)] == [nowhere, f"error: {DOWN}"]
    assert up.startswith(f"{node.url}  ready, ")
    assert "refused 0 %" in up


def test_the_only_node_may_be_down(nowhere: str) -> None:
    shown = status(nowhere)
    assert (shown.exit_code, shown.stdout.strip()) == (1, f"{nowhere}  error: {DOWN}")


def test_an_alarm_is_shown_with_its_time_and_cause(
    start: Start, node: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with Client(node.url) as client:
        now = msgspec.convert(client.status(), Status)
    at, stream = datetime(2026, 11, 28, 23, 20, tzinfo=UTC), "8b3078d0906805de0c6fc34fdf67b576"
    row = GuaranteeStatus(
        stream, True, AccuracyStatus.SUSPENDED, StatusReason.ALARM, 120, 118, 2, 0.155, 0.052, None, None
    )
    task = msgspec.structs.replace(
        now.tasks[0],
        guarantee=(now.tasks[0].guarantee[0], row),
        alarms=(
            AlarmStatus(at, stream, "31 of 200 audits differ", None),
            AlarmStatus(None, None, "a\x1b[31mtenth", at),
        ),
    )
    served = start((200, {}, msgspec.json.encode(msgspec.structs.replace(now, tasks=(task,)))))
    said = " ".join(status(served.url).stdout.split())
    assert "stream 8b3078d0 suspended (alarm)" in said
    assert "118/120" in said
    assert "15.5 %" in said
    assert f"alarm 2026-11-28 23:20:00 imagenet {stream}: 31 of 200 audits differ" in said
    assert "alarm at an unknown time imagenet node: a?[31mtenth (ended 2026-11-28 23:20:00)" in said
    line, _ = status(served.url, f"{served.url}/again").stdout.splitlines()
    assert "alarms: 1" in line


def test_a_node_that_has_no_status_is_an_error(start: Start) -> None:
    shown = status(start(refusal(NotFound("no such path"))).url)
    assert shown.exit_code == 1
    assert "error: no such path" in shown.stdout


# ------------------------------------------------------------------------------------------------------- watching


def watching(*urls: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hawkvision", "status", "--watch", *urls],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def test_watching_goes_on_until_the_only_node_stops() -> None:
    with running(*NODE) as node:
        watcher = watching(node.url)
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith(f"{node.url}: ready")
        node.stop()
        rest, _ = watcher.communicate(timeout=60)
    assert f"{node.url}: stopping" in rest
    assert watcher.returncode == 0


def test_watching_several_goes_on_until_it_is_told_to_end(node: ServerProcess, nowhere: str) -> None:
    watcher = watching(node.url, nowhere)
    assert watcher.stdout is not None
    lines = [watcher.stdout.readline() for _ in range(6)]
    assert [line.split()[0] for line in lines] == [node.url, nowhere] * 3
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=60)
    assert watcher.returncode == 0


def test_the_client_reads_lines_and_stops_when_it_likes(node: ServerProcess) -> None:
    with Client(node.url) as client:
        lines = client.watch_status()
        first, second = next(lines), next(lines)
        lines.close()
        assert first["time"] < second["time"]
        assert client.status()["ready"]


def test_the_client_says_why_a_node_cannot_be_watched(nowhere: str, start: Start) -> None:
    with Client(nowhere) as client, pytest.raises(Unreachable, match="nothing listens there"):
        next(client.watch_status())
    with Client(start(refusal(NotFound("no such path"))).url) as client, pytest.raises(NotFound):
        next(client.watch_status())
    with Client(start((200, {}, b"[]\n")).url) as client, pytest.raises(BadReply):
        next(client.watch_status())
