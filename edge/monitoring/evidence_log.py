"""The evidence of a node: its audits, in the order in which they were drawn, and images of some of them.

    drawn ─► a row, which counts as lost ─► settled: both answers and their disagreement ─► labelled: what each lost

Rows are in a SQLite file beside the state file, of the last `KEPT` audits. They are a uniform sample of all images that
the node was asked about: an audit that was drawn on suspicion only is no evidence, and one that is missing stays a row.
Rows come in blocks of `BLOCK` by their number alone, and leave by whole blocks, so that nobody chooses where one begins
or ends (`hawkvision.guarantee.review`). A start with another share, or after an end in which the last rows may have
been lost, begins a block.

Images are kept only where the operator bounds them, `review_max_bytes` and `review_max_days`: those of disagreements,
and of the audits drawn at random for the check of labels. They lie beside the file, in a folder that only this user may
read. The oldest leave first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from edge.monitoring.kept_written import KeptWritten
from hawkvision.core.errors import MALFORMED
from hawkvision.guarantee.review import BLOCK, block_of, for_label_check

log = logging.getLogger("hawkvision.edge")

KEPT: Final = 8 * BLOCK
"""Rows, in whole blocks of which the newest may still fill; 1 kB each for most kinds of task."""
MOST_OPENINGS: Final = 1024
"""Blocks of which it is remembered that they were opened."""
MOST_UNWRITTEN_BYTES: Final = 40_000_000
"""Bytes of images that wait to be written; further ones are not kept."""
DAY_S: Final = 86_400.0

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS audits (number INTEGER NOT NULL PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS openings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    block INTEGER NOT NULL UNIQUE,
    certified TEXT NOT NULL DEFAULT '[]'
);
PRAGMA application_id = 0x48574B45;
"""


class Audit(msgspec.Struct, omit_defaults=True):
    """A row: an audit of the edge stage."""

    drawn: float
    """When; seconds since 1970."""
    stream: str
    """Key of the innermost log that watched the request, in hexadecimal; empty if none did."""
    digest: str
    """SHA-256 of the image."""
    share: float
    """Of the images that were drawn; the same in all of a block."""
    versions: str
    """Of the stages, and of what their scores depend on."""
    score: float
    """Of the edge stage."""
    answer: dict[str, Any]
    """The edge stage's (`TaskKind.encode_compared`)."""
    settled: bool = False
    """Whether the outcome is known, or that there will be none."""
    reference: dict[str, Any] | None = None
    """The reference stage's answer; None if it is missing."""
    disagreement: float = 1.0
    label: Any = None
    """What a person said; None for nothing."""
    losses: tuple[float, float] | None = None
    """Of both answers by the label; None if it does not tell."""
    again: Any = None
    """What a person said the second time."""
    losses_again: tuple[float, float] | None = None

    @property
    def contradicted(self) -> bool:
        """Whether both labels differ in what is lost."""
        return self.label is not None and self.again is not None and self.losses != self.losses_again

    @property
    def told(self) -> tuple[float, float] | None:
        """What both answers lose, as far as labels tell; None if they do not."""
        return None if self.contradicted else self.losses


