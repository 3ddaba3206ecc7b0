"""Keeps the processors from halting during a measurement (`--prevent-cpu-idle`).

A virtual processor that halts is lent to others, and its host gives it back milliseconds later; every request that
needs it then pays for the wait. One process per processor spins at idle priority (SCHED_IDLE, sched(7)), which is what
the kernel's idle=poll does, without privileges and for as long as a test runs.

- Idle priority counts within a session only ("The autogroup feature", sched(7)). So the spinners' sessions get the
  lowest weight there is.
- A spinner yields its processor on each round (sched_yield(2)). Otherwise a thread that wakes waits for the next clock
  tick behind it.
- Spinners rest for 3 % of the time, so that they do not use up a CPU quota (cpu.max of a cgroup).
- They count their rounds, which tells how fast the processors are (`loadgen.host.cpu_slowdown`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from hawkvision.core.errors import ConfigError
from hawkvision.system.child_server import ended, stop_with_parent
from loadgen.host.cpu_slowdown import SpinnerBoard, SpinnerLap, SpinnerProgress, board_bytes

STOP_LIMIT_S: Final = 5.0
SPIN_S: Final = 0.1
REST_S: Final = 0.003
AUTOGROUP: Final = Path("/proc/self/autogroup")
LEAST: Final = "19"
AUTOGROUP_EVERY_S: Final = 0.1
"""Without privileges all processes together may tell one autogroup in that time (Linux, kernel/sched/autogroup.c)."""
AUTOGROUP_TRIES: Final = 50

_spinners: list[subprocess.Popen[bytes]] = []
_boards: list[SpinnerBoard] = []
"""Where they write; empty without any."""


@contextlib.contextmanager
def prevented() -> Iterator[None]:
    """All processors that this process may use are kept awake. Enter it on the main thread.

    Raises:
        ConfigError: where the system knows no idle priority.
    """
    if not hasattr(os, "SCHED_IDLE"):
        raise ConfigError("--prevent-cpu-idle needs Linux, whose processes can run at idle priority")
    processors = sorted(os.sched_getaffinity(0))
    try:
        with _shared(board_bytes(len(processors))) as shared:
            _boards.append(SpinnerBoard(shared, len(processors)))
            for number, processor in enumerate(processors):
                words = (str(word) for word in (processor, shared, number, len(processors)))
                _spinners.append(
                    subprocess.Popen(  # noqa: S603 - ourselves
                        [sys.executable, "-m", "loadgen.host.idle_prevention", *words],
                        start_new_session=True,  # an interrupt from the terminal is not for them
                        preexec_fn=stop_with_parent,
                        pass_fds=(shared,),
                    )
                )
        yield
    finally:
        for spinner in _spinners:
            spinner.terminate()
        for spinner in _spinners:
            ended(spinner, STOP_LIMIT_S)
        _spinners.clear()
        for board in _boards:
            board.close()
        _boards.clear()


@contextlib.contextmanager
def _shared(size: int) -> Iterator[int]:
    """A file in memory, for as long as it takes to hand it on."""
    descriptor = os.memfd_create("hawkvision-awake")
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def spinning() -> int:
    """How many processors are kept awake; the load average counts as many processes too many."""
    return len(_spinners)


def pace() -> SpinnerProgress | None:
    """How far the spinners are, to be compared with later; None while processors are not kept awake."""
    return _boards[0].read() if _boards else None


def _spin(processor: int, board: SpinnerBoard, number: int) -> NoReturn:
    """Spin on one processor, with short rests, until terminated."""
    _give_way_to_other_sessions()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {processor})
    lap = SpinnerLap()
    while True:
        turns, began, until = 0, time.thread_time(), time.perf_counter() + SPIN_S
        while time.perf_counter() < until:
            os.sched_yield()
            turns += 1
        spent = time.thread_time() - began
        # Of a stretch in which it hardly ran, little can be said.
        best = max(lap.best, turns / spent) if spent > 0.5 * SPIN_S else lap.best
        lap = SpinnerLap(lap.turns + turns, lap.cpu_s + spent, best)
        board.write(number, lap)
        time.sleep(REST_S)


def _give_way_to_other_sessions() -> None:
    for further in reversed(range(AUTOGROUP_TRIES)):
        try:
            with AUTOGROUP.open("w") as autogroup:
                autogroup.write(LEAST)
        except FileNotFoundError:  # this kernel does not weigh sessions
            return
        except BlockingIOError:
            if not further:
                raise
            time.sleep(AUTOGROUP_EVERY_S)
        else:
            return


if __name__ == "__main__":
    own, shared, place, all_of_them = (int(word) for word in sys.argv[1:])
    _spin(own, SpinnerBoard(shared, all_of_them), place)
