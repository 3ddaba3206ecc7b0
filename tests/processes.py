"""Real server processes for tests: started on free ports, awaited by their ready line, stopped and checked."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass
class Server:
    """A running server: its URL, its process, and where its standard error goes."""

    process: subprocess.Popen[str]
    url: str = ""
    errors: str = field(default="", repr=False)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sent)
        return self.process.wait(STOP_TIMEOUT_S)


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL of the `ready:` line on standard output."""
    assert process.stdout is not None
    until = time.monotonic() + READY_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(until - time.monotonic()):
            line = process.stdout.readline()
            if line.startswith("ready: "):
                return line.removeprefix("ready: ").strip()
            if not line:
                break
    raise AssertionError(f"{process.args} did not become ready; exit status {process.poll()}")


@contextlib.contextmanager
def running(*command: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`python -m command…`, ready to answer; its standard error goes to the test's own."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        yield Server(process, wait_ready(process))
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