class EvidenceLog:
    """The audits of one task. Made and used on one event loop."""

    def __init__(
        self,
        path: Path | None,
        share: float,
        *,
        most_bytes: int = 0,
        most_days: float = 0.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open or make the file.

        Args:
            path: of the file; None keeps rows in memory, and no images.
            share: of the images that are audited without suspicion.
            most_bytes: of the images that are kept; 0 for none.
            most_days: after which an image is deleted; 0 for none.
            now: seconds since 1970.

        Raises:
            OSError, sqlite3.Error: if file or folder cannot be used.
        """
        self.share = share
        self._now = now
        self._turn = threading.Lock()
        self._unwritten: dict[int, Audit] = {}
        self._new_images: dict[int, bytes] = {}
        self._images: dict[int, tuple[int, float]] = {}
        """Size and time of each kept image, the oldest first."""
        self._most_bytes, self._most_age_s = most_bytes, most_days * DAY_S
        self.remembers = path is not None
        """Whether a restart keeps rows and openings."""
        self.keeps_images = path is not None and bool(self._most_bytes and self._most_age_s)
        self._folder = None if path is None else path.with_name(f"{path.name}.images")
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite would let others read it
        self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        try:
            self._connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
            self._connection.executescript(_SCHEMA)
            self._next = self._begin()
            self._find_images()
        except BaseException:
            self._connection.close()
            raise
        self._open: dict[int, Audit] = {}
        """The audits of this run that are not settled."""
        self._complaint = ""
        self._kept = KeptWritten(self.write)

    @property
    def last(self) -> int:
        """The number of the last audit; 0 if there is none."""
        return self._next - 1

    # ---------------------------------------------------------------------------------------------------- audits

    def draw(
        self, u: float, stream: bytes, versions: str, body: bytes, score: float, answer: dict[str, Any]
    ) -> int | None:
        """Begin the row of an audit that was drawn by `u`. Its number; None if it is no evidence."""
        if u >= self.share:
            return None
        number, self._next = self._next, self._next + 1
        digest = hashlib.sha256(body).hexdigest()
        audit = Audit(self._now(), stream.hex(), digest, self.share, versions, score, answer)
        self._open[number] = self._unwritten[number] = audit
        return number

    def settle(
        self,
        number: int,
        body: bytes,
        reference: dict[str, Any] | None,
        disagreement: float,
        score: float | None = None,
    ) -> None:
        """Add the reference stage's answer to a row; None if there is none, so that the disagreement stays 1.

        `score`: the edge stage's, if it may have run after the drawing.
        """
        audit = self._open.pop(number)
        audit.settled, audit.score = True, audit.score if score is None else score
        self._unwritten[number] = audit
        if reference is None:
            return
        audit.reference, audit.disagreement = reference, disagreement
        held = sum(map(len, self._new_images.values()))
        wanted = self.keeps_images and (disagreement > 0.0 or for_label_check(number))
        if wanted and len(body) <= self._most_bytes and held + len(body) <= MOST_UNWRITTEN_BYTES:
            self._new_images[number] = body

    async def write(self) -> None:
        """Write what has changed, and delete what is too old or too much. Rows that cannot be written wait."""
        audits, images = self._unwritten, self._new_images
        rows = [(number, msgspec.json.encode(audit)) for number, audit in audits.items()]
        self._new_images, self._unwritten = {}, {}
        try:
            await asyncio.to_thread(self._store, rows, images)
            self._complaint = ""
        except (sqlite3.Error, OSError) as error:
            kept = audits | self._unwritten  # written later; a row that is lost would not count as lost
            self._unwritten = dict(itertools.islice(kept.items(), max(0, len(kept) - KEPT), None))
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("evidence of audits cannot be written: %s", error)

    async def read(self, block: int) -> dict[int, Audit]:
        """The rows of a block by number, in order, up to the first audit that is still under way.

        Raises:
            sqlite3.Error: if the file cannot be read.
        """
        return await self._rows(*self._span(block))

    async def count(self, block: int) -> int:
        """How many rows of a block there are, up to the first audit that is still under way.

        Raises:
            sqlite3.Error: if the file cannot be read.
        """
        span = self._span(block)
        await self.write()

        def counted() -> int:
            query = "SELECT count(*) FROM audits WHERE number BETWEEN ? AND ?"
            with self._turn:
                return int(self._connection.execute(query, span).fetchone()[0])

        return await asyncio.to_thread(counted)

    def _span(self, block: int) -> tuple[int, int]:
        """The first and the last number of a block's rows before the first audit that is still under way."""
        return block * BLOCK + 1, min((block + 1) * BLOCK, min(self._open, default=self._next) - 1)

    async def audit(self, number: int) -> Audit | None:
        """One row; None if there is none of this number.

        Raises:
            sqlite3.Error: if the file cannot be read.
        """
        return (await self._rows(number, number)).get(number)

    async def _rows(self, first: int, end: int) -> dict[int, Audit]:
        await self.write()

        def rows() -> list[tuple[int, bytes]]:
            with self._turn:
                query = "SELECT number, record FROM audits WHERE number BETWEEN ? AND ? ORDER BY number"
                return self._connection.execute(query, (first, end)).fetchall()

        found = {}
        for number, record in await asyncio.to_thread(rows):
            with contextlib.suppress(*MALFORMED):
                found[number] = msgspec.json.decode(record, type=Audit)
        return found

    def image(self, number: int) -> bytes | None:
        """The image of an audit; None if it is not kept. It reads a file."""
        if number in self._new_images:
            return self._new_images[number]
        if number not in self._images or self._folder is None:
            return None
        with contextlib.suppress(OSError):
            return (self._folder / str(number)).read_bytes()
        return None

    def has_image(self, number: int) -> bool:
        """Whether the image of an audit is kept."""
        return number in self._images or number in self._new_images

    # ---------------------------------------------------------------------------------------- labels and openings

    async def update(self, number: int, audit: Audit) -> None:
        """Write a row whose label changed.

        Raises:
            sqlite3.Error: if the file cannot be written.
        """
        await asyncio.to_thread(self._execute, "UPDATE audits SET record = ? WHERE number = ?", audit, number)

    def open(self, block: int) -> None:
        """Note that a block was opened.

        Raises:
            sqlite3.Error: if the file cannot be written.
        """
        with self._turn:
            self._connection.execute("INSERT OR IGNORE INTO openings (block) VALUES (?)", (block,))
            self._connection.execute(
                "DELETE FROM openings WHERE id <= (SELECT max(id) FROM openings) - ?", (MOST_OPENINGS,)
            )

    def openings(self) -> dict[int, frozenset[float]]:
        """The blocks that were opened, in this order, and the drops that each has certified.

        Raises:
            sqlite3.Error: if the file cannot be read.
        """
        with self._turn:
            found = self._connection.execute("SELECT block, certified FROM openings ORDER BY id").fetchall()
        return {block: frozenset(msgspec.json.decode(drops, type=list[float])) for block, drops in found}

    def certified(self, block: int, drops: Iterable[float]) -> None:
        """Note what an opened block has certified.

        Raises:
            sqlite3.Error: if the file cannot be written.
        """
        written = msgspec.json.encode(sorted(drops)).decode()
        with self._turn:
            self._connection.execute("UPDATE openings SET certified = ? WHERE block = ?", (written, block))

    async def close(self) -> None:
        """Write what is not written yet, and close the file."""
        await self._kept.close()
        if not self._unwritten:
            with contextlib.suppress(sqlite3.Error):  # then the next start begins a block
                await asyncio.to_thread(self._connection.execute, "PRAGMA user_version = 0")
        await asyncio.to_thread(self._connection.close)

    # ------------------------------------------------------------------------------------------------- the files

    def _execute(self, statement: str, audit: Audit, number: int) -> None:
        with self._turn:
            self._connection.execute(statement, (msgspec.json.encode(audit), number))

    def _store(self, rows: list[tuple[int, bytes]], images: dict[int, bytes]) -> None:
        with self._turn:
            if rows:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    self._connection.executemany("INSERT OR REPLACE INTO audits VALUES (?, ?)", rows)
                    gone = (block_of(self.last) + 1) * BLOCK - KEPT  # whole blocks: what is left of one would be chosen
                    self._connection.execute("DELETE FROM audits WHERE number <= ?", (gone,))
                    self._connection.execute("COMMIT")
                except sqlite3.Error:
                    with contextlib.suppress(sqlite3.Error):  # the first error is the one that matters
                        self._connection.execute("ROLLBACK")
                    raise
            for number, body in images.items():
                self._write_image(number, body)
            self._delete_images()

    def _begin(self) -> int:
        """The number of the next audit. It begins a block if the share changed, or if audits may be missing."""
        found = self._connection.execute("SELECT number, record FROM audits ORDER BY number DESC LIMIT 1").fetchone()
        unclosed = self._connection.execute("PRAGMA user_version").fetchone()[0]
        self._connection.execute("PRAGMA user_version = 1")
        number, record = found or (0, b"")
        with contextlib.suppress(*MALFORMED):
            if not unclosed and msgspec.json.decode(record, type=Audit).share == self.share:
                return int(number) + 1
        return (block_of(number) + 1) * BLOCK + 1

    def _find_images(self) -> None:
        """The images of the last run; where none are to be kept, they are deleted."""
        if self._folder is None:
            return
        if self.keeps_images:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
        if self._folder.is_dir():
            found = sorted((int(each.name), each.stat()) for each in self._folder.iterdir() if each.name.isdecimal())
            self._images = {number: (state.st_size, state.st_mtime) for number, state in found}
            self._delete_images()

    def _write_image(self, number: int, body: bytes) -> None:
        assert self._folder is not None, "images are kept"
        handle = os.open(self._folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._images[number] = len(body), self._now()
        with os.fdopen(handle, "wb") as file:
            file.write(body)

    def _delete_images(self) -> None:
        assert self._folder is not None or not self._images, "images are kept"
        held, oldest = sum(size for size, _ in self._images.values()), self._now() - self._most_age_s
        for number, (size, written) in list(self._images.items()):
            if held <= self._most_bytes and written > oldest and self.keeps_images:
                break
            if self._folder is not None:
                (self._folder / str(number)).unlink(missing_ok=True)
            del self._images[number]
            held -= size
