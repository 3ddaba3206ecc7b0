"""ONNX Runtime's execution providers: which package brings them, and why one is missing or did not start.

`onnxruntime` and `onnxruntime-gpu` hold the same module. Where both are installed, the files of the one that was
installed last have replaced those of the other, and removing one of them leaves holes. ONNX Runtime itself lists a
provider as available whose libraries cannot be loaded, and then runs on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from hawkvision.system.onnx_runtime import ort

NVIDIA: Final = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
REINSTALL: Final = (
    "pip uninstall --yes onnxruntime onnxruntime-gpu, then pip install --no-deps onnxruntime-gpu "
    "(or onnxruntime, for a machine without a GPU)"
)
"""Leaves one of the packages, whole."""
DRIVER: Final = Path("/proc/driver/nvidia/version")
_LIBRARIES: Final = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "tensorrt"}


def runtime_packages(path: Sequence[str] | None = None) -> tuple[str, ...]:
    """The installed packages that hold the module `onnxruntime`, by name; `path` replaces Python's search path."""
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    names = {dist.name for dist in found if _holds_runtime(dist)}
    return tuple(sorted(name.lower().replace("_", "-") for name in names))


def available_providers() -> tuple[str, ...]:
    """The providers of the installed ONNX Runtime; empty if its package is not whole."""
    return tuple(ort.get_available_providers()) if hasattr(ort, "get_available_providers") else ()


def missing_reason(provider: str) -> str:
    """Why the installed ONNX Runtime does not have a provider, and what to do."""
    packages, known = runtime_packages(), available_providers()
    if not known:
        return f"the module onnxruntime of {' and '.join(packages) or 'no package'} is not whole: {REINSTALL}"
    has = f"this ONNX Runtime {ort.__version__} ({' and '.join(packages)}) has {', '.join(known)}"
    if provider not in NVIDIA:
        return has
    if len(packages) > 1:
        return f"{has}; these packages have overwritten each other: {REINSTALL}"
    return f"{has}; install the extra `gpu` as docs/operations/gpu.md says"


def start_failure(provider: str) -> str | None:
    """What keeps an available provider from starting, as far as its libraries and the driver show; None if nothing."""
    library = _LIBRARIES.get(provider)
    if library is None:
        return None
    folder = Path(ort.__file__).parent / "capi"
    load_libraries([provider])
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / f"libonnxruntime_providers_{library}.so"))
    except OSError as error:
        return f"a library does not load: {error}"
    return None if DRIVER.exists() else f"no NVIDIA driver is visible here: {DRIVER} is missing"


def load_libraries(providers: Sequence[str]) -> None:
    """Load CUDA and cuDNN from NVIDIA's Python packages, if a provider needs them and they are installed."""
    # Where they are not, the function prints each library that it misses; the system's may do.
    needed = any(name in NVIDIA for name in providers)
    if needed and hasattr(ort, "preload_dlls") and importlib.util.find_spec("nvidia") is not None:
        ort.preload_dlls()


def _holds_runtime(dist: metadata.Distribution) -> bool:
    named = str(dist.metadata["Name"] or "").lower().startswith("onnxruntime")
    return named and any(file.parts[0] == "onnxruntime" for file in dist.files or ())


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
