"""`python -m tests.bench.servers.overhead.node`: what an edge node costs, against the least that could do the same
work.

- Overhead: a node on the no-op backend, which receives, decodes and routes an image but runs no model, against bare
  Starlette and FastAPI echoes that only receive it. One kept-alive connection, one request at a time. The node is also
  asked by the Open Inference Protocol (OIP), with the image as the raw body.
- Throughput: a node with a real model pinned to one core, its load on another, against a loop of decode, resize and
  ONNX Runtime on that same core, one image at a time. Closed loop with a few connections: where images wait, the
  node runs the model on several at once, which the loop, whose images do not wait, cannot.
- Footprint: memory with one model loaded, and the time from starting the process to `ready`.

Rounds rotate the order, so that drift of the machine falls on all alike; ratios are per round, with their range.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import HawkVisionError
from hawkvision.models.manifest import InputSpec, artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.system.onnx_runtime import ort
from tests.bench.servers.overhead.wire import WireClient, WireClientError

TASK: Final = "imagenet"
VARIANT: Final = "efficientnet_lite0_int8"
"""What edge nodes look with first, and what they are compared with other servers by (`tests.bench.servers`)."""
CONNECTIONS: Final = 8
"""Likewise."""
IMAGE_BYTES: Final = 25_000
CLASSIFY: Final = "/v1/classify"
INFER: Final = f"/v2/models/{TASK}/infer"
INTERPOLATION: Final = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC, "area": cv2.INTER_AREA}


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """How long to measure. Quick: about 25 s in all; else about 90 s, on two shared cores."""

    rounds: int
    requests: int
    """Per round and server, for overhead."""
    window_s: float
    """Per round and contender, for throughput."""


QUICK: Final = OverheadPlan(rounds=3, requests=150, window_s=1.0)
FULL: Final = OverheadPlan(rounds=8, requests=500, window_s=3.0)
WARM_UP: Final = 50


class NodeOverhead(msgspec.Struct, frozen=True):
    """One server's waiting times, ms, over all rounds; ratios of round medians to Starlette's."""

    server: str
    n: int
    p50_ms: float
    p99_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float


class Throughput(msgspec.Struct, frozen=True):
    """A node and the bare loop on one core; ratios are node over loop per round.

    Rates hold for a core that nobody else uses; `core_share` tells whether that was so. Where it was not, a node with
    its several threads is given more of the core than a loop with one, and only the figures per CPU second compare.
    """

    variant: str
    connections: int
    edge_per_s: float
    bare_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    edge_per_cpu_s: float
    bare_per_cpu_s: float
    cpu_ratio: float
    cpu_ratio_low: float
    cpu_ratio_high: float
    edge_core_share: float
    bare_core_share: float


@dataclass(frozen=True, slots=True)
class ThroughputWindow:
    """What was done in one window: runs, and the wall and CPU seconds that they took."""

    done: int
    wall_s: float
    cpu_s: float


class Footprint(msgspec.Struct, frozen=True):
    """A node with one model loaded; MB are 10^6 bytes. PSS counts pages that are shared with others by their share."""

    variant: str
    cold_start_s: float
    warm_start_s: float
    rss_mb: float
    pss_mb: float
    rss_after_load_mb: float
    pss_after_load_mb: float


class OverheadReport(msgspec.Struct, frozen=True):
    """All that was measured, and on what."""

    machine: str
    image_bytes: int
    rounds: int
    overhead: tuple[NodeOverhead, ...]
    node_decode_ms: float
    throughput: Throughput | None
    footprint: Footprint | None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; everything started is stopped, also on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.servers.overhead.node", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter, and less exact")
    parser.add_argument("--variant", default=VARIANT, help="for throughput and footprint; default: %(default)s")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="for throughput; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    plan = QUICK if given.quick else FULL
    console = Console() if sys.stdout.isatty() else Console(width=120)
    image = make_image()
    try:
        overhead, decode_ms = measure_overhead(plan, image)
        model = artifact_path(cache_dir(), TASK, given.variant)
        if model.is_file():
            footprint = measure_footprint(given.variant, model, image)
            throughput = measure_throughput(plan, given.variant, model, image, given.connections)
        else:
            console.print(f"{model} is not built (run `hawkvision models build`): overhead only")
            throughput = footprint = None
    except (HawkVisionError, WireClientError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    machine = f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    report = OverheadReport(machine, len(image), plan.rounds, overhead, decode_ms, throughput, footprint)
    show(report, console)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


# -------------------------------------------------------------------------------------------------- overhead


def measure_overhead(plan: OverheadPlan, image: bytes) -> tuple[tuple[NodeOverhead, ...], float]:
    """Every server's waiting times, and how many ms of the node's median are decoding."""
    with ExitStack() as stack:
        servers: dict[str, tuple[str, ...]] = {"client alone": ("/echo", "tests.bench.servers.overhead.echo", "raw")}
        servers["Starlette echo"] = ("/echo", "tests.bench.servers.overhead.echo", "starlette")
        if importlib.util.find_spec("fastapi") is not None:
            servers["FastAPI echo"] = ("/echo", "tests.bench.servers.overhead.echo", "fastapi")
        servers["edge node, no-op"] = (CLASSIFY, "edge", "--port", "0", "--backend", "noop")
        urls = {name: stack.enter_context(running(*command)).url for name, (_, *command) in servers.items()}
        wires = {name: stack.enter_context(WireClient(urls[name], path, image)) for name, (path, *_) in servers.items()}
        raw = WireClient(urls["edge node, no-op"], INFER, image, "Inference-Header-Content-Length: 0\r\n")
        wires["the same, OIP"] = stack.enter_context(raw)
        decode_ms = _decode_share(wires["edge node, no-op"])
        for wire in wires.values():
            _waits(wire, WARM_UP)
        waits: dict[str, list[NDArray[np.float64]]] = {name: [] for name in wires}
        for order in _rotations(list(wires), plan.rounds):
            for name in order:
                waits[name].append(_waits(wires[name], plan.requests))
    base = [np.median(found) for found in waits["Starlette echo"]]
    return tuple(_overhead(name, found, base) for name, found in waits.items()), decode_ms


def _overhead(server: str, rounds: Sequence[NDArray[np.float64]], base: Sequence[Any]) -> NodeOverhead:
    p50, p99 = np.percentile(np.concatenate(rounds), (50, 99))
    ratios = [float(np.median(found) / other) for found, other in zip(rounds, base, strict=True)]
    return NodeOverhead(
        server=server,
        n=sum(map(len, rounds)),
        p50_ms=float(p50),
        p99_ms=float(p99),
        ratio=float(np.median(ratios)),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def _waits(wire: WireClient, requests: int) -> NDArray[np.float64]:
    """What each of so many requests in a row waited, in ms."""
    waits = np.empty(requests)
    for i in range(requests):
        started = time.perf_counter_ns()
        wire.exchange()
        waits[i] = time.perf_counter_ns() - started
    return waits / 1e6


def _decode_share(wire: WireClient) -> float:
    """Median of the decoding times that a node states in its answers, ms."""
    return float(np.median([msgspec.json.decode(wire.exchange())["timing_ms"]["decode"] for _ in range(WARM_UP)]))


def _rotations(names: list[str], rounds: int) -> Iterator[list[str]]:
    for i in range(rounds):
        start = i % len(names)
        yield names[start:] + names[:start]


# ------------------------------------------------------------------------------------------------ throughput


def measure_throughput(
    plan: OverheadPlan, variant: str, model: Path, image: bytes, connections: int
) -> Throughput | None:
    """Images a second on one core, by node and by bare loop; None on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    spec = load_manifest(TASK, models_dir()).variant(variant).input
    windows: dict[str, list[ThroughputWindow]] = {"edge": [], "bare": []}
    with ExitStack() as stack:
        with pinned(cores[0]):
            run_bare = bare_loop(model, spec, image)
            # It inherits the core, and so counts one worker.
            node = stack.enter_context(running("edge", "--port", "0", "--variant", variant))
        wires = [stack.enter_context(WireClient(node.url, CLASSIFY, image)) for _ in range(connections)]

        def edge_window() -> ThroughputWindow:
            with pinned(cores[1]):
                before = cpu_seconds(node)
                done, wall_s = closed_loop(wires, plan.window_s)
                return ThroughputWindow(done, wall_s, cpu_seconds(node) - before)

        def bare_window() -> ThroughputWindow:
            with pinned(cores[0]):
                before = time.thread_time()
                done, wall_s = _repeat(run_bare, plan.window_s)
                return ThroughputWindow(done, wall_s, time.thread_time() - before)

        contenders: dict[str, Callable[[], ThroughputWindow]] = {"edge": edge_window, "bare": bare_window}
        closed_loop(wires, plan.window_s / 4)
        for order in _rotations(list(contenders), plan.rounds):
            for name in order:
                windows[name].append(contenders[name]())
    return _compared(variant, connections, windows["edge"], windows["bare"])


