"""The one place that turns a backend's name from the settings into a loaded backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

from hawkvision.core.errors import BackendError
from hawkvision.inference.backends.interface import Backend
from hawkvision.models.fingerprints import Execution
from hawkvision.models.manifest import InputSpec

log = logging.getLogger("hawkvision.inference")

BackendKind: TypeAlias = Literal["auto", "int8", "onnxruntime", "openvino", "numpy", "noop"]
"""`auto` is `int8`, our own kernels, for what these can run on this machine, else `onnxruntime`: the same logits."""

ON_THE_CPU: Final = ("CPUExecutionProvider",)


def open_backend(
    kind: BackendKind,
    model: Path | bytes,
    spec: InputSpec,
    classes: int,
    providers: Sequence[str] = ON_THE_CPU,
    threads: int = 1,
) -> Backend:
    """Load a variant. Only the chosen backend's module, and what it needs, is imported.

    Args:
        kind: which.
        model: a file or its bytes; not read by the no-op backend.
        spec: the input that the manifest says it takes.
        classes: that the manifest says it tells apart.
        providers: ONNX Runtime's; other than its CPU's leave `auto` to it.
        threads: that work on one inference, of ONNX Runtime, of OpenVINO and of our own kernels.

    Raises:
        BackendError: if the model cannot be loaded, or does not take `spec` in and give `classes` out.
    """
    backend: Backend
    match kind:
        case "auto":
            backend = _open_fastest(model, providers, threads)
        case "int8":
            backend = _open_int8(model, threads)
        case "onnxruntime":
            from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend

            backend = OnnxRuntimeBackend(model, providers, threads)
        case "openvino":
            from hawkvision.inference.backends.openvino_backend import OpenVinoBackend

            backend = OpenVinoBackend(model, threads)
        case "numpy":
            from hawkvision.inference.backends.numpy_backend import NumpyBackend

            backend = NumpyBackend(model)
        case "noop":
            from hawkvision.inference.backends.noop_backend import NoopBackend

            backend = NoopBackend((spec.height, spec.width, 3), classes)
        case _:
            raise BackendError(
                f"no backend is called {kind!r}; expected auto, int8, onnxruntime, openvino, numpy or noop"
            )
    expected, found = ((spec.height, spec.width, 3), classes), (backend.input_shape, backend.classes)
    if found != expected:
        backend.close()
        raise BackendError(
            f"{model if isinstance(model, Path) else 'model'}: it takes {found[0]} in and gives {found[1]} classes; "
            f"the manifest says {expected[0]} and {expected[1]}"
        )
    return backend


@runtime_checkable
class ReportsExecution(Protocol):
    """A backend that knows better than its name what runs its network."""

    @property
    def execution(self) -> Execution:
        """What runs it."""
        ...


def execution_of(asked: str, backend: Backend) -> str:
    """What runs a variant that was opened as `asked` in the settings: the text of its `Execution`."""
    return str(backend.execution if isinstance(backend, ReportsExecution) else Execution(backend_name(asked, backend)))


def backend_name(asked: str, backend: Backend) -> str:
    """What runs a variant that was opened as `asked` in the settings: of `auto`, which of the two."""
    if asked != "auto":
        return asked
    from hawkvision.inference.int8.backend import Int8Backend

    return "int8" if isinstance(backend, Int8Backend) else "onnxruntime"


def _open_fastest(model: Path | bytes, providers: Sequence[str], threads: int) -> Backend:
    if tuple(providers) == ON_THE_CPU:
        try:
            return _open_int8(model, threads)
        except BackendError as error:
            log.info("ONNX Runtime runs the model: %s", error.message)
    from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend

    return OnnxRuntimeBackend(model, providers, threads)


def _open_int8(model: Path | bytes, threads: int) -> Backend:
    from hawkvision.imaging import bicubic
    from hawkvision.inference.int8.backend import Int8Backend
    from hawkvision.inference.int8.equivalence_check import agrees

    backend = Int8Backend(model, threads)
    if not agrees(model, backend, backend.way):
        backend.close()
        raise BackendError(
            f"{model if isinstance(model, Path) else 'model'}: int8: its logits are not those of ONNX Runtime here: "
            "a defect of these kernels, or of the compiler that made them"
        )
    bicubic.prepare()  # whoever runs networks by these kernels scales images by them
    return backend
