"""The state file: what monitors know of each stream, in one SQLite file.

It has a row per stream. Names are hashed, so rows have a bounded size. Beyond a bound, the rows that were written
longest ago are deleted, those without an alarm first. If a row with an alarm must go, the file says so from then on
(`full`). A write-ahead log lets the event loop read while a thread writes.

A file that cannot be written (a full disk, a read-only file system) is still read, so that suspended streams stay
suspended. The caller logs and counts failures; they cost state, never an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.cascade.drift.monitor import MonitorState
from hawkvision.core.errors import MALFORMED, ConfigError
from hawkvision.guarantee.answered import AnsweredRequests, WindowState

log = logging.getLogger("hawkvision.edge")

APPLICATION_ID: Final = 0x48574B53
"""`HWKS` in the file's header, which tells it from other SQLite files."""
SCHEMA_VERSION: Final = 3

_SCHEMA: Final = f"""
CREATE TABLE states (
    stream BLOB NOT NULL PRIMARY KEY,
    state BLOB NOT NULL,
    suspended INTEGER NOT NULL,
    written INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX states_by_age ON states (suspended, written);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_FULL: Final = b"\xff" * 16
"""Key of the row that records that a row with an alarm was deleted; a hash of 128 bits does not meet it."""


class StreamState(msgspec.Struct):
    """One stream: its logs by stage."""

    monitors: dict[str, MonitorState] = msgspec.field(default_factory=dict)
    suspended_before: bool = False
    """Whether there was an alarm without a log: an older version wrote it, or its row cannot be read."""
    answered: dict[str, WindowState] = msgspec.field(default_factory=dict)
    """Of the node's own stream: how the requests of all callers were answered."""

    @property
    def suspended(self) -> bool:
        """Whether an alarm stands."""
        return self.suspended_before or any(state.failed is not None for state in self.monitors.values())


_decoder = msgspec.json.Decoder(StreamState)


class StateError(Exception):
    """The file cannot be read or written."""


class StateFile:
    """The open file. One thread at a time may `read`, and one `write`."""

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
        """Why the file is only read; None if it is written, too."""
        self.suspended = 0
        """Streams with an alarm when the file was opened."""
        self.full = False
        """Whether an alarm was deleted, so that a stream without a row may have one."""
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

    def _count_alarms(self) -> None:
        alarms = "SELECT count(*) FROM states WHERE suspended AND stream <> ?"
        (self.suspended,) = self._reader.execute(alarms, (_FULL,)).fetchone()
        self.full = self._reader.execute("SELECT 1 FROM states WHERE stream = ?", (_FULL,)).fetchone() is not None

    def _open(self) -> None:
        self._opened.callback(os.close, _lock(self._path))
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
        self._writer = self._connected("")
        _prepare(self._writer, self._path)
        self._reader = self._connected("?mode=ro")
        self._count_alarms()
        (self._written,) = self._writer.execute("SELECT coalesce(max(written), 0) FROM states").fetchone()

    def _open_for_reading(self) -> None:
        """Read the file without writing anything beside it. Its write-ahead log is not read."""
        try:
            self._reader = self._connected("?mode=ro&immutable=1")
            if not _check(self._reader, self._path):
                raise StateError(f"state_file {self._path}: cannot be used: {self.unwritable}")
            if _pragma(self._reader, "user_version") != SCHEMA_VERSION:
                raise StateError(f"state_file {self._path}: is of an older version, and {self.unwritable}")
            self._count_alarms()
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

    def read(self, key: bytes) -> StreamState | None:
        """The state of a stream; None without a row.

        Raises:
            StateError: if the file or the row cannot be read.
        """
        try:
            row = self._reader.execute("SELECT state FROM states WHERE stream = ?", (key,)).fetchone()
            return None if row is None else decode_state(row[0])
        except (sqlite3.Error, *MALFORMED, ValueError) as error:
            raise StateError(f"cannot read the state of a stream: {error}") from None

    def write(self, states: Iterable[tuple[bytes, bytes, bool]], *, full: bool = False) -> None:
        """Write encoded states and delete the oldest rows beyond the bound, in one transaction.

        Args:
            states: key, state, and whether an alarm stands.
            full: whether an alarm was lost elsewhere.

        Raises:
            StateError: if the file cannot be written; then none of them is.
        """
        if self.unwritable is not None:
            raise StateError(f"cannot write the state of streams: {self.unwritable}")
        self._written += 1
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.executemany(
                    "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)",
                    ((key, state, suspended, self._written) for key, state, suspended in states),
                )
                gone = self._writer.execute(
                    "DELETE FROM states WHERE stream IN (SELECT stream FROM states WHERE stream NOT IN (?, ?) ORDER BY "
                    "suspended, written LIMIT max(0, (SELECT count(*) FROM states) - ?)) RETURNING suspended",
                    (self._kept, _FULL, self._rows_limit),
                ).fetchall()
                full = full or any(suspended for (suspended,) in gone)
                if full and not self.full:
                    self._writer.execute("INSERT OR REPLACE INTO states VALUES (?, '{}', 1, 0)", (_FULL,))
                self._writer.execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):  # the first error is the one that matters
                    self._writer.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StateError(f"cannot write the state of streams: {error}") from None
        self.full = self.full or full

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
        ValueError: if no monitor, or no window of requests, can have it.
    """
    state = _decoder.decode(data)
    if not all(map(_sound, state.monitors.values())):
        raise ValueError("no monitor can have this state")
    AnsweredRequests(state.answered)
    return state


def _sound(state: MonitorState) -> bool:
    return min(state.alarms, state.audits, state.disagreements) >= 0 and (state.failed is None or state.alarms > 0)


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
        StateError: if it is corrupt, or has an unknown version.
        sqlite3.Error: if it is corrupt or cannot be read.
    """
    # SQLite writes the journal mode before the schema. After a crash in between, the file has pages and no tables.
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    kind, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if not tables and kind == 0:
        return False
    if kind != APPLICATION_ID and "states" not in tables:
        raise ConfigError(f"state_file {path}: is a database of something else; name another file")
    if kind == APPLICATION_ID and version not in (2, SCHEMA_VERSION):
        raise StateError(f"state_file {path}: has version {version}, this node reads {SCHEMA_VERSION}; move it away")
    damage = _pragma(connection, "quick_check(1)") if kind == APPLICATION_ID else "its header is damaged"
    if damage != "ok":
        raise StateError(f"state_file {path}: is corrupt ({damage}); move it away")
    return True


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is a state file, or make it one.

    Raises:
        ConfigError: if it is a database of something else.
        StateError: if it is corrupt, or has an unknown version.
        sqlite3.Error: if it is corrupt or cannot be written.
    """
    ours = _check(connection, path)
    if _pragma(connection, "journal_mode = WAL") != "wal":
        raise ConfigError(f"state_file {path}: its file system cannot hold a write-ahead log; name a local file")
    connection.execute("PRAGMA synchronous = NORMAL")
    if not ours:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    elif _pragma(connection, "user_version") == 2:
        _migrate(connection, path)
    # A file that cannot be written is found now, not at the next restart.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Convert version 2, whose logs are about certificates under other names: which streams are suspended stays."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("DELETE FROM states WHERE NOT suspended")
        alarm = encode_state(StreamState(suspended_before=True))
        kept = connection.execute("UPDATE states SET state = ? WHERE stream <> ?", (alarm, _FULL)).rowcount
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    log.warning("state_file %s: is of an older version; the %d streams that were suspended stay so", path, kept)