def _compared(
    variant: str, connections: int, edge: Sequence[ThroughputWindow], bare: Sequence[ThroughputWindow]
) -> Throughput:
    def per_s(windows: Sequence[ThroughputWindow]) -> NDArray[np.float64]:
        return np.array([w.done / w.wall_s for w in windows])

    def per_cpu_s(windows: Sequence[ThroughputWindow]) -> NDArray[np.float64]:
        return np.array([w.done / w.cpu_s for w in windows])

    def core_share(windows: Sequence[ThroughputWindow]) -> float:
        return float(np.median([w.cpu_s / w.wall_s for w in windows]))

    ratios, cpu_ratios = per_s(edge) / per_s(bare), per_cpu_s(edge) / per_cpu_s(bare)
    return Throughput(
        variant=variant,
        connections=connections,
        edge_per_s=float(np.median(per_s(edge))),
        bare_per_s=float(np.median(per_s(bare))),
        ratio=float(np.median(ratios)),
        ratio_low=float(ratios.min()),
        ratio_high=float(ratios.max()),
        edge_per_cpu_s=float(np.median(per_cpu_s(edge))),
        bare_per_cpu_s=float(np.median(per_cpu_s(bare))),
        cpu_ratio=float(np.median(cpu_ratios)),
        cpu_ratio_low=float(cpu_ratios.min()),
        cpu_ratio_high=float(cpu_ratios.max()),
        edge_core_share=core_share(edge),
        bare_core_share=core_share(bare),
    )


