"""`python -m tests.bench.servers.overhead.node`: what an edge node costs, beside the least that could do the same work.

- Overhead: a node on the no-op backend, which receives, decodes and routes an image but runs no model, against a bare
  Starlette echo that only receives it. One kept-alive connection, one request at a time.
- Throughput: a node with a real model pinned to one core, its load on another, against a loop of decode, resize and
  ONNX Runtime on that same core, one image at a time. Closed loop with a few connections: where images wait, the
  node runs the model on several at once, which the loop, whose images do not wait, cannot.
- Footprint: memory with one model loaded, and the time from starting the process to `ready`.

Rounds rotate the order, so that drift of the machine falls on all alike; ratios are per round, with their range.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import HawkVisionError, NotReady
from hawkvision.models.manifest import InputSpec, artifact_path, cache_dir, load_manifest, models_dir
from hawkvision.system.child_server import ServerProcess, running
from hawkvision.system.onnx_runtime import ort
from loadgen.commands.options import origin

TASK: Final = "imagenet"
VARIANT: Final = "efficientnet_lite0_int8"
"""What edge nodes look with first, and what they are compared with other servers by (`tests.bench.servers`)."""
CONNECTIONS: Final = 8
"""Likewise."""
IMAGE_BYTES: Final = 25_000
CLASSIFY: Final = "/v1/classify"
ECHO: Final = "Starlette echo"
NODE: Final = "edge node, no-op"
INTERPOLATION: Final = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC, "area": cv2.INTER_AREA}
QUICK: Final = (2, 100, 0.5)
FULL: Final = (8, 500, 3.0)
"""Rounds; requests per round and server for overhead; seconds per round and contender for throughput. Quick: some
seconds in all; else about 90 s, on two shared cores."""
WARM_UP: Final = 50
TIMEOUT_S: Final = 10.0
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

Report: TypeAlias = dict[str, Any]
Window: TypeAlias = tuple[int, float, float]
"""Runs, and the wall and CPU seconds that they took."""


class Wire:
    """The lightest HTTP client that is still one: a kept-alive blocking socket that sends one POST again and again.

    It knows just enough of HTTP/1.1 to find the end of a reply: a status line, a Content-Length, a body.
    """

    def __init__(self, url: str, path: str, body: bytes) -> None:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: image/jpeg\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = self._socket.close

    def exchange(self) -> bytes:
        """Send the request and give the body of the reply.

        Raises:
            NotReady: for any status but 200, and for a reply that breaks off or has no Content-Length.
        """
        self._socket.sendall(self._request)
        received, end = b"", -1
        while end < 0 and (piece := self._socket.recv(65536)):
            received += piece
            end = received.find(b"\r\n\r\n")
        length = _LENGTH.search(received, 0, end + 2)
        whole = end + 4 + int(length[1]) if length else 0
        while len(received) < whole and (piece := self._socket.recv(65536)):
            received += piece
        if not 0 < whole <= len(received) or not received.startswith(b"HTTP/1.1 200"):
            raise NotReady(received[:300].decode(errors="replace"))
        return received[end + 4 : whole]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; everything started is stopped, also on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.servers.overhead.node", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter, and less exact")
    parser.add_argument("--variant", default=VARIANT, help="for throughput and footprint; default: %(default)s")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="for throughput; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(argv)
    rounds, requests, window_s = QUICK if given.quick else FULL
    console = Console() if sys.stdout.isatty() else Console(width=120)
    image = make_image()
    report: Report = {"origin": origin(0), "image_bytes": len(image), "rounds": rounds}
    try:
        report |= measure_overhead(rounds, requests, image)
        model = artifact_path(cache_dir(), TASK, given.variant)
        if model.is_file():
            report["footprint"] = measure_footprint(given.variant, model, image)
            if len(os.sched_getaffinity(0)) > 1:
                report["throughput"] = measure_throughput(rounds, window_s, given.variant, image, given.connections)
        else:
            console.print(f"{model} is not built (run `hawkvision models build`): overhead only")
    except (HawkVisionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(report, console)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


def spread(ratios: Sequence[float] | NDArray[np.float64]) -> tuple[float, float, float]:
    """The median of rounds, the least and the most."""
    return float(np.median(ratios)), float(min(ratios)), float(max(ratios))


def rotations(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The names once for each round, every time another first."""
    for start in range(rounds):
        yield from (names[(start + place) % len(names)] for place in range(len(names)))


