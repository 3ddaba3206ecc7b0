"""Files that are read again while the server runs: when they change, and when an operator says so (SIGHUP).

A change is taken up once the files have been the same for two looks, so that a pair is not read while it is being
written. Whatever way a file is replaced is seen: written in place, renamed over, or behind a link, as Kubernetes does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from hawkvision.core.errors import ConfigError
from hawkvision.servers.keys import Keys
from hawkvision.servers.tls import Certificates

log = logging.getLogger("hawkvision.reload")

PERIOD_S: Final = 1.0
"""Between two looks; a look is one stat(2) per file, in a thread, for file systems may hang."""

_State: TypeAlias = tuple[tuple[int, ...], ...]
"""Per file: device, inode, size and time of change; nothing of one that is not there."""


@dataclass
class _WatchedFiles:
    title: str
    files: tuple[Path, ...]
    reload: Callable[[], None]
    loaded: _State
    """As the files were when they were read."""
    seen: _State | None = None
    """As they were at the last look, if not as loaded."""

    def read(self, state: _State) -> None:
        self.loaded, self.seen = state, None
        try:
            self.reload()
        except ConfigError as error:
            log.error("%s: what was in use stays in use: %s", self.title, error)
        except Exception:  # a defect must not end the watching of everything else
            log.exception("%s: what was in use stays in use", self.title)


class FileWatcher:
    """What a server reads again. Watching begins with `start`, on the running loop; close it."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._watched: list[_WatchedFiles] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, keys: Keys, *certificates: Certificates | None) -> FileWatcher:
        """Those of a server's files that there are; they have been read just now."""
        made = cls()
        if keys.file is not None:
            made.add("keys", [keys.file], keys.reload)
        for one in certificates:
            if one is not None:
                made.add(one.files.title, one.files.paths, one.reload)
        return made

    def add(self, title: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        """Have files watched that have been read just now; `reload` reads them again, or raises `ConfigError`."""
        if files:
            self._watched.append(_WatchedFiles(title, tuple(files), reload, _state(files)))

    def start(self) -> None:
        """Begin to watch."""
        if self._watched and self._task is None:
            self._task = asyncio.create_task(self._watch())

    def now(self) -> None:
        """Read everything again, whether it has changed or not."""
        if not self._watched:
            log.info("told to reload: there is no file of keys or certificates to read again")
        for one in self._watched:
            one.read(_state(one.files))

    async def close(self) -> None:
        """Watch no longer."""
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
