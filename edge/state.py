"""What controllers remember, kept in one SQLite file across restarts.

A row per stream and certificate; the stream's name is hashed, so rows have a bounded size, and beyond a bound the rows
that were written longest ago go. Readers of write-ahead logs never wait for the writer: states are read on the event
loop (a lookup among 16,384 rows takes 10 µs), and written from a thread.

A file that cannot be written (a full disk, a read-only file system) is still read, so that what was suspended before a
restart stays so. Failures are logged and counted by the caller, and cost memory of the past, never an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hawkvision.cascade.online import Bet, State
from hawkvision.errors import MALFORMED, ConfigError

log = logging.getLogger("hawkvision.edge")

APPLICATION_ID: Final = 0x48574B53
"""`HWKS` in the file's header, so that no other SQLite file is taken for ours."""
SCHEMA_VERSION: Final = 1

_SCHEMA: Final = f"""
CREATE TABLE states (
    stream BLOB NOT NULL,
    certificate TEXT NOT NULL,
    state BLOB NOT NULL,
    written INTEGER NOT NULL,
    PRIMARY KEY (stream, certificate)
) WITHOUT ROWID;
CREATE INDEX states_by_age ON states (written);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_decoder = msgspec.json.Decoder(State)


class Place(NamedTuple):
    """Whose state it is: a hashed stream name and a certificate's key."""

    stream: bytes
    certificate: str


class StateError(Exception):
    """The file cannot be read or written."""


class StateFile:
    """The open file. One caller at a time may `read`, and one, on any thread, `write`."""

    def __init__(self, path: Path, rows_limit: int, kept: bytes) -> None:
        """Open or make the file; rows of the stream `kept` are never deleted.

        Raises:
            ConfigError: if its folder is missing, or it is used by another node or of another kind.
            StateError: if it can neither be written nor read, is corrupt, or has another version.
        """
        self._path = path
        self._rows_limit = rows_limit
        self._kept = kept
        self.unwritable: str | None = None
        """Why nothing can be kept, and only what is there is read; None if all is well."""
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"state_file {path}: cannot be used: expected a file in a folder that exists")
        self._opened = contextlib.ExitStack()
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            self._opened.close()
            self.unwritable = str(error)
            self._open_for_reading()
        except BaseException:
            self._opened.close()
            raise

    def _open(self) -> None:
        self._opened.callback(os.close, _lock(self._path))
        self._writer = self._connected("")
        _prepare(self._writer, self._path)
        self._reader = self._connected("?mode=ro")
        (self._written,) = self._writer.execute("SELECT coalesce(max(written), 0) FROM states").fetchone()

    def _open_for_reading(self) -> None:
        """Read what was kept, without writing anything beside it; what its write-ahead log holds is not seen."""
        try:
            self._reader = self._connected("?mode=ro&immutable=1")
            if not _check(self._reader, self._path):
                raise StateError(f"state_file {self._path}: cannot be used: {self.unwritable}")
        except (sqlite3.Error, OSError):
            self._opened.close()
            raise StateError(f"state_file {self._path}: cannot be used: {self.unwritable}") from None
        except BaseException:
            self._opened.close()
            raise

    def _connected(self, options: str) -> sqlite3.Connection:
        where = f"{self._path.absolute().as_uri()}{options}"
        connection = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
        self._opened.callback(connection.close)
        return connection

    def read(self, place: Place) -> State | None:
        """What was kept of a stream.

        Raises:
            StateError: if the file or the row cannot be read.
        """
        try:
            row = self._reader.execute(
                "SELECT state FROM states WHERE stream = ? AND certificate = ?", (place.stream, place.certificate)
            ).fetchone()
            return None if row is None else decode_state(row[0])
        except (sqlite3.Error, *MALFORMED, ValueError) as error:
            raise StateError(f"cannot read the state of a stream: {error}") from None

    def write(self, states: Iterable[tuple[Place, bytes]]) -> None:
        """Keep encoded states, and forget the oldest beyond the bound; all in one transaction.

        Raises:
            StateError: if the file cannot be written; then none of them is kept.
        """
        if self.unwritable is not None:
            raise StateError(f"cannot write the state of streams: {self.unwritable}")
        self._written += 1
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.executemany(
                    "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)",
                    ((place.stream, place.certificate, state, self._written) for place, state in states),
                )
                self._writer.execute(
                    "DELETE FROM states WHERE (stream, certificate) IN (SELECT stream, certificate FROM states "
                    "WHERE stream <> ? ORDER BY written LIMIT max(0, (SELECT count(*) FROM states) - ?))",
                    (self._kept, self._rows_limit),
                )
                self._writer.execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):  # the first error is the one that matters
                    self._writer.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StateError(f"cannot write the state of streams: {error}") from None

    def close(self) -> None:
        """Close the file; its write-ahead log is folded into it."""
        self._opened.close()


