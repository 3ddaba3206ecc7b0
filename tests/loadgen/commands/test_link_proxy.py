"""Servers behind a link: what callers say crosses it, by TCP and as datagrams, and nothing hangs when it cannot."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.system.child_server import ServerProcess
from loadgen.commands.link_proxy import LinkProxy, udp_port_of
from loadgen.network.namespaces import available
from loadgen.network.profiles import LinkProfile, load_profile
from loadgen.workload.record import load
from tests.loadgen.command import command

ANSWER_S = 30.0
"""A bound on waiting for what must come, not on how fast it does."""
DELAY_MS = 30

needs_a_link = pytest.mark.skipif(available() is not None, reason=f"no TUN link here: {available()}")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def profile_file(folder: Path, loss: str = "0%") -> Path:
    way = f'rate = "50mbit"\ndelay = "{DELAY_MS}ms"\nloss = "{loss}"\nqueue = "1MB"\n'
    path = folder / "slow.toml"
    path.write_text(f'description = "slow"\nsources = ["assumption: a test"]\n[up]\n{way}[down]\n{way}')
    return path


@pytest.fixture
def slow(tmp_path: Path) -> LinkProfile:
    return load_profile(profile_file(tmp_path))


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def address(behind: LinkProxy) -> tuple[str, int]:
    host, _, port = behind.url.removeprefix("http://").partition(":")
    return host, int(port)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that was said, once the caller has said it."""
    writer.write(await reader.read())
    writer.close()


@needs_a_link
def test_every_byte_crosses_both_ways_whatever_the_link_loses(tmp_path: Path) -> None:
    datagram = load_profile(profile_file(tmp_path, "2%"))
    data = os.urandom(300_000)

    async def scenario() -> tuple[bytes, int, float]:
        loop = asyncio.get_running_loop()
        async with serving(echo) as url, LinkProxy(url, datagram) as behind:
            behind.begin()
            begun = loop.time()
            reader, writer = await asyncio.open_connection(*address(behind))
            writer.write(data)
            writer.write_eof()
            said = await reader.read()
            writer.close()
            return said, behind.counts()[0].lost_air, loop.time() - begun

    said, lost, seconds = asyncio.run(asyncio.wait_for(scenario(), ANSWER_S))
    assert said == data
    assert lost > 0
    assert seconds >= 4 * DELAY_MS / 1e3, "a handshake and an answer"


@needs_a_link
def test_a_server_that_is_not_there_quietly_breaks_the_callers_connection(slow: LinkProfile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    complaints: list[dict[str, Any]] = []

    async def scenario() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        async with LinkProxy(f"http://127.0.0.1:{port}", slow) as behind:
            reader, _ = await asyncio.open_connection(*address(behind))
            return await reader.read()

    with pytest.raises(ConnectionResetError):
        asyncio.run(asyncio.wait_for(scenario(), ANSWER_S))
    assert complaints == []


@needs_a_link
def test_a_caller_beyond_the_bound_is_hung_up_on(slow: LinkProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.commands.link_proxy.MAX_CONNECTIONS", 1)

    async def scenario() -> tuple[bytes, int]:
        there, go_on = asyncio.Event(), asyncio.Event()

        async def wait(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there.set()
            await go_on.wait()
            writer.write(b"still here")
            writer.close()

        async with serving(wait) as url, LinkProxy(url, slow) as behind:
            first, writer = await asyncio.open_connection(*address(behind))  # dropped, it would close
            await there.wait()
            reader, _ = await asyncio.open_connection(*address(behind))
            with pytest.raises(ConnectionResetError):
                await reader.read()
            go_on.set()
            said = await first.read()
            writer.close()
            return said, behind.refused

    assert asyncio.run(asyncio.wait_for(scenario(), ANSWER_S)) == (b"still here", 1)


@needs_a_link
def test_leaving_hangs_up_on_who_is_still_there(slow: LinkProfile) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.set()
        await reader.read()
        writer.close()

    async def scenario() -> bytes:
        async with serving(silent) as url:
            async with LinkProxy(url, slow) as behind:
                reader, writer = await asyncio.open_connection(*address(behind))
                writer.write(b"?")
                await there.wait()
            return await reader.read()

    there = asyncio.Event()
    with pytest.raises(ConnectionResetError):
        asyncio.run(asyncio.wait_for(scenario(), ANSWER_S))


@needs_a_link
def test_runs_over_a_link_take_as_long_as_it_and_say_so(null: ServerProcess, tmp_path: Path) -> None:
    for protocol in ("http", "datagram"):
        record = tmp_path / f"{protocol}.json"
        done = command(
            "run", "--url", null.url, "--protocol", protocol, "--link", str(profile_file(tmp_path)), "--no-noise",
            "--arrivals", "constant:20", "--duration-s", "1", "--warm-up-s", "0", "--json", str(record),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        run = load(record)
        assert (run.url, run.link) == (null.url, profile_file(tmp_path).stem)
        assert [(each.link, each.delay_ms, each.up) for each in run.links] == [("client-edge", DELAY_MS, True)]
        assert all(each.answered and each.latency_s >= 2 * DELAY_MS / 1e3 for each in run.outcomes)


@needs_a_link
def test_the_command_offers_a_server_until_it_is_interrupted(null: ServerProcess, tmp_path: Path) -> None:
    port = null.url.rpartition(":")[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", "link-proxy", "--url", null.url, "--link", str(profile_file(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith(f"ready: http://127.0.0.2:{port} is {null.url} behind ")
        with socket.create_connection(("127.0.0.2", int(port)), ANSWER_S) as caller:
            caller.sendall(b"GET /v1/transport HTTP/1.1\r\n\r\n")
            assert caller.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=ANSWER_S)
    assert process.returncode == 0
    assert re.search(r'^up \{.*"delivered":[1-9]', said, re.MULTILINE)


def test_a_node_says_where_it_takes_datagrams(null: ServerProcess) -> None:
    assert 0 < asyncio.run(udp_port_of(null.url, None)) < 65536
    with pytest.raises(NotReady, match="/v1/transport"):
        asyncio.run(udp_port_of("http://127.0.0.1:1", None))


@pytest.mark.parametrize(
    ("url", "listen", "said"),
    [
        ("https://127.0.0.1:1", "127.0.0.2", "plain HTTP"),
        ("127.0.0.1:1", "127.0.0.2", "expected http://HOST"),
        ("http://[::1", "127.0.0.2", "expected http://HOST"),
        ("http://127.0.0.1:99999", "127.0.0.2", "expected http://HOST"),
        ("http://name:secret@127.0.0.1:1", "127.0.0.2", "user name or password"),
        ("http://127.0.0.1:1", "0.0.0.0", "beyond this machine"),
        ("http://127.0.0.1:1", "localhost", "beyond this machine"),
    ],
)
def test_what_cannot_be_offered_is_refused(url: str, listen: str, said: str, slow: LinkProfile) -> None:
    with pytest.raises(ConfigError, match=said):
        LinkProxy(url, slow, listen=listen)


@needs_a_link
def test_an_address_that_is_taken_is_named(slow: LinkProfile) -> None:
    async def scenario(port: int) -> None:
        async with LinkProxy("http://127.0.0.1:1", slow, port=port):
            pass

    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.2:{port}"):
            asyncio.run(scenario(port))
