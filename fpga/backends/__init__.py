"""The edge node's FPGA backends: one integer graph, computed by the CPU, by the simulated RTL or by a device.

Nobody takes another's place: a backend that cannot run is an error when it is opened.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from fpga.backends.base import Build, FpgaBackend
from fpga.compiler import folding_search as search
from fpga.compiler.devices import device
from fpga.compiler.folding import Folding, check_folding, parse_folding
from fpga.reports import build_report as report
from hawkvision.errors import BackendError, CompileError, ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import Graph

FpgaKind: TypeAlias = Literal["fpga-ref", "fpga-sim", "fpga-device"]
DEFAULT_DEVICE: Final = "lfe5u-45f"
"""What a simulation without a folding is of: the fastest design for the middle one of the family."""


@dataclass(frozen=True, slots=True)
class Options:
    """What there is to say of a device besides the model; None where nobody said."""

    device: str | None = None
    """Its address, as `fpga.device.device_link` reads it."""
    report: Path | None = None
    """The report of its build: folding, clock and estimated energy."""
    folding: Path | None = None
    """In place of the report's."""
    clock_mhz: float | None = None
    """In place of the report's."""
    cache: Path | None = None
    """The cache folder, for what is compiled; None takes the usual one."""


def open_fpga(
    kind: FpgaKind, model: Path | bytes, options: Options, given_up: Future[None] | None = None
) -> FpgaBackend:
    """A backend for a built variant that carries its integer graph; `given_up` ends the waiting for a device.

    Raises:
        CompileError: if the model carries none, or the folding or report is another graph's or broken.
        ConfigError: if what the backend needs was not said.
        BackendError: if it cannot run.
    """
    graph = graph_of(model)
    build = build_of(graph, options)
    match kind:
        case "fpga-ref":
            from fpga.backends.reference import ReferenceBackend

            return ReferenceBackend(graph, build, cache=options.cache)
        case "fpga-sim":
            from fpga.backends.simulated import SimulatedBackend

            folding = build.folding or search.fastest(graph, device(DEFAULT_DEVICE)).folding
            return SimulatedBackend(graph, Build(folding, build.clock_hz, build.joules), options.cache)
        case "fpga-device":
            from fpga.backends.device import BoardBackend

            if options.device is None:
                raise ConfigError("fpga-device: missing its address, udp://HOST:PORT or serial:/dev/NAME")
            return BoardBackend(graph, options.device, build, given_up=given_up)
        case _:
            raise BackendError(f"no FPGA backend is called {kind!r}; expected fpga-ref, fpga-sim or fpga-device")


def build_of(graph: Graph, options: Options) -> Build:
    """What the files say of a device's build.

    Raises:
        CompileError: if a file is missing, broken or about another graph.
    """
    folding: Folding | None = None
    clock_hz = joules = None
    if options.report is not None:
        found = report.read(options.report)
        if found.graph_sha256 != graph.sha256:
            raise CompileError(
                f"{options.report}: it is about the graph {found.graph_sha256[:16]}…, the model's is "
                f"{graph.sha256[:16]}…"
            )
        folding, clock_hz = found.folding, found.median_mhz * 1e6
        joules = found.energy.mid.chip_uj * 1e-6
    if options.folding is not None:
        try:
            folding = parse_folding(options.folding.read_bytes(), str(options.folding))
        except OSError as error:
            raise CompileError(f"{options.folding}: {error.strerror}") from None
        joules = None  # another design takes other energy
    if options.clock_mhz is not None:
        clock_hz = options.clock_mhz * 1e6
    if folding is not None:
        check_folding(graph, folding)
    return Build(folding, clock_hz, joules)
