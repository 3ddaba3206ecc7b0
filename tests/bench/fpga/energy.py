"""Compares the energy per inference of an FPGA design with that of this CPU; both are estimates.

    python -m tests.bench.fpga.energy --report FILE…

The CPU runs one thread and one image at a time, the same network in four forms: the float network and its int8 form
(`hawkvision.model_zoo.building.quantize`) in ONNX Runtime, the integer network in ONNX Runtime, and the integer network
compiled (`fpga-ref`). CPU seconds are measured; watts per core are an assumed range. The FPGA's side is a build's
report. Three comparisons, each low / mid / high, where low takes the CPU's least and the FPGA's most:

    chip             the CPU's core against the FPGA's chip
    chip and board   the same with the board's power on the FPGA's side; the CPU's board, memory and supply left out
    equal rate       both answer at the rate of the slower one; if that is the CPU, the FPGA idles with its clock on
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from fpga.backends.reference import ReferenceBackend
from fpga.compiler.devices import device
from fpga.offload.cli import CORE_W
from fpga.reports.build_report import BuildReport, read
from fpga.reports.energy import BOARD_W
from fpga.reports.pages import table
from hawkvision.core.types import Pixels
from hawkvision.integer.artifact import graph_of
from hawkvision.model_zoo.building.quantize import measure_ranges, quantise_model
from hawkvision.models.manifest import artifact_path, cache_dir
from hawkvision.system.onnx_runtime import ort

Infer = Callable[[Pixels], object]

WATTS_A_CORE: Final = (CORE_W.low, CORE_W.mid, CORE_W.high)
"""Of a server processor's core under load: thermal design power divided by cores, 240 W / 64 to 280 W / 32; the share
of memory and fans is left out, which favours the CPU. What `hawkvision plan` counts on as well."""
FLOAT_VARIANT: Final = "tiny"
WARM_UP: Final = 500
RUNS: Final = 5
INFERENCES: Final = 4000
RANGED: Final = 64
"""Images of noise that the ranges of int8 are measured on: what they are makes no difference to its time."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """One way to run the network on one core."""

    name: str
    us: float
    """CPU time an inference: the least of several runs, for what else runs here can only add."""

    @property
    def uj(self) -> tuple[float, float, float]:
        """Low, mid, high."""
        low, mid, high = (self.us * watts for watts in WATTS_A_CORE)
        return low, mid, high


def in_onnxruntime(content: bytes) -> Infer:
    """On one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    running = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (taken,) = running.get_inputs()
    return lambda images: running.run(None, {taken.name: images})


def cpu_us(infer: Infer, image: Pixels) -> float:
    """CPU microseconds an inference of one image."""
    for _ in range(WARM_UP):
        infer(image)
    found = []
    for _ in range(RUNS):
        begun = time.process_time()
        for _ in range(INFERENCES):
            infer(image)
        found.append((time.process_time() - begun) / INFERENCES * 1e6)
    return min(found)


def quantised(content: bytes, images: Pixels) -> bytes:
    """The float network with weights and activations of 8 bits, in the ranges that these images have."""
    parsed = onnx.load_from_string(content)
    model: bytes = quantise_model(parsed, measure_ranges(parsed, images), "just now").SerializeToString()
    return model


def measured(task: str, variant: str, cache: Path) -> list[Cpu]:
    """All the ways, on noise, which takes as long as images do."""
    whole, exact = (artifact_path(cache, task, name).read_bytes() for name in (FLOAT_VARIANT, variant))
    graph = graph_of(exact)
    size = (RANGED, graph.input.height, graph.input.width, 3)
    noise = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    ways = {
        f"{FLOAT_VARIANT}, fp32": in_onnxruntime(whole),
        f"{FLOAT_VARIANT}, int8": in_onnxruntime(quantised(whole, noise)),
        f"{variant}, its integers exactly": in_onnxruntime(exact),
        f"{variant}, compiled (fpga-ref)": ReferenceBackend(graph).infer,
    }
    return [Cpu(name, cpu_us(infer, noise[:1])) for name, infer in ways.items()]


def ratios(cpu: Cpu, report: BuildReport) -> dict[str, tuple[float, float, float]]:
    """CPU energy divided by the FPGA's, low to high, in the three comparisons."""
    corners = (report.energy.high, report.energy.mid, report.energy.low)
    chip = tuple(energy / fpga.chip_uj for energy, fpga in zip(cpu.uj, corners, strict=True))
    board = tuple(energy / fpga.with_board_uj for energy, fpga in zip(cpu.uj, corners, strict=True))
    # At the slower one's rate the FPGA's static power lasts longer, and its clock runs on; the CPU is taken to be off.
    period_us = max(cpu.us, 1e6 / report.rate)
    waiting = period_us * report.rate * 1e-6 - 1
    static = device(report.device).static_w[::-1]
    equal = tuple(
        energy / (fpga.chip_uj - fpga.static_uj + fpga.clock_uj * waiting + (watts + board_w) * period_us)
        for energy, fpga, watts, board_w in zip(cpu.uj, corners, static, BOARD_W[::-1], strict=True)
    )
    assert len(chip) == len(board) == len(equal) == 3
    return {"chip": chip, "chip and board": board, "equal rate, chip and board": equal}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the CPU and compare it with each report."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fpga.energy", description=__doc__)
    parser.add_argument("--report", type=Path, nargs="+", required=True, help="JSON files of fpga/reports")
    parser.add_argument("--cache-dir", type=Path, help="where models are built")
    parser.add_argument("--out", type=Path, help="write page and data there, as NAME.md and NAME.json")
    options = parser.parse_args(arguments)
    command = shlex.join(
        ["python", "-m", "tests.bench.fpga.energy", *(sys.argv[1:] if arguments is None else arguments)]
    )
    pages = [
        "# Energy per inference, FPGA against a CPU core",
        f"{date.today():%d %B %Y}, `{command}`, one core.",
        "**All figures are estimates.** CPU time is measured; watts per core are assumed; the FPGA's energy is a model "
        "and nothing ran on a board. Each value is low / mid / high.",
    ]
    data = []
    for path in options.report:
        report = read(path)
        ways = measured(report.task, report.variant, cache_dir(options.cache_dir))
        rows = []
        for way in ways:
            found = ratios(way, report)
            data.append({"report": path.name, "cpu": asdict(way), "ratios": found})
            low, mid, high = way.uj
            shown = (f"{r[0]:.1f} / **{r[1]:.1f}** / {r[2]:.1f}" for r in found.values())
            rows.append([way.name, f"{way.us:.1f}", f"{low:.0f} / {mid:.0f} / {high:.0f}", *shown])
        energy = report.energy
        head = ("on the CPU", "CPU µs", "µJ", "chip", "chip and board", "equal rate, chip and board")
        pages += [
            f"## {report.task} {report.variant} on {report.device}",
            f"FPGA: {energy.low.chip_uj:.1f} / {energy.mid.chip_uj:.1f} / {energy.high.chip_uj:.1f} µJ for the chip, "
            f"{report.rate:,.0f} a second (estimates). CPU: watts a core {WATTS_A_CORE[0]} / {WATTS_A_CORE[1]} / "
            f"{WATTS_A_CORE[2]} (assumed). Ratios are CPU over FPGA, low / mid / high: above 1 the FPGA takes less. "
            "Every ratio is an estimate.",
            table(head, rows),
        ]
    written = "\n\n".join(pages) + "\n"
    sys.stdout.write(written)
    if options.out is not None:
        options.out.with_suffix(".md").write_text(written, encoding="utf-8")
        options.out.with_suffix(".json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
