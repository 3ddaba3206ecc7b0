"""`hawkvision up` as a process, and what it has printed."""

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

from hawkvision.system.child_server import ended

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
