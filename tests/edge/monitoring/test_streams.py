"""Streams: bounded whatever callers name them, remembered in memory and in the file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from edge.monitoring.request_streams import StreamControllers
from edge.monitoring.state_store import StateFile
from edge.monitoring.stream import StageScore, Stream
from edge.monitoring.stream_keys import DEFAULT_STREAM, stream_key
from edge.monitoring.streams import ROWS_PER_STREAM, Streams
from hawkvision.cascade.drift.monitor import Claim, Claims
from hawkvision.cascade.route import Controls
from hawkvision.core.metrics import EdgeMetrics
from tests.hawkvision.tasks.classes import predicted
from tests.waiting import until

LIMIT = 50
CLAIMS = Claims("p", "edge", (Claim(0.4, 0.028),), 0.05)
CONTROLS = Controls(CLAIMS)


class Bench:
    def __init__(self, streams: Streams, metrics: EdgeMetrics) -> None:
        self.streams = streams
        self.metrics = metrics

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": "t", **labels}) or 0.0

    def controllers(self, stream: str | None, caller: str = "camera") -> StreamControllers:
        return self.streams.controllers(stream, CONTROLS, caller)

    def find(self, stream: str | None) -> Stream:
        found = self.controllers(stream)._own
        assert found is not None
        return found

    def past(self, stream: str) -> int:
        """Audits in its log."""
        return self.find(stream).monitor(CLAIMS).state.audits

    def audit(self, stream: str | None, caller: str = "camera", disagreement: float = 0.0) -> None:
        self.controllers(stream, caller).audited((StageScore(CLAIMS, 0.9, predicted((3, 0.9))),), [disagreement])

    def suspend(self, stream: str | None, caller: str = "camera") -> None:
        for _ in range(200):
            self.audit(stream, caller, 1.0)


@asynccontextmanager
async def bench(path: Path | None = None) -> AsyncIterator[Bench]:
    metrics = EdgeMetrics()
    file = None if path is None else StateFile(path, ROWS_PER_STREAM * LIMIT, DEFAULT_STREAM)
    streams = Streams("t", LIMIT, 0.02, metrics, file)
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


def test_a_stream_keeps_its_log_and_another_has_its_own() -> None:
    async def scenario() -> None:
        async with bench() as it:
            assert it.find("server") is it.find("server")
            assert len({id(it.find(name)) for name in ("server", "yard", None)}) == 3

    run(scenario)


def test_names_are_kept_as_hashes_of_one_size() -> None:
    names = [None, "", "a", "a" * 10_000, "\u00e4\U0001f600", "\x00" * 16]
    places = [stream_key(name) for name in names]
    assert {len(place) for place in places} == {16}
    assert len(set(places)) == len(names)


def test_a_named_stream_of_a_key_is_that_keys_alone() -> None:
    places = {stream_key("server", caller) for caller in ("key alice", "key bob", "10.0.0.1", "10.0.0.2")}
    assert len(places) == 3, "who is known by an address alone shares the names"
    assert len({stream_key(None, caller) for caller in ("key alice", "10.0.0.1", "10.0.0.2")}) == 3


def test_ten_thousand_names_leave_memory_and_rows_bounded_and_an_alarm_standing(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.suspend(None)
            for number in range(10_000):
                it.audit(f"camera {number}")
                if number % 500 == 0:
                    await asyncio.sleep(0)
            assert len(it.streams) == LIMIT
            assert it.counted("streams") == LIMIT
            assert it.controllers(None).suspended
        async with bench(path) as it:
            assert it.controllers(None).suspended

    run(scenario)
    assert rows(path) <= ROWS_PER_STREAM * LIMIT


def test_a_stream_that_made_room_comes_back_with_its_past(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.audit("first")
            for number in range(LIMIT):
                it.audit(str(number))
            assert it.past("first") == 1, "from what is not written yet"
        async with bench(path) as it:
            assert it.past("first") == 1, "from the file"

    run(scenario)


def test_a_stream_that_is_used_does_not_make_room() -> None:
    async def scenario() -> None:
        async with bench() as it:
            used = it.find("used")
            for number in range(3 * LIMIT):
                it.find(str(number))
                assert it.find("used") is used

    run(scenario)


def test_without_a_file_a_stream_that_made_room_begins_anew() -> None:
    async def scenario() -> None:
        async with bench() as it:
            it.audit("first")
            for number in range(LIMIT):
                it.find(str(number))
            assert it.past("first") == 0

    run(scenario)


def test_an_alarm_outlives_the_names_that_come_after_it_and_without_a_file_too() -> None:
    async def scenario() -> None:
        async with bench() as it:
            it.suspend("camera 1")
            for number in range(5 * LIMIT):
                it.find(f"other {number}")
            assert it.controllers("camera 1").suspended
            assert not it.controllers("other 1").suspended

    run(scenario)


def test_unknown_streams_begin_suspended_once_more_alarms_exist_than_memory_holds() -> None:
    async def scenario() -> None:
        async with bench() as it:
            assert not it.controllers("new").suspended
            for number in range(2 * LIMIT + 5):
                it.suspend(f"camera {number}")
            assert it.controllers("camera 0").suspended
            assert it.controllers("quite another").suspended
            assert len(it.streams) + len(it.streams._keeper._evicted) <= 2 * LIMIT

    run(scenario)


def test_an_alarm_that_an_audit_raises_after_its_stream_made_room_is_not_lost() -> None:
    async def scenario() -> None:
        async with bench() as it:
            before = it.controllers("camera 1")
            for number in range(LIMIT):
                it.find(f"other {number}")
            for _ in range(200):
                before.audited((StageScore(CLAIMS, 0.9, predicted((3, 0.9))),), [1.0])
            assert it.controllers("camera 1").suspended

    run(scenario)


def test_one_caller_suspends_itself_and_three_the_node() -> None:
    async def scenario() -> None:
        async with bench() as it:
            it.suspend(None, "mallory")
            assert [it.controllers(None, caller).suspended for caller in ("mallory", "camera")] == [True, False]
            it.suspend(None, "marvin")
            assert not it.controllers(None, "camera").suspended
            it.suspend(None, "milo")
            assert it.controllers(None, "camera").suspended
            assert not it.controllers("named", "camera").suspended

    run(scenario)


def test_a_row_that_cannot_be_read_is_counted_and_the_stream_begins_suspended(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.audit("server")
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE states SET state = x'00'")
        async with bench(path) as it:
            assert it.controllers("server").suspended
            assert it.past("server") == 0
            assert it.counted("state_failures_total", operation="read") == 1.0

    run(scenario)


def test_a_write_that_fails_is_counted_and_made_up_for(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            with closing(sqlite3.connect(path)) as raw:
                it.audit("server")
                raw.execute("ALTER TABLE states RENAME TO stolen")
                await it.streams._keeper.write()
                raw.execute("ALTER TABLE stolen RENAME TO states")
            assert it.counted("state_failures_total", operation="write") == 1.0
        async with bench(path) as it:
            assert it.past("server") == 1

    run(scenario)


def test_states_are_written_while_the_node_runs(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.audit("server")
            await until(lambda: rows(path) == 1)

    run(scenario)


def test_alarms_and_suspended_streams_are_counted() -> None:
    async def scenario() -> None:
        async with bench() as it:
            it.suspend("server")
            assert (it.counted("alarms_total"), it.counted("streams_suspended")) == (1.0, 1.0)
            watched = it.controllers("server")
            while watched.suspended:
                it.audit("server")
            assert it.counted("streams_suspended") == 0.0

    run(scenario)


def test_half_of_the_audits_that_are_due_must_take_place() -> None:
    async def scenario() -> None:
        async with bench() as it:
            watched, other = it.controllers("server"), it.controllers("yard")
            assert watched.monitored
            watched.missed()
            assert [watched.monitored, other.monitored] == [False, False], "the link is everybody's"
            watched.audited((StageScore(CLAIMS, 0.9, predicted((3, 0.9))),), [0.0])
            assert [watched.monitored, other.monitored] == [True, True]
            for _ in range(3):
                watched.missed(refused=True)
            assert [watched.monitored, other.monitored] == [False, True], "what one caller sends is not"

    run(scenario)
