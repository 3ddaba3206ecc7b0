"""`hawkvision up`: both tiers, proved, shown and stopped together, as a user at a terminal has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawkvision.system.child_server import ended
from tests.waiting import until

pytestmark = pytest.mark.slow

READY = "ready; Ctrl-C stops both"
COMMAND = (sys.executable, "-m", "hawkvision.cli", "up", "--port", "0", "--dc-port", "0")


def descendants(pid: int) -> set[int]:
    """All living processes below one."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found |= {child} | descendants(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run."""
    running = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                running.add(pid)
    return running


class Up:
    """The command, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []

    def ready(self) -> None:
        """Read until it says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if self.said[-1] == READY:
                return
        assert self.process.stderr is not None
        pytest.fail("\n".join([*self.said, self.process.stderr.read()]))

    def address(self, tier: str) -> str:
        """Of a tier, as it was shown."""
        found = re.search(rf"^{tier} +(http://\S+)", "\n".join(self.said), re.MULTILINE)
        assert found is not None
        return found[1]


@contextlib.contextmanager
def up(log: Path, *words: str) -> Iterator[Up]:
    with log.open("w") as errors:
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield Up(process)
        finally:
            process.terminate()
            ended(process)  # type: ignore[arg-type]
            assert process.stdout is not None
            process.stdout.close()


def test_what_it_shows_works_as_pasted_and_ctrl_c_leaves_nothing_behind(cascade: None, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    with up(tmp_path / "log") as it:
        it.ready()
        assert it.address("edge node") != it.address("datacenter")
        place = next(number for number, line in enumerate(it.said) if line.startswith("$ curl "))
        ran = subprocess.run(["bash", "-c", it.said[place].removeprefix("$ ")], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        shown, answered = json.loads(it.said[place + 1]), json.loads(ran.stdout)
        assert shown.keys() == answered.keys()
        assert (shown["label"], shown["accuracy"]["target"]) == (answered["label"], {"max_accuracy_drop": 0.02})
        assert not shown["degraded"]
        below = descendants(it.process.pid)
        assert len(below) > 2
        it.process.send_signal(signal.SIGINT)
        assert it.process.wait(60) == 0
        assert it.process.stdout is not None
        assert it.process.stdout.read() == "stopped\n"
    asyncio.run(until(lambda: not alive(below)))
    said = (tmp_path / "log").read_text()
    assert re.search(r"^edge +\| ", said, re.MULTILINE)
    assert re.search(r"^datacenter +\| ", said, re.MULTILINE)


def test_when_a_tier_dies_the_other_is_stopped_and_the_error_names_it(tmp_path: Path) -> None:
    settings = tmp_path / "hawkvision.toml"
    settings.write_text('[edge]\nbackend = "noop"\n[dc]\nbackend = "noop"\n')
    with up(tmp_path / "log", "--config", str(settings)) as it:
        it.ready()
        below = descendants(it.process.pid)
        children = Path(f"/proc/{it.process.pid}/task/{it.process.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in children}
        (killed,) = (pid for pid, command in commands.items() if "-m\0hawkvision.datacenter\0" in command)
        subprocess.run(["kill", "-KILL", killed], check=True)
        assert it.process.wait(60) == 1
    asyncio.run(until(lambda: not alive(below)))
    assert re.search(r"error: the datacenter tier ended by itself with status -9", (tmp_path / "log").read_text())


def test_a_port_that_is_taken_is_an_error_that_says_so(tmp_path: Path) -> None:
    settings = tmp_path / "hawkvision.toml"
    settings.write_text('[edge]\nbackend = "noop"\n[dc]\nbackend = "noop"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*COMMAND[:-1], port, "--config", str(settings)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "cannot listen on 127.0.0.1" in ran.stderr
    assert "the datacenter tier did not become ready" in ran.stderr
