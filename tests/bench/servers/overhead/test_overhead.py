"""The benchmark's own parts: a client that reads replies exactly, servers that echo, and one whole quick run."""

import importlib.util
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.system.child_server import running
from tests.bench.servers.overhead.node import make_image, pinned
from tests.bench.servers.overhead.wire import WireClient, WireClientError


@contextmanager
def replying(*pieces: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads one request of a three-byte body and sends these pieces one by one, then hangs up."""
    requests: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = b""
            while not request.endswith(b"\r\n\r\nabc"):
                request += connection.recv(65536)
            requests.append(request)
            for piece in pieces:
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        thread.join()


REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\nContent-Length: 5\r\n\r\nhello"


@given(st.lists(st.integers(1, len(REPLY) - 1), max_size=6, unique=True).map(sorted))
def test_reply_is_read_however_it_is_cut(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(REPLY)]
    pieces = [REPLY[a:b] for a, b in itertools.pairwise(bounds)]
    with replying(*pieces) as (url, requests), WireClient(url, "/x", b"abc") as wire:
        assert wire.exchange() == b"hello"
    assert requests[0].startswith(b"POST /x HTTP/1.1\r\n")
    assert b"Content-Length: 3\r\n" in requests[0]


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        REPLY[:-1],
        b"",
        b"x" * 100_000,
    ],
)
def test_what_is_no_whole_200_is_an_error(reply: bytes) -> None:
    with (
        replying(reply) as (url, _),
        WireClient(url, "/x", b"abc") as wire,
        pytest.raises((WireClientError, ConnectionError)),
    ):
        wire.exchange()


@pytest.mark.parametrize("kind", ["raw", "starlette", "fastapi"])
def test_echoes_receive_the_whole_body_every_time(kind: str) -> None:
    if kind == "fastapi" and importlib.util.find_spec("fastapi") is None:
        pytest.skip("FastAPI is not installed")
    body = make_image()
    with running("tests.bench.servers.overhead.echo", kind) as server, WireClient(server.url, "/echo", body) as wire:
        assert [json.loads(wire.exchange()) for _ in range(3)] == [{"bytes": len(body)}] * 3


def test_image_has_the_size_that_is_stated() -> None:
    assert abs(len(make_image(25_000)) - 25_000) < 1_000
    assert make_image() == make_image()


def test_pinning_is_inherited_and_undone() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned(core):
        ran = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], capture_output=True, check=True
        )
    assert ran.stdout.decode().strip() == str({core})
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_quick_run_reports_every_part(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.servers.overhead.node", "--quick", "--json", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert {"client alone", "Starlette echo", "edge node, no-op"} <= {row["server"] for row in report["overhead"]}
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in report["overhead"])


def program_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def children(pid: int) -> set[int]:
    """Those that run a program of their own by now; a signal that comes in the midst of a fork may be lost."""
    own = program_of(pid)
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return {child for child in found if program_of(child) not in (b"", own)}


@pytest.mark.slow
def test_interrupt_leaves_no_server_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.servers.overhead.node", "--quick"],
        stdout=subprocess.DEVNULL,
        # A test run in the background inherits an ignored SIGINT, and Python would keep ignoring it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as bench:
        started: set[int] = set()
        while not started and bench.poll() is None:
            started = children(bench.pid)
        servers = [os.pidfd_open(pid) for pid in started]
        bench.send_signal(signal.SIGINT)
        assert bench.wait(60) == 130
    assert servers
    for server in servers:
        assert select.select([server], [], [], 10)[0], "a server outlived the benchmark by ten seconds"
        os.close(server)