def cpu_seconds(server: ServerProcess) -> float:
    """CPU time of all threads of a process so far, to a hundredth of a second (proc(5): utime and stime)."""
    # The name in field 2 may hold spaces, so count from the parenthesis that ends it.
    fields = Path(f"/proc/{server.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare_loop(model: Path, spec: InputSpec, image: bytes) -> Callable[[], int]:
    """Decode, crop, resize, infer and pick the class, with nothing around it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    encoded = np.frombuffer(image, np.uint8)
    cv2.setNumThreads(1)

    def run() -> int:
        pixels = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
        assert pixels is not None
        height, width = pixels.shape[:2]
        side = round(min(height, width) * spec.crop_fraction)
        top, left = (height - side) // 2, (width - side) // 2
        scaled = cv2.resize(
            pixels[top : top + side, left : left + side],
            (spec.width, spec.height),
            interpolation=INTERPOLATION[spec.interpolation],
        )
        return int(session.run(None, {name: scaled[None]})[0].argmax())

    return run


def _repeat(run: Callable[[], object], window_s: float) -> tuple[int, float]:
    """Run for a window: (runs, seconds they took)."""
    started = time.perf_counter()
    for done in itertools.count(1):
        run()
        elapsed = time.perf_counter() - started
        if elapsed >= window_s:
            return done, elapsed
    raise AssertionError("count never ends")


def closed_loop(wires: Sequence[WireClient], window_s: float) -> tuple[int, float]:
    """One request under way per connection, for a window: (answers, seconds until the last).

    Raises:
        WireError, OSError: the first that any connection met.
    """
    done: list[int] = []
    failures: list[Exception] = []

    def caller(wire: WireClient) -> None:
        try:
            done.append(_repeat(wire.exchange, window_s)[0])
        except Exception as error:  # noqa: BLE001 - carried to the thread that waits, and raised there
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(wire,)) for wire in wires]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(done), time.perf_counter() - started


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this thread, and the threads and processes it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ------------------------------------------------------------------------------------------------- footprint


def measure_footprint(variant: str, model: Path, image: bytes) -> Footprint:
    """Start twice: with no compiled bytecode and the model out of the page cache, then with both."""
    command = ("edge", "--port", "0", "--variant", variant)
    with tempfile.TemporaryDirectory() as bytecode:
        # PYTHONPYCACHEPREFIX keeps the machine's own bytecode, which others use, out of it.
        environment = {"PYTHONPYCACHEPREFIX": bytecode}
        _evict(model)
        started = time.perf_counter()
        with running(*command, env=environment):
            cold_s = time.perf_counter() - started
        started = time.perf_counter()
        with running(*command, env=environment) as node:
            warm_s = time.perf_counter() - started
            rss, pss = memory_mb(node)
            with WireClient(node.url, CLASSIFY, image) as wire:
                for _ in range(4 * WARM_UP):
                    wire.exchange()
            rss_after, pss_after = memory_mb(node)
    return Footprint(variant, cold_s, warm_s, rss, pss, rss_after, pss_after)


def memory_mb(server: ServerProcess) -> tuple[float, float]:
    """(resident, proportional) set size of a process, from /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{server.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    found = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines[1:])}
    return found["Rss"] * 1024 / 1e6, found["Pss"] * 1024 / 1e6