# -------------------------------------------------------------------------------------------------- overhead


def measure_overhead(rounds: int, requests: int, image: bytes) -> Report:
    """Both servers' waiting times in ms, and how many of the node's median are decoding."""
    with ExitStack() as stack:
        echo = stack.enter_context(running("tests.bench.servers.overhead.echo"))
        node = stack.enter_context(running("edge", "--port", "0", "--backend", "noop"))
        wires = {
            ECHO: stack.enter_context(closing(Wire(echo.url, "/echo", image))),
            NODE: stack.enter_context(closing(Wire(node.url, CLASSIFY, image))),
        }
        answers = [msgspec.json.decode(wires[NODE].exchange()) for _ in range(WARM_UP)]
        for wire in wires.values():
            _waits(wire, WARM_UP)
        waits: dict[str, list[NDArray[np.float64]]] = {name: [] for name in wires}
        for name in rotations(list(wires), rounds):
            waits[name].append(_waits(wires[name], requests))
    base = [np.median(found) for found in waits[ECHO]]
    rows = []
    for name, found in waits.items():
        p50, p99 = np.percentile(np.concatenate(found), (50, 99)).tolist()
        ratio = spread([float(np.median(each) / other) for each, other in zip(found, base, strict=True)])
        rows.append({"server": name, "n": rounds * requests, "p50_ms": p50, "p99_ms": p99, "ratio": ratio})
    return {"overhead": rows, "node_decode_ms": float(np.median([each["timing_ms"]["decode"] for each in answers]))}


def _waits(wire: Wire, requests: int) -> NDArray[np.float64]:
    """What each of so many requests in a row waited, in ms."""
    waits = np.empty(requests)
    for i in range(requests):
        started = time.perf_counter_ns()
        wire.exchange()
        waits[i] = time.perf_counter_ns() - started
    return waits / 1e6


# ------------------------------------------------------------------------------------------------ throughput


def measure_throughput(rounds: int, window_s: float, variant: str, image: bytes, connections: int) -> Report:
    """Images a second on one core, by node and by bare loop.

    Rates hold for a core that nobody else uses; `core_share` tells whether that was so. Where it was not, a node with
    its several threads is given more of the core than a loop with one, and only the figures per CPU second compare.
    """
    cores = sorted(os.sched_getaffinity(0))
    spec = load_manifest(TASK, models_dir()).variant(variant).input
    with ExitStack() as stack:
        with pinned(cores[0]):
            run_bare = bare_loop(artifact_path(cache_dir(), TASK, variant), spec, image)
            # It inherits the core, and so counts one worker.
            node = stack.enter_context(running("edge", "--port", "0", "--variant", variant))
        wires = [stack.enter_context(closing(Wire(node.url, CLASSIFY, image))) for _ in range(connections)]
        threads = stack.enter_context(ThreadPoolExecutor(connections))

        def edge_window() -> Window:
            with pinned(cores[1]):
                before, started = cpu_seconds(node), time.perf_counter()
                done = sum(threads.map(lambda wire: _repeat(wire.exchange, window_s), wires))
                return done, time.perf_counter() - started, cpu_seconds(node) - before

        def bare_window() -> Window:
            with pinned(cores[0]):
                before, started = time.thread_time(), time.perf_counter()
                return _repeat(run_bare, window_s), time.perf_counter() - started, time.thread_time() - before

        contenders: dict[str, Callable[[], Window]] = {"edge": edge_window, "bare": bare_window}
        edge_window()
        windows: dict[str, list[Window]] = {name: [] for name in contenders}
        for name in rotations(list(contenders), rounds):
            windows[name].append(contenders[name]())
    done, wall_s, cpu_s = np.array([windows["edge"], windows["bare"]]).transpose(2, 0, 1)
    return {
        "variant": variant,
        "connections": connections,
        "per_s": np.median(done / wall_s, axis=1).tolist(),
        "ratio": spread(np.divide(*(done / wall_s))),
        "per_cpu_s": np.median(done / cpu_s, axis=1).tolist(),
        "cpu_ratio": spread(np.divide(*(done / cpu_s))),
        "core_share": np.median(cpu_s / wall_s, axis=1).tolist(),
    }


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


