"""`hawkvision plan`: which share of the images to compute on an FPGA, and what comes of it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from fpga.compiler.devices import device as device_of
from fpga.compiler.folding import interval, latency
from fpga.compiler.folding_search import fastest
from fpga.offload.model import ByRate, Forecast, OffloadModel
from fpga.offload.queueing import ServiceTime
from fpga.reports.build_report import read, read_design
from hawkvision.core.advice import advise
from hawkvision.core.errors import ConfigError
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph
from hawkvision.models.manifest import artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.files import CacheDir

REPORTS: Final = Path(__file__).parents[1] / "reports"
CLOCK_MHZ: Final = 120.0
"""Clock of designs that are not built; built ones reach about that."""
SPREAD: Final = 0.2
"""Coefficient of variation of a given CPU time."""
MEASURE_S: Final = 0.5
BYTES_PER_LOGIT: Final = 4
FRAMING_BYTES: Final = 64
"""Approximate bytes around an image's pixels, and around its logits."""


def plan(
    task: Annotated[str, Meta(description="The task whose quantised variant is used.")] = "fashion_mnist",
    rate: Annotated[float, Meta(ge=0.001, le=1e9, description="Images per second.")] = 100.0,
    deadline_ms: Annotated[float, Meta(ge=0.001, description="Deadline for 99 of 100 images.")] = 20,
    variant: Annotated[str | None, Meta(description="The variant; default: the task's for FPGAs.")] = None,
    device: Annotated[str, Meta(description="lfe5u-25f, lfe5u-45f or lfe5u-85f.")] = "lfe5u-45f",
    folding: Annotated[Path | None, Meta(description="The design's folding; default: built, else searched.")] = None,
    report: Annotated[Path | None, Meta(description="The report of the design's build.")] = None,
    clock_mhz: Annotated[float, Meta(ge=1, le=1e4, description="Default: the build's, else 120.")] | None = None,
    cpu_ms: Annotated[float, Meta(ge=1e-6, le=1e6, description="Per image; default: measured now.")] | None = None,
    cores: Annotated[int, Meta(ge=1, le=1024, description="Number of cores; default: all usable.")] | None = None,
    link_mbit: Annotated[float, Meta(ge=0.001, description="Mbit/s between host and FPGA.")] = 100.0,
    link_ms: Annotated[float, Meta(ge=0, description="One-way delay beside the transfer.")] = 0.1,
    host_ms: Annotated[float, Meta(ge=0, le=1e6, description="CPU time to send an image and read its reply.")] = 0.2,
    places: Annotated[int, Meta(ge=1, le=200, description="Images on their way to the FPGA at once.")] = 16,
    json_: Annotated[bool, Meta(description="Print one JSON document.")] = False,
    cache_dir: CacheDir = None,
) -> int:
    """Plan which share of the images an FPGA computes; exit status 1 if no share keeps the deadline."""
    variant = variant or load_manifest(task, models_dir(None, task)).cascade.fpga
    if variant is None:
        raise ConfigError(f"task {task!r} has no variant for FPGAs; name a quantised variant")
    graph = _graph(task, variant, cache_dir)
    built = REPORTS / f"{task}-{variant}-{device}.json"
    if report is None and folding is None and built.is_file() and read(built).graph_sha256 == graph.sha256:
        report = built
    design = read_design(graph, report, folding, clock_mhz)
    chosen, clock_hz = design.folding or fastest(graph, device_of(device)), design.clock_hz or CLOCK_MHZ * 1e6
    source = (folding or report or Path(f"fastest on an {device}")).name
    service = _measured(graph) if cpu_ms is None else ServiceTime.spread(cpu_ms * 1e-3, SPREAD)
    sizes = graph.input.elements + FRAMING_BYTES, graph.classes * BYTES_PER_LOGIT + FRAMING_BYTES
    bytes_per_s = link_mbit * 1e6 / 8
    device_s, through_s = interval(graph, chosen) / clock_hz, latency(graph, chosen) / clock_hz
    busy_s = max(device_s, max(sizes) / bytes_per_s)
    idle_s = sum(sizes) / bytes_per_s + (2 * link_ms + host_ms) * 1e-3 + max(device_s, through_s)
    model = OffloadModel(
        cpu=service,
        work=ByRate.always(service.mean_s),
        host=ByRate.always(host_ms * 1e-3),
        busy_s=busy_s,
        travel_s=idle_s - busy_s,
        deadline_s=deadline_ms * 1e-3,
        cores=cores or len(os.sched_getaffinity(0)),
        places=places,
    )
    share = model.best_share(rate)
    forecasts = {each: model.forecast(rate, each) for each in sorted({0.0, share, 1.0})}
    feasible = forecasts[share].p99_s <= model.deadline_s and forecasts[share].cpu_load < model.cores
    if json_:
        found = {"feasible": feasible, "share": share, "design": source, "cpu_ms": service.mean_s * 1e3}
        found |= {"cores": model.cores, "forecasts": [_row(each, made) for each, made in forecasts.items()]}
        print(json.dumps(found))
    else:
        print(f"{task}/{variant} at {rate:g}/s, deadline {deadline_ms:g} ms for 99 of 100 images, {model.cores} cores")
        print(
            f"FPGA: {source}, {device_s * 1e3:.3g} ms an image; "
            f"a core takes {service.mean_s * 1e3:.3g} ms ± {service.variation:.0%}"
        )
        for each, made in forecasts.items():
            _show(each, made, chosen=each == share)
        if not feasible:
            print("No share keeps the deadline; this one comes nearest.")
    return int(not feasible)


def _row(share: float, made: Forecast) -> dict[str, float | None]:
    """A forecast for programs; infinite values are null."""
    figures = {"share": share, **asdict(made)}
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _show(share: float, made: Forecast, *, chosen: bool) -> None:
    print(
        f"{'->' if chosen else '  '} {share:6.1%} to the FPGA, which answers {made.fpga_share:.1%} and is busy "
        f"{made.fpga_load:.1%}; {made.cpu_load:.3f} CPU seconds per second; "
        f"P50 {made.p50_s * 1e3:.2f} ms, P99 {made.p99_s * 1e3:.2f} ms"
    )


def _graph(task: str, variant: str, cache: Path | None) -> IntegerGraph:
    path = artifact_path(cache_dir(cache), task, variant)
    if not path.is_file():
        build = advise("models build", "--task", task, variant, cache_dir=cache)
        raise ConfigError(f"{path}: no such model; build it with `{build}`")
    return graph_of(path)


def _measured(graph: IntegerGraph) -> ServiceTime:
    """The service time of one image on this machine, with the compiled kernel."""
    from fpga.backends.local import ReferenceBackend
    from fpga.offload.calibration import measure_service

    backend = ReferenceBackend(graph)
    try:
        return measure_service(backend, MEASURE_S)
    finally:
        backend.close()
