"""What the FPGA backends have in common: the contract of `Backend`, pictures in pieces, and counting.

Cycles and times come in kinds that must not be mixed, and each has its own name: *simulated* cycles are counted in
the RTL, *modelled* ones come from the folding's performance model, *reported* ones from a device, and a *round trip*
is what the host's clock says. Energy is always an estimate.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fpga.compiler.folding import Folding, interval
from hawkvision.errors import BackendError
from hawkvision.integer.ir import Graph
from hawkvision.integer.reference import Mask
from hawkvision.metrics import Cycles, FpgaCounts, Seconds
from hawkvision.types import Logits, Pixels
from hawkvision.vision.backend import check_batch, check_open


@dataclass(frozen=True, slots=True)
class Build:
    """What is known of a device's build; None where nothing is."""

    folding: Folding | None = None
    clock_hz: float | None = None
    joules: float | None = None
    """Per picture, the chip alone, the middle of the estimate."""

    def interval(self, graph: Graph) -> int | None:
        """Cycles from one picture to the next by the performance model."""
        return None if self.folding is None else interval(graph, self.folding)


UNKNOWN: Final = Build()
NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class FpgaBackend(ABC):
    """An integer graph as an edge node's backend: float32 logits are integers times the graph's `logit_scale`."""

    name: str

    def __init__(self, graph: Graph, build: Build = UNKNOWN) -> None:
        self.graph = graph
        self._build = build
        self._scale = np.float32(graph.logit_scale)
        self._shape = (graph.input.height, graph.input.width, 3)
        self._classes = graph.classes
        self._closed = False
        self._lock = threading.Lock()
        self._pictures = 0
        self._cycles: dict[Cycles, int] = {}
        self._seconds: dict[Seconds, float] = {}

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
        check_open(self.name, self._closed)
        check_batch(batch, self._shape)
        return self._floats(self._integers(batch, None))

    def infer_masked(self, batch: Pixels, mask: Mask) -> Logits:
        """`infer` of pictures of which `mask` (n, height, width) says what arrived.

        The rest shows what the hardware's input stage puts there (`hawkvision.integer.reference.filled`), whatever
        `batch` has.

        Raises:
            BackendError: as `infer`, and if the mask does not fit the batch.
        """
        check_open(self.name, self._closed)
        check_batch(batch, self._shape)
        if mask.dtype != np.bool_ or mask.shape != batch.shape[:3]:
            raise BackendError(f"the mask is {mask.dtype} of shape {mask.shape}; expected bool of {batch.shape[:3]}")
        return self._floats(self._integers(batch, mask))

    def counts(self) -> FpgaCounts:
        """What has been computed so far."""
        with self._lock:
            joules = None if self._build.joules is None else self._build.joules * self._pictures
            return FpgaCounts(self._pictures, dict(self._cycles), dict(self._seconds), joules, self.emulated)

    @property
    def emulated(self) -> bool | None:
        """Whether a program stands in for the device; None where there is none."""
        return None

    def close(self) -> None:
        """See `Backend.close`."""
        self._closed = True

    def _floats(self, logits: NDArray[np.int32]) -> Logits:
        return logits.astype(np.float32) * self._scale

    @abstractmethod
    def _integers(self, batch: Pixels, mask: Mask | None) -> NDArray[np.int32]:
        """Integer logits (n, classes) of RGB pictures; counts them."""

    def _count(
        self, pictures: int, cycles: Mapping[Cycles, int] = NOTHING, seconds: Mapping[Seconds, float] = NOTHING
    ) -> None:
        with self._lock:
            self._pictures += pictures
            for basis, n in cycles.items():
                self._cycles[basis] = self._cycles.get(basis, 0) + n
            for kind, more in seconds.items():
                self._seconds[kind] = self._seconds.get(kind, 0.0) + more
