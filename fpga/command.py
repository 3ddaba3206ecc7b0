"""`hawkvision fpga …`: build a network for a device, or say what a build would come to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import cv2
import numpy as np
import typer

from fpga import report as reports
from fpga.artifact import graph_of
from fpga.devices import Device, devices
from fpga.devices import device as device_of
from fpga.folding import Folding, check_folding, cycles_of, format_folding, interval, parse_folding
from fpga.ir import Graph
from fpga.reference import planes
from fpga.resources import of_graph
from fpga.search import Found, fastest, slowest_that_keeps_up
from fpga.synth import ROUTE_CPU_S
from hawkvision.advice import advise
from hawkvision.artifacts import write_atomic
from hawkvision.errors import CompileError, ConfigError
from hawkvision.manifest import artifact_path, cache_dir, load_labels, load_manifest, models_dir
from hawkvision.pictures import read_pictures
from hawkvision.types import Pixels

app = typer.Typer(no_args_is_help=True, help="Quantised networks on an FPGA: fold, estimate, build, report.")

MAX_MHZ: Final = 1000.0
"""More than any supported device's clock network."""
NOISE_PICTURES: Final = 64
DEFAULT_VARIANT: Final = "tiny_w4"

Task = Annotated[str, typer.Option(help="The task whose quantised rung is meant.")]
Variant = Annotated[str | None, typer.Option(help="A quantised variant of it; default: tiny_w4, or the model's name.")]
ModelFile = Annotated[Path | None, typer.Option("--model", help="A QONNX file instead of the task's built variant.")]
DeviceName = Annotated[str, typer.Option("--device", help=f"{', '.join(devices())}.")]
FoldingFile = Annotated[Path | None, typer.Option("--folding", help="A folding file; default: found by search.")]
Rate = Annotated[
    float | None, typer.Option(min=0.1, max=1e9, help="Pictures a second to keep up with; default: the most.")
]
Clock = Annotated[
    float | None, typer.Option("--mhz", min=1, max=MAX_MHZ, help="The clock to plan with; default: the device's usual.")
]
CacheDir = Annotated[Path | None, typer.Option(help="Where built models lie; default: ~/.cache/hawkvision.")]

# Of a build alone.
Seeds = Annotated[int, typer.Option(min=1, max=64, help="Placements to try.")]
TargetMhz = Annotated[
    float | None, typer.Option(min=1, max=MAX_MHZ, help="What the placer strives for; default: the device's usual.")
]
RouteCpuS = Annotated[
    int, typer.Option(min=10, max=86_400, help="CPU seconds that placing and routing one seed may take.")
]
PinsFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="An LPF (iCE40: PCF) file; without one, all pins but the clock are anywhere.",
    ),
]
Labelled = Annotated[Path | None, typer.Option(help="Labelled pictures for proof and switching; default: noise.")]
BuildDir = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Folder of all files; default: ./fpga-<task>-<variant>-<device>."),
]
ReportsDir = Annotated[Path | None, typer.Option(file_okay=False, help="Where the report goes too.")]


