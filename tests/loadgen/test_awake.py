"""Processors kept awake while a test runs: real spinning processes, and none of them afterwards."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from loadgen import awake
from tests.loadgen.scripted import Asked, reply, scripted
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
        with awake.kept():
            await until(lambda: one_each(idle_children(os.getpid())))
            spinners = idle_children(os.getpid())
            assert awake.spinning() == len(spinners)
        assert awake.spinning() == 0
        assert not any(runs(pid) for pid in spinners)

    asyncio.run(scenario())


def test_a_test_that_is_killed_leaves_no_spinner_behind() -> None:
    asked = asyncio.Event()

    async def say(_: Asked) -> bytes:
        asked.set()
        return reply(b'{"index": 1}')

    async def scenario() -> None:
        async with scripted(say) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgen", "run", "--url", server.url, "--arrivals", "constant:20",
                "--duration-s", "600", "--no-noise", "--keep-awake",
            )  # fmt: skip
            await asked.wait()
            await until(lambda: one_each(idle_children(process.pid)))
            spinners = idle_children(process.pid)
            process.kill()
            await process.wait()
            await until(lambda: not any(runs(pid) for pid in spinners))

    asyncio.run(scenario())
