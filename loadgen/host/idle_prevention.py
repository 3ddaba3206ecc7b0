"""Keeping the processors awake while latencies are measured (`--prevent-cpu-idle`).

A processor without work halts. A virtual one is then lent to others, and comes back when its host sees fit: on a
crowded host milliseconds later, or tens of them, which every request pays that finds it asleep. Linux counts that wait
as stolen (`loadgen.host.cpu_steal`). A process for each processor that spins at idle priority (SCHED_IDLE, sched(7))
keeps it
running. It is what the kernel's idle=poll does, for as long as a test runs, without privileges, and it does so for
everybody who is compared.

Idle priority counts within a session only: between sessions Linux shares processors evenly unless told otherwise
("The autogroup feature", sched(7)), and a spinner would hold up what wakes in another, by 3 to 4 ms one time in ten. So
the spinners' sessions are told to have the least weight there is, and all else takes the processor at once.

Idle priority lets a spinner back in at a bad moment: a thread that has just computed, and sleeps for an instant between
two layers of a network, has had its share by the scheduler's books, and when it wakes it waits behind the spinner until
the clock's next tick, 4 ms (so we understand EEVDF, Linux 6.6 on). So a spinner offers its processor each time round
(sched_yield(2)), which gives up its claim. On two cores of an AMD EPYC, Linux 6.18, in two turns of 300 inferences on
two threads, one every 60 ms: beside spinners that never yield 5.3 and 6.0 % took at least 2 ms more than the median,
beside these none, beside none 0.3 %.

They rest for 3 % of the time: who uses all of its processors' time may find that it has a quota (cpu.max of a cgroup,
its own or its host's), and then everything stands still until the quota's next period begins.

Measured on two shared cores of an Intel Xeon, in nine turns of 10 s each, before they yielded: a process of another
session that sleeps 5 ms and works 1 ms woke 7 to 35 ms late at its 99th percentile (median of the turns: 17) and up to
95 ms; with the processors awake 0.3 to 3.0 ms (2.2) and, but for one turn in which the host was crowded, up to 3 to
42 ms. Spinning without rest it was 0.14 to 0.23 ms, but in two of five turns all stood still for 100 ms. On that EPYC,
in three turns of 8 s, it woke 0.17 to 0.23 ms late at the 99th percentile and up to 1.4 without spinners, 0.11 and 4.8
with those that never yield, 0.11 and 1.5 with these.

With spinners hardly any of the processors' time is not wanted, so what was stolen is a share of nearly all of it. They
count how often they go round, which tells how fast the processors are (`loadgen.host.cpu_slowdown`).
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

from hawkvision.errors import ConfigError
from hawkvision.process import ended, stop_with_parent
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