@app.command()
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
    """From a built quantised model to a bitstream and a report."""
    from fpga.build import Order
    from fpga.build import build as run

    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    chosen = _folding(graph, chip, folding, rate, mhz)
    pictures, where = _pictures(task, graph, data)
    variant = variant or (DEFAULT_VARIANT if model is None else model.stem)
    name = f"{task}-{variant}-{chip.name}"
    words = {
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
    order = Order(
        graph=graph,
        task=task,
        variant=variant,
        device=chip,
        folding=chosen,
        pictures=pictures,
        pictures_from=where,
        command=_command(words),
        folder=out or Path(f"fpga-{name}"),
        seeds=seeds,
        target_mhz=target_mhz,
        route_cpu_s=route_cpu_s,
        pins=pins,
    )
    typer.echo(f"{order.command}, in {order.folder}", err=True)
    made = run(order, lambda line: typer.echo(line, err=True))
    for folder in filter(None, (order.folder, reports_dir)):
        written = reports.write(made, folder, name)
    typer.echo(f"{made.rate:,.0f} inferences/s at {made.median_mhz:.1f} MHz (median); report: {written[1]}")


@app.command()
def fold(
    task: Task = "fashion_mnist",
    variant: Variant = None,
    model: ModelFile = None,
    device: DeviceName = "lfe5u-45f",
    rate: Rate = None,
    mhz: Clock = None,
    out: Annotated[Path, typer.Option(help="The folding file.")] = Path("folding.json"),
    cache_dir: CacheDir = None,
) -> None:
    """Search a folding and write it to a file that can be edited."""
    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    found = _search(graph, chip, rate, mhz)
    write_atomic(out, format_folding(found.folding))
    typer.echo(_estimated(graph, chip, found.folding, mhz))
    typer.echo(f"written to {out}")


@app.command()
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
    """Say what a folding would take and give, without any tool."""
    graph, chip = _graph(task, variant, model, cache_dir), device_of(device)
    typer.echo(_estimated(graph, chip, _folding(graph, chip, folding, rate, mhz), mhz))


@app.command()
def report(files: Annotated[list[Path], typer.Argument(help="JSON files of reports.")]) -> None:
    """Print a report as Markdown, or several as a table."""
    read = [reports.read(file) for file in files]
    typer.echo(reports.markdown(read[0]) if len(read) == 1 else reports.summary(read), nl=False)


def _command(words: Mapping[str, object]) -> str:
    """The build that the words of its options decide, as one would type it; those that are None were not given."""
    given = (word for option, value in words.items() if value is not None for word in (option, f"{value}"))
    return shlex.join(["hawkvision", "fpga", "build", *given])


def _graph(task: str, variant: str | None, model: Path | None, cache: Path | None) -> Graph:
    if model is not None:
        from fpga.qonnx import MAX_BYTES, read_qonnx  # needs onnx, which devices do not have

        try:
            with model.open("rb") as file:
                return read_qonnx(file.read(MAX_BYTES + 1), str(model))
        except OSError as error:
            raise CompileError(f"{model}: cannot be read: {error.strerror}") from None
    variant = variant or DEFAULT_VARIANT
    path = artifact_path(cache_dir(cache), task, variant)
    if not path.is_file():
        mend = advise("models build", "--task", task, variant)
        raise CompileError(f"{path} is missing; build it with `{mend}`")
    return graph_of(path)


def _folding(graph: Graph, device: Device, file: Path | None, rate: float | None, mhz: float | None) -> Folding:
    if file is None:
        return _search(graph, device, rate, mhz).folding
    if rate is not None:
        raise CompileError("--folding and --rate exclude one another: a folding file has its rate")
    try:
        folding = parse_folding(file.read_bytes(), str(file))
    except OSError as error:
        raise CompileError(f"{file}: cannot be read: {error.strerror}") from None
    check_folding(graph, folding)
    return folding


def _search(graph: Graph, device: Device, rate: float | None, mhz: float | None) -> Found:
    if rate is None:
        return fastest(graph, device)
    return slowest_that_keeps_up(graph, device, rate, mhz or device.planned_mhz)


def _estimated(graph: Graph, device: Device, folding: Folding, mhz: float | None) -> str:
    needed, cycles = of_graph(graph, folding, device.family), cycles_of(graph, folding)
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


def _pictures(task: str, graph: Graph, data: Path | None) -> tuple[Pixels, str]:
    """Test pictures where the set has some, else all; (n, height, width, planes) and what they are."""
    size = (graph.input.height, graph.input.width)
    if data is None:
        noise = np.random.default_rng(0).integers(0, 256, (NOISE_PICTURES, *size, graph.input.channels), np.uint8)
        return noise, "uniform noise, seed 0"
    models = models_dir(None)
    read = read_pictures(data, load_labels(load_manifest(task, models), models))
    wanted = np.flatnonzero(read.is_test) if read.is_test.any() else np.arange(len(read))
    decoded = [cv2.imdecode(np.frombuffer(read.bodies[at], np.uint8), cv2.IMREAD_COLOR) for at in wanted[:1024]]
    fitting = [picture[..., ::-1] for picture in decoded if picture is not None and picture.shape[:2] == size]
    if not fitting:
        raise ConfigError(f"{data}: expected pictures of {size[0]}x{size[1]} pixels, found none")
    return planes(graph, np.stack(fitting)), f"{read.name}, {len(fitting)} pictures"
