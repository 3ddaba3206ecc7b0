"""What the FPGA backends share: the `Backend` contract, counting, and metrics.

Simulated, modelled, reported and measured figures are kept apart.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fpga.reports.build_report import UNKNOWN_DESIGN, DesignInfo
from hawkvision.core.types import LOGITS, Logits, Pixels, Tensors
from hawkvision.inference.backends.interface import Outputs, check_batch, check_open
from hawkvision.integer.ir import IntegerGraph

NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

CycleBasis: TypeAlias = Literal["simulated", "modelled", "reported"]
"""The source of cycles: counted in simulated RTL, computed from the folding, or reported by a device."""
TimeBasis: TypeAlias = Literal["simulated", "modelled", "round_trip"]
"""The source of seconds: simulated or modelled cycles at the given clock, or the host's clock, from the first pixel of
an image sent to its reply received."""

_SECONDS_TEXT: Final[Mapping[TimeBasis, str]] = {
    "simulated": "Cycles of the simulated RTL at the given clock: simulated, not measured",
    "modelled": "Cycles of the performance model at the given clock: modelled, not measured",
    "round_trip": "From an image's first pixel sent to its reply, by this node's clock",
}


@dataclass(frozen=True, slots=True)
class FpgaCounts:
    """The totals of an FPGA backend since it was opened."""

    images: int
    cycles: Mapping[CycleBasis, int]
    """By basis; a basis without figures is missing."""
    seconds: Mapping[TimeBasis, float]
    joules: float | None
    """Estimated energy; None if unknown."""
    emulated: bool | None
    """Whether the device is an emulator; None without a device."""


class FpgaCollector(Collector):
    """Reads a backend's counts when Prometheus asks."""

    def __init__(self, read: Callable[[], FpgaCounts]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        counts = self._read()
        yield CounterMetricFamily("hawkvision_fpga_images", "Images that the FPGA backend computed", counts.images)
        cycles = CounterMetricFamily("hawkvision_fpga_cycles", "Clock cycles, by their basis", labels=("basis",))
        for basis, n in sorted(counts.cycles.items()):
            cycles.add_metric((basis,), n)
        yield cycles
        for kind, seconds in sorted(counts.seconds.items()):
            yield CounterMetricFamily(f"hawkvision_fpga_{kind}_seconds", _SECONDS_TEXT[kind], seconds)
        if counts.joules is not None:
            yield CounterMetricFamily(
                "hawkvision_fpga_estimated_joules",
                "Estimate: images times the build report's energy per image at full load, chip alone",
                counts.joules,
            )
        if counts.emulated is not None:
            yield GaugeMetricFamily("hawkvision_fpga_emulated", "1 if the device is an emulator", int(counts.emulated))


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
        return {LOGITS: self._floats(self._integers(batch))}

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
    def _integers(self, batch: Pixels) -> NDArray[np.int32]:
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
