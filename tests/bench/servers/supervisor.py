"""`python supervisor.py CORE FOLDER COMMAND…`: run a reference server and leave no process of it behind.

Reference servers start trees of processes, some in sessions of their own, and not all end with their parent. The
supervisor adopts orphans (prctl(2), PR_SET_CHILD_SUBREAPER), so that it can end all of them: when the server ends, at
SIGTERM, and when its standard input closes, which happens however its parent dies. All processes run on CORE only; the
server starts in FOLDER, which is removed at the end.

It uses the standard library only, because it runs with the environment of the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

STOP_TIMEOUT_S: Final = 8.0
"""For the server to end by itself after SIGTERM; what is left then is killed."""
MAX_GENERATIONS: Final = 100
"""Rounds of killing: those killed may have started others meanwhile."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None)


def main() -> int:
    """Start, wait, end everything; the exit status is the server's."""
    core, folder, *command = sys.argv[1:]
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.sched_setaffinity(0, {int(core)})
    stopped, stop = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"."))
    server = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_supervisor
    )
    ended = os.pidfd_open(server.pid)
    select.select([sys.stdin.fileno(), stopped, ended], [], [])
    if not select.select([ended], [], [], 0)[0]:
        server.send_signal(signal.SIGTERM)
        select.select([ended], [], [], STOP_TIMEOUT_S)
    for _ in range(MAX_GENERATIONS):
        left = set(descendants(os.getpid()))
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(left)
    shutil.rmtree(folder, ignore_errors=True)  # symbolic links in it are not followed
    return server.poll() or 0


def descendants(pid: int) -> Iterator[int]:
    """Children, grandchildren and so on, as far as they are there now."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in tasks.read_text(encoding="ascii").split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield child
            yield from descendants(child)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's living descendants, and of those of theirs that were waited for (proc(5))."""
    ticks = 0
    for child in descendants(pid):
        try:
            stat = Path(f"/proc/{child}/stat").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name in field 2 may hold spaces, so count from the parenthesis that ends it.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _die_with_supervisor() -> None:
    """If the supervisor is killed, the kernel stops the server itself."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _reap(killed: set[int]) -> None:
    """Wait for those that are ours by now; the others become so when their parents are reaped."""
    until = time.monotonic() + STOP_TIMEOUT_S
    for pid in killed:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
