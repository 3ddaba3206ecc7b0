"""`python -m tests.bench.inference.intra_op_threads MODEL.onnx [MODEL.onnx …]`: what threads that help with an
inference take and give.

Each way runs the models one after another on an image of noise, in random order with the other ways, after a pause:

- `one thread`;
- `kernel's`: helpers run where the kernel puts them, and sleep between layers;
- `aside`: they are kept off their caller's processor (`hawkvision.inference.backends.intra_op_threads`);
- `spinning`: they run where the kernel puts them, and spin;
- `aside, spinning`: as `OnnxRuntimeBackend` runs them.

Processor time is that of the whole process, with 3 ms after each run, in which helpers that spin may go on. Compare
with and without `--prevent-cpu-idle`: where processors halt, the kernel of a virtual machine places helpers
differently.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.core.types import Pixels
from hawkvision.inference.backends.intra_op_threads import HelperThreads, can_step_aside, helpers_started
from hawkvision.inference.backends.onnxruntime_backend import SPIN_US
from hawkvision.system.onnx_runtime import ort
from loadgen.host.idle_prevention import prevented

AFTER_S: Final = 0.003


@dataclass
class ThreadSetting:
    """One way to run the models, and what each run took."""

    name: str
    threads: int
    aside: bool
    spin_us: int
    sessions: list[tuple[Any, HelperThreads, Pixels]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def open(self, path: Path) -> None:
        """One more model."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spin_us > 0)))
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(self.spin_us))
        options.add_session_config_entry("session.force_spinning_stop", "1")
        with helpers_started(self.threads) as helpers:
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        shape = session.get_inputs()[0].shape[1:]
        noise = np.random.default_rng(0).integers(0, 256, (1, *shape), np.uint8)
        self.sessions.append((session, helpers if self.aside else HelperThreads(), noise))

    def run(self, *, counts: bool) -> None:
        """All models, one after another."""
        processor, begun = time.process_time(), time.perf_counter()
        for session, helpers, image in self.sessions:
            helpers.step_aside()
            session.run(None, {session.get_inputs()[0].name: image})
        took = time.perf_counter() - begun
        time.sleep(AFTER_S)
        if counts:
            self.took_s.append(took)
            self.processor_s.append(time.process_time() - processor)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.inference.intra_op_threads")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2, help="of each inference, the caller's among them")
    parser.add_argument("--runs", type=int, default=60, help="of each way")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="before each run")
    parser.add_argument("--spin-us", type=int, default=SPIN_US, help="how long helpers wait before they sleep")
    parser.add_argument("--prevent-cpu-idle", action="store_true", help="keep processors from halting")
    options = parser.parse_args()
    several, spin = options.threads, options.spin_us
    if not can_step_aside(several):
        parser.error(f"--threads {several}: helpers cannot be kept off their caller's core here")
    ways = [
        ThreadSetting("one thread", 1, aside=False, spin_us=0),
        ThreadSetting("kernel's", several, aside=False, spin_us=0),
        ThreadSetting("aside", several, aside=True, spin_us=0),
        ThreadSetting("spinning", several, aside=False, spin_us=spin),
        ThreadSetting("aside, spinning", several, aside=True, spin_us=spin),
    ]
    for way in ways:
        for model in options.models:
            way.open(model)
    order = random.Random(0)
    with prevented() if options.prevent_cpu_idle else nullcontext():
        for number in range(1 + options.runs):
            for way in order.sample(ways, len(ways)):
                time.sleep(options.pause_ms / 1e3)
                way.run(counts=number > 0)
    table = Table("way", "P10 ms", "P50", "P90", "processor ms", title=f"{several} threads, {options.runs} runs")
    for way in ways:
        spread = (f"{ms:.2f}" for ms in np.percentile(way.took_s, (10, 50, 90)) * 1e3)
        table.add_row(way.name, *spread, f"{np.mean(way.processor_s) * 1e3:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
