"""Commands that are run to their end, or to that of the CPU time that they are given."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hawkvision.errors import CompileError
from hawkvision.process import stop_with_parent

WALL_PER_CPU: Final = 20
"""A command that sleeps, or is starved, is ended after so many times its CPU limit, and a minute, or as it is told."""
KEPT_CHARACTERS: Final = 2000
"""Of a command's last words, in errors."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    title: str
    status: int
    """The exit status; negative: the signal that ended it."""
    output: str
    """Standard output and error."""
    cpu_s: float
    """Of it and its children."""
    cpu_limit_s: int

    @property
    def succeeded(self) -> bool:
        """Whether it did what it was asked for."""
        return self.status == 0

    @property
    def stopped_at_limit(self) -> bool:
        """Whether its CPU time ended it."""
        return self.status == -signal.SIGXCPU or (self.status == -signal.SIGKILL and self.cpu_s >= self.cpu_limit_s)

    @property
    def complaint(self) -> str:
        """Why it did not, in one line or a few."""
        if self.stopped_at_limit:
            return f"{self.title}: stopped at its limit of {self.cpu_limit_s} CPU seconds"
        if self.status < 0:
            return f"{self.title}: ended by signal {-self.status} after {self.cpu_s:.0f} CPU seconds"
        errors = [line for line in self.output.splitlines() if line.startswith("ERROR")]
        return f"{self.title}: {' '.join(errors) or self.output[-KEPT_CHARACTERS:].strip() or 'failed silently'}"

    def check(self) -> Ran:
        """Itself.

        Raises:
            CompileError: if it did not succeed.
        """
        if not self.succeeded:
            raise CompileError(self.complaint)
        return self


def run(
    command: str,
    arguments: Sequence[str],
    *,
    cpu_limit_s: int,
    wall_limit_s: float | None = None,
    folder: Path | None = None,
    title: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run a command to its end, or to that of its CPU time; it is told nothing on standard input.

    `env` is added to our own environment. Without `wall_limit_s`, it may take `WALL_PER_CPU` times its CPU time, and a
    minute.

    The kernel enforces the limit (RLIMIT_CPU), so it holds on a loaded machine. On Linux the command does not outlive
    us either: it would go on writing into a folder in which the next one works.

    Raises:
        OSError: if it cannot be started, or there is no folder for temporary files.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    soft, hard = (
        each if most == resource.RLIM_INFINITY else min(each, most) for each in (cpu_limit_s, cpu_limit_s + 5)
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        stop_with_parent(signal.SIGKILL)

    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603 - what the caller looked up
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=None if env is None else {**os.environ, **env},
            preexec_fn=limit,
        )
        longest_s = 60 + WALL_PER_CPU * cpu_limit_s if wall_limit_s is None else wall_limit_s
        guard = threading.Timer(longest_s, process.kill)
        guard.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            guard.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    name = title or Path(command).name
    return Ran(name, process.returncode, output, used.ru_utime + used.ru_stime, cpu_limit_s)
