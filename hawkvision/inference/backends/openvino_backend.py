"""An optional backend: runs the ONNX graph of a variant in OpenVINO, for processors that our own kernels do not
support.

Its numbers differ from those of ONNX Runtime, so certificates made with that do not cover them. Its answers are
`best_effort` unless it passes an equivalence check (`cascade.certification.equivalence`). Install
`hawkvision[openvino]`.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.devices import processor_of
from hawkvision.inference.backends.interface import Outputs, as_tensors, check_batch, check_open, joined, named
from hawkvision.models.fingerprints import Execution

DEVICE: Final = "CPU"
PRECISION: Final = "f32"
"""Of float layers."""


class OpenVinoBackend:
    """A graph of one input, uint8 (n, height, width, 3), and outputs of numbers whose first axis is n.

    Args:
        model: the file, or its bytes.
        threads: of each inference. With one, as many inferences run at once as there are usable cores.

    Raises:
        BackendError: if OpenVINO is not installed, or the file is missing or no such graph.
    """

    def __init__(self, model: Path | bytes, threads: int = 1) -> None:
        self._where = "model" if isinstance(model, bytes) else str(model)
        self._compiled: Any = _compiled(model, self._where, threads)
        self._free: deque[Any] = deque()
        """Requests that nobody runs: never more than threads that were inferring at once."""
        inputs, outputs = self._compiled.inputs, self._compiled.outputs
        if len(inputs) != 1 or not outputs:
            raise BackendError(f"{self._where}: {len(inputs)} inputs and {len(outputs)} outputs; expected one input")
        self._batch, *shape = _sizes(inputs[0])
        if inputs[0].element_type.to_dtype() != np.uint8 or len(shape) != 3 or None in shape or shape[2] != 3:
            raise BackendError(
                f"{self._where}: the input is {inputs[0].element_type.get_type_name()} of shape "
                f"{inputs[0].partial_shape}; expected u8 of (n, height, width, 3)"
            )
        self._shape = (int(shape[0] or 0), int(shape[1] or 0), 3)
        self._outputs = named([(each.get_any_name(), _output_contract(each, self._where)) for each in outputs])

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._outputs

    @property
    def execution(self) -> Execution:
        """What runs the network."""
        return Execution("openvino", DEVICE, PRECISION, str(_openvino().__version__), processor_of())

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`. A graph of free batch size, or of 1, is run once per image."""
        compiled = self._compiled  # held here, so that `close` in another thread waits for this run
        check_open("OpenVINO", compiled is None)
        check_batch(batch, self._shape)
        if self._batch is not None and self._batch != len(batch):
            if self._batch != 1:
                raise BackendError(f"{self._where}: batches of exactly {self._batch} are taken, got {len(batch)}")
            return joined([self._run(compiled, batch[i : i + 1]) for i in range(len(batch))])
        return self._run(compiled, batch)

    def close(self) -> None:
        """See `Backend.close`. Runs that have begun in other threads end well."""
        self._compiled = None
        self._free.clear()

    def _run(self, compiled: Any, batch: Pixels) -> Tensors:
        try:
            request = self._free.pop()
        except IndexError:
            request = compiled.create_infer_request()
        try:
            found = request.infer({0: np.ascontiguousarray(batch)})
        except Exception as error:  # the runtime's own exceptions derive from nothing narrower
            raise BackendError(f"{self._where}: OpenVINO failed: {error}") from error
        if self._compiled is not None:
            self._free.append(request)
        return as_tensors(self._outputs, [found[i] for i in range(len(self._outputs))], len(batch), self._where)


def _compiled(model: Path | bytes, where: str, threads: int) -> Any:
    openvino = _openvino()
    if isinstance(model, Path) and not model.is_file():
        raise BackendError(f"{where}: no such model file; build the cascade first")
    cores = len(os.sched_getaffinity(0))
    settings = {
        "NUM_STREAMS": cores if threads == 1 else 1,
        "INFERENCE_NUM_THREADS": cores if threads == 1 else threads,
        "INFERENCE_PRECISION_HINT": PRECISION,  # else what a float layer answers would depend on the processor
        "ENABLE_CPU_PINNING": False,  # the node's other threads want the same cores
    }
    try:
        core = openvino.Core()
        graph = core.read_model(model if isinstance(model, bytes) else str(model))
        shape = graph.inputs[0].partial_shape
        if len(graph.inputs) == 1 and shape.rank.is_static and len(shape) == 4 and shape[0].is_dynamic:
            # Images one by one: with a shape that is known the runtime is quicker than with a free batch size.
            shape[0] = 1
            graph.reshape(shape)
        return core.compile_model(graph, DEVICE, settings)
    except Exception as error:  # as above
        said = str(error).strip().splitlines()
        raise BackendError(f"{where}: OpenVINO cannot load the model: {said[-1] if said else error!r}") from error


def _openvino() -> Any:
    """The runtime, imported without its reports to Intel, which the converter beside it would send."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # what is None cannot be imported
    try:
        import openvino
    except ImportError as error:
        raise BackendError("OpenVINO is not installed; install hawkvision[openvino]") from error
    return openvino


def _output_contract(port: Any, where: str) -> tuple[int | None, ...]:
    """The output's shape for one image, None where it is free."""
    sizes = _sizes(port)
    if not sizes:
        raise BackendError(
            f"{where}: output {port.get_any_name()!r} is of shape {port.partial_shape}; expected (n, ...)"
        )
    return tuple(sizes[1:])


def _sizes(port: Any) -> list[int | None]:
    """A port's dimensions; None where one is free, none at all where even their number is."""
    shape = port.partial_shape
    return [] if shape.rank.is_dynamic else [None if each.is_dynamic else each.get_length() for each in shape]
