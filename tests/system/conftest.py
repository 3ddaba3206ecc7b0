"""`hawkvision up` as a process, and tiers that several files of system tests ask, started once.

`tests/conftest.py` runs the tests of such a tier in a row.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from hawkvision.core.errors import ArtifactError
from hawkvision.model_zoo.building.build import verify
from hawkvision.models.manifest import cache_dir
from hawkvision.system.child_server import ServerProcess, ended, running
from tests.system import pages

REAL_TASKS: Final = ("imagenet", "cifar10")
"""What the datacenter of `both` serves."""
READY: Final = "ready; Ctrl-C stops both"
COMMAND: Final = (sys.executable, "-m", "hawkvision.cli", "up", "--port", "0", "--dc-port", "0")


class Up:
    """The command, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        """What its tiers have logged."""
        self.said: list[str] = []

    def ready(self) -> None:
        """Read until it says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if self.said[-1] == READY:
                return
        pytest.fail("\n".join([*self.said, self.log.read_text()]))

    def address(self, tier: str) -> str:
        """Of a tier, as it was shown."""
        found = re.search(rf"^{tier} +(http://\S+)", "\n".join(self.said), re.MULTILINE)
        assert found is not None
        return found[1]


@contextlib.contextmanager
def up(
    log: Path, *words: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[Up]:
    """Start it; it is stopped in any case."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield Up(process, log)
        finally:
            process.terminate()
            ended(process)  # type: ignore[arg-type]
            assert process.stdout is not None
            process.stdout.close()


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


@pytest.fixture(scope="session")
def cascade() -> None:
    """The built cascades of `both`, or a skip that says how to get them."""
    try:
        for task in REAL_TASKS:
            verify(task, cache=cache_dir())
    except ArtifactError as error:
        pytest.skip(f"the cascade is not built: {error}")


@pytest.fixture(scope="package")
def both(cascade: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Both tiers with the real cascade, by `hawkvision up`. A test of test_up.py ends them."""
    folder = tmp_path_factory.mktemp("up")
    settings = {"HAWKVISION_DC_TASKS": ",".join(REAL_TASKS)}
    with up(folder / "log", environment=pages.shell_environment(folder) | settings) as found:
        found.ready()
        yield found


@pytest.fixture(scope="package")
def noop_tier() -> Iterator[ServerProcess]:
    """A datacenter of two tasks below a path, and of one that has no manifest: over HTTP and by datagrams."""
    words = ("--backend", "noop", "--port", "0", "--datagram-port", "0", "--route-prefix", "/vision")
    with running("hawkvision.datacenter", *words, "--tasks", "imagenet,cifar10,letters") as tier:
        yield tier
