"""The benchmark's own parts: a client that reads replies exactly, servers that echo, and one whole quick run."""

import importlib.util
import itertools
import json
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
from tests.bench.servers.overhead.node import make_image
from tests.bench.servers.overhead.wire import WireClient


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


@pytest.mark.parametrize("kind", ["raw", "starlette", "fastapi"])
def test_echoes_receive_the_whole_body_every_time(kind: str) -> None:
    if kind == "fastapi" and importlib.util.find_spec("fastapi") is None:
        pytest.skip("FastAPI is not installed")
    body = make_image()
    with running("tests.bench.servers.overhead.echo", kind) as server, WireClient(server.url, "/echo", body) as wire:
        assert [json.loads(wire.exchange()) for _ in range(3)] == [{"bytes": len(body)}] * 3


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
