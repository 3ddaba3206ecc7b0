"""`python -m tests.bench.inference.core_placement MODEL.onnx [MODEL.onnx …]`: models side by side, left to the
kernel and kept apart.

As many threads as there are cores look at an image of noise with all models, each on one thread, the first with the
first; in random order with the other way, after a pause. `CorePlacement` places them as
`hawkvision.datacenter.execution.replica` runs them. Compare with and without `--prevent-cpu-idle`: where processors
halt, the kernel of a virtual machine places threads differently.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.core.types import Pixels
from hawkvision.inference.adaptive_parallelism import usable_cores
from hawkvision.inference.backends.onnxruntime_backend import OnnxRuntimeBackend
from hawkvision.inference.core_placement import CorePlacement, PlaceableThreads
from loadgen.host.idle_prevention import prevented


@dataclass
class Placement:
    """One way to run the models, and what each run took."""

    name: str
    threads: Executor
    took_ms: list[float] = field(default_factory=list)

    def run(self, models: list[tuple[OnnxRuntimeBackend, Pixels]], *, counts: bool) -> None:
        """All models, side by side."""
        begun = time.perf_counter()
        wait([self.threads.submit(model.infer, image) for model, image in models])
        if counts:
            self.took_ms.append((time.perf_counter() - begun) * 1e3)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.inference.core_placement")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--runs", type=int, default=100, help="of each way")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="before each run")
    parser.add_argument("--prevent-cpu-idle", action="store_true", help="keep processors from halting")
    options = parser.parse_args()
    cores = usable_cores()
    if cores < 2:
        parser.error("threads can only be kept apart where there are two cores or more; this process may use one")
    models = []
    for path in options.models:
        model = OnnxRuntimeBackend(path)
        noise = np.random.default_rng(0).integers(0, 256, (1, *model.input_shape), np.uint8)
        models.append((model, noise))
    ways = [
        Placement("kernel's", ThreadPoolExecutor(cores)),
        Placement("apart", PlaceableThreads(cores, "apart", CorePlacement())),
    ]
    order = random.Random(0)
    with prevented() if options.prevent_cpu_idle else nullcontext():
        for number in range(1 + options.runs):
            for way in order.sample(ways, len(ways)):
                time.sleep(options.pause_ms / 1e3)
                way.run(models, counts=number > 0)
    table = Table("way", "mean ms", "P10", "P50", "P90", title=f"{len(models)} models, {cores} threads")
    for way in ways:
        spread = (f"{ms:.2f}" for ms in np.percentile(way.took_ms, (10, 50, 90)))
        table.add_row(way.name, f"{np.mean(way.took_ms):.2f}", *spread)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
