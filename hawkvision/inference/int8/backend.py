"""Runs a quantised network by kernels of our own, where the processor has what they need: ONNX Runtime's logits, bit
for bit, in 0.60 to 0.74 of its time, and with Intel AMX in 0.42 to 0.47 (`python -m tests.bench.int8`).

What makes the difference is less the products than what lies between them: a depthwise window is computed with the
instruction of a product; what lies between a convolution and its windows stays in the nearest cache; two threads meet
some twenty times an image instead of sixty.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import numpy as np

from hawkvision.core.errors import BackendError
from hawkvision.core.types import Logits, Pixels
from hawkvision.inference.backends.interface import check_batch, check_open
from hawkvision.inference.backends.intra_op_threads import HelperThreads, can_step_aside
from hawkvision.inference.int8.graph import Int8Network, Unsupported, read
from hawkvision.inference.int8.plan import Program, plan
from hawkvision.native import library


class Int8Backend:
    """A graph of one input, uint8 (n, height, width, 3), and one output, float32 (n, classes), of integer layers.

    Images of a batch are run one by one: there is nothing to be gained by running them together.

    Args:
        model: the file, or its bytes.
        threads: that work on one image, as far as there is a core for each. Of callers at once, the first has them.
        tiles: whether convolutions are computed by tiles (Intel AMX); None: where the machine has them.

    Raises:
        BackendError: if the processor, the compiler or the model is not one for this; the message says which and why.
    """

    def __init__(self, model: Path | bytes, threads: int = 1, tiles: bool | None = None) -> None:
        where = "model" if isinstance(model, bytes) else str(model)
        network = read_network(model, where)
        self._shape, self._classes = network.image, network.classes
        helpers = threads - 1 if can_step_aside(threads) else 0
        if tiles and not library.has_tiles():
            raise BackendError("int8: tiles were asked for; this machine has none (Intel AMX, and Linux 5.16 or later)")
        by_tiles = library.has_tiles() if tiles is None else tiles
        self.way = f"{'tiles' if by_tiles else 'vectors'}, {1 + helpers} threads"
        """How it runs the model, which its logits do not tell."""
        self._network: _Open | None = _Open(network, helpers, by_tiles, where)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """See `Backend.input_shape`."""
        return self._shape

    @property
    def classes(self) -> int:
        """See `Backend.classes`."""
        return self._classes

    def infer(self, batch: Pixels) -> Logits:
        """See `Backend.infer`."""
        network = self._network  # held here, so that it stays while this runs, whoever closes
        check_open("int8", network is None)
        assert network is not None
        check_batch(batch, self._shape)
        return network.run(np.ascontiguousarray(batch))

    def expect(self) -> None:
        """See `Expectant.expect`. A helper fetches the weights; where there is none, nothing is done."""
        network = self._network
        if network is not None:
            network.expect()

    def close(self) -> None:
        """See `Backend.close`. Runs that have begun in other threads end well."""
        self._network = None


class _Open:
    """A network in the library's memory, given back when nobody uses it any more."""

    def __init__(self, network: Int8Network, helpers: int, tiles: bool, where: str) -> None:
        self._library = library.library()
        try:
            program = plan(network, tiles, 1 + helpers)
        except (OSError, MemoryError) as error:
            raise BackendError(f"{where}: no memory for its weights: {error}") from None
        self._classes = network.classes
        self._handle = self._library.network_open(ctypes.addressof(program.struct), helpers)
        if not self._handle:
            raise BackendError(f"{where}: no memory, or no thread, for it")
        # Not when the process ends: threads that are not waited for may be computing still.
        weakref.finalize(self, _close, self._library, self._handle, program).atexit = False
        threads = (self._library.network_helper(self._handle, number) for number in range(helpers))
        self._helpers = HelperThreads(threads)

    def expect(self) -> None:
        self._helpers.step_aside()
        self._library.network_expect(self._handle)

    def run(self, batch: Pixels) -> Logits:
        logits = np.empty((len(batch), self._classes), np.float32)
        self._helpers.step_aside()
        image = batch.nbytes // len(batch)
        if not self._library.network_run(self._handle, batch.ctypes.data, logits.ctypes.data, image, len(batch)):
            raise BackendError("int8: no memory for an inference")
        return logits


def _close(loaded: ctypes.CDLL, handle: int, program: Program) -> None:
    loaded.network_close(handle)
    del program  # its memory was in use until now


def read_network(model: Path | bytes, where: str) -> Int8Network:
    """The integer layers of an ONNX model.

    Raises:
        BackendError: if it is none, or has other layers, or `onnx` is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise BackendError("int8: models are read with the package `onnx`; install hawkvision[int8]") from None
    from google.protobuf import message as google_message  # what onnx itself is built on

    try:
        data = model if isinstance(model, bytes) else model.read_bytes()
        return read(onnx.load_model_from_string(data))
    except OSError as error:
        raise BackendError(f"{where}: {error.strerror}") from None
    except google_message.DecodeError as error:
        raise BackendError(f"{where}: not an ONNX model: {error}") from None
    except Unsupported as error:
        raise BackendError(f"{where}: int8: {error}") from None
