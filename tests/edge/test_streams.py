"""Streams: bounded whatever callers name them, remembered in memory and in the file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.state import StateFile
from edge.streams import DEFAULT_STREAM, ROWS_PER_STREAM, Kept, Streams, stream_place
from hawkvision.metrics import EdgeMetrics
from tests.hawkvision.cascade.test_online import USUAL
from tests.waiting import until

LIMIT = 50


class Bench:
    def __init__(self, streams: Streams, metrics: EdgeMetrics) -> None:
        self.streams = streams
        self.metrics = metrics

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"hawkvision_{name}", {"task": "t", **labels}) or 0.0

    def find(self, stream: str | None) -> Kept:
        return self.streams.find(stream, USUAL)


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


def test_a_stream_keeps_its_controller_and_another_has_its_own() -> None:
    async def scenario() -> None:
        async with bench() as it:
            assert it.find("door") is it.find("door")
            assert it.find("door") is not it.find("yard")
            assert it.find(None) is not it.find("door")
            assert it.streams.find("door", replace(USUAL, key="another")) is not it.find("door")

    run(scenario)


def test_names_are_kept_as_hashes_of_one_size() -> None:
    names = [None, "", "a", "a" * 10_000, "\u00e4\U0001f600", "\x00" * 16]
    places = [stream_place(name) for name in names]
    assert {len(place) for place in places} == {16}
    assert len(set(places)) == len(names)


def test_ten_thousand_names_leave_memory_and_rows_bounded_and_the_own_stream_untouched(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            own = it.find(None)
            own.fell_short(0.1)
            for number in range(10_000):
                it.find(f"camera {number}").fell_short(0.1)
                if number % 500 == 0:
                    await asyncio.sleep(0)
            assert len(it.streams) == LIMIT + 1
            assert it.find(None) is own
            assert it.counted("streams") == LIMIT + 1
        async with bench(path) as it:
            assert it.find(None).control.state.debt == own.control.state.debt > 0.0

    run(scenario)
    assert rows(path) <= ROWS_PER_STREAM * LIMIT


def test_a_stream_that_made_room_comes_back_with_its_past(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.find("first").fell_short(0.1)
            debt = it.find("first").control.state.debt
            for number in range(LIMIT):
                it.find(str(number)).fell_short(0.1)
            assert it.find("first").control.state.debt == debt, "from what is not written yet"
        async with bench(path) as it:
            assert it.find("first").control.state.debt == debt, "from the file"

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
            it.find("first").fell_short(0.1)
            for number in range(LIMIT):
                it.find(str(number))
            assert it.find("first").control.state.debt == 0.0

    run(scenario)


def test_a_row_that_cannot_be_read_is_counted_and_the_stream_begins_anew(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.find("door").fell_short(0.1)
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("UPDATE states SET state = x'00'")
        async with bench(path) as it:
            assert it.find("door").control.state.debt == 0.0
            assert it.counted("state_failures_total", operation="read") == 1.0

    run(scenario)


def test_a_write_that_fails_is_counted_and_made_up_for(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            assert it.streams._file is not None
            with closing(sqlite3.connect(path)) as raw:
                it.find("door").fell_short(0.1)
                raw.execute("ALTER TABLE states RENAME TO stolen")
                await it.streams._write_all(it.streams._file)
                raw.execute("ALTER TABLE stolen RENAME TO states")
            assert it.counted("state_failures_total", operation="write") == 1.0
        async with bench(path) as it:
            assert it.find("door").control.state.debt > 0.0

    run(scenario)


def test_states_are_written_while_the_node_runs(path: Path) -> None:
    async def scenario() -> None:
        async with bench(path) as it:
            it.find("door").fell_short(0.1)
            await until(lambda: rows(path) == 1)

    run(scenario)


def test_alarms_returns_void_streams_and_debt_are_counted() -> None:
    async def scenario() -> None:
        async with bench() as it:
            kept = it.find("door")
            for _ in range(100):
                kept.escalated(0.1, True)  # difficult, every one
            assert (it.counted("alarms_total"), it.counted("streams_void")) == (1.0, 1.0)
            for _ in range(3_000):
                kept.escalated(0.9, False)
            assert (it.counted("returns_total"), it.counted("streams_void")) == (1.0, 0.0)
            kept.fell_short(0.1)
            assert it.counted("accuracy_debt") == kept.control.state.debt > 0.0

    run(scenario)
