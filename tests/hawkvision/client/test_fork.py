"""A client across `os.fork`, as in servers that fork before they serve and in pools of workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hawkvision.system.child_server import ServerProcess, running


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with running("edge", "--port", "0", "--backend", "noop", "--datagram-port", "0") as node:
        yield node


@pytest.mark.parametrize("transport", ["http", "datagram"])
def test_parent_and_children_each_get_answers_and_close_only_what_is_theirs(
    node: ServerProcess, transport: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hawkvision.client.forking", node.url, transport],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert lines[0] == "before: edge"
    assert lines.count("child: edge") == 2, ran.stdout
    assert lines.count("parent: edge") == 3, ran.stdout
    assert lines.count("status: 0") == 3, ran.stdout
    assert any(line.startswith("closed: the client of") for line in lines)
    assert ran.stderr == ""


def test_a_fork_while_other_threads_call_does_not_hang_the_child(node: ServerProcess) -> None:
    script = f"""
import os, signal, threading
from hawkvision import Client
from tests.images import encoded
image, client, stop = encoded(), Client({node.url!r}), threading.Event()
def ask():
    while not stop.is_set():
        client.classify(image, quality="fast")
callers = [threading.Thread(target=ask) for _ in range(4)]
[caller.start() for caller in callers]
client.classify(image)
for _ in range(10):
    if os.fork() == 0:
        signal.alarm(30)
        client.classify(image)
        os._exit(0)
    assert os.wait()[1] == 0, "the child hung or failed"
stop.set()
[caller.join() for caller in callers]
client.close()
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr


def test_an_async_client_made_before_a_fork_works_on_the_childs_loop(node: ServerProcess) -> None:
    script = f"""
import asyncio, os, signal
from hawkvision import AsyncClient
from tests.images import encoded
client = AsyncClient({node.url!r}, timeout_s=20.0)
loop = asyncio.new_event_loop()
loop.run_until_complete(client.classify(encoded()))
if os.fork() == 0:
    signal.alarm(30)
    async def once():
        async with client:
            return await client.classify(encoded())
    print(asyncio.run(once()).tier.value, flush=True)
    os._exit(0)
assert os.wait()[1] == 0, "the child hung or failed"
print(loop.run_until_complete(client.classify(encoded())).tier.value, flush=True)
loop.run_until_complete(client.close())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["edge", "edge"]
