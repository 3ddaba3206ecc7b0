"""Opens the FPGA backend that an edge node's settings name."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeAlias

from fpga.backends.factory import open_fpga
from fpga.reports.design_info import DesignFiles
from fpga.settings import FpgaSettings
from hawkvision.core.clock import Clock
from hawkvision.inference.backends.interface import Backend

NodeBackendKind: TypeAlias = Literal["fpga-ref", "fpga-sim", "fpga-device", "fpga-offload"]


def open_node_backend(
    kind: NodeBackendKind,
    model: bytes,
    settings: FpgaSettings,
    cache: Path,
    cores: int,
    clock: Clock,
    given_up: Future[None] | None = None,
) -> Backend:
    """A backend for a built quantised variant.

    Args:
        kind: the kind of backend.
        model: the variant's file, which carries its integer graph.
        settings: the node's settings for the device.
        cache: the cache folder, for compiled code.
        cores: processor cores that `fpga-offload` may use.
        clock: the node's.
        given_up: ends the wait for a device when it is done.

    Raises:
        CompileError: if the model carries no graph, or the folding or report is broken or belongs to another graph.
        ConfigError: if a setting is missing.
        BackendError: if the backend cannot run.
    """
    files = DesignFiles(settings.report, settings.folding, settings.clock_mhz)
    if kind != "fpga-offload":
        return open_fpga(kind, model, settings.device, files, cache, given_up)
    from fpga.offload.factory import DEFAULT_DEADLINE_S, open_offload

    deadline_s = DEFAULT_DEADLINE_S if settings.deadline_ms is None else settings.deadline_ms / 1e3
    return open_offload(model, settings.device, files, deadline_s, cores, clock, cache, given_up)
