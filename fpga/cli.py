"""`hawkvision fpga …`: builds a quantised network for a device, or estimates what a build would take."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import cv2
import numpy as np
from msgspec import Meta

from fpga.compiler.devices import FpgaDevice, devices
from fpga.compiler.devices import device as device_of
from fpga.compiler.folding import Folding, check_folding, cycles_of, format_folding, interval, read_folding
from fpga.compiler.folding_search import fastest, slowest_that_keeps_up
from fpga.compiler.resource_model import of_graph
from fpga.compiler.synthesis import ROUTE_CPU_S, RoutingOptions
from fpga.reports import pages
from fpga.reports.build_report import read
from hawkvision.core.advice import advise
from hawkvision.core.command_line import ARGUMENT, Group
from hawkvision.core.errors import CompileError, ConfigError
from hawkvision.core.types import Pixels
from hawkvision.integer.artifact import graph_of
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.reference import planes
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import artifact_path, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.system.files import CacheDir, write_atomic

MAX_MHZ: Final = 1000.0
"""Higher than any supported device's clock network allows."""
NOISE_IMAGES: Final = 64

Task = Annotated[str, Meta(description="The task whose quantised variant is used.")]
Variant = Annotated[
    str | None, Meta(description="The quantised variant; default: the task's stage for FPGAs, or the model's name.")
]
ModelFile = Annotated[Path | None, Meta(description="A QONNX file instead of the task's built variant.")]
DeviceName = Annotated[str, Meta(description=f"The device: {', '.join(devices())}.")]
FoldingFile = Annotated[Path | None, Meta(description="A folding file; default: found by search.")]
Rate = (
    Annotated[float, Meta(ge=0.1, le=1e9, description="Images per second to keep up with; default: the most.")] | None
)
Clock = Annotated[float, Meta(ge=1, le=MAX_MHZ, description="Clock to plan with; default: the device's usual.")] | None

# Options of `build` alone.
Seeds = Annotated[int, Meta(ge=1, le=64, description="Number of placements to try.")]
TargetMhz = (
    Annotated[float, Meta(ge=1, le=MAX_MHZ, description="Clock that the placer aims at; default: the device's usual.")]
    | None
)
RouteCpuS = Annotated[
    int, Meta(ge=10, le=86_400, description="CPU seconds that placing and routing one seed may take.")
]
PinsFile = Annotated[Path | None, Meta(description="LPF file; default: only the clock has a fixed pin.")]
Labelled = Annotated[Path | None, Meta(description="Labelled images for proof and switching; default: noise.")]
BuildDir = Annotated[Path | None, Meta(description="Folder of the build; default: ./fpga-<task>-<variant>-<device>.")]
ReportsDir = Annotated[Path | None, Meta(description="Another folder to write the report to.")]


