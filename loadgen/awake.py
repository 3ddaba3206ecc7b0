"""Keeping the processors awake while latencies are measured (`--keep-awake`).

A processor without work halts. A virtual one is then lent to others, and comes back when its host sees fit: on a
crowded host milliseconds later, or tens of them, which every request pays that finds it asleep. Linux counts that wait
as stolen (`loadgen.stolen`). A process for each processor that spins at idle priority (SCHED_IDLE, sched(7)) keeps it
running; whatever else wants the processor takes it at once. It is what the kernel's idle=poll does, for as long as a
test runs, without privileges, and it does so for everybody who is compared.

They rest for 3 % of the time: who uses all of its processors' time may find that it has a quota (cpu.max of a cgroup,
its own or its host's), and then everything stands still until the quota's next period begins.

Measured on two shared cores of an Intel Xeon: a process that sleeps 5 ms and works 1 ms woke 1.0 to 5.2 ms late at its
99th percentile and up to 43 ms, and 0.13 ms with the processors awake. Without rest all stood still for 100 ms five to
seven times in 40 s; with rest nothing woke more than 4 ms late in 80 s. Of the processor time that `rivals` wanted, 24
to 71 % was stolen, and 1 to 2 % with the processors awake.

With spinners hardly any of the processors' time is not wanted, so what was stolen is a share of nearly all of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final, NoReturn

from hawkvision.errors import ConfigError
from hawkvision.process import stop_with_parent

STOP_LIMIT_S: Final = 5.0
SPIN_S: Final = 0.02
REST_S: Final = 0.0006

_spinners: list[subprocess.Popen[bytes]] = []


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """All processors that this process may use are kept awake. Enter it on the main thread.

    Raises:
        ConfigError: where the system knows no idle priority.
    """
    if not hasattr(os, "SCHED_IDLE"):
        raise ConfigError("--keep-awake needs Linux, whose processes can run at idle priority")
    try:
        for processor in sorted(os.sched_getaffinity(0)):
            _spinners.append(  # noqa: PERF401 - those before one that cannot be started are to be stopped
                subprocess.Popen(  # noqa: S603 - ourselves
                    [sys.executable, "-m", "loadgen.awake", str(processor)],
                    start_new_session=True,  # an interrupt from the terminal is not for them
                    preexec_fn=stop_with_parent,
                )
            )
        yield
    finally:
        for spinner in _spinners:
            spinner.terminate()
        for spinner in _spinners:
            _end(spinner)
        _spinners.clear()


def spinning() -> int:
    """How many processors are kept awake; the load average counts as many processes too many."""
    return len(_spinners)


def _end(spinner: subprocess.Popen[bytes]) -> None:
    try:
        spinner.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        spinner.kill()
        spinner.wait()


def _spin(processor: int) -> NoReturn:
    """Spin on one processor, with short rests, until terminated."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {processor})
    while True:
        until = time.perf_counter() + SPIN_S
        while time.perf_counter() < until:
            pass
        time.sleep(REST_S)


if __name__ == "__main__":
    _spin(int(sys.argv[1]))
