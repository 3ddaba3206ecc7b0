"""Loads backends by the names in the settings: ours, and those that packages add by the entry point
`hawkvision.backends`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.package_settings import BACKEND_ENTRY_POINTS, backend_names
from hawkvision.core.types import LOGITS, Logits, Pixels, Tensors
from hawkvision.inference.backends.interface import Backend, OnnxPrecision, Outputs, check_batch, check_open
from hawkvision.models.fingerprints import Execution
from hawkvision.models.manifest import InputSpec

log = logging.getLogger("hawkvision.inference")

BackendKind: TypeAlias = str
"""One of `backend_names()`. `auto` is `int8`, our own kernels, for models that they can run on this machine, else
`onnxruntime`."""

ON_THE_CPU: Final = ("CPUExecutionProvider",)


class OpenBackend(Protocol):
    """What an entry point of the group `hawkvision.backends` names."""

    def __call__(self, model: Path | bytes, spec: InputSpec, classes: int, threads: int) -> Backend:
        """Load a variant; see `open_backend`."""
        ...


def open_backend(
    kind: BackendKind,
    model: Path | bytes,
    spec: InputSpec,
    classes: int,
    providers: Sequence[str] = ON_THE_CPU,
    threads: int = 1,
    precision: OnnxPrecision = "model",
) -> Backend:
    """Load a variant. Imports only the module of the chosen backend.

    Args:
        kind: the backend.
        model: a file or its bytes; the no-op backend does not read it.
        spec: the input from the manifest.
        classes: the number of labels in the manifest, for backends that read none from the model.
        providers: of ONNX Runtime. With any but the CPU's, `auto` is `onnxruntime`.
        threads: threads per inference of ONNX Runtime and our own kernels.
        precision: of ONNX Runtime's layers. With another than the model file's, `auto` is `onnxruntime`.

    Raises:
        BackendError: if the model cannot be loaded, the backend has no such precision, or the model's input
            differs from `spec`.
    """
    if precision != "model" and kind not in ("auto", "onnxruntime"):
        raise BackendError(f"backend {kind} runs models as they are; precision {precision} is ONNX Runtime's")
    backend: Backend
    match kind:
        case "auto":
            backend = _open_fastest(model, providers, threads, precision)
        case "int8":
            backend = _open_int8(model, threads)
        case "onnxruntime":
            from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend

            backend = OnnxRuntimeBackend(model, providers, threads, precision)
        case "noop":
            backend = NoopBackend((spec.height, spec.width, 3), classes)
        case _:
            backend = _checked(kind, _added(kind)(model, spec, classes, threads))
    expected, found = (spec.height, spec.width, 3), backend.input_shape
    if found != expected:
        backend.close()
        raise BackendError(
            f"{model if isinstance(model, Path) else 'model'}: it takes {found}; the manifest says {expected}"
        )
    return backend


def _checked(kind: str, backend: object) -> Backend:
    """What an installed package has opened.

    Raises:
        BackendError: if it is no backend, or one of a release whose backends returned no named tensors.
    """
    if not isinstance(backend, Backend):
        raise BackendError(
            f"backend {kind!r}: {type(backend).__name__} is no backend of this release; expected `input_shape`, "
            "`outputs`, `infer`, which returns tensors by name, and `close` (`hawkvision.inference.backends.interface`)"
        )
    return backend


def _added(kind: str) -> OpenBackend:
    """What opens a backend that an installed package provides.

    Raises:
        BackendError: if there is none of this name, or it cannot be imported.
    """
    for point in entry_points(group=BACKEND_ENTRY_POINTS, name=kind):
        try:
            found: OpenBackend = point.load()
        except (ImportError, AttributeError) as error:
            raise BackendError(f"backend {kind!r}: entry point {point.value}: {error}") from None
        return found
    raise BackendError(f"no backend is called {kind!r}; expected one of {', '.join(backend_names())}")


@runtime_checkable
class ReportsExecution(Protocol):
    """A backend that reports what runs its network."""

    @property
    def execution(self) -> Execution:
        """What runs it."""
        ...


def execution_of(asked: str, backend: Backend) -> str:
    """The text of the `Execution` of a variant that was opened as `asked`."""
    return str(backend.execution if isinstance(backend, ReportsExecution) else Execution(backend_name(asked, backend)))


def backend_name(asked: str, backend: Backend) -> str:
    """The backend of a variant that was opened as `asked`; resolves `auto`."""
    if asked != "auto":
        return asked
    from hawkvision.inference.int8.backend import Int8Backend

    return "int8" if isinstance(backend, Int8Backend) else "onnxruntime"


def _open_fastest(model: Path | bytes, providers: Sequence[str], threads: int, precision: OnnxPrecision) -> Backend:
    if tuple(providers) == ON_THE_CPU and precision == "model":
        try:
            return _open_int8(model, threads)
        except BackendError as error:
            log.info("ONNX Runtime runs the model: %s", error.message)
    from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend

    return OnnxRuntimeBackend(model, providers, threads, precision)


def _open_int8(model: Path | bytes, threads: int) -> Backend:
    from hawkvision.inference.int8.backend import Int8Backend
    from hawkvision.inference.int8.equivalence_check import agrees

    backend = Int8Backend(model, threads)
    if not agrees(model, backend, backend.way):
        backend.close()
        raise BackendError(
            f"{model if isinstance(model, Path) else 'model'}: int8: its outputs are not those of ONNX Runtime here: "
            "a defect of these kernels, or of the compiler that made them"
        )
    return backend


class NoopBackend:
    """Answers every image at once with the same logits, drawn from a seed, to measure the serving path alone."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, seed: int = 0) -> None:
        self._shape = input_shape
        self._logits: Logits = np.random.default_rng(seed).normal(0.0, 2.0, classes).astype(np.float32)
        self._closed = False

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return {LOGITS: self._logits.shape}

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        check_open("noop", self._closed)
        check_batch(batch, self._shape)
        return {LOGITS: np.tile(self._logits, (len(batch), 1))}

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True
