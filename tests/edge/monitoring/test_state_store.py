"""The state file: what is kept comes back, what is not ours is refused, and it never grows beyond its bound."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.monitoring.state_opening import open_state
from edge.monitoring.state_store import StateError, StateFile, StreamState, decode_state, encode_state
from hawkvision.cascade.drift.monitor import MonitorState
from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from tests.fuzz.examples import examples

OWN = bytes(16)
NAMES = st.text(max_size=40)
LOGS = st.builds(
    MonitorState,
    key=NAMES,
    outcomes=st.binary(max_size=50).map(bytearray),
    callers=st.lists(NAMES, max_size=3),
    failed=st.none() | st.integers(0, 100),
    alarms=st.integers(1, 2**53),
)
STATES = st.builds(
    StreamState,
    monitors=st.dictionaries(NAMES, LOGS, max_size=3),
    suspended_before=st.booleans(),
)


def state(audits: int = 5, *, suspended: bool = False) -> StreamState:
    failed, alarms = (0, 1) if suspended else (None, 0)
    return StreamState({"c": MonitorState("c", failed=failed, alarms=alarms, audits=audits)})


def row(place: bytes, state: StreamState) -> tuple[bytes, bytes, bool]:
    return place, encode_state(state), state.suspended


def place(number: int) -> bytes:
    return number.to_bytes(16, "big")


@contextmanager
def opened(path: Path, rows: int = 100) -> Iterator[StateFile]:
    with closing(StateFile(path, rows, OWN)) as file:
        yield file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite3"


@given(STATES)
def test_every_state_comes_back_as_it_was(state: StreamState) -> None:
    assert decode_state(encode_state(state)) == state


@given(st.binary(max_size=200))
def test_any_bytes_are_a_state_or_refused(data: bytes) -> None:
    with suppress(msgspec.DecodeError, ValueError):
        assert isinstance(decode_state(data), StreamState)


@pytest.mark.parametrize("change", [{"alarms": -1}, {"failed": 0}])
def test_a_log_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    log = msgspec.structs.replace(MonitorState("c"), **change)
    with pytest.raises(ValueError, match="no monitor can have this state"):
        decode_state(encode_state(StreamState(monitors={"c": log})))


def test_what_was_written_is_read_after_reopening(path: Path) -> None:
    with opened(path) as file:
        file.write([row(place(1), state(7))])
    with opened(path) as file:
        assert file.read(place(1)) == state(7)
        assert file.read(place(2)) is None


def test_nobody_but_the_nodes_user_may_read_what_it_keeps(path: Path) -> None:
    with opened(path) as file:
        file.write([row(OWN, state())])
        kept = list(path.parent.iterdir())
        assert path in kept
        assert {each.stat().st_mode & 0o077 for each in kept} == {0}


def test_the_newest_of_two_states_counts(path: Path) -> None:
    with opened(path) as file:
        file.write([row(place(1), state(1))])
        file.write([row(place(1), state(2))])
        assert file.read(place(1)) == state(2)


def test_rows_are_bounded_and_the_nodes_own_stream_stays(path: Path) -> None:
    with opened(path, rows=10) as file:
        file.write([row(OWN, state(9))])
        for first in range(1, 100, 7):
            file.write([row(place(first + i), state()) for i in range(7)])
        assert file.read(OWN) == state(9)
        assert file.read(place(99)) is not None
        assert file.read(place(1)) is None
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT count(*) FROM states").fetchone() == (10,)


def test_rows_with_an_alarm_go_last_and_the_file_remembers_that_one_had_to(path: Path) -> None:
    with opened(path, rows=10) as file:
        file.write([row(place(number), state(suspended=True)) for number in range(1, 6)])
        file.write([row(place(number), state()) for number in range(100, 150)])
        assert all(file.read(place(number)) for number in range(1, 6))
        assert file.full is False
        file.write([row(place(number), state(suspended=True)) for number in range(200, 220)])
    with opened(path, rows=10) as file:
        assert file.full


def test_a_file_of_the_version_before_keeps_its_alarms(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(path) as file:
        file.write([row(place(1), state()), row(place(2), state(suspended=True)), row(OWN, state(suspended=True))])
        file.write([], full=True)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 2")
    with opened(path) as file:
        alarm = StreamState(suspended_before=True)
        assert [file.read(key) for key in (place(1), place(2), OWN)] == [None, alarm, alarm]
        assert file.full
    assert "the 2 streams that were suspended stay so" in caplog.text


def test_age_goes_on_counting_after_a_restart(path: Path) -> None:
    for number in (1, 2, 3):
        with opened(path, rows=2) as file:
            file.write([row(place(number), state())])
    with opened(path) as file:
        assert [file.read(place(number)) is not None for number in (1, 2, 3)] == [False, True, True]


def test_two_nodes_on_one_file_are_refused(path: Path) -> None:
    with opened(path), pytest.raises(ConfigError, match="in use by another node"):
        StateFile(path, 10, OWN)
    with opened(path) as file:
        assert file.read(place(1)) is None


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"surveillance notes, please keep\n" * 100)
    with pytest.raises(StateError, match=r"state\.sqlite3: cannot be used: file is not a database"):
        StateFile(path, 10, OWN)
    assert path.read_bytes().startswith(b"surveillance")


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE albums (name TEXT)")
    with pytest.raises(ConfigError, match="database of something else"):
        StateFile(path, 10, OWN)


def test_a_file_of_another_version_is_refused(path: Path) -> None:
    with opened(path):
        pass
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 7")
    with pytest.raises(StateError, match="has version 7, this node reads 3"):
        StateFile(path, 10, OWN)


def test_a_corrupt_file_is_refused(path: Path) -> None:
    with opened(path, rows=1_000) as file:
        file.write([row(place(number), state()) for number in range(500)])
    data = bytearray(path.read_bytes())
    data[8192 : len(data) // 2] = b"\xff" * (len(data) // 2 - 8192)
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"corrupt|malformed"):
        StateFile(path, 10, OWN)


@pytest.mark.parametrize("where", ["missing/state.sqlite3", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        StateFile(tmp_path / where, 10, OWN)


def test_an_empty_file_left_by_a_crash_is_taken(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")
    with opened(path) as file:
        file.write([row(place(1), state())])
        assert file.read(place(1)) == state()


def test_reads_and_writes_that_fail_later_say_so_and_work_again(path: Path) -> None:
    with opened(path) as file, closing(sqlite3.connect(path)) as raw:
        raw.execute("ALTER TABLE states RENAME TO stolen")
        with pytest.raises(StateError, match="cannot write"):
            file.write([row(place(1), state())])
        with pytest.raises(StateError, match="cannot read"):
            file.read(place(1))
        raw.execute("ALTER TABLE stolen RENAME TO states")
        file.write([row(place(1), state())])
        assert file.read(place(1)) == state()


def test_a_row_that_is_no_state_is_an_error_not_a_state(path: Path) -> None:
    with opened(path) as file:
        file.write([(place(1), b"[]", False)])
        with pytest.raises(StateError, match="cannot read"):
            file.read(place(1))


def test_what_was_kept_is_read_from_a_disk_that_takes_no_more(path: Path) -> None:
    with opened(path) as file:
        file.write([row(place(1), state(7))])
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.with_name(f"{path.name}.lock").unlink()
    path.with_name(f"{path.name}.lock").mkdir()  # as good as a disk on which no file can be made
    with opened(path) as file:
        assert file.unwritable is not None
        assert file.read(place(1)) == state(7)
        with pytest.raises(StateError, match="cannot write"):
            file.write([row(place(1), state(8))])
        assert file.read(place(1)) == state(7)


@settings(max_examples=examples(300))
@given(start=st.integers(0, 30_000), length=st.integers(1, 5_000), fill=st.sampled_from([0, 255, 17]))
def test_whatever_part_of_a_file_is_damaged_it_is_opened_or_given_up(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, fill: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "state"
    with opened(path, rows=1_000) as file:
        file.write([row(place(number), state()) for number in range(60)])
    data = bytearray(path.read_bytes())
    data[start : start + length] = bytes([fill]) * max(0, min(length, len(data) - start))
    path.write_bytes(data)
    with suppress(StateError), opened(path) as file:
        for number in range(60):
            with suppress(StateError):
                file.read(place(number))


# ------------------------------------------------------------------------------------------------ where it is kept


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_a_node_keeps_its_state_by_default_in_a_file_of_its_task_and_address(home: Path) -> None:
    file = open_state(EdgeConfig(task="cifar10", port=8081), EdgeMetrics())
    assert file is not None
    with closing(file):
        assert (home / "hawkvision" / "edge-cifar10-127.0.0.1-8081.sqlite3").is_file()


def test_a_node_whose_port_nobody_knows_keeps_nothing(home: Path) -> None:
    assert open_state(EdgeConfig(port=0), EdgeMetrics()) is None
    assert not home.exists()


def test_a_default_place_that_cannot_be_used_is_said_and_the_node_serves(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_state(EdgeConfig(port=8081), EdgeMetrics())
    assert first is not None
    with closing(first):
        assert open_state(EdgeConfig(port=8081), EdgeMetrics()) is None
    assert "in use by another node" in caplog.text
    shutil.rmtree(home)
    home.write_text("no folder")
    assert open_state(EdgeConfig(port=8081), EdgeMetrics()) is None
    assert "none can be made" in caplog.text


def test_a_file_that_was_asked_for_and_is_anothers_ends_the_start(path: Path) -> None:
    with opened(path), pytest.raises(ConfigError, match="in use by another node"):
        open_state(EdgeConfig(state_file=path), EdgeMetrics())
