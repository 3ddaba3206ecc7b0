"""What the FPGA backends share: the `Backend` contract, masked images and counting."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client.registry import Collector

from fpga.backends.metrics import CycleBasis, FpgaCollector, FpgaCounts, TimeBasis
from fpga.reports.design_info import UNKNOWN_DESIGN, DesignInfo
from hawkvision.core.errors import BackendError
from hawkvision.core.types import LOGITS, Logits, Pixels, Tensors
from hawkvision.inference.backends.interface import Outputs, check_batch, check_open
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.reference import Mask

NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class FpgaBackend(ABC):
    """An integer graph as an edge node's backend; its logits are integers times the graph's `logit_scale`."""

    name: str

    def __init__(self, graph: IntegerGraph, design: DesignInfo = UNKNOWN_DESIGN) -> None:
        self.graph = graph
        self._design = design
        self._scale = np.float32(graph.logit_scale)
        self._shape = (graph.input.height, graph.input.width, 3)
        self._outputs = {LOGITS: (graph.classes,)}
        self._closed = False
        self._lock = threading.Lock()
        self._images = 0
        self._cycles: dict[CycleBasis, int] = {}
        self._seconds: dict[TimeBasis, float] = {}

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
        check_open(self.name, self._closed)
        check_batch(batch, self._shape)
        return {LOGITS: self._floats(self._integers(batch, None))}

    def infer_masked(self, batch: Pixels, mask: Mask) -> Logits:
        """Logits (n, classes) of incomplete images: `mask` (n, height, width) is true where a pixel arrived.

        Other pixels get the value that the hardware gives them (`hawkvision.integer.reference.filled`).

        Raises:
            BackendError: as `infer`, and if the mask does not fit the batch.
        """
        check_open(self.name, self._closed)
        check_batch(batch, self._shape)
        if mask.dtype != np.bool_ or mask.shape != batch.shape[:3]:
            raise BackendError(f"the mask is {mask.dtype} of shape {mask.shape}; expected bool of {batch.shape[:3]}")
        return self._floats(self._integers(batch, mask))

    def counts(self) -> FpgaCounts:
        """The images and cycles that have been computed so far."""
        with self._lock:
            joules = None if self._design.joules is None else self._design.joules * self._images
            return FpgaCounts(self._images, dict(self._cycles), dict(self._seconds), joules, self.emulated)

    def collectors(self) -> Iterable[Collector]:
        """See `hawkvision.core.metrics.Instrumented`."""
        return (FpgaCollector(self.counts),)

    @property
    def emulated(self) -> bool | None:
        """Whether the device is an emulator; None without a device."""
        return None

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True

    def _floats(self, logits: NDArray[np.int32]) -> Logits:
        return logits.astype(np.float32) * self._scale

    @abstractmethod
    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        """Integer logits (n, classes) of RGB images; counts them."""

    def _count(
        self, images: int, cycles: Mapping[CycleBasis, int] = NOTHING, seconds: Mapping[TimeBasis, float] = NOTHING
    ) -> None:
        with self._lock:
            self._images += images
            for basis, n in cycles.items():
                self._cycles[basis] = self._cycles.get(basis, 0) + n
            for kind, more in seconds.items():
                self._seconds[kind] = self._seconds.get(kind, 0.0) + more