def _repeat(run: Callable[[], object], window_s: float) -> int:
    """How often it runs in a window."""
    ends = time.perf_counter() + window_s
    for done in itertools.count(1):
        run()
        if time.perf_counter() >= ends:
            return done
    raise AssertionError("count never ends")


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


def measure_footprint(variant: str, model: Path, image: bytes) -> Report:
    """Start twice: with no compiled bytecode and the model out of the page cache, then with both. MB are 10^6 bytes."""
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
            ready_mb = memory_mb(node)
            with closing(Wire(node.url, CLASSIFY, image)) as wire:
                for _ in range(4 * WARM_UP):
                    wire.exchange()
            loaded_mb = memory_mb(node)
    return {"variant": variant, "start_s": (cold_s, warm_s), "ready_mb": ready_mb, "loaded_mb": loaded_mb}


def memory_mb(server: ServerProcess) -> tuple[float, float]:
    """(resident, proportional) set size of a process; the latter counts pages that are shared with others by share."""
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


def show(report: Report, console: Console) -> None:
    """Print the report for a person."""
    machine = report["origin"]
    console.print(f"{machine.cpu}, {machine.cores} cores; {report['image_bytes']} byte JPEG; {report['rounds']} rounds")
    table = Table(box=None, header_style="bold", title="overhead: one connection, one request at a time")
    for title in ("server", "n", "P50 ms", "P99 ms", "P50 over Starlette's (range of rounds)"):
        table.add_column(title, justify="left" if title == "server" else "right", no_wrap=True)
    for row in report["overhead"]:
        found = [f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}", "{:.2f} ({:.2f}–{:.2f})".format(*row["ratio"])]
        table.add_row(row["server"], str(row["n"]), *found)
    console.print(table)
    console.print(f"of the node's time, decoding the image takes {report['node_decode_ms']:.3f} ms (median)")
    if (t := report.get("throughput")) is not None:
        console.print(
            "throughput on one core, {variant}, {connections} connections: node {per_s[0]:.1f}/s, bare loop "
            "{per_s[1]:.1f}/s, ratio {ratio[0]:.3f} ({ratio[1]:.3f}–{ratio[2]:.3f}); they had {core_share[0]:.0%} and "
            "{core_share[1]:.0%} of the core\nper CPU second: node {per_cpu_s[0]:.1f}, bare loop {per_cpu_s[1]:.1f}, "
            "ratio {cpu_ratio[0]:.3f} ({cpu_ratio[1]:.3f}–{cpu_ratio[2]:.3f})".format(**t)
        )
    if (f := report.get("footprint")) is not None:
        console.print(
            "footprint, {variant}: RSS {ready_mb[0]:.0f} MB, PSS {ready_mb[1]:.0f} MB when ready; {loaded_mb[0]:.0f} "
            "and {loaded_mb[1]:.0f} MB after {images} images; ready after {start_s[0]:.2f} s (no bytecode, model "
            "evicted), then {start_s[1]:.2f} s".format(images=4 * WARM_UP, **f)
        )


if __name__ == "__main__":
    sys.exit(main())
