"""SIGTERM at every stage of a start: a clean stop, exit status 0, and no process left.

One with a request inside ends the tier of test_supervision.py.
"""

from __future__ import annotations

import http.client
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hawkvision.datacenter.conftest import START_LIMIT_S, Running, launch, marked_processes

pytestmark = pytest.mark.slow


def until(happened: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < ends
        selectors.DefaultSelector().select(0.01)


def receives(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for SIGTERM, by the kernel's account."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def runs(running: Running, title: str) -> bool:
    return any(title in line for line in marked_processes(running.mark))


STAGES: dict[str, Callable[[Running], object]] = {
    "signals are heard": lambda running: until(lambda: receives(running.process)),
    "Ray begins to start": lambda running: until(lambda: runs(running, "gcs_server")),
    "replicas are deployed": lambda running: until(lambda: runs(running, "ServeController")),
}


def ready(running: Running) -> int:
    """The status of /readyz; 0 if it does not come within a second."""
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=1.0)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("stage", STAGES)
def test_termination_stops_cleanly_and_leaves_no_process_behind(models: Path, stage: str) -> None:
    running = launch(models, "--variants", "medium")
    try:
        STAGES[stage](running)
        running.process.terminate()
        output, _ = running.process.communicate(timeout=60)
    finally:
        running.process.kill()
    assert (running.process.returncode, "ready" in output) == (0, False)
    assert marked_processes(running.mark) == []