def _evict(path: Path) -> None:
    """Ask the kernel to drop a file from its page cache; pages mapped by a running process stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- inputs


def make_image(size: int = IMAGE_BYTES) -> bytes:
    """A 256-pixel JPEG of about `size` bytes, the usual size of a thumbnail photograph: blurred noise, seeded."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (256, 256, 3), np.uint8)
    pixels = cv2.GaussianBlur(noise, (0, 0), 1.0)
    coded = (cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, q])[1].tobytes() for q in range(30, 100, 2))
    return min(coded, key=lambda data: abs(len(data) - size))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show(report: OverheadReport, console: Console) -> None:
    """Print the report for a person."""
    console.print(f"{report.machine}; {report.image_bytes} byte JPEG; {report.rounds} rounds in rotated order")
    table = Table(box=None, header_style="bold", title="overhead: one connection, one request at a time")
    for title in ("server", "n", "P50 ms", "P99 ms", "P50 over Starlette's (range of rounds)"):
        table.add_column(title, justify="left" if title == "server" else "right", no_wrap=True)
    for row in report.overhead:
        ratio = f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
        table.add_row(row.server, str(row.n), f"{row.p50_ms:.3f}", f"{row.p99_ms:.3f}", ratio)
    console.print(table)
    console.print(f"of the node's time, decoding the image takes {report.node_decode_ms:.3f} ms (median)")
    if (t := report.throughput) is not None:
        console.print(
            f"throughput on one core, {t.variant}, {t.connections} connections: node {t.edge_per_s:.1f}/s, "
            f"bare loop {t.bare_per_s:.1f}/s, ratio {t.ratio:.3f} ({t.ratio_low:.3f}–{t.ratio_high:.3f}); "
            f"they had {t.edge_core_share:.0%} and {t.bare_core_share:.0%} of the core"
        )
        console.print(
            f"per CPU second: node {t.edge_per_cpu_s:.1f}, bare loop {t.bare_per_cpu_s:.1f}, "
            f"ratio {t.cpu_ratio:.3f} ({t.cpu_ratio_low:.3f}–{t.cpu_ratio_high:.3f})"
        )
    if (f := report.footprint) is not None:
        console.print(
            f"footprint, {f.variant}: RSS {f.rss_mb:.0f} MB, PSS {f.pss_mb:.0f} MB when ready; "
            f"{f.rss_after_load_mb:.0f} and {f.pss_after_load_mb:.0f} MB after {4 * WARM_UP} images; "
            f"ready after {f.cold_start_s:.2f} s (no bytecode, model evicted), then {f.warm_start_s:.2f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
