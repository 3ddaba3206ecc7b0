"""Servers as child processes: what ends them, and what does not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from hawkvision.core.errors import NotReady
from hawkvision.system.child_server import ServerProcess, running

SERVER = ("tests.bench.servers.overhead.echo",)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")


def echoed(server: ServerProcess, body: bytes) -> bytes:
    with urlopen(Request(f"{server.url}/echo", body), timeout=60) as reply:
        answer: bytes = reply.read()
        return answer


def test_server_is_ready_when_entered_and_gone_when_left() -> None:
    with running(*SERVER) as server:
        assert echoed(server, b"abc") == b'{"bytes":3}'
    assert server.process.poll() == -signal.SIGTERM


def test_server_that_ends_at_once_is_explained_and_leaves_nothing() -> None:
    with pytest.raises(NotReady, match=r"No module named tests\.nonsense"), running("tests.nonsense"):
        pass


@linux_only
def test_server_started_on_a_thread_outlives_that_thread() -> None:
    with ExitStack() as stack:
        started: list[ServerProcess] = []
        starter = threading.Thread(target=lambda: started.append(stack.enter_context(running(*SERVER))))
        starter.start()
        starter.join()
        task = Path(f"/proc/self/task/{starter.native_id}")
        while task.exists():  # the kernel signals children before the task disappears
            os.sched_yield()
        assert echoed(started[0], b"abc") == b'{"bytes":3}'


@linux_only
def test_child_whose_parent_died_before_it_asked_ends_at_once() -> None:
    program = (
        "import os, signal; from hawkvision.system.child_server import stop_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() == parent: os.sched_yield()\n"
        "print('asks', flush=True); stop_with_parent(signal.SIGKILL, parent); print('lives on')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "asks\n"


@linux_only
def test_server_ends_when_its_parent_is_killed() -> None:
    program = (
        "import os, signal; from hawkvision.system.child_server import running\n"
        f"with running(*{SERVER}) as server:\n"
        "    print(server.pid, flush=True); input(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.communicate("now\n")
    readable, _, _ = select.select([server], [], [], 30)
    os.close(server)
    assert readable == [server]
