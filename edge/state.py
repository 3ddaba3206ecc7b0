"""What controllers remember, kept in one SQLite file across restarts.

A row per stream and certificate; the stream's name is hashed, so rows have a bounded size, and beyond a bound the rows
that were written longest ago go. Readers of write-ahead logs never wait for the writer: states are read on the event
loop (a lookup among 16,384 rows takes 10 µs), and written from a thread.

Failures while a node runs are logged and counted by the caller, and cost memory of the past, never an answer.
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
    """The file could not be read or written just now."""


class StateFile:
    """The open file. One caller at a time may `read`, and one, on any thread, `write`."""

    def __init__(self, path: Path, rows_limit: int, kept: bytes) -> None:
        """Open or make the file; rows of the stream `kept` are never deleted.

        Raises:
            ConfigError: if the file cannot be opened for writing, is used by another node, or is not of this kind.
        """
        self._rows_limit = rows_limit
        self._kept = kept
        with contextlib.ExitStack() as opened:
            try:
                self._lock = _lock(path)
                opened.callback(os.close, self._lock)
                self._writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                opened.callback(self._writer.close)
                _prepare(self._writer, path)
                self._reader = sqlite3.connect(
                    f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
                )
                opened.callback(self._reader.close)
                (self._written,) = self._writer.execute("SELECT coalesce(max(written), 0) FROM states").fetchone()
            except (sqlite3.Error, OSError) as error:
                raise ConfigError(f"state_file {path}: cannot be used: {error}") from None
            opened.pop_all()

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
        self._reader.close()
        self._writer.close()
        os.close(self._lock)


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


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is ours, or make it so.

    Raises:
        ConfigError: if it is something else's, or another version's.
        sqlite3.Error: if it is corrupt or cannot be written.
    """

    def pragma(name: str) -> object:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]

    # The log's mode is written before the schema: after a crash in between, the file is empty but not of no pages.
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    fresh = tables == 0 and pragma("application_id") == 0
    if not fresh and pragma("application_id") != APPLICATION_ID:
        raise ConfigError(f"state_file {path}: is a database of something else; name another file")
    if not fresh and pragma("user_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"state_file {path}: has version {pragma('user_version')}, this node reads {SCHEMA_VERSION}; move it away"
        )
    if not fresh and pragma("quick_check(1)") != "ok":
        raise ConfigError(f"state_file {path}: is corrupt ({pragma('quick_check(1)')}); move it away")
    if pragma("journal_mode = WAL") != "wal":
        raise ConfigError(f"state_file {path}: its file system cannot hold a write-ahead log; name a local file")
    connection.execute("PRAGMA synchronous = NORMAL")
    if fresh:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    # Found out now, not by a node that forgets everything at its next restart.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
