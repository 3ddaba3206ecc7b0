"""The state file: the logs and alarms of each stream, in one SQLite file.

It has a row per stream in memory, and is read once, when a node starts. Names are hashed. An alarm is written before
any answer says so, and with a sync, so that it outlives the process and a power cut.

A file that cannot be written (a full disk, a read-only file system) is still read, so that suspended streams stay
suspended. The caller logs and counts failures; they cost state, never an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.guarantee.answered import AnsweredRequests
from hawkvision.guarantee.monitor import StreamState

APPLICATION_ID: Final = 0x48574B53
"""`HWKS` in the file's header, which tells it from other SQLite files."""
SCHEMA_VERSION: Final = 4

_SCHEMA: Final = f"""
CREATE TABLE states (
    stream BLOB NOT NULL PRIMARY KEY,
    state BLOB NOT NULL,
    written INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
_WRITE: Final = """
INSERT INTO states VALUES (?1, ?2, ?3)
ON CONFLICT DO UPDATE SET state = ?2, written = ?3 WHERE written < ?3
"""

_decoder = msgspec.json.Decoder(StreamState)


class StateError(Exception):
    """The file cannot be read or written."""


class StateFile:
    """The open file. Any thread may write."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: if its folder is missing, or it is used by another node or of another kind.
            StateError: if it can neither be written nor read, is corrupt, or has another version.
        """
        self.path = path
        self._turn = threading.Lock()
        self._written = 0
        self.unwritable: str | None = None
        """Why the file is only read; None if it is written, too."""
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
        self._opened.callback(os.close, _lock(self.path))
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
        self._connection = self._connected("")
        _prepare(self._connection, self.path)
        (self._written,) = self._connection.execute("SELECT coalesce(max(written), 0) FROM states").fetchone()

    def _open_for_reading(self) -> None:
        """Read the file without writing anything beside it. Its write-ahead log is not read."""
        try:
            self._connection = self._connected("?mode=ro&immutable=1")
            if not _check(self._connection, self.path):
                raise StateError(f"state_file {self.path}: cannot be used: {self.unwritable}")
        except (sqlite3.Error, OSError):
            self._opened.close()
            raise StateError(f"state_file {self.path}: cannot be used: {self.unwritable}") from None
        except BaseException:
            self._opened.close()
            raise

    def _connected(self, options: str) -> sqlite3.Connection:
        where = f"{self.path.absolute().as_uri()}{options}"
        connection = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
        self._opened.callback(connection.close)
        return connection

    def read(self) -> tuple[dict[bytes, StreamState], int]:
        """The states by stream, and how many cannot be read: those streams may have been in alarm, so they are.

        Raises:
            StateError: if the file cannot be read.
        """
        try:
            rows = self._connection.execute("SELECT stream, state FROM states ORDER BY written").fetchall()
        except sqlite3.Error as error:
            raise StateError(f"cannot read the states of streams: {error}") from None
        states, broken = {}, 0
        for key, state in rows:
            try:
                states[key] = decode_state(state)
            except (*MALFORMED, ValueError):
                states[key] = StreamState(carried=True)
                broken += 1
        return states, broken

    def next(self) -> int:
        """A number for states that are encoded now; of two states of a stream the one with the larger number stays."""
        self._written += 1
        return self._written

    def write(self, states: Mapping[bytes, bytes | None], number: int, *, sync: bool = False) -> None:
        """Write encoded states, and delete the rows of those that are None, in one transaction.

        Args:
            states: by stream.
            number: see `next`.
            sync: whether they must outlive a power cut that comes after this.

        Raises:
            StateError: if the file cannot be written; then none of them is.
        """
        if self.unwritable is not None:
            raise StateError(f"cannot write the states of streams: {self.unwritable}")
        gone = [(key, number) for key, state in states.items() if state is None]
        kept = [(key, state, number) for key, state in states.items() if state is not None]
        with self._turn:
            try:
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._connection.executemany("DELETE FROM states WHERE stream = ? AND written < ?", gone)
                    self._connection.executemany(_WRITE, kept)
                    self._connection.execute("COMMIT")
                except sqlite3.Error:
                    with contextlib.suppress(sqlite3.Error):  # the first error is the one that matters
                        self._connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StateError(f"cannot write the states of streams: {error}") from None

    def close(self) -> None:
        """Close the file; its write-ahead log is merged into it."""
        self._opened.close()


def encode_state(state: StreamState) -> bytes:
    """A state as the file has it."""
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> StreamState:
    """A state from the file.

    Raises:
        msgspec.DecodeError: if it is not a state.
        ValueError: if no log, or no window of requests, can have it.
    """
    state = _decoder.decode(data)
    for each in state.logs.values():
        if min(each.counted, each.alarms, each.audits, each.disagreements, *each.evidence) < 0:
            raise ValueError("no log can have this state")
    AnsweredRequests(state.answered)
    return state


def _lock(path: Path) -> int:
    """Lock the file against other nodes. The lock is another file, for closing the database ends SQLite's locks."""
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
    """Whether the file is a state file; if not, it is empty.

    Raises:
        ConfigError: if it is a database of something else.
        StateError: if it is corrupt, or has another version.
        sqlite3.Error: if it is corrupt or cannot be read.
    """
    # SQLite writes the journal mode before the schema. After a crash in between, the file has pages and no tables.
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
    """Check that the file is a state file, or make it one.

    Raises:
        ConfigError: if it is a database of something else.
        StateError: if it is corrupt, or has another version.
        sqlite3.Error: if it is corrupt or cannot be written.
    """
    ours = _check(connection, path)
    if _pragma(connection, "journal_mode = WAL") != "wal":
        raise ConfigError(f"state_file {path}: its file system cannot hold a write-ahead log; name a local file")
    if not ours:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    # A file that cannot be written is found now, not at the next restart.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
