"""Compares the offload planner's prediction with a measurement under a rate step.

    python -m tests.bench.fpga.offload

One process serves a network of 162 million multiply-accumulates with `OffloadBackend`: the compiled integer kernel on
one core, and `fpga-device` over UDP on loopback. **The device is emulated** by another process on the same machine,
which computes with the same kernel and answers when the performance model says. Weights are random. So the comparison
covers queueing, sharing and the controller with a real link, real threads and real CPU work, but no hardware.

First each side is measured alone, idle and at a few rates. Then images arrive at random (open loop; latency counts from
when an image was due) at a low rate, at one above the FPGA's, and at the low one again. The first `SETTLE_S` of each
spell are left out. The benchmark needs an otherwise idle machine, and says if it had none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from fpga.backends.device import DeviceBackend
from fpga.backends.local import ReferenceBackend
from fpga.compiler.devices import device
from fpga.compiler.folding import format_folding, interval
from fpga.compiler.folding_search import slowest_that_keeps_up
from fpga.offload.calibration import measure_work
from fpga.offload.model import ByRate, Forecast, OffloadModel
from fpga.offload.queueing import ServiceTime
from fpga.offload.runtime import OffloadBackend
from fpga.reports.build_report import DesignInfo
from hawkvision.core.clock import MonotonicClock
from hawkvision.core.types import Pixels
from hawkvision.integer.ir import IntegerGraph
from hawkvision.integer.onnx_writer import write
from tests.fpga.small_model import emulated
from tests.hawkvision.integer.graphs import random_graph

CLOCK_HZ: Final = 120e6
FPGA_RATE_HZ: Final = 30.0
"""Rate of the design: low enough that other work of a shared machine matters little."""
CHANNELS: Final = (64, 128, 128, 128, 128)
SETTLE_S: Final = 10.0
PLACES: Final = 24
IDLE_RATE_HZ: Final = 6.0
IDLE_S: Final = 20.0
WORK_LOADS: Final = (0.15, 0.3, 0.6, 0.85)
"""Shares of the FPGA's rate at which both sides' CPU seconds are measured; no spell has one of them."""
WORK_S: Final = 12.0
SUSPENDED: Final = 0.05
"""Share of the predicted P99 by which images may be handed over late; beyond it, other work is measured."""


@dataclass
class Samples:
    """Results of one spell after it has settled."""

    latency_s: list[float] = field(default_factory=list)
    fpga: int = 0
    cpu: int = 0
    cpu_s: float = 0.0
    seconds: float = 0.0
    late_start_s: list[float] = field(default_factory=list)
    """Delay of each image's hand-over: the load generator's own error."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each spell")
    parser.add_argument("--deadline-ms", type=float, default=240.0)
    parser.add_argument("--low", type=float, default=0.4, help="rate, as a part of what the FPGA can do")
    parser.add_argument("--high", type=float, default=1.2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    graph = random_graph(side=32, planes=3, channels=CHANNELS, pools=(1, 3, 4), classes=10, name="wide")
    found = slowest_that_keeps_up(graph, device("lfe5u-85f"), FPGA_RATE_HZ, CLOCK_HZ / 1e6)
    with tempfile.TemporaryDirectory() as folder:
        model, folding = Path(folder) / "wide.onnx", Path(folder) / "folding.json"
        model.write_bytes(write(graph))
        folding.write_bytes(format_folding(found))
        words = ("--folding", str(folding), "--clock-mhz", f"{CLOCK_HZ / 1e6:g}")
        with emulated(model, *words) as process:
            run(graph, process.url, DesignInfo(found, CLOCK_HZ), given)
    return 0


def run(graph: IntegerGraph, address: str, build: DesignInfo, given: argparse.Namespace) -> None:
    """Measure both sides idle, plan, run the three spells, print."""
    cpu = ReferenceBackend(graph)
    fpga = DeviceBackend(graph, address, build)
    images = np.random.default_rng(0).integers(0, 256, (256, *cpu.input_shape), dtype=np.uint8)
    rng = np.random.default_rng(given.seed)
    assert build.folding is not None
    cycles = interval(graph, build.folding)
    device_s = cycles / CLOCK_HZ
    unknown = OffloadModel(
        cpu=ServiceTime.constant(device_s),
        work=ByRate.always(device_s),
        host=ByRate.always(0.0),
        busy_s=device_s,
        travel_s=0.0,
        deadline_s=given.deadline_ms / 1e3,
        cores=1,
        places=PLACES,
    )
    # Each side alone, on the same path through threads and locks as later.
    sides = [OffloadBackend(fpga, cpu, unknown, MonotonicClock(), ByRate.always(share)) for share in (1.0, 0.0)]
    there, here = (spell(side, images, IDLE_RATE_HZ, IDLE_S, 2.0, rng) for side in sides)
    host, work = (measure_work(side, [load / device_s for load in WORK_LOADS], WORK_S) for side in sides)
    alone = ServiceTime.measured(here.latency_s)
    travel_s = max(host.at(0.0), float(np.median(there.latency_s)) - device_s)
    model = replace(unknown, cpu=alone, work=work, host=host, travel_s=travel_s)
    schedule = model.schedule()
    low, high = given.low / device_s, given.high / device_s
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} at the start")
    print(f"{graph.multiplications / 1e6:.1f} M multiply-accumulates; {cpu.kernel} kernel")
    print(f"CPU, idle: {alone.mean_s * 1e3:.3f} ms ± {alone.variation:.0%}")
    print(
        f"FPGA, emulated: {cycles:,} cycles at {CLOCK_HZ / 1e6:g} MHz, {1 / device_s:.0f}/s; beside them, idle: "
        f"{travel_s * 1e3:.3f} ms"
    )
    for what, each in (("sent to the FPGA", host), ("computed on the CPU", work)):
        shown = ", ".join(f"{s * 1e3:.3f} at {r:.1f}/s" for r, s in zip(each.rates_hz, each.values, strict=True))
        print(f"CPU-ms of an image {what}: {shown}")
    both = OffloadBackend(fpga, cpu, model, MonotonicClock(), schedule, given.seed)
    titles = ("P50 ms", "P99 ms", "per s", "CPU-s/s")
    print(f"{'spell':27}{'share':>8}" + "".join(f"{title:>9}" for title in titles) + f"{'n':>8}{'late start':>12}")
    try:
        for name, rate in (("low", low), ("high", high), ("low again", low)):
            samples = spell(both, images, rate, given.seconds, SETTLE_S, rng)
            show(name, rate, samples, model.forecast(rate, schedule.at(rate)), both)
    finally:
        both.close()


