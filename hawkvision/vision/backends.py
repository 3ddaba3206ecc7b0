"""The one place that turns a backend's name from the settings into a loaded backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from hawkvision.errors import BackendError
from hawkvision.manifest import InputSpec
from hawkvision.vision.backend import Backend

BackendKind: TypeAlias = Literal["onnxruntime", "numpy", "noop"]


def open_backend(
    kind: BackendKind,
    model: Path | bytes,
    spec: InputSpec,
    classes: int,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    threads: int = 1,
) -> Backend:
    """Load a variant. Only the chosen backend's module, and what it needs, is imported.

    `providers` and `threads` are ONNX Runtime's; `model` is a file or its bytes, and is not read by the no-op backend.

    Raises:
        BackendError: if the model cannot be loaded, or does not take `spec` in and give `classes` out.
    """
    backend: Backend
    match kind:
        case "onnxruntime":
            from hawkvision.vision.onnxruntime_backend import OnnxRuntimeBackend

            backend = OnnxRuntimeBackend(model, providers, threads)
        case "numpy":
            from hawkvision.vision.numpy_backend import NumpyBackend

            backend = NumpyBackend(model)
        case "noop":
            from hawkvision.vision.noop_backend import NoopBackend

            backend = NoopBackend((spec.height, spec.width, 3), classes)
        case _:
            raise BackendError(f"no backend is called {kind!r}; expected onnxruntime, numpy or noop")
    expected, found = ((spec.height, spec.width, 3), classes), (backend.input_shape, backend.classes)
    if found != expected:
        backend.close()
        raise BackendError(
            f"{model if isinstance(model, Path) else 'model'}: it takes {found[0]} in and gives {found[1]} classes; "
            f"the manifest says {expected[0]} and {expected[1]}"
        )
    return backend
