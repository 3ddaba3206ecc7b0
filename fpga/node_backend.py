"""Opens the FPGA backend that an edge node's settings name. One that cannot run is an error; no other replaces it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from fpga.backends.local import ReferenceBackend, SimulatedBackend
from fpga.compiler.devices import device
from fpga.compiler.folding_search import fastest
from fpga.reports.build_report import read_design
from fpga.settings import FpgaSettings
from hawkvision.core.clock import Clock
from hawkvision.core.errors import ConfigError
from hawkvision.inference.backends.interface import Backend
from hawkvision.integer.artifact import graph_of

NodeBackendKind: TypeAlias = Literal["fpga-ref", "fpga-sim", "fpga-device", "fpga-offload"]

SIMULATED_DEVICE: Final = "lfe5u-45f"
"""Without a folding, `fpga-sim` simulates the fastest design that this device holds."""
DEADLINE_MS: Final = 50.0
"""The default of `fpga_deadline_ms`."""


def open_node_backend(
    kind: NodeBackendKind,
    model: bytes | Path,
    settings: FpgaSettings,
    cores: int,
    clock: Clock,
    given_up: Future[None] | None = None,
) -> Backend:
    """A backend for a built quantised variant.

    Args:
        kind: the kind of backend.
        model: the variant, which carries its integer graph.
        settings: the node's settings for the device.
        cores: processor cores that `fpga-offload` may use.
        clock: the node's.
        given_up: ends the wait for a device when it is done.

    Raises:
        CompileError: if the model carries no graph, or the folding or report is broken or belongs to another graph.
        ConfigError: if a setting is missing.
        BackendError: if the backend cannot run.
    """
    graph = graph_of(model)
    design = read_design(graph, settings.report, settings.folding, settings.clock_mhz)
    if kind == "fpga-ref":
        return ReferenceBackend(graph, design)
    if kind == "fpga-sim":
        folding = design.folding or fastest(graph, device(SIMULATED_DEVICE))
        return SimulatedBackend(graph, replace(design, folding=folding))
    if settings.device is None:
        raise ConfigError(f"{kind}: missing the device's address, udp://HOST:PORT")
    if kind == "fpga-device":
        from fpga.backends.device import DeviceBackend

        return DeviceBackend(graph, settings.device, design, given_up=given_up)
    from fpga.backends.offload import open_offload

    deadline_s = (DEADLINE_MS if settings.deadline_ms is None else settings.deadline_ms) * 1e-3
    return open_offload(graph, settings.device, design, deadline_s, cores, clock, given_up)
