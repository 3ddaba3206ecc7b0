"""Compares the simulated RTL, and the compiled kernel, with the integer reference, logit by logit.

    python -m tests.bench.fpga.exact --task fashion_mnist --data /usr/share/datasets/fashion-mnist

The network is read from its committed weights, folded (by search for --device, or by --folding), emitted and simulated
cycle by cycle. Test images come first; others follow if there are fewer than --images. A third of them streams without
pauses, a third with random pauses at both sides, a third with pauses and missing pixels. Goals: no logit differs, and
the cycles from image to image are within 1 % of the model's; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fpga.compiler.devices import device
from fpga.compiler.folding import Folding, check_folding, interval, parse_folding
from fpga.compiler.folding_search import fastest
from fpga.simulation.integer_kernel import IntegerKernel
from fpga.simulation.rtl_simulation import Simulation, Stalls
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import load_input
from hawkvision.integer import reference
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.qonnx import read_qonnx
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import load_labels, load_manifest, models_dir

BATCH: Final = 250
MAX_PIXELS: Final = 1_000_000
CYCLES_GOAL: Final = 0.01
MISSING: Final = 0.3
"""Share of missing pixels, in the third that has any."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", type=Path, required=True, help="labelled images, as calibrate takes them")
    parser.add_argument("--variant", default="tiny_w4")
    parser.add_argument("--device", default="lfe5u-85f", help="whose fastest folding is taken")
    parser.add_argument("--folding", type=Path, help="a folding file instead")
    parser.add_argument("--images", type=int, default=10_000)
    given = parser.parse_args()
    try:
        graph = graph_of(given.task, given.variant)
        folding = chosen_folding(graph, given.device, given.folding)
        images, tests = load(given.task, given.variant, given.data, given.images)
        began = time.perf_counter()
        table, failures = measure(graph, folding, images)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.task} {given.variant} {graph.sha256[:16]}: {len(images):,} images, {tests:,} of the test set")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{time.perf_counter() - began:.0f} s")
    print("\n".join(failures) or "every goal is met")
    return 1 if failures else 0


def graph_of(task: str, variant: str) -> IntegerGraph:
    """A stage's network, from its committed weights."""
    path = models_dir(None) / task / "weights" / f"{variant}.onnx"
    return read_qonnx(path.read_bytes(), str(path))


def chosen_folding(graph: IntegerGraph, name: str, file: Path | None) -> Folding:
    """The folding of a file, else the fastest that fits the device."""
    if file is None:
        return fastest(graph, device(name))
    folding = parse_folding(file.read_bytes(), str(file))
    check_folding(graph, folding)
    return folding


def load(task: str, variant: str, data: Path, most: int) -> tuple[Pixels, int]:
    """At most so many images (n, height, width, 3), test images first, and the number of these."""
    models = models_dir(None)
    manifest = load_manifest(task, models)
    spec = next(member.input for name in manifest.cascade.edge for member in manifest.members(name) if name == variant)
    read = read_images(data, load_labels(manifest, models))
    order = np.argsort(~read.is_test, kind="stable")[:most]
    pixels = np.stack([load_input(read.bodies[at], spec, max_pixels=MAX_PIXELS)[0] for at in order])
    return pixels, int(read.is_test[order].sum())


def measure(graph: IntegerGraph, folding: Folding, images: Pixels) -> tuple[Table, list[str]]:
    """Stream all images through the RTL, a third in each way, and compute all of them with the kernel.

    Returns a table, and the goals that are missed.
    """
    simulation, estimate = Simulation(graph, folding), interval(graph, folding)
    rng = np.random.default_rng(0)
    table, failures = Table(box=None, pad_edge=False, header_style="bold"), list[str]()
    for title in ("streams", "images", "logits", "differing", "cycles an image, simulated", "estimated"):
        table.add_column(title, justify="left" if title == "streams" else "right")

    def add(name: str, count: int, differing: int, *cycles: str) -> None:
        table.add_row(name, f"{count:,}", f"{count * graph.classes:,}", f"{differing:,}", *cycles)
        if differing:
            failures.append(f"{name}: {differing} logits differ")

    ways = [("without pauses", 0, 0.0), ("random pauses", 96, 0.0), ("and pixels missing", 96, MISSING)]
    for (name, stalls, missing), share in zip(ways, np.array_split(reference.planes(graph, images), 3), strict=True):
        differing, spent = 0, list[float]()
        for at in track(range(0, len(share), BATCH), name, console=Console(stderr=True), transient=True):
            batch = share[at : at + BATCH]
            mask = rng.random(batch.shape[:3]) >= missing if missing else None
            run = simulation.run(batch, mask, stalls=Stalls(stalls, stalls, at))
            shown = batch if mask is None else reference.filled(graph, batch, mask)
            differing += int((run.logits != reference.logits(graph, shown)).sum())
            if len(batch) > 4:
                spent.append((run.last_out[-1] - run.last_out[3]) / (len(batch) - 4))
        if stalls:  # pauses make the cycles more
            add(name, len(share), differing)
            continue
        measured = float(np.mean(spent))
        add(name, len(share), differing, f"{measured:,.1f}", f"{estimate:,}")
        if abs(measured - estimate) > CYCLES_GOAL * estimate:
            failures.append(f"{name}: {measured:,.1f} cycles an image, estimated {estimate:,}")
    expected = reference.logits(graph, reference.planes(graph, images))
    add("compiled kernel", len(images), int((IntegerKernel(graph).logits(images) != expected).sum()))
    return table, failures


if __name__ == "__main__":
    sys.exit(main())
