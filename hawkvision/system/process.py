"""Servers as child processes: started, awaited by their `ready: URL` line, and never left behind.

The demonstration, the benchmarks and the tests start nodes and datacenter tiers this way.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from hawkvision.core.errors import NotReady

READY_TIMEOUT_S: Final = 120.0
"""A datacenter tier is ready in 6 s on two idle cores; this is twenty times that."""
STOP_TIMEOUT_S: Final = 60.0
STOP_NOW_S: Final = 5.0
"""For a server that was told to stop twice."""
KEPT_LINES: Final = 200
"""Lines of a server's output that are kept to explain a failure."""
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


class ServerProcess:
    """A running server: where it answers, and what it said last."""

    def __init__(self, title: str, process: subprocess.Popen[bytes], said: deque[str]) -> None:
        self.title = title
        self.process = process
        self.url = ""
        self._said = said

    @property
    def port(self) -> int:
        """The port of `url`."""
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def output(self) -> str:
        """The last lines the server wrote, standard error included."""
        return "".join(self._said)

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait, and give the exit status; a server that does not end in time is killed."""
        return _stop(self.process, sent)


@contextlib.contextmanager
def running(
    *command: str,
    title: str | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
    own_group: bool = False,
) -> Iterator[ServerProcess]:
    """`python -m command…` as a server, ready to answer; stopped on leaving, and by the kernel if we die (Linux).

    The kernel stops it only where this is called on the main thread: elsewhere it would also do so when the calling
    thread ends, which is no reason to stop a server that others use. A `prefix` is a command that becomes the one
    behind it, such as `ip netns exec NAME`.

    Args:
        command: a module and its arguments.
        title: what errors call the server; default: the module.
        env: variables beside those of this process.
        prefix: see above.
        on_line: called with each line that the server writes, by one thread at a time.
        own_group: keep the terminal's signals from it, so that Ctrl-C reaches this process alone, which stops it.

    Raises:
        NotReady: if it ends, or says nothing of the kind within `READY_TIMEOUT_S`; carries what it said.
    """
    said: deque[str] = deque(maxlen=KEPT_LINES)
    reader: threading.Thread | None = None
    on_main_thread = threading.current_thread() is threading.main_thread()
    process = subprocess.Popen(  # noqa: S603 - our own modules
        [*prefix, sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        preexec_fn=stop_with_parent if on_main_thread else None,
        process_group=0 if own_group else None,
    )
    try:  # at once, so that an interrupt leaves no child behind
        server = ServerProcess(title or command[0], process, said)
        assert process.stdout is not None
        server.url = _wait_ready(server, process.stdout, said, on_line)
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
    server: ServerProcess, output: IO[bytes], said: deque[str], on_line: Callable[[str], None] | None
) -> str:
    until = time.monotonic() + READY_TIMEOUT_S
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
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
    if on_line is not None:  # whoever was told each line need not be told again
        raise NotReady(f"{server.title} did not become ready; its lines are above")
    raise NotReady(f"{server.title} did not become ready; it said:\n{server.output()}")


def _drain(output: IO[bytes], said: deque[str], on_line: Callable[[str], None] | None) -> None:
    """Keep reading, so that a talkative server never blocks on a full pipe."""
    for line in output:
        said.append(line.decode(errors="replace"))
        if on_line is not None:
            on_line(said[-1].rstrip("\n"))


def _stop(process: subprocess.Popen[bytes], sent: signal.Signals = signal.SIGTERM) -> int:
    if process.poll() is None:
        process.send_signal(sent)
    try:
        return ended(process)
    except KeyboardInterrupt:  # told to stop a second time: servers then end at once
        process.send_signal(sent)
        ended(process, STOP_NOW_S)
        raise


def ended(process: subprocess.Popen[bytes], within_s: float = STOP_TIMEOUT_S) -> int:
    """The exit status of a process that was asked to end; one that does not in time is killed."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def exit_on_sigterm(status: int = 128 + signal.SIGTERM) -> None:
    """Have SIGTERM raise `SystemExit`, so that what this process has started and made is cleared away.

    For the main thread of a process that has no handler of its own yet.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))


def stop_with_parent(sent: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send us a signal when our parent dies, however it dies (Linux; elsewhere nothing happens).

    The parent is the *thread* that started us (prctl(2), PR_SET_PDEATHSIG), so that thread must live as long as we
    are wanted: start such processes from the main thread.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, sent, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), sent)
