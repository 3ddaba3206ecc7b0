"""Opens an FPGA backend by its name. A backend that cannot run is an error; no other backend replaces it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from fpga.backends.base import FpgaBackend
from fpga.compiler.devices import device
from fpga.compiler.folding_search import fastest
from fpga.reports.design_info import DesignFiles, read_design
from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.integer.artifact import graph_of

FpgaKind: TypeAlias = Literal["fpga-ref", "fpga-sim", "fpga-device"]
SIMULATED_DEVICE: Final = "lfe5u-45f"
"""Without a folding, `fpga-sim` simulates the fastest design that this device holds."""


def open_fpga(
    kind: FpgaKind,
    model: Path | bytes,
    address: str | None = None,
    files: DesignFiles | None = None,
    cache: Path | None = None,
    given_up: Future[None] | None = None,
) -> FpgaBackend:
    """Open a backend for a built variant that carries its integer graph.

    Args:
        kind: the kind of backend.
        model: the variant, as a file or its bytes.
        address: the device's address (`fpga.device.frame_transport.open_link`), for `fpga-device`.
        files: the files about its design.
        cache: the cache folder for compiled code; None takes the default.
        given_up: ends the wait for a device when it is done.

    Raises:
        CompileError: if the model carries no graph, or a file is broken or about another graph.
        ConfigError: if the address is missing.
        BackendError: if the backend cannot run.
    """
    graph = graph_of(model)
    design = read_design(graph, files or DesignFiles())
    match kind:
        case "fpga-ref":
            from fpga.backends.reference import ReferenceBackend

            return ReferenceBackend(graph, design, cache=cache)
        case "fpga-sim":
            from fpga.backends.simulated import SimulatedBackend

            folding = design.folding or fastest(graph, device(SIMULATED_DEVICE)).folding
            return SimulatedBackend(graph, replace(design, folding=folding), cache)
        case "fpga-device":
            from fpga.backends.device import DeviceBackend

            if address is None:
                raise ConfigError("fpga-device: missing its address, udp://HOST:PORT or serial:/dev/NAME")
            return DeviceBackend(graph, address, design, given_up=given_up)
        case _:
            raise BackendError(f"no FPGA backend is called {kind!r}; expected fpga-ref, fpga-sim or fpga-device")
