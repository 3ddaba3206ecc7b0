"""Log lines of processes whose standard error goes elsewhere: Ray sends that of its workers to files of its own.

    replica ── a line, one datagram ──► socket in the tier's private folder ──► the tier process' standard error

The variable `HAWKVISION_LOG_SOCKET` says where; Ray's processes inherit it. A line that finds the socket full is lost,
for no answer may wait for a log, and the next one says how many were.
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
"""Of one line, traceback included; the rest is cut off. Linux takes datagrams of 208 KiB between processes."""
_NAME: Final = "log.socket"

log = logging.getLogger("hawkvision.core.logs")


@contextlib.contextmanager
def relaying(folder: Path, written: TextIO | None = None) -> Iterator[None]:
    """Meanwhile write what other processes send on standard error. To be entered on a running event loop.

    Args:
        folder: for the socket; whoever may write there may write to the log.
        written: in place of standard error.

    Raises:
        OSError: if there can be no socket in the folder.
    """
    loop = asyncio.get_running_loop()
    out = written or sys.__stderr__ or sys.stderr
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.setblocking(False)

    def arrived() -> None:
        for _ in range(100):  # the loop has other work, too
            try:
                line = listener.recv(MAX_LINE_BYTES)
            except BlockingIOError:
                return
            out.write(line.decode(errors="replace") + "\n")
            out.flush()

    before = os.environ.get(VARIABLE)
    try:
        (folder / _NAME).unlink(missing_ok=True)  # a process that was killed has left it
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
    """Set up the logging of a process that Ray has started: as `configure`, by way of the launcher if it listens."""
    named = os.environ.get(VARIABLE)
    handler = None
    if named is not None:
        with contextlib.suppress(OSError):  # the launcher is on another machine, or gone
            handler = RelayHandler(Path(named))
    configure(level, form, handler)


class RelayHandler(logging.Handler):
    """Sends lines to the socket of `relaying`; never waits for it."""

    def __init__(self, path: Path) -> None:
        """Connect.

        Raises:
            OSError: if nobody listens there.
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
        except Exception:  # noqa: BLE001 - a line that cannot be written must not end what it is about
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
        """Hang up."""
        self._socket.close()
        super().close()


@contextlib.contextmanager
def _reached(folder: Path) -> Iterator[str]:
    """A short name of a folder: addresses of sockets have 107 bytes, which a long TMPDIR takes up."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)
