"""The state file: what is kept comes back, and what is not ours is refused."""

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
from edge.monitoring.state_store import StateError, StateFile, decode_state, encode_state
from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.guarantee.bets import LogState
from hawkvision.guarantee.monitor import NODE, StreamState
from tests.fuzz.examples import examples

NAMES = st.text(max_size=40)
LOGS = st.builds(
    LogState,
    evidence=st.lists(st.floats(0.0, 1e30), max_size=9),
    counted=st.integers(0, 2**53),
    alarm=st.booleans(),
    alarms=st.integers(0, 2**53),
    disagreements=st.floats(0.0, 1e9),
)
STATES = st.builds(
    StreamState,
    logs=st.dictionaries(NAMES, LOGS, max_size=3),
    carried=st.booleans(),
    cause=st.text(max_size=20),
    lost=st.booleans(),
    due=st.lists(st.booleans(), max_size=9),
)


def state(audits: int = 5, *, alarm: bool = False) -> StreamState:
    return StreamState({"c": LogState([1.0, 2.5], alarm=alarm, audits=audits)})


def place(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(file: StateFile, states: dict[bytes, StreamState | None]) -> None:
    file.write({key: None if each is None else encode_state(each) for key, each in states.items()}, file.next())


@contextmanager
def opened(path: Path) -> Iterator[StateFile]:
    with closing(StateFile(path)) as file:
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


def test_what_was_written_is_read_after_reopening_and_what_was_deleted_is_not(path: Path) -> None:
    with opened(path) as file:
        write(file, {place(1): state(7), place(2): state(8)})
        write(file, {place(1): state(9), place(2): None})
    with opened(path) as file:
        assert file.read() == ({place(1): state(9)}, 0)


def test_nobody_but_the_nodes_user_may_read_what_it_keeps(path: Path) -> None:
    with opened(path) as file:
        write(file, {NODE: state()})
        kept = list(path.parent.iterdir())
        assert path in kept
        assert {each.stat().st_mode & 0o077 for each in kept} == {0}


def test_an_alarm_is_not_undone_by_a_state_that_was_encoded_before_it_and_is_written_after_it(path: Path) -> None:
    with opened(path) as file:
        before, alarm = file.next(), file.next()
        file.write({place(1): encode_state(state(alarm=True))}, alarm, sync=True)
        file.write({place(1): encode_state(state()), place(2): encode_state(state())}, before)
        file.write({place(1): None}, before)
    with opened(path) as file:
        assert file.read()[0] == {place(1): state(alarm=True), place(2): state()}
        assert file.next() > alarm


def test_two_nodes_on_one_file_are_refused(path: Path) -> None:
    with opened(path), pytest.raises(ConfigError, match="in use by another node"):
        StateFile(path)
    with opened(path) as file:
        assert file.read() == ({}, 0)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"surveillance notes, please keep\n" * 100)
    with pytest.raises(StateError, match=r"state\.sqlite3: cannot be used: file is not a database"):
        StateFile(path)
    assert path.read_bytes().startswith(b"surveillance")


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE albums (name TEXT)")
    with pytest.raises(ConfigError, match="database of something else"):
        StateFile(path)


@pytest.mark.parametrize("version", [3, 7])
def test_a_file_of_another_version_is_refused(path: Path, version: int) -> None:
    with opened(path):
        pass
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StateError, match=f"has version {version}, this node reads 4"):
        StateFile(path)


def test_a_corrupt_file_is_refused(path: Path) -> None:
    with opened(path) as file:
        write(file, {place(number): state() for number in range(500)})
    data = bytearray(path.read_bytes())
    data[8192 : len(data) // 2] = b"\xff" * (len(data) // 2 - 8192)
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"corrupt|malformed"):
        StateFile(path)


@pytest.mark.parametrize("where", ["missing/state.sqlite3", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        StateFile(tmp_path / where)


def test_an_empty_file_left_by_a_crash_is_taken(path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA journal_mode = WAL")
    with opened(path) as file:
        write(file, {place(1): state()})
        assert file.read() == ({place(1): state()}, 0)


def test_reads_and_writes_that_fail_later_say_so_and_work_again(path: Path) -> None:
    with opened(path) as file, closing(sqlite3.connect(path)) as raw:
        raw.execute("ALTER TABLE states RENAME TO stolen")
        with pytest.raises(StateError, match="cannot write"):
            write(file, {place(1): state()})
        with pytest.raises(StateError, match="cannot read"):
            file.read()
        raw.execute("ALTER TABLE stolen RENAME TO states")
        write(file, {place(1): state()})
        assert file.read() == ({place(1): state()}, 0)


@pytest.mark.parametrize(
    "row", [b"[]", b"\x00", b'{"logs": {"c": {"alarms": -1}}}', b'{"logs": {"c": {"evidence": [-1]}}}']
)
def test_a_row_that_is_no_state_is_an_alarm(path: Path, row: bytes) -> None:
    with opened(path) as file:
        file.write({place(1): row, place(2): encode_state(state())}, file.next())
        assert file.read() == ({place(1): StreamState(carried=True), place(2): state()}, 1)


def test_what_was_kept_is_read_from_a_disk_that_takes_no_more(path: Path) -> None:
    with opened(path) as file:
        write(file, {place(1): state(7)})
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.with_name(f"{path.name}.lock").unlink()
    path.with_name(f"{path.name}.lock").mkdir()  # as good as a disk on which no file can be made
    with opened(path) as file:
        assert file.unwritable is not None
        with pytest.raises(StateError, match="cannot write"):
            write(file, {place(1): state(8)})
        assert file.read() == ({place(1): state(7)}, 0)


@settings(max_examples=examples(300))
@given(start=st.integers(0, 30_000), length=st.integers(1, 5_000), fill=st.sampled_from([0, 255, 17]))
def test_whatever_part_of_a_file_is_damaged_it_is_opened_or_given_up(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, fill: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "state"
    with opened(path) as file:
        write(file, {place(number): state() for number in range(60)})
    data = bytearray(path.read_bytes())
    data[start : start + length] = bytes([fill]) * max(0, min(length, len(data) - start))
    path.write_bytes(data)
    with suppress(StateError), opened(path) as file:
        file.read()


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
