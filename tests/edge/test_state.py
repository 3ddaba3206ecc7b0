"""The state file: what is kept comes back, what is not ours is refused, and it never grows beyond its bound."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.state import Place, StateError, StateFile, decode_state, encode_state
from hawkvision.cascade.online import Bet, State
from hawkvision.errors import ConfigError

OWN = bytes(16)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(1e-6, 1e9)
COUNTS = st.integers(0, 2**53)
BETS = st.builds(Bet, FINITE, st.sampled_from([-1, 1]), POSITIVE, COUNTS, FINITE, POSITIVE)
STATES = st.builds(
    State,
    key=st.text(max_size=40),
    theta=FINITE,
    loss_bet=BETS,
    difficulty_bet=BETS,
    return_bet=BETS,
    correction=POSITIVE,
    root_mean=POSITIVE,
    debt=POSITIVE,
    void=st.booleans(),
    void_since=COUNTS,
    void_loss=FINITE,
    void_seen=COUNTS,
    alarms=st.integers(1, 2**53),
    requests=COUNTS,
)


def state(theta: float = 0.5, key: str = "c") -> State:
    return State(key, theta, Bet(0.1), Bet(0.2), Bet(0.3, sign=-1))


def place(number: int) -> Place:
    return Place(number.to_bytes(16, "big"), "c")


@contextmanager
def opened(path: Path, rows: int = 100) -> Iterator[StateFile]:
    with closing(StateFile(path, rows, OWN)) as file:
        yield file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite3"


@given(STATES)
def test_every_state_comes_back_as_it_was(state: State) -> None:
    assert decode_state(encode_state(state)) == state


@given(st.binary(max_size=200))
def test_any_bytes_are_a_state_or_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, ValueError)):
        decode_state(data)


@pytest.mark.parametrize(
    "change",
    [
        {"root_mean": 0.0},
        {"correction": -1.0},
        {"debt": -1.0},
        {"requests": -1},
        {"void": True},
        {"loss_bet": Bet(0.1, 1, -2.0)},
    ],
)
def test_a_state_that_no_controller_can_have_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="none that a controller can have"):
        decode_state(encode_state(msgspec.structs.replace(state(), **change)))


def test_what_was_written_is_read_after_reopening(path: Path) -> None:
    with opened(path) as file:
        file.write([(place(1), encode_state(state(0.7)))])
    with opened(path) as file:
        assert file.read(place(1)) == state(0.7)
        assert file.read(place(2)) is None


def test_the_newest_of_two_states_counts(path: Path) -> None:
    with opened(path) as file:
        file.write([(place(1), encode_state(state(0.1)))])
        file.write([(place(1), encode_state(state(0.2)))])
        assert file.read(place(1)) == state(0.2)


def test_rows_are_bounded_and_the_nodes_own_stream_stays(path: Path) -> None:
    with opened(path, rows=10) as file:
        file.write([(Place(OWN, "c"), encode_state(state(0.9)))])
        for first in range(1, 100, 7):
            file.write([(place(first + i), encode_state(state())) for i in range(7)])
        assert file.read(Place(OWN, "c")) == state(0.9)
        assert file.read(place(99)) is not None
        assert file.read(place(1)) is None
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT count(*) FROM states").fetchone() == (10,)


def test_age_goes_on_counting_after_a_restart(path: Path) -> None:
    for number in (1, 2, 3):
        with opened(path, rows=2) as file:
            file.write([(place(number), encode_state(state()))])
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
    with pytest.raises(StateError, match="has version 7, this node reads 1"):
        StateFile(path, 10, OWN)


def test_a_corrupt_file_is_refused(path: Path) -> None:
    with opened(path, rows=1_000) as file:
        file.write([(place(number), encode_state(state())) for number in range(500)])
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
        file.write([(place(1), encode_state(state()))])
        assert file.read(place(1)) == state()


def test_reads_and_writes_that_fail_later_say_so_and_work_again(path: Path) -> None:
    with opened(path) as file, closing(sqlite3.connect(path)) as raw:
        raw.execute("ALTER TABLE states RENAME TO stolen")
        with pytest.raises(StateError, match="cannot write"):
            file.write([(place(1), encode_state(state()))])
        with pytest.raises(StateError, match="cannot read"):
            file.read(place(1))
        raw.execute("ALTER TABLE stolen RENAME TO states")
        file.write([(place(1), encode_state(state()))])
        assert file.read(place(1)) == state()


def test_a_row_that_is_no_state_is_an_error_not_a_state(path: Path) -> None:
    with opened(path) as file:
        file.write([(place(1), b"{}")])
        with pytest.raises(StateError, match="cannot read"):
            file.read(place(1))


def test_what_was_kept_is_read_from_a_disk_that_takes_no_more(path: Path) -> None:
    with opened(path) as file:
        file.write([(place(1), encode_state(state(0.7)))])
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.with_name(f"{path.name}.lock").unlink()
    path.with_name(f"{path.name}.lock").mkdir()  # as good as a disk on which no file can be made
    with opened(path) as file:
        assert file.unwritable is not None
        assert file.read(place(1)) == state(0.7)
        with pytest.raises(StateError, match="cannot write"):
            file.write([(place(1), encode_state(state(0.8)))])
        assert file.read(place(1)) == state(0.7)


@settings(max_examples=60)
@given(start=st.integers(0, 30_000), length=st.integers(1, 5_000), fill=st.sampled_from([0, 255, 17]))
def test_whatever_part_of_a_file_is_damaged_it_is_opened_or_given_up(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, fill: int
) -> None:
    path = tmp_path_factory.mktemp("state") / "state"
    with opened(path, rows=1_000) as file:
        file.write([(place(number), encode_state(state())) for number in range(60)])
    data = bytearray(path.read_bytes())
    data[start : start + length] = bytes([fill]) * max(0, min(length, len(data) - start))
    path.write_bytes(data)
    with suppress(StateError), opened(path) as file:
        for number in range(60):
            with suppress(StateError):
                file.read(place(number))
