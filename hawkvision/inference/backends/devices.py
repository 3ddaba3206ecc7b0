"""The names of the processors that run networks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

NVIDIA: Final = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")


def processor_of(providers: Sequence[str] = ()) -> str:
    """What these execution providers run on: the graphics processors of NVIDIA's, else this machine's CPU.

    Empty where the system does not say.
    """
    if any(provider in NVIDIA for provider in providers):
        found = [_line(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
        return ",".join(dict.fromkeys(name for name in found if name))
    return _line(Path("/proc/cpuinfo"), "model name")


def _line(path: Path, name: str) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
