"""Servers as child processes: start one, wait for its `ready: URL` line, and stop it in any case."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Final
from urllib.parse import urlsplit

from hawkvision.core.errors import NotReady

READY_TIMEOUT_S: Final = 120.0
"""Time for a server to become ready."""
STOP_TIMEOUT_S: Final = 60.0
STOP_NOW_S: Final = 5.0
"""Time to end after a second signal."""
KEPT_LINES: Final = 200
"""Lines of output that are kept to explain a failure."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None)


class ServerProcess:
    """A running server: its URL and its last output."""

    def __init__(self, title: str, process: subprocess.Popen[bytes], said: deque[str]) -> None:
        self.title = title
        self.process = process
        self.url = ""
        self._said = said

    @property
    def port(self) -> int:
        """The port of `url`, which has no scheme if the server is not one for HTTP."""
        return urlsplit(self.url if "//" in self.url else f"//{self.url}").port or 0

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def output(self) -> str:
        """The last lines of the server's standard output and error."""
        return "".join(self._said)

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait. Returns the exit status. A server that does not end in time is killed."""
        return _stop(self.process, sent)


@contextlib.contextmanager
def running(
    *command: str,
    title: str | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
    own_group: bool = False,
    within_s: float | None = READY_TIMEOUT_S,
) -> Iterator[ServerProcess]:
    """Run `python -m command…` as a server until the block ends. It is ready when the block begins.

    If this is called on the main thread, the kernel also stops the server when this process dies. On other
    threads the kernel would stop it when the thread ends.

    Args:
        command: a module and its arguments.
        title: name of the server in errors; default: the module.
        env: variables in addition to those of this process.
        prefix: a command that runs the rest, such as `ip netns exec NAME`.
        on_line: called with each line of output, by one thread at a time.
        own_group: give the server its own process group, so that Ctrl-C reaches only this process, which stops it.
        within_s: time to become ready; None: as long as it runs.

    Raises:
        NotReady: if it ends, or says nothing of the kind within `within_s`; carries what it said.
    """
    said: deque[str] = deque(maxlen=KEPT_LINES)
    reader: threading.Thread | None = None
    on_main_thread = threading.current_thread() is threading.main_thread()
    process = subprocess.Popen(  # noqa: S603 - our own modules
        [*prefix, sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        preexec_fn=functools.partial(stop_with_parent, parent=os.getpid()) if on_main_thread else None,
        process_group=0 if own_group else None,
    )
    try:  # at once, so that an interrupt leaves no child behind
        server = ServerProcess(title or command[0], process, said)
        assert process.stdout is not None
        server.url = _wait_ready(server, process.stdout, said, on_line, within_s)
        reader = threading.Thread(target=_drain, args=(process.stdout, said, on_line), daemon=True)
        reader.start()
        yield server
    finally:
        _stop(process)
        if reader is not None:
            reader.join()
        if process.stdout is not None:
            process.stdout.close()


def _wait_ready(
    server: ServerProcess,
    output: IO[bytes],
    said: deque[str],
    on_line: Callable[[str], None] | None,
    within_s: float | None,
) -> str:
    until = None if within_s is None else time.monotonic() + within_s
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(None if until is None else max(0.0, until - time.monotonic())):
            chunk = os.read(output.fileno(), 65536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            url: str | None = None
            for line in lines:
                text = line.decode(errors="replace")
                if url is None and text.startswith("ready: "):
                    url = text.removeprefix("ready: ").strip()
                else:
                    said.append(text + "\n")
                    if on_line is not None:
                        on_line(text)
            if url is not None:
                said.append(pending.decode(errors="replace"))
                return url
    said.append(pending.decode(errors="replace"))
    if on_line is not None:  # the lines have been shown already
        raise NotReady(f"{server.title} did not become ready; its output is above")
    raise NotReady(f"{server.title} did not become ready; its output:\n{server.output()}")


def _drain(output: IO[bytes], said: deque[str], on_line: Callable[[str], None] | None) -> None:
    """Read on, so that the server never blocks on a full pipe."""
    for line in output:
        said.append(line.decode(errors="replace"))
        if on_line is not None:
            on_line(said[-1].rstrip("\n"))


def _stop(process: subprocess.Popen[bytes], sent: signal.Signals = signal.SIGTERM) -> int:
    if process.poll() is None:
        process.send_signal(sent)
    try:
        return ended(process)
    except KeyboardInterrupt:  # a second signal ends servers at once
        process.send_signal(sent)
        ended(process, STOP_NOW_S)
        raise


def ended(process: subprocess.Popen[bytes], within_s: float = STOP_TIMEOUT_S) -> int:
    """Wait for a process to end, and kill it after `within_s`. Returns the exit status."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def exit_on_sigterm(status: int = 128 + signal.SIGTERM) -> None:
    """Make SIGTERM raise `SystemExit`, so that this process cleans up. For the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


def stop_with_parent(sent: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Ask the kernel to send this process a signal when its parent dies.

    The parent is the *thread* that started this process (prctl(2), PR_SET_PDEATHSIG), so start such processes from the
    main thread. After a fork, give the parent's number: it may be dead already.
    """
    parent = os.getppid() if parent is None else parent
    _LIBC.prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), sent)


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process, so that it finds them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
