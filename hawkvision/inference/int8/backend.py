"""Runs a quantised network by our own kernels, with ONNX Runtime's outputs bit for bit.

The processor needs AVX-512 VNNI; Intel AMX is used if there is some. `docs/design/int8-kernels.md` explains the
kernels, and `docs/benchmarks/int8-kernels.md` compares their speed with ONNX Runtime's.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Pixels, Tensors
from hawkvision.inference.backends.interface import Outputs, as_tensors, check_batch, check_open, joined, named
from hawkvision.inference.backends.intra_op_threads import HelperThreads, can_step_aside
from hawkvision.inference.int8.graph import Int8Network, Unsupported, read
from hawkvision.inference.int8.plan import Program, plan
from hawkvision.native import library


class Int8Backend:
    """A graph with one input, uint8 (n, height, width, 3), integer layers, and outputs of logits or of what real
    operations make of quantised tensors. ONNX Runtime runs those operations, on one thread.

    Images of a batch are run one by one, because running them together gains nothing.

    Args:
        model: the file, or its bytes.
        threads: threads per image, at most one per core. Of several callers, the first gets the additional threads.
        tiles: whether tiles (Intel AMX) compute convolutions; None uses them if the machine has them.

    Raises:
        BackendError: if the processor, the compiler or the model does not fit; the message says which and why.
    """

    def __init__(self, model: Path | bytes, threads: int = 1, tiles: bool | None = None) -> None:
        where = "model" if isinstance(model, bytes) else str(model)
        network = read_network(model, where)
        self._shape = network.image
        helpers = threads - 1 if can_step_aside(threads) else 0
        if tiles and not library.has_tiles():
            raise BackendError("int8: tiles were asked for; this machine has none (Intel AMX, and Linux 5.16 or later)")
        by_tiles = library.has_tiles() if tiles is None else tiles
        self.way = f"{'tiles' if by_tiles else 'vectors'}, {1 + helpers} threads"
        """The way of execution, which the outputs do not show."""
        self._network: _Open | None = _Open(network, helpers, by_tiles, where)
        self._outputs = self._network.outputs

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def outputs(self) -> Outputs:
        """See `Backend.outputs`."""
        return self._outputs

    def infer(self, batch: Pixels) -> Tensors:
        """See `Backend.infer`."""
        network = self._network  # keeps the network alive during this run if another thread closes the backend
        check_open("int8", network is None)
        assert network is not None
        check_batch(batch, self._shape)
        return network.run(np.ascontiguousarray(batch))

    def close(self) -> None:
        """See `Backend.close`. Runs of other threads finish."""
        self._network = None


class _Open:
    """A network in the library's memory, released after its last use."""

    def __init__(self, network: Int8Network, helpers: int, tiles: bool, where: str) -> None:
        self._library = library.library()
        try:
            program = plan(network, tiles, 1 + helpers)
        except (OSError, MemoryError) as error:
            raise BackendError(f"{where}: no memory for its weights: {error}") from None
        self._results, self._where = network.results, where
        self.outputs: Outputs = named([(result.name, result.shape) for result in network.results])
        self._rest: Any = None
        if network.rest is not None:
            from hawkvision.inference.backends import onnxruntime_backend  # memory that other networks do not need

            self._rest, _ = onnxruntime_backend.open_session(network.rest, where, ["CPUExecutionProvider"], 1)
            self._taken = [each.name for each in self._rest.get_inputs()]
            self.outputs = onnxruntime_backend.outputs_of(self._rest, where)
        self._handle = self._library.network_open(ctypes.addressof(program.struct), helpers)
        if not self._handle:
            raise BackendError(f"{where}: no memory, or no thread, for it")
        # Not at exit, because threads that nobody joined may still be computing.
        weakref.finalize(self, _close, self._library, self._handle, program).atexit = False
        threads = (self._library.network_helper(self._handle, number) for number in range(helpers))
        self._helpers = HelperThreads(threads)

    def run(self, batch: Pixels) -> Tensors:
        n = len(batch)
        made = [np.empty((n, *result.shape), result.dtype) for result in self._results]
        pointers = (ctypes.c_void_p * len(made))(*(array.ctypes.data for array in made))
        self._helpers.step_aside()
        if not self._library.network_run(self._handle, batch.ctypes.data, pointers, batch.nbytes // n, n):
            raise BackendError("int8: no memory for an inference")
        if self._rest is None:
            return as_tensors(self.outputs, made, n, self._where)
        return joined([self._after([array[number : number + 1] for array in made]) for number in range(n)])

    def _after(self, made: Sequence[NDArray[Any]]) -> Tensors:
        """The outputs of one image."""
        try:
            found = self._rest.run(None, dict(zip(self._taken, made, strict=True)))
        except Exception as error:  # the runtime's own exceptions derive from nothing narrower
            raise BackendError(f"{self._where}: ONNX Runtime failed: {error}") from error
        return as_tensors(self.outputs, found, 1, self._where)


def _close(loaded: ctypes.CDLL, handle: int, program: Program) -> None:
    loaded.network_close(handle)
    del program  # its memory was in use until now


def read_network(model: Path | bytes, where: str) -> Int8Network:
    """The integer layers of an ONNX model.

    Raises:
        BackendError: if it is no ONNX model, has other layers, or `onnx` is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise BackendError(
            "int8: models are read with the package `onnx`; in a checkout, pip install '.[int8]'"
        ) from None
    from google.protobuf import message as google_message  # the package that onnx is built on

    try:
        data = model if isinstance(model, bytes) else model.read_bytes()
        return read(onnx.load_model_from_string(data))
    except OSError as error:
        raise BackendError(f"{where}: {error.strerror}") from None
    except google_message.DecodeError as error:
        raise BackendError(f"{where}: not an ONNX model: {error}") from None
    except Unsupported as error:
        raise BackendError(f"{where}: int8: {error}") from None