def build(
    task: Task = "fashion_mnist",
    variant: Variant = None,
    model: ModelFile = None,
    device: DeviceName = "lfe5u-45f",
    folding: FoldingFile = None,
    rate: Rate = None,
    mhz: Clock = None,
    seeds: Seeds = 5,
    target_mhz: TargetMhz = None,
    route_cpu_s: RouteCpuS = ROUTE_CPU_S,
    pins: PinsFile = None,
    data: Labelled = None,
    out: BuildDir = None,
    reports_dir: ReportsDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Build a bitstream and a report from a quantised model."""
    if pins is not None and not pins.is_file():
        raise ConfigError(f"--pins {pins}: expected a file")
    for option, folder in (("--out", out), ("--reports-dir", reports_dir)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"{option} {folder}: expected a folder")
    from fpga.build import BuildOrder
    from fpga.build import build as run

    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    chosen = _folding(graph, chip, folding, rate, mhz)
    images, source = _images(task, graph, data)
    variant = variant or (_stage_for_fpgas(task) if model is None else model.stem)
    name = f"{task}-{variant}-{chip.name}"
    options = {
        "--task": task,
        "--variant": variant,
        "--device": chip.name,
        "--model": model and model.name,
        "--folding": folding and folding.name,
        "--rate": rate and f"{rate:g}",
        "--mhz": None if rate is None or mhz is None else f"{mhz:g}",
        "--target-mhz": target_mhz and f"{target_mhz:g}",
        "--route-cpu-s": None if route_cpu_s == ROUTE_CPU_S else route_cpu_s,
        "--pins": pins and pins.name,
        "--data": data and data.name,
        "--seeds": seeds,
    }
    order = BuildOrder(
        graph=graph,
        task=task,
        variant=variant,
        device=chip,
        folding=chosen,
        images=images,
        images_from=source,
        command=_command(options),
        folder=out or Path(f"fpga-{name}"),
        routing=RoutingOptions(seeds, target_mhz, route_cpu_s, pins),
    )
    print(f"{order.command}, in {order.folder}", file=sys.stderr)
    report = run(order, lambda line: print(line, file=sys.stderr))
    for folder in filter(None, (order.folder, reports_dir)):
        written = pages.write(report, folder, name)
    print(f"{report.rate:,.0f} inferences/s at {report.median_mhz:.1f} MHz (median); report: {written[1]}")


def fold(
    task: Task = "fashion_mnist",
    variant: Variant = None,
    model: ModelFile = None,
    device: DeviceName = "lfe5u-45f",
    rate: Rate = None,
    mhz: Clock = None,
    out: Annotated[Path, Meta(description="The folding file to write.")] = Path("folding.json"),
    cache_dir: CacheDir = None,
) -> None:
    """Search for a folding and write it to a file that you can edit."""
    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    found = _search(graph, chip, rate, mhz)
    write_atomic(out, format_folding(found))
    print(_estimated(graph, chip, found, mhz))
    print(f"written to {out}")


def estimate(
    task: Task = "fashion_mnist",
    variant: Variant = None,
    model: ModelFile = None,
    device: DeviceName = "lfe5u-45f",
    folding: FoldingFile = None,
    rate: Rate = None,
    mhz: Clock = None,
    cache_dir: CacheDir = None,
) -> None:
    """Estimate resources and speed of a folding without running any tool."""
    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    print(_estimated(graph, chip, _folding(graph, chip, folding, rate, mhz), mhz))


def report(files: Annotated[list[Path], Meta(description="JSON files of reports.", extra=ARGUMENT)]) -> None:
    """Print one report as Markdown, or several as a table."""
    reports = [read(file) for file in files]
    print(pages.markdown(reports[0]) if len(reports) == 1 else pages.summary(reports), end="")


COMMANDS: Final = Group(
    "Quantised networks on an FPGA: fold, estimate, build, report.",
    {"": {"build": build, "fold": fold, "estimate": estimate, "report": report}},
)


def _command(options: Mapping[str, object]) -> str:
    """The command line that repeats a build; options with None were not given."""
    given = (word for option, value in options.items() if value is not None for word in (option, f"{value}"))
    return shlex.join(["hawkvision", "fpga", "build", *given])


def _graph(task: str, variant: str | None, model: Path | None, cache: Path | None) -> IntegerGraph:
    if model is not None:
        from hawkvision.integer.qonnx import MAX_BYTES, read_qonnx  # needs onnx, which edge nodes lack

        try:
            with model.open("rb") as file:
                return read_qonnx(file.read(MAX_BYTES + 1), str(model))
        except OSError as error:
            raise CompileError(f"{model}: cannot be read: {error.strerror}") from None
    variant = variant or _stage_for_fpgas(task)
    path = artifact_path(cache_dir(cache), task, variant)
    if not path.is_file():
        mend = advise("models build", "--task", task, variant)
        raise CompileError(f"{path} is missing; build it with `{mend}`")
    return graph_of(path)


def _stage_for_fpgas(task: str) -> str:
    found = load_manifest(task, models_dir(None, task)).cascade.fpga
    if found is None:
        raise CompileError(
            f"task {task!r} has no stage for FPGAs; make one with `hawkvision models quantize STAGE --task {task} "
            "--data IMAGES --precision w8a8`"
        )
    return found


def _folding(
    graph: IntegerGraph, device: FpgaDevice, file: Path | None, rate: float | None, mhz: float | None
) -> Folding:
    if file is None:
        return _search(graph, device, rate, mhz)
    if rate is not None:
        raise CompileError("--folding and --rate exclude one another: a folding file has its rate")
    folding = read_folding(file)
    check_folding(graph, folding)
    return folding


def _search(graph: IntegerGraph, device: FpgaDevice, rate: float | None, mhz: float | None) -> Folding:
    if rate is None:
        return fastest(graph, device)
    return slowest_that_keeps_up(graph, device, rate, mhz or device.planned_mhz)


def _estimated(graph: IntegerGraph, device: FpgaDevice, folding: Folding, mhz: float | None) -> str:
    needed, cycles = of_graph(graph, folding), cycles_of(graph, folding)
    whole, clock = device.resources, mhz or device.planned_mhz
    shares = ", ".join(
        f"{getattr(needed, field):,} {field} of {getattr(whole, field):,}"
        for field in needed.__struct_fields__
        if getattr(whole, field)
    )
    lines = [
        f"{name}: taps {fold.taps}, channels {fold.channels}, pe {fold.pe}, {cycles[name]:,} cycles"
        for name, fold in folding.stages.items()
    ]
    slowest = interval(graph, folding)
    rate = clock * 1e6 / slowest
    return "\n".join([*lines, f"estimated: {slowest:,} cycles, {rate:,.0f}/s at {clock:g} MHz; {shares}"])


def _images(task: str, graph: IntegerGraph, data: Path | None) -> tuple[Pixels, str]:
    """Images (n, height, width, planes) and their description: the set's test part, else all of it, else noise."""
    size = (graph.input.height, graph.input.width)
    if data is None:
        noise = np.random.default_rng(0).integers(0, 256, (NOISE_IMAGES, *size, graph.input.channels), np.uint8)
        return noise, "uniform noise, seed 0"
    labelled = read_images(data, load_labels(load_manifest(task, models_dir(None, task)), models_dir(None, task)))
    wanted = np.flatnonzero(labelled.is_test) if labelled.is_test.any() else np.arange(len(labelled))
    decoded = [cv2.imdecode(np.frombuffer(labelled.bodies[at], np.uint8), cv2.IMREAD_COLOR) for at in wanted[:1024]]
    fitting = [image[..., ::-1] for image in decoded if image is not None and image.shape[:2] == size]
    if not fitting:
        raise ConfigError(f"{data}: expected images of {size[0]}x{size[1]} pixels, found none")
    return planes(graph, np.stack(fitting)), f"{labelled.name}, {len(fitting)} images"
