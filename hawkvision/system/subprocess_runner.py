"""Runs commands with limits of CPU and wall time.

Each command has its own process group, which is ended as a whole, because compilers start further processes.
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
from hawkvision.system.child_server import stop_with_parent

WALL_PER_CPU: Final = 20
"""Default wall limit, as a multiple of the CPU limit; one minute is added."""
KEPT_CHARACTERS: Final = 2000
"""Characters of a command's output in errors."""


_lock: Final = threading.Lock()
_groups: Final[set[int]] = set()
"""Process groups of the running commands; none has been waited for."""
_stopped = False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The outcome of a command."""

    title: str
    status: int
    """The exit status, or the negative number of the signal that ended the command."""
    output: str
    """Standard output and error."""
    cpu_s: float
    """CPU seconds of the command and its children."""
    cpu_limit_s: int

    @property
    def succeeded(self) -> bool:
        """Whether the exit status is 0."""
        return self.status == 0

    @property
    def stopped_at_limit(self) -> bool:
        """Whether the CPU limit ended the command."""
        return self.status == -signal.SIGXCPU or (self.status == -signal.SIGKILL and self.cpu_s >= self.cpu_limit_s)

    @property
    def complaint(self) -> str:
        """Why the command failed, in a few lines."""
        if self.stopped_at_limit:
            return f"{self.title}: stopped at its limit of {self.cpu_limit_s} CPU seconds"
        if self.status < 0:
            return f"{self.title}: ended by signal {-self.status} after {self.cpu_s:.0f} CPU seconds"
        errors = [line for line in self.output.splitlines() if line.startswith("ERROR")]
        return f"{self.title}: {' '.join(errors) or self.output[-KEPT_CHARACTERS:].strip() or 'failed silently'}"

    def check(self) -> CommandResult:
        """Return this result.

        Raises:
            CompileError: if the command failed.
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
    """Run a command without standard input, until it ends or reaches a limit.

    `env` is added to this process's environment. Without `wall_limit_s` the command may take `WALL_PER_CPU` times its
    CPU limit and a minute. The kernel enforces the CPU limit (RLIMIT_CPU). On Linux the command ends with this process.

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

    # A SIGTERM that raises (`exit_on_sigterm`) is held back until the clean-up below is in place.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getpid()

    def limit() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        stop_with_parent(signal.SIGKILL, parent)

    with contextlib.ExitStack() as opened:
        opened.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        said = opened.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(  # noqa: S603 - the caller chose the command
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
        guard.daemon = True  # it must not keep the process alive
        guard.start()
        with _lock:
            _groups.add(process.pid)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _refuse_if_stopped(name)  # checked again, now that the group is registered
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            guard.cancel()
            # Kill before waiting: until then no other group can have this number.
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
    """End all running commands, on all threads, and start no more, because this process is stopping."""
    global _stopped
    with _lock:
        _stopped = True
        for group in _groups:
            _kill(group)


def _refuse_if_stopped(name: str) -> None:
    if _stopped:
        raise CompileError(f"{name}: cancelled, because this process is stopping")


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(group, signal.SIGKILL)
