"""Commands that are run to their end, or to that of the CPU time that they are given.

A command leads a process group of its own, and whatever ends it ends the group: a compiler is several processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hawkvision.core.errors import CompileError
from hawkvision.system.process import stop_with_parent

WALL_PER_CPU: Final = 20
"""A command that sleeps, or is starved, is ended after so many times its CPU limit, and a minute, or as it is told."""
KEPT_CHARACTERS: Final = 2000
"""Of a command's last words, in errors."""


_lock: Final = threading.Lock()
_groups: Final[set[int]] = set()
"""Process groups of the commands that run now; none of them has been waited for."""
_stopped = False


@dataclass(frozen=True, slots=True)
class CommandResult:
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

    def check(self) -> CommandResult:
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
) -> CommandResult:
    """Run a command to its end, or to that of its CPU time; it is told nothing on standard input.

    `env` is added to our own environment. Without `wall_limit_s`, it may take `WALL_PER_CPU` times its CPU time, and a
    minute.

    The kernel enforces the limit (RLIMIT_CPU), so it holds on a loaded machine. On Linux the command does not outlive
    us either: it would go on writing into a folder in which the next one works.

    Raises:
        CompileError: if `stop_commands` ended it, or was called before.
        OSError: if it cannot be started, or there is no folder for temporary files.
    """
    name = title or Path(command).name
    _refuse_if_stopped(name)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    soft, hard = (
        each if most == resource.RLIM_INFINITY else min(each, most) for each in (cpu_limit_s, cpu_limit_s + 5)
    )

    # A SIGTERM that raises (`exit_on_sigterm`) waits until there is something to clear away, and a way to do so.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def limit() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        stop_with_parent(signal.SIGKILL)

    with contextlib.ExitStack() as opened:
        opened.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        said = opened.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(  # noqa: S603 - what the caller looked up
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=None if env is None else {**os.environ, **env},
            preexec_fn=limit,
            start_new_session=True,
        )
        longest_s = 60 + WALL_PER_CPU * cpu_limit_s if wall_limit_s is None else wall_limit_s
        guard = threading.Timer(longest_s, _kill, (process.pid,))
        guard.daemon = True  # it is no reason to go on
        guard.start()
        with _lock:
            _groups.add(process.pid)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _refuse_if_stopped(name)  # since it was looked at first
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            guard.cancel()
            # Before it is waited for: until then nobody else's group can have its number.
            with _lock:
                _kill(process.pid)
                _groups.discard(process.pid)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        _refuse_if_stopped(name)
        said.seek(0)
        output = said.read().decode(errors="replace")
    return CommandResult(name, process.returncode, output, used.ru_utime + used.ru_stime, cpu_limit_s)


def stop_commands() -> None:
    """End all commands that run, on whatever threads, and start no more: this process was told to end."""
    global _stopped
    with _lock:
        _stopped = True
        for group in _groups:
            _kill(group)


def _refuse_if_stopped(name: str) -> None:
    if _stopped:
        raise CompileError(f"{name}: not run to its end, for this process was told to end")


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, all of it
        os.killpg(group, signal.SIGKILL)
