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


def system(
    tmp_path: Path, cgroup: str, mountinfo: str, files: dict[str, str], available_kb: int = 8 * MB
) -> tuple[Path, Path]:
    """A `/proc` that says so, and where groups are mounted; `{top}` stands for that."""
    proc, top = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mountinfo.format(top=top))
    top.mkdir()
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, top


V2 = "30 23 0:26 / {top} rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {root} {top} rw - cgroup cgroup rw,memory\n36 31 0:33 / /elsewhere rw - cgroup cgroup rw,cpu\n"


def test_the_least_limit_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": f"{300 * MB}\n",
        "a/memory.current": f"{100 * MB}\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": f"{90 * MB}\n",
    }
    proc, top = system(tmp_path, "0::/a/b\n", V2, files)
    assert (room(proc).free_bytes, room(proc).limited_by) == (200 * MB, f"cgroup {top}/a")


def test_page_cache_that_can_go_is_free(tmp_path: Path) -> None:
    files = {
        "memory.max": str(300 * MB),
        "memory.current": str(250 * MB),
        "memory.stat": f"anon 5\ninactive_file {150 * MB}\n",
    }
    proc, _ = system(tmp_path, "0::/\n", V2, files)
    assert room(proc).free_bytes == 200 * MB


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_a_container_sees_its_own_group_at_the_top_of_the_mount(tmp_path: Path, root: str) -> None:
    files = {"memory.limit_in_bytes": str(128 * MB), "memory.usage_in_bytes": str(28 * MB)}
    proc, top = system(tmp_path, "4:cpu:/x\n7:memory:/docker/abc\n0::/\n", V1.replace("{root}", root), files)
    assert (room(proc).free_bytes, room(proc).limited_by) == (100 * MB, f"cgroup {top}")


def test_a_group_of_version_1_without_a_limit_leaves_the_machine(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"}
    proc, _ = system(tmp_path, "7:memory:/\n", V1.replace("{root}", "/"), files, available_kb=1024)
    assert (room(proc).free_bytes, room(proc).limited_by) == (MB, "the machine's available memory")


def test_a_limit_of_address_space_counts() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from hawkvision.system.memory import room; found = room(); print(found.limited_by, found.free_bytes < 1 << 30)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["RLIMIT_AS", "True"]


@given(*[st.text(max_size=60)] * 3)
def test_whatever_the_kernel_writes_there_is_an_answer(
    tmp_path_factory: pytest.TempPathFactory, cgroup: str, mountinfo: str, meminfo: str
) -> None:
    proc = tmp_path_factory.mktemp("odd")
    (proc / "self").mkdir()
    for name, text in (("self/cgroup", cgroup), ("self/mountinfo", mountinfo), ("meminfo", meminfo)):
        (proc / name).write_text(text, encoding="utf-8", errors="replace")
    assert room(proc).free_bytes >= 0


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