def encode_state(state: State) -> bytes:
    """A state as it is kept."""
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> State:
    """A state as it was kept.

    Raises:
        msgspec.DecodeError: if it is not a state.
        ValueError: if it is one that no controller can have.
    """
    state = _decoder.decode(data)
    bets = (state.loss_bet, state.difficulty_bet, state.return_bet)
    counts = (
        state.void_since, state.requests, state.accepted, state.audits, state.disagreements, state.escalations,
        state.degraded, state.void_seen, state.alarms,
    )  # fmt: skip
    positive = (state.correction, state.root_mean)
    sound = all(map(_sound, bets)) and min(positive) > 0.0 and min(counts) >= 0 and state.debt >= 0.0
    sound = sound and (state.alarms > 0 or not state.void)
    if not sound or not all(map(math.isfinite, (state.theta, state.debt, state.void_loss, *positive))):
        raise ValueError("the state is none that a controller can have")
    return state


def _sound(bet: Bet) -> bool:
    numbers = (bet.bound, bet.wealth, bet.mean, bet.variance)
    return all(map(math.isfinite, numbers)) and bet.wealth >= 0.0 and bet.variance >= 0.0 and bet.seen >= 0


def _lock(path: Path) -> int:
    """Two nodes on one file would overwrite each other. In a file of its own: closing this one ends SQLite's locks."""
    held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"state_file {path}: is in use by another node; each needs its own") from None
    return held


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _check(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is ours; if not, it is empty.

    Raises:
        ConfigError: if it is something else's.
        StateError: if it is corrupt, or another version's.
        sqlite3.Error: if it is corrupt or cannot be read.
    """
    # The log's mode is written before the schema: after a crash in between, the file is empty but not of no pages.
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    kind, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if not tables and kind == 0:
        return False
    if kind != APPLICATION_ID and "states" not in tables:
        raise ConfigError(f"state_file {path}: is a database of something else; name another file")
    if kind == APPLICATION_ID and version != SCHEMA_VERSION:
        raise StateError(f"state_file {path}: has version {version}, this node reads {SCHEMA_VERSION}; move it away")
    damage = _pragma(connection, "quick_check(1)") if kind == APPLICATION_ID else "its header is damaged"
    if damage != "ok":
        raise StateError(f"state_file {path}: is corrupt ({damage}); move it away")
    return True


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is ours, or make it so.

    Raises:
        ConfigError: if it is something else's.
        StateError: if it is corrupt, or another version's.
        sqlite3.Error: if it is corrupt or cannot be written.
    """
    ours = _check(connection, path)
    if _pragma(connection, "journal_mode = WAL") != "wal":
        raise ConfigError(f"state_file {path}: its file system cannot hold a write-ahead log; name a local file")
    connection.execute("PRAGMA synchronous = NORMAL")
    if not ours:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    # Found out now, not by a node that forgets everything at its next restart.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
