"""Environments of the peers' own, made when first needed: `~/.cache/hawkvision/peers/NAME`, from pinned packages.

Their dependencies contradict one another and ours, so each has its own interpreter folder. What does the work in all of
them (ONNX Runtime, OpenCV, simplejpeg, Pillow) is installed in the very versions that this interpreter has.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.system.files import write_atomic

SHARED: Final = ("onnxruntime", "opencv-python-headless", "pillow", "simplejpeg")
INSTALL_TIMEOUT_S: Final = 900.0
"""The largest of them is 700 MB: 1 MB/s with a quarter to spare."""
SAID_BYTES: Final = 2000
"""Of pip's last words that an error carries."""
STAMP: Final = "installed.txt"


def shared_pins() -> tuple[str, ...]:
    """`onnxruntime==…` and so on, as installed here.

    Raises:
        ConfigError: if one is missing; all but Pillow are HawkVision's own dependencies.
    """
    try:
        return tuple(f"{name}=={importlib.metadata.version(name)}" for name in SHARED)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the peers are installed with the same {error.name} as this interpreter, which has none; "
            "install the extra: pip install '.[bench]'"
        ) from None


def is_installed(folder: Path, pins: Sequence[str], alone: Sequence[str]) -> bool:
    """Whether the environment holds just what is asked for."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp(pins, alone)


def install(folder: Path, pins: Sequence[str], alone: Sequence[str], say: Callable[[str], None]) -> Path:
    """The interpreter of an environment with these packages; made anew unless it is there already.

    Args:
        folder: the environment's.
        pins: requirements, with their dependencies.
        alone: requirements that are installed without their dependencies.
        say: is told what is installed, for it takes minutes.

    Raises:
        ConfigError: if pip fails, as it does without a network; carries its last words.
    """
    python = folder / "bin" / "python"
    if is_installed(folder, pins, alone):
        return python
    say(f"installing {', '.join((*pins, *alone))} into {folder}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot make this environment: {error.strerror}") from None
    _do([sys.executable, "-m", "venv", str(folder)])
    pip(python, pins)
    if alone:
        pip(python, ["--no-deps", *alone])
    write_atomic(folder / STAMP, _stamp(pins, alone).encode())
    return python


def pip(python: Path, wanted: Sequence[str]) -> None:
    """Install into an interpreter's environment.

    Raises:
        ConfigError: if pip fails; carries its last words.
    """
    _do([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])


def _stamp(pins: Sequence[str], alone: Sequence[str]) -> str:
    return "".join(f"{pin}\n" for pin in (*pins, *(f"{each} --no-deps" for each in alone)))


def _do(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(command)}: not done after {INSTALL_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        said = error.output[-SAID_BYTES:].decode(errors="replace")
        raise ConfigError(
            f"{' '.join(command)} failed; peers are installed from the package index, once, with a network:\n{said}"
        ) from None
