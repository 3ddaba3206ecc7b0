"""The metrics of offloading: how images are shared between an FPGA and the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class OffloadCounts:
    """The images of each side since the start."""

    fpga: int
    """Images answered by the FPGA."""
    cpu: int
    """Images answered by the CPU, for any reason."""
    no_place: int
    """Images of the CPU that were drawn for the FPGA while it was full."""
    failed: int
    """Images of the CPU for which the FPGA gave an error."""
    failures: int
    """Errors and wrong answers of the FPGA, those of probes included."""
    late: int
    """Images that the FPGA answered after the deadline."""
    fpga_cpu_s: float
    """CPU seconds of callers' threads for images of the FPGA."""
    cpu_cpu_s: float
    """CPU seconds of callers' threads for images of the CPU."""
    share: float
    """Current share of images meant for the FPGA."""
    rate_hz: float
    """Estimated arrival rate."""
    slowness: float
    """Measured ÷ modelled time from one image to the next."""
    fpga_up: bool


class OffloadCollector(Collector):
    """Reads an offload backend's counts when Prometheus asks."""

    def __init__(self, read: Callable[[], OffloadCounts]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        counts = self._read()
        images = CounterMetricFamily("hawkvision_offload_images", "Images, by the side that answered", labels=("side",))
        images.add_metric(("fpga",), counts.fpga)
        images.add_metric(("cpu",), counts.cpu)
        yield images
        yield CounterMetricFamily("hawkvision_offload_no_place", "Sent to the CPU for a full FPGA", counts.no_place)
        yield CounterMetricFamily("hawkvision_offload_late", "Answered by the FPGA after the deadline", counts.late)
        yield CounterMetricFamily("hawkvision_offload_failures", "Errors of the FPGA, with probes", counts.failures)
        yield GaugeMetricFamily("hawkvision_offload_share", "Share of images meant for the FPGA", counts.share)
        yield GaugeMetricFamily("hawkvision_offload_fpga_up", "1 while the FPGA is used", int(counts.fpga_up))
