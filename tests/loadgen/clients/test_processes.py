"""Client processes: how a schedule is dealt among them, and what comes back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawkvision.client.response import Unreachable
from hawkvision.core.errors import ConfigError, InternalError
from hawkvision.system.child_server import ServerProcess
from loadgen.__main__ import main
from loadgen.clients.engine import LoadJob, ServerAddress, Tally
from loadgen.clients.processes import WorkerProcesses, parts
from loadgen.workload.dataset import read_dataset
from loadgen.workload.record import NoiseFloor, RequestOutcome

IMAGES = read_dataset(None, "imagenet", Path(), limit=3)


def job(url: str, due: list[float], callers: int = 0, duration_s: float = 1.0) -> LoadJob:
    n = len(due) or 60
    return LoadJob(ServerAddress(url), [{}], [0] * n, [i % 3 for i in range(n)], duration_s, 64, due, callers)


@given(st.lists(st.floats(0, 10), max_size=40).map(sorted), st.integers(1, 8))
def test_parts_are_the_whole_and_share_the_bound(due: list[float], size: int) -> None:
    whole = job("http://a", due)
    shares = parts(whole, size)
    assert sorted(each for share in shares for each in share.due) == due
    assert all(len(share.due) == len(share.target) == len(share.image) or not due for share in shares)
    assert sum(share.max_in_flight for share in shares) <= whole.max_in_flight


@given(st.integers(1, 40), st.integers(1, 8))
def test_callers_are_shared_out(callers: int, size: int) -> None:
    assert sum(share.callers for share in parts(job("http://a", [], callers), size)) == callers


def test_two_processes_send_one_schedule_and_their_outcomes_are_one(null: ServerProcess) -> None:
    due = [i / 100 for i in range(60)]
    shown: list[Tally] = []

    async def scenario() -> tuple[list[RequestOutcome], list[RequestOutcome]]:
        async with WorkerProcesses(2) as workers:
            await workers.load(IMAGES)
            again = await workers.run(job(null.url, [], callers=4, duration_s=0.1))
            return await workers.run(job(null.url, due), show=shown.append), again

    outcomes, closed = asyncio.run(scenario())
    assert [each.due_s for each in outcomes] == due
    assert [each.image for each in outcomes] == [IMAGES.numbers[i % 3] for i in range(60)]
    assert all(each.answered for each in (*outcomes, *closed))
    assert closed
    assert shown[-1].sent <= 60
    assert sum(len(each.latencies_ms) for each in shown) <= 60
    assert all(0.0 < ms < 60_000.0 for each in shown for ms in each.latencies_ms)


def test_a_server_that_is_not_there_is_said_before_anything_is_sent() -> None:
    async def scenario() -> None:
        async with WorkerProcesses(1) as workers:
            await workers.load(IMAGES)
            with pytest.raises(Unreachable, match="127"):
                await workers.run(job("http://127.0.0.1:1", [0.0]))
            with pytest.raises(ConfigError, match="--url"):
                await workers.run(job("nonsense", [0.0]))

    asyncio.run(scenario())


def test_a_client_process_that_ends_is_no_silent_loss() -> None:
    async def scenario() -> None:
        async with WorkerProcesses(1, ["/bin/sh", "-c", "exit 3", "sh"]) as workers:
            with pytest.raises(InternalError, match="status 3"):
                await workers.load(IMAGES)

    asyncio.run(scenario())


def test_noise_is_a_command_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "noise.json"
    assert main(["noise", "--seconds", "0.4", "--rate", "50", "--limit", "2", "--json", str(report)]) == 0
    floor = msgspec.convert(json.loads(report.read_text())["floor"], NoiseFloor)
    assert 0.0 < floor.p50_ms <= floor.p99_ms < float("inf")
    assert f"ceiling: {floor.max_rate:.0f} requests/s" in capsys.readouterr().out
