"""Log lines of Ray's worker processes, whose standard error Ray writes to its own files.

    replica ── one datagram per line ──► socket in the tier's private folder ──► standard error of the tier

Ray's processes inherit the variable `HAWKVISION_LOG_SOCKET` with the path. A line is dropped if the socket is full,
because no answer may wait for a log. The next line gives the number of dropped lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from hawkvision.core.logs import LogFormat, LogLevel, configure

VARIABLE: Final = "HAWKVISION_LOG_SOCKET"
MAX_LINE_BYTES: Final = 64 * 1024
"""Longest line, traceback included; the rest is cut off."""
_NAME: Final = "log.socket"

log = logging.getLogger("hawkvision.core.logs")


@contextlib.contextmanager
def relaying(folder: Path, written: TextIO | None = None) -> Iterator[None]:
    """Write the lines of other processes to standard error during the block. Needs a running event loop.

    Args:
        folder: of the socket. Everyone who may write there may write to the log.
        written: replaces standard error.

    Raises:
        OSError: if the socket cannot be made.
    """
    loop = asyncio.get_running_loop()
    out = written or sys.__stderr__ or sys.stderr
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.setblocking(False)

    def arrived() -> None:
        for _ in range(100):  # then let the loop do other work
            try:
                line = listener.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                return
            out.write(line.decode(errors="replace") + "\n")
            out.flush()

    before = os.environ.get(VARIABLE)
    try:
        (folder / _NAME).unlink(missing_ok=True)  # left by a process that was killed
        with _reached(folder) as place:
            listener.bind(f"{place}/{_NAME}")
        loop.add_reader(listener, arrived)
        os.environ[VARIABLE] = str(folder / _NAME)
        yield
        arrived()
    finally:
        loop.remove_reader(listener)
        listener.close()
        (folder / _NAME).unlink(missing_ok=True)
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def configure_worker(level: LogLevel, form: LogFormat) -> None:
    """Configure the logging of a process started by Ray: through the launcher if it listens, else as `configure`."""
    named = os.environ.get(VARIABLE)
    handler = None
    if named is not None:
        with contextlib.suppress(OSError):  # the launcher is on another machine, or gone
            handler = RelayHandler(Path(named))
    configure(level, form, handler)


class RelayHandler(logging.Handler):
    """Sends lines to the socket of `relaying` without waiting."""

    def __init__(self, path: Path) -> None:
        """Connect.

        Raises:
            OSError: if nothing listens there.
        """
        super().__init__()
        self._lost = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            with _reached(path.parent) as place:
                self._socket.connect(f"{place}/{path.name}")
        except OSError:
            self._socket.close()
            raise

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        try:
            line = self.format(record).encode(errors="replace")[:MAX_LINE_BYTES]
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not end the request
            self.handleError(record)
            return
        try:
            if self._lost:
                self._socket.send(self.format(self._loss()).encode())
                self._lost = 0
            self._socket.send(line)
        except OSError:  # full, or the launcher is gone
            self._lost += 1

    def _loss(self) -> logging.LogRecord:
        message = "%d log lines of process %d were lost"
        return logging.LogRecord(log.name, logging.WARNING, __file__, 0, message, (self._lost, os.getpid()), None)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()


@contextlib.contextmanager
def _reached(folder: Path) -> Iterator[str]:
    """A short path of a folder, because socket addresses have at most 107 bytes."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)
