"""The production backend: runs the ONNX graph of a variant in ONNX Runtime, with one thread per inference by default.

Several worker threads run one image each, so a session has one thread and runs its graph sequentially. Sessions with
several threads are for lone images (`inference.adaptive_parallelism`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.execution_providers import (
    available_providers,
    load_libraries,
    missing_reason,
    processor_of,
    start_failure,
)
from hawkvision.inference.backends.half_precision import FP16, in_half_precision
from hawkvision.inference.backends.interface import (
    OnnxPrecision,
    Outputs,
    as_tensors,
    check_batch,
    check_open,
    joined,
    named,
)
from hawkvision.inference.backends.intra_op_threads import HelperThreads, can_step_aside, helpers_started
from hawkvision.models.fingerprints import Execution
from hawkvision.system.onnx_runtime import ort

Provider: TypeAlias = str | tuple[str, Mapping[str, Any]]
"""An execution provider's name, alone or with its options as ONNX Runtime documents them."""

SPIN_US: Final = 100
"""How long a helper waits for more work before it sleeps: longer than most layers that it has no part in."""


class OnnxRuntimeBackend:
    """A graph of one input, uint8 (n, height, width, 3), and outputs of numbers whose first axis is n.

    Args:
        model: the file, or its bytes.
        providers: in order of preference, e.g. `("TensorrtExecutionProvider", "CPUExecutionProvider")` or
            `(("CUDAExecutionProvider", {"device_id": 1}),)`.
        threads: intra-op threads of each inference.
        precision: of the layers: the model file's, or float16 for float models (`half_precision`).

    Raises:
        BackendError: if the file is missing or no such graph, or a provider is not installed or did not start, or
            part of the graph would run on the CPU although its provider is not named. There is no silent fallback.
    """

    def __init__(
        self,
        model: Path | bytes,
        providers: Sequence[Provider] = ("CPUExecutionProvider",),
        threads: int = 1,
        precision: OnnxPrecision = "model",
    ) -> None:
        self._where = "model" if isinstance(model, bytes) else str(model)
        self._precision = precision
        if precision == FP16:
            model = in_half_precision(_content(model, self._where), self._where)
        self._session: Any
        self._session, self._helpers = open_session(model, self._where, providers, threads)
        inputs = self._session.get_inputs()
        self._outputs = outputs_of(self._session, self._where)
        if len(inputs) != 1 or not self._outputs:
            found = f"{len(inputs)} inputs and {len(self._outputs)} outputs"
            raise BackendError(f"{self._where}: {found}; expected one input")
        self._input = inputs[0].name
        self._shape, self._batch = _input_contract(inputs[0], self._where)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._outputs

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use, in order of preference."""
        session = self._session
        check_open("ONNX Runtime", session is None)
        return tuple(session.get_providers())

    @property
    def execution(self) -> Execution:
        """What runs the network, and in which precision if that is not the model file's."""
        return execution_on(self.providers, self._session.get_provider_options(), self._precision)

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`. A graph of fixed batch size 1 is run once per image."""
        session = self._session  # held here, so that `close` in another thread waits for this run
        check_open("ONNX Runtime", session is None)
        check_batch(batch, self._shape)
        if self._batch is not None and self._batch != len(batch):
            if self._batch != 1:
                raise BackendError(f"{self._where}: batches of exactly {self._batch} are taken, got {len(batch)}")
            return joined([self._run(session, batch[i : i + 1]) for i in range(len(batch))])
        return self._run(session, batch)

    def warm_up(self, batch_sizes: Sequence[int] = (1,)) -> None:
        """Run on black images, so that kernels are chosen and memory is mapped before the first request."""
        for size in batch_sizes:
            self.infer(np.zeros((size, *self._shape), np.uint8))

    def close(self) -> None:
        """See `Backend.close`. Runs that have begun in other threads end well."""
        self._session = None

    def _run(self, session: Any, batch: Pixels) -> Tensors:
        self._helpers.step_aside()
        try:
            found = session.run(None, {self._input: np.ascontiguousarray(batch)})
        except Exception as error:  # the runtime's own exceptions derive from nothing narrower
            raise BackendError(f"{self._where}: ONNX Runtime failed: {error}") from error
        return as_tensors(self._outputs, found, len(batch), self._where)


def execution_on(
    providers: Sequence[str], options: Mapping[str, Mapping[str, str]], precision: OnnxPrecision
) -> Execution:
    """The execution of a session with these providers and their options; `precision` is that of the layers."""
    if tuple(providers) == (_CPU,) and precision == "model":
        return Execution("onnxruntime", _CPU)
    faster = {
        word
        for (provider, option), word in _PRECISIONS.items()
        if options.get(provider, {}).get(option, "0").lower() in ("1", "true")
    }
    if precision != "model":
        faster.add(precision)
    words = ",".join(sorted(faster))
    return Execution("onnxruntime", ",".join(providers), words, ort.__version__, processor_of(providers))


_CPU: Final = "CPUExecutionProvider"
_PRECISIONS: Final = {
    ("CUDAExecutionProvider", "use_tf32"): "tf32",
    ("TensorrtExecutionProvider", "trt_fp16_enable"): "fp16",
    ("TensorrtExecutionProvider", "trt_bf16_enable"): "bf16",
    ("TensorrtExecutionProvider", "trt_int8_enable"): "int8",
}
"""Options with which a provider computes less exactly than the model file says."""

_EXACT: Final = {"CUDAExecutionProvider": {"use_tf32": "0"}}
"""Options that replace defaults with which a provider computes less exactly than the model file says."""

_NO_FILE: Final = "no such model file; build the cascade first"
_loading = threading.Lock()
"""Two sessions loading at once would double the peak of memory, which on an edge node is the peak of the process."""


def with_exact_options(provider: Provider) -> tuple[str, dict[str, Any]]:
    """A provider with its options, computing as exactly as the model file says unless the options say otherwise."""
    name, options = (provider, {}) if isinstance(provider, str) else provider
    return name, {**_EXACT.get(name, {}), **options}


def open_session(
    model: Path | bytes, where: str, providers: Sequence[Provider], threads: int
) -> tuple[Any, HelperThreads]:
    """A session of ONNX Runtime and its helpers.

    Raises:
        BackendError: as `OnnxRuntimeBackend`, for any graph.
    """
    wanted = [with_exact_options(each) for each in providers]
    _check_installed([name for name, _ in wanted], where)
    if isinstance(model, Path) and not model.is_file():
        raise BackendError(f"{where}: {_NO_FILE}")
    spins = can_step_aside(threads)
    try:
        session, helpers = _load(model, wanted, threads, spins=spins)
        if spins and not helpers.threads:
            session, helpers = _load(model, wanted, threads, spins=False)
    except Exception as error:  # the exceptions of the runtime, see above
        _check_started([name for name, _ in wanted], where, error)
        advice = f"; to allow that, name {_CPU} last" if "fallback to CPU EP" in str(error) else ""
        raise BackendError(f"{where}: ONNX Runtime cannot load the model: {error}{advice}") from error
    for name, _ in wanted:
        if name not in session.get_providers():
            _check_started([name], where)
            raise BackendError(f"{where}: execution provider {name} is installed but did not start; see the log")
    return session, helpers


def _content(model: Path | bytes, where: str) -> bytes:
    try:
        return model if isinstance(model, bytes) else model.read_bytes()
    except OSError as error:
        raise BackendError(f"{where}: {_NO_FILE}") from error


def _check_installed(providers: Sequence[str], where: str) -> None:
    """Raises: BackendError unless there are providers, all of them in this ONNX Runtime."""
    if not providers:
        raise BackendError(f"{where}: no execution provider is named (none given); expected at least {_CPU}")
    known = available_providers()
    for name in providers:
        if name not in known:
            raise BackendError(f"{where}: execution provider {name} is not installed; {missing_reason(name)}")
    load_libraries(providers)


def _check_started(providers: Sequence[str], where: str, cause: Exception | None = None) -> None:
    """Raises: BackendError if something is known to keep one of these providers from starting."""
    for name in providers:
        reason = start_failure(name)
        if reason is not None:
            raise BackendError(
                f"{where}: execution provider {name} is installed but did not start: {reason}"
            ) from cause


def _load(
    model: Path | bytes, providers: Sequence[tuple[str, Mapping[str, Any]]], threads: int, *, spins: bool
) -> tuple[Any, HelperThreads]:
    with _loading, helpers_started(threads) as helpers:
        session = ort.InferenceSession(
            model if isinstance(model, bytes) else str(model),
            sess_options=_session_options(threads, spins=spins, on_cpu=any(name == _CPU for name, _ in providers)),
            providers=providers,
            enable_fallback=0,  # otherwise the runtime tries others when one of these does not start
        )
        session.disable_fallback()
    return session, helpers


def _session_options(threads: int, *, spins: bool, on_cpu: bool) -> Any:
    """`on_cpu`: whether nodes that no other provider takes may run on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3  # errors only: warnings are for builders of graphs
    # A spinning thread takes a core from the decoding of the next request, so threads do not spin between inferences
    # (older versions of ONNX Runtime, without a duration, then do not spin at all) or on their caller's core.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if on_cpu else "1")
    return options


def _input_contract(value: Any, where: str) -> tuple[tuple[int, int, int], int | None]:
    """(height, width, 3) and the batch size, None where it is free."""
    shape = value.shape
    fixed = len(shape) == 4 and all(isinstance(size, int) and size > 0 for size in shape[1:])
    if value.type != "tensor(uint8)" or not fixed or shape[3] != 3:
        raise BackendError(
            f"{where}: input {value.name!r} is {value.type} of shape {shape}; "
            "expected tensor(uint8) of (n, height, width, 3)"
        )
    return (shape[1], shape[2], 3), shape[0] if isinstance(shape[0], int) else None


_NUMBERS: Final = frozenset(
    f"tensor({kind})" for kind in ("float", "float16", "double", "bool", "uint8", "int32", "int64")
)
"""Types of outputs that become float32."""


def outputs_of(session: Any, where: str) -> Outputs:
    """The outputs of a session's graph.

    Raises:
        BackendError: if one is no tensor of numbers for each image.
    """
    outputs = [(output.name, _output_contract(output, where)) for output in session.get_outputs()]
    return named(outputs) if outputs else {}


def _output_contract(value: Any, where: str) -> tuple[int | None, ...]:
    """The output's shape for one image, None where it is free."""
    shape = value.shape
    if value.type not in _NUMBERS or not shape:
        raise BackendError(
            f"{where}: output {value.name!r} is {value.type} of shape {shape}; expected numbers of (n, ...)"
        )
    return tuple(size if isinstance(size, int) else None for size in shape[1:])
