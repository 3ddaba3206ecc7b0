"""Reads keys and certificates again while the server runs: when their files change, and on SIGHUP.

A change takes effect when the files are the same at two checks, so that a pair is not read while it is being written.
Files may be written in place, renamed over, or replaced behind a link, as Kubernetes does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError
from hawkvision.servers.keys import Keys
from hawkvision.servers.tls import Certificates

log = logging.getLogger("hawkvision.reload")

PERIOD_S: Final = 1.0
"""Between two checks. A check is one stat(2) per file, in a thread, because file systems may hang."""

_State: TypeAlias = tuple[tuple[int, ...], ...]
"""Per file: device, inode, size and times of change; empty for a missing file."""


class _WatchedFiles:
    def __init__(self, title: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self.title, self.files, self.reload = title, tuple(files), reload
        self.loaded = _state(files)
        """State of the files when they were last read."""
        self.seen: _State | None = None
        """State at the last check, if it differs from `loaded`."""

    def read(self, state: _State) -> None:
        self.loaded, self.seen = state, None
        try:
            self.reload()
        except ConfigError as error:
            log.error("%s: the previous files stay in use: %s", self.title, error)
        except Exception:  # a defect must not stop the watching of other files
            log.exception("%s: the previous files stay in use", self.title)


class FileWatcher:
    """Reads files again when they change. `start` begins to watch, on the running loop; `close` ends it."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._watched: list[_WatchedFiles] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, keys: Keys, *certificates: Certificates | None) -> FileWatcher:
        """A watcher of a server's key file and certificates, which have just been read."""
        made = cls()
        if keys.file is not None:
            made.add("keys", [keys.file], keys.reload)
        for one in certificates:
            if one is not None:
                made.add(one.title, one.paths, one.reload)
        return made

    def add(self, title: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        """Watch files that have just been read. `reload` reads them again, or raises `ConfigError`."""
        if files:
            self._watched.append(_WatchedFiles(title, files, reload))

    def start(self) -> None:
        """Begin to watch."""
        if self._watched and self._task is None:
            self._task = asyncio.create_task(self._watch())

    def now(self) -> None:
        """Read all files again, changed or not."""
        if not self._watched:
            log.info("reload: there is no file of keys or certificates to read")
        for one in self._watched:
            one.read(_state(one.files))

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            for one in self._watched:
                state = await asyncio.to_thread(_state, one.files)
                if state == one.loaded:
                    one.seen = None
                elif state == one.seen:
                    one.read(state)
                else:
                    one.seen = state


def _state(files: Sequence[Path]) -> _State:
    return tuple(_stat(path) for path in files)


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)  # noqa: PTH116  follows links, as reading does
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