def spell(
    both: OffloadBackend, images: Pixels, rate: float, seconds: float, settle_s: float, rng: np.random.Generator
) -> Samples:
    """Send images at random times, each in a thread of its own while it is under way."""
    arrivals = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
    samples, lock = Samples(seconds=seconds - settle_s), threading.Lock()

    def one(number: int, due: float, counted: bool) -> None:
        begun = time.perf_counter()
        both.infer(images[number % 256 : number % 256 + 1])
        done = time.perf_counter()
        if counted:
            with lock:
                samples.latency_s.append(done - due)
                samples.late_start_s.append(begun - due)

    begin, decided = time.perf_counter() + 0.1, None
    with ThreadPoolExecutor(PLACES + 40) as pool:
        for number, arrival in enumerate(arrivals.tolist()):
            wait = begin + arrival - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            if decided is None and arrival >= settle_s:
                decided = (both.offloaded(), time.process_time(), time.thread_time())
            pool.submit(one, number, begin + arrival, arrival >= settle_s)
        now = both.offloaded(), time.process_time(), time.thread_time()
    assert decided is not None
    samples.fpga, samples.cpu = now[0].fpga - decided[0].fpga, now[0].cpu - decided[0].cpu
    samples.cpu_s = (now[1] - decided[1]) - (now[2] - decided[2])  # the load generator's own left out
    return samples


def show(name: str, rate: float, samples: Samples, predicted: Forecast, both: OffloadBackend) -> None:
    """Three lines: predicted, measured, the difference."""
    n = samples.fpga + samples.cpu
    p50, p99 = np.percentile(samples.latency_s, (50, 99))
    first = (predicted.fpga_share, predicted.p50_s * 1e3, predicted.p99_s * 1e3, rate, predicted.cpu_load)
    second = (samples.fpga / n, p50 * 1e3, p99 * 1e3, n / samples.seconds, samples.cpu_s / samples.seconds)
    for label, values in (("predicted", first), ("measured", second)):
        share, *others, load = values
        print(f"{name:16}{label:11}{share:8.3f}" + "".join(f"{v:9.2f}" for v in others) + f"{load:9.3f}", end="")
        print(f"{n:8}{np.percentile(samples.late_start_s, 99) * 1e3:9.2f} ms" if label == "measured" else "")
    apart = [(b / a - 1) * 100 for a, b in zip(first, second, strict=True)]
    print(f"{name:16}{'apart, %':11}{apart[0]:8.1f}" + "".join(f"{v:9.1f}" for v in apart[1:]))
    if (own_s := float(np.percentile(samples.late_start_s, 99))) > SUSPENDED * predicted.p99_s:
        print(f"{'':16}SUSPENDED: images were handed over up to {own_s * 1e3:.1f} ms late (P99); this machine was busy")
    seen = both.offloaded()
    print(f"{'':16}so far: no place {seen.no_place}, late {seen.late}, failures {seen.failures}")
    print(f"{'':16}distance of answers, measured ÷ modelled: {both.slowness:.3f}")


if __name__ == "__main__":
    sys.exit(main())
