"""A child process with limits, in which a command loads and runs graphs that strangers made.

    hawkvision models add … ─ in_child ─┬─ parent: waits, passes signals on, says which limit ended the child
                                        └─ child:  the command; each `one_run` has processor time, wall time, memory

A graph may never end, may take all memory, or may end its process. While it runs, Python handles no signal.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from hawkvision.system.child_server import stop_with_parent

RUN_CPU_S: Final = 20
"""Processor seconds for loading a graph, or for one image. The largest models take a few on a slow machine."""
MORE_CPU_S: Final = 5
"""Processor seconds for each further image of a batch."""
WALL_PER_CPU: Final = 15
"""Seconds for each of these: a busy machine gives a fraction of a core."""
STOP_S: Final = 2.0
"""Seconds in which the child may clean up after a signal."""
_STEP_S: Final = 0.02
_NAME_BYTES: Final = 4096

_running: mmap.mmap | None = None
"""In the child: the name of the graph that runs, which its parent reads too."""


def in_child() -> None:
    """Go on in a child process. This returns in the child; the parent exits as the child does.

    For the main thread of a process that has no other.
    """
    global _running
    name = mmap.mmap(-1, _NAME_BYTES)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        _wait(child, name)
    stop_with_parent(signal.SIGKILL, parent)
    _running = name
    from hawkvision.system.memory import room

    free, most = room().free_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
    free = free if most == resource.RLIM_INFINITY else min(free, most)
    resource.setrlimit(resource.RLIMIT_DATA, (free, free))


@contextmanager
def one_run(where: str, images: int = 1) -> Iterator[None]:
    """Run foreign code about a graph within limits, if this is a child of `in_child`.

    Args:
        where: names the graph in errors.
        images: how many are inferred at once.
    """
    if _running is None:
        yield
        return
    _running[:] = where.encode()[-_NAME_BYTES:].ljust(_NAME_BYTES, b"\0")
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    cpu_s = RUN_CPU_S + MORE_CPU_S * (images - 1)
    soft = int(time.process_time()) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (soft if most == resource.RLIM_INFINITY else min(soft, most), most))
    signal.setitimer(signal.ITIMER_REAL, WALL_PER_CPU * cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        _running[:] = bytes(_NAME_BYTES)


def _wait(child: int, name: mmap.mmap) -> NoReturn:
    """Exit as the child does; on SIGTERM or SIGINT, end it."""
    try:
        _, status = os.waitpid(child, 0)
    except (SystemExit, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.kill(child, signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(_STEP_S)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        graph = name[:].rstrip(b"\0").decode(errors="replace")
        print(f"error: {_ended(graph, -code)}", file=sys.stderr)  # noqa: T201 - it speaks for the command
    sys.exit(code if code >= 0 else 1)


def _ended(graph: str, number: int) -> str:
    """Why the child ended."""
    limits = f"{RUN_CPU_S} s, and {MORE_CPU_S} s for each further image of a batch"
    match signal.Signals(number):
        case signal.SIGXCPU:
            how = f"was stopped at its limit of processor time: {limits}"
        case signal.SIGALRM:
            how = f"was stopped after {WALL_PER_CPU} times its limit of processor time: {limits}"
        case other:
            how = f"ended the process by {other.name}"
    return f"{graph}: loading or running the graph {how}" if graph else f"the command {how}"
