"""The metrics of FPGA backends. They keep simulated, modelled, reported and measured figures apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
