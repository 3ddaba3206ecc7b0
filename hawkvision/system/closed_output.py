"""Commands whose output nobody reads any more, as in `hawkvision classify --json … | head -1`."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_without_reader() -> Iterator[None]:
    """End the command in the block with status 1 and without a traceback once its output has no reader.

    Output that is still buffered is written at the end of the block, where a failure can still be handled.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE or not _without_reader():
            raise
        # The interpreter flushes standard output once more when it ends.
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, sys.stdout.fileno())
        os.close(discarded)
        sys.exit(1)


def _without_reader() -> bool:
    """Whether standard output or error is a pipe or socket that the other end has closed.

    A broken pipe of any other kind, such as a connection to a server, is not the output's.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream has no file, or is closed
            asked = select.poll()
            asked.register(stream.fileno(), 0)
            if any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0)):
                return True
    return False
