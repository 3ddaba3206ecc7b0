"""Processors kept awake while a test runs: real spinning processes, and none of them afterwards."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from loadgen.host import cpu_slowdown, idle_prevention
from tests.loadgen.command import endless
from tests.waiting import until

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="idle priority is Linux's")


def idle_children(pid: int) -> dict[int, set[int]]:
    """A process's children at idle priority, and the processors that each may use."""
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return {child: os.sched_getaffinity(child) for child in found if os.sched_getscheduler(child) == os.SCHED_IDLE}


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie (proc(5), field 3 of stat)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def one_each(spinners: dict[int, set[int]]) -> bool:
    return sorted(spinners.values(), key=min) == [{processor} for processor in sorted(os.sched_getaffinity(0))]


def test_every_processor_has_one_spinner_at_idle_priority_until_the_end() -> None:
    async def scenario() -> None:
        with idle_prevention.prevented():
            await until(lambda: one_each(idle_children(os.getpid())))
            spinners = idle_children(os.getpid())
            assert idle_prevention.spinning() == len(spinners)
        assert idle_prevention.spinning() == 0
        assert not any(runs(pid) for pid in spinners)

    asyncio.run(scenario())


def weight_of_session(pid: int) -> str | None:
    """The nice value of a process's autogroup; None for what was started before all sessions and is in none."""
    said = Path(f"/proc/{pid}/autogroup").read_text()
    return said.split()[-1] if said else None


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not weigh sessions")
def test_spinners_give_way_to_all_other_sessions() -> None:
    before = weight_of_session(os.getpid())

    async def scenario() -> None:
        with idle_prevention.prevented():
            await until(lambda: one_each(idle_children(os.getpid())))
            assert {weight_of_session(pid) for pid in idle_children(os.getpid())} == {"19"}
            assert weight_of_session(os.getpid()) == before

    asyncio.run(scenario())


def test_spinners_say_how_far_they_are_while_they_spin() -> None:
    def spinning_now() -> cpu_slowdown.SpinnerProgress:
        now = idle_prevention.pace()
        assert now is not None
        return now

    def ahead(now: cpu_slowdown.SpinnerLap, then: cpu_slowdown.SpinnerLap) -> bool:
        return now.turns > then.turns and now.cpu_s > then.cpu_s

    async def scenario() -> None:
        assert idle_prevention.pace() is None
        with idle_prevention.prevented():
            before = spinning_now()
            await until(lambda: all(ahead(*laps) for laps in zip(spinning_now().laps, before.laps, strict=True)))
            slowed = cpu_slowdown.since(before, idle_prevention.pace())
            # Not known where other tests left a spinner too little of its processor.
            assert slowed is None or 0.0 <= slowed < 1.0
        assert idle_prevention.pace() is None

    asyncio.run(scenario())


def test_a_test_that_is_killed_leaves_no_spinner_behind() -> None:
    async def scenario() -> None:
        async with endless("--prevent-cpu-idle") as (_, process):
            await until(lambda: one_each(idle_children(process.pid)))
            spinners = idle_children(process.pid)
            assert all(map(runs, spinners))
            process.kill()
            await process.wait()
            await until(lambda: not any(map(runs, spinners)))

    asyncio.run(scenario())
