"""What large images cost a node and its callers, with its bounds and without: `python -m
tests.bench.inference.pixel_cost`.

Each attack goes to a node of its own, whose bounds are the default ones ("bounded"), or so wide that they hold nothing
back ("wide"), while another caller sends small images one after the other. With `--before DIR`, a checkout of an
earlier version serves as well. Reported are the node's processor seconds, how far its resident memory rose and how much
of that stayed, and the other caller's longest wait. Only against nodes that this program starts itself, on loopback.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hawkvision.system.child_server import ServerProcess, running
from tests.images import encoded, flat_png

TIMEOUT_S: Final = 600.0
WIDE: Final = (
    "--max-pixels-whole", "50000000", "--decode-limit-s", "3600", "--request-memory-bytes", str(2 << 30)
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """Requests that are sent at once; of each, the path, the body and its headers."""

    title: str
    requests: Callable[[], list[tuple[str, bytes, dict[str, str]]]]


@dataclass(frozen=True)
class AttackOutcome:
    """What came of an attack."""

    statuses: Sequence[int]
    cpu_s: float
    peak_mb: float
    kept_mb: float
    others: int
    """Small images that were answered meanwhile."""
    longest_ms: float


def alone(body: bytes) -> tuple[str, bytes, dict[str, str]]:
    """A request of one image."""
    return "/v1/classify?quality=fast", body, {}


def together(bodies: Sequence[bytes]) -> tuple[str, bytes, dict[str, str]]:
    """A request of several."""
    data = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    tensor = {"name": "image", "shape": [len(bodies), 1], "datatype": "BYTES"}
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(data)}}], "parameters": {"quality": "fast"}}
    text = json.dumps(head).encode()
    return "/v2/models/imagenet/infer", text + data, {"Inference-Header-Content-Length": str(len(text))}


ATTACKS: Final = (
    Attack("1 PNG of 48 MP", lambda: [alone(flat_png(6900, 6900))]),
    Attack("32 PNGs of 48 MP in one request", lambda: [together([flat_png(6900, 6900)] * 32)]),
    Attack("32 PNGs of 16 MP in one request", lambda: [together([flat_png(4000, 4000)] * 32)]),
    Attack("16 PNGs of 16 MP in one request", lambda: [together([flat_png(4000, 4000)] * 16)]),
    Attack("24 requests of a PNG of 16 MP", lambda: [alone(flat_png(4000, 4000))] * 24),
    Attack("24 of 8 MP, 16 bits with alpha", lambda: [alone(flat_png(2880, 2880, 6, 16))] * 24),
)


def send(port: int, path: str, body: bytes, headers: dict[str, str]) -> int:
    """The status of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def attacked(server: ServerProcess, attack: Attack) -> AttackOutcome:
    """What an attack does to a node."""
    requests = attack.requests()
    small = alone(encoded(height=375, width=500))
    for _ in range(20):
        send(server.port, *small)
    before, cpu_before = memory(server.pid, "VmRSS"), cpu_s(server.pid)
    waits: list[float] = []
    with ThreadPoolExecutor(len(requests)) as threads:
        sent: list[Future[int]] = [threads.submit(send, server.port, *request) for request in requests]
        while not waits or not all(each.done() for each in sent):
            begun = time.perf_counter()
            assert send(server.port, *small) == 200
            waits.append(time.perf_counter() - begun)
        statuses = [each.result() for each in sent]
    return AttackOutcome(
        statuses,
        cpu_s(server.pid) - cpu_before,
        (memory(server.pid, "VmHWM") - before) / 1e6,
        (memory(server.pid, "VmRSS") - before) / 1e6,
        len(waits),
        max(waits) * 1e3,
    )


def memory(pid: int, name: str) -> int:
    """Bytes, by proc(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def cpu_s(pid: int) -> float:
    """Of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str]) -> int:
    """Print a row for each attack and node."""
    parser = argparse.ArgumentParser(prog="tests.bench.inference.pixel_cost", description=__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an earlier version")
    parser.add_argument("--backend", default="noop", help="of the nodes; default: noop")
    asked = parser.parse_args(argv)
    nodes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    if asked.before is not None:
        path = str(asked.before.resolve())
        nodes["before"] = (("env", "-C", path, f"PYTHONPATH={path}"), ())
    nodes["wide"], nodes["bounded"] = ((), WIDE), ((), ())
    print(f"{'attack':34} {'node':8} {'answers':>14} {'cpu s':>7} {'peak MB':>8} {'kept MB':>8} {'others':>14}")
    for attack in ATTACKS:
        for title, (prefix, more) in nodes.items():
            with running("edge", "--port", "0", "--backend", asked.backend, *more, prefix=prefix) as node:
                seen = attacked(node, attack)
            counts = " ".join(f"{seen.statuses.count(each)}x{each}" for each in sorted(set(seen.statuses)))
            print(
                f"{attack.title:34} {title:8} {counts:>14} {seen.cpu_s:7.2f} {seen.peak_mb:8.0f} {seen.kept_mb:8.0f} "
                f"{seen.others:5} <= {seen.longest_ms:6.0f} ms",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
