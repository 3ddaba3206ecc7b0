"""How much memory a process may use, and the budget of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.core.errors import DeadlineMissed, Overloaded
from hawkvision.imaging.decoding_cost import SMALL
from hawkvision.system.memory import LEAST_BYTES, OVERTAKEN_MOST, WAITING_MOST, MemoryBudget, divided, room
from tests.waiting import until

MB = 1024 * 1024


V2 = "30 23 0:26 / {top} rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {root} {top} rw - cgroup cgroup rw,memory\n36 31 0:33 / /elsewhere rw - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "free_mb", "limited_by"),
    [
        (
            "0::/a/b\n",
            V2,
            {"a/memory.max": 300, "a/memory.current": 100, "a/b/memory.max": "max\n", "a/b/memory.current": 90},
            200,
            "cgroup {top}/a",
        ),
        (
            "0::/\n",
            V2,
            {"memory.max": 300, "memory.current": 250, "memory.stat": f"anon 5\ninactive_file {150 * MB}\n"},
            200,
            "cgroup {top}",
        ),
        *(
            (
                "4:cpu:/x\n7:memory:/docker/abc\n0::/\n",
                V1.replace("{root}", root),
                {"memory.limit_in_bytes": 128, "memory.usage_in_bytes": 28},
                100,
                "cgroup {top}",
            )
            for root in ("/", "/docker/abc")
        ),
        (
            "7:memory:/\n",
            V1.replace("{root}", "/"),
            {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"},
            8192,
            "the machine's available memory",
        ),
        ("\x00odd::", "30 / {top} -", {}, 8192, "the machine's available memory"),
    ],
    ids=["the least above it", "page cache is free", "a container", "a container's mount", "no limit", "odd text"],
)
def test_room_is_what_the_least_limit_leaves(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, int | str], free_mb: int, limited_by: str
) -> None:
    """A `/proc` that says so; `{top}` is where groups are mounted, and numbers are MiB."""
    proc, top = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * MB} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mounts.format(top=top))
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text if isinstance(text, str) else f"{text * MB}\n")
    assert (room(proc).free_bytes, room(proc).limited_by) == (free_mb * MB, limited_by.format(top=top))


def test_a_limit_of_address_space_counts() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from hawkvision.system.memory import room; found = room(); print(found.limited_by, found.free_bytes < 1 << 30)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["RLIMIT_AS", "True"]


def test_a_budget_is_divided_so_that_no_request_takes_it_all() -> None:
    parts = divided(400 * MB, None)
    assert (parts.bodies, parts.decoding, parts.request) == (100 * MB, 300 * MB, 150 * MB)
    assert divided(400 * MB, 900 * MB).request == 300 * MB
    assert 0 < divided(None, None, processes=4).total < divided(None, None).total


def test_with_next_to_nothing_left_small_images_are_decoded_all_the_same_and_the_log_can_say_so() -> None:
    parts = divided(None, None, processes=10**9)
    assert (parts.total, parts.basis.endswith("which leaves less than that")) == (LEAST_BYTES, True)
    assert parts.request > SMALL.bytes


def test_who_waits_is_served_by_deadline() -> None:
    async def scenario() -> list[str]:
        budget, order, loop = MemoryBudget(10), list[str](), asyncio.get_running_loop()

        async def hold(name: str, until_s: float) -> None:
            async with budget.held(10, loop.time() + until_s):
                order.append(name)

        assert budget.take(10)
        tasks = [asyncio.create_task(hold(*each)) for each in (("later", 90.0), ("soon", 60.0))]
        await until(lambda: len(budget._waiting) == 2)
        budget.give_back(10)
        await asyncio.gather(*tasks)
        assert budget.in_use == 0
        return order

    assert asyncio.run(scenario()) == ["soon", "later"]


def test_who_waits_for_much_is_overtaken_so_many_times_and_not_more() -> None:
    async def scenario() -> int:
        budget = MemoryBudget(10)
        assert budget.take(5)

        async def hold() -> None:
            async with budget.held(10):
                pass

        large = asyncio.create_task(hold())
        await until(lambda: bool(budget._waiting))
        overtook = 0
        while budget.take(1):
            overtook += 1
            budget.give_back(1)
        budget.give_back(5)
        await large
        assert budget.take(1)  # and then everybody is served as before
        return overtook

    assert asyncio.run(scenario()) == OVERTAKEN_MOST


def test_who_gives_up_or_comes_too_late_takes_nothing() -> None:
    async def scenario() -> None:
        budget, loop = MemoryBudget(10), asyncio.get_running_loop()
        assert budget.take(10)

        async def hold(until_s: float) -> None:
            async with budget.held(5, loop.time() + until_s):
                raise AssertionError("there was nothing to have")

        with pytest.raises(DeadlineMissed):
            await hold(0.01)
        waits = asyncio.create_task(hold(60.0))
        await until(lambda: bool(budget._waiting))
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        # Served and given up in the same moment: what it was given comes back.
        waits = asyncio.create_task(hold(60.0))
        await until(lambda: bool(budget._waiting))
        budget.give_back(10)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert (budget.in_use, budget._waiting) == (0, [])

    asyncio.run(scenario())


def test_more_than_there_ever_is_and_a_full_line_are_refused_at_once() -> None:
    async def scenario() -> None:
        budget = MemoryBudget(10)
        with pytest.raises(Overloaded, match="11 bytes"):
            async with budget.held(11):
                pass
        assert budget.take(10)

        async def hold() -> None:
            async with budget.held(1):
                pass

        tasks = [asyncio.create_task(hold()) for _ in range(WAITING_MOST)]
        await until(lambda: len(budget._waiting) == WAITING_MOST)
        with pytest.raises(Overloaded, match="waiting for memory"):
            await hold()
        budget.give_back(10)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=60))
def test_never_more_is_out_than_there_is(steps: list[tuple[int, bool]]) -> None:
    budget, out = MemoryBudget(10), list[int]()
    for size, back in steps:
        if back and out:
            budget.give_back(out.pop())
        elif budget.take(size):
            out.append(size)
        assert budget.in_use == sum(out) <= 10
