"""Streams of a node: the file, the metrics and the log beside its monitor."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from edge.monitoring.state_store import StateFile
from edge.monitoring.stream_keys import stream_key
from edge.monitoring.streams import Streams
from hawkvision.cascade.route import StageClaims
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.guarantee.bets import Claim, Claims
from hawkvision.guarantee.monitor import Watched
from tests.clocks import ManualClock
from tests.waiting import until

LIMIT = 50
CLAIMS = Claims("p", "edge", (Claim(0.5, 0.05),), 0.05)
STAGE_CLAIMS = StageClaims(CLAIMS)


class Bench:
    def __init__(self, streams: Streams, metrics: EdgeMetrics) -> None:
        self.streams = streams
        self.metrics = metrics

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": "t", **labels}) or 0.0

    def watched(self, stream: str | None, caller: str = "camera") -> Watched:
        return self.streams.watched(stream, STAGE_CLAIMS, caller)

    def request(self, stream: str | None, differs: float, caller: str = "camera") -> None:
        due = self.streams.monitor.draw(self.watched(stream, caller))
        if due is not None:
            self.streams.monitor.settle(due, [(CLAIMS, 0.9, differs)])

    def suspend(self, stream: str | None, caller: str = "camera") -> None:
        while not self.watched(stream, caller).suspended:
            self.request(stream, 1.0, caller)


@asynccontextmanager
async def bench(path: Path | None = None) -> AsyncIterator[Bench]:
    metrics = EdgeMetrics()
    file = None if path is None else StateFile(path)
    streams = Streams("t", LIMIT, 0.2, metrics, file, ManualClock(), random.Random(1), {CLAIMS.key})
    try:
        yield Bench(streams, metrics)
    finally:
        await streams.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite3"


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as raw:
        return int(raw.execute("SELECT count(*) FROM states").fetchone()[0])


def test_names_are_kept_as_hashes_of_one_size() -> None:
    names = [None, "", "a", "a" * 10_000, "\u00e4\U0001f600", "\x00" * 16]
    places = [stream_key(name, caller) for name in names for caller in ("key alice", "10.0.0.1", "10.0.0.2")]
    assert {len(place) for place in places} == {16}
    assert len(set(places)) == len(places), "a stream belongs to the caller that names it"


def test_ten_thousand_names_leave_memory_and_rows_bounded_and_alarms_standing(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.suspend("yard")
            for number in range(10_000):
                it.request(f"camera {number}", 0.0, f"caller {number % 9}")
                if number % 500 == 0:
                    await asyncio.sleep(0)
            assert len(it.streams.monitor) == it.counted("streams") == LIMIT + 1
            assert it.watched("yard").suspended
        async with bench(path) as it:
            assert it.watched("yard").suspended
            assert not it.watched("camera 1").suspended
            assert it.counted("streams_suspended") == 1.0

    run(scenario)
    assert rows(path) <= LIMIT + 2


SUSPENDS_AND_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.edge.monitoring.test_streams import bench

async def main():
    async with bench(Path(sys.argv[1])) as it:
        it.suspend("yard")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_an_alarm_outlives_a_process_that_is_killed_as_soon_as_an_answer_could_say_so(path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SUSPENDS_AND_DIES, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL

    async def scenario() -> None:
        async with bench(path) as it:
            assert it.watched("yard").suspended

    run(scenario)


def test_a_write_that_fails_is_counted_and_made_up_for(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            with closing(sqlite3.connect(path)) as raw:
                raw.execute("ALTER TABLE states RENAME TO stolen")
                it.suspend("yard")
                await it.streams.write()
                raw.execute("ALTER TABLE stolen RENAME TO states")
            assert it.counted("state_failures_total", operation="write") == 2.0
        async with bench(path) as it:
            assert it.watched("yard").suspended

    run(scenario)


def test_a_row_that_cannot_be_read_is_counted_and_the_stream_begins_suspended(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            for _ in range(20):
                it.request("yard", 0.0)
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE states SET state = x'00' WHERE stream = ?", (stream_key("yard", "camera"),))
        async with bench(path) as it:
            assert it.watched("yard").suspended
            assert not it.watched("server").suspended
            assert it.counted("state_failures_total", operation="read") == 1.0

    run(scenario)


def test_states_are_written_while_the_node_runs(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            for _ in range(20):
                it.request("yard", 0.0)
            await until(lambda: rows(path) == 3)

    run(scenario)


def test_alarms_and_their_end_are_counted() -> None:
    async def scenario() -> None:
        async with bench() as it:
            it.suspend("yard")
            assert (it.counted("alarms_total"), it.counted("streams_suspended")) == (1.0, 1.0)
            for _ in range(5000):
                it.request("yard", 0.0)
            assert it.counted("streams_suspended") == 0.0

    run(scenario)
