"""`python -m tests.bench.transport.datagram_against_tcp`: a running node over a bad link, by datagrams and by kernel
TCP, side by side.

An edge node runs in one network namespace, the caller in another; between them is an emulated link
(`loadgen.network.tun_link`) for real kernel TCP and UDP. For each loss rate, in rotating order and several rounds, it
measures the datagram transport, and HTTP over one warm, kept-alive connection with each congestion control. One caller
sends one image after another with a short pause. Latency is the caller's wait and includes preparing the image. For
HTTP the image is a plain JPEG of the quality that the datagram sender uses without loss, so TCP carries fewer bytes. A
request that takes longer than `--limit-s` counts with that time, which favours TCP.

Needs root, as `loadgen.network.tun_link` says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import cv2
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import HawkVisionError
from hawkvision.models.datasets import read_images
from hawkvision.models.manifest import load_labels, load_manifest, models_dir
from hawkvision.transport.coding.rate_fec_control import FINE
from loadgen.network.link_spec import LinkSpec
from loadgen.network.tun_link import TunLink

PORT: Final = 8080
KEY: Final = "only-for-this-bench"
WARM_UP: Final = 20
WITHIN_MS: Final = (60.0, 100.0, 200.0)
PERCENTILES: Final = (50.0, 90.0, 99.0)
DATAGRAM: Final = "datagram"


class TimedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One image: how long the caller waited, and whether the answer was right; unanswered ones are neither."""

    latency_ms: float
    right: bool
    degraded: bool = False
    received: float = 1.0


class CallerJob(msgspec.Struct, frozen=True):
    """What a caller in the client's namespace does."""

    transport: str
    host: str
    images: str
    """A folder of `NUMBER-LABEL.jpg`."""
    count: int
    seed: int
    pause_s: float
    limit_s: float
    phase_s: float
    deadline_ms: float
    paths: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------- the caller


def call(job: CallerJob) -> list[TimedAnswer]:
    """Ask about images, one after another."""
    chosen = _chosen(job)
    if job.transport == DATAGRAM:
        return asyncio.run(_call_datagram(job, chosen))
    return _call_http(job, chosen)


def _chosen(job: CallerJob) -> list[tuple[bytes, int]]:
    files = sorted(Path(job.images).iterdir())
    rng = np.random.default_rng(job.seed)
    picked = (files[i] for i in rng.choice(len(files), WARM_UP + job.count, replace=len(files) < WARM_UP + job.count))
    return [(file.read_bytes(), int(file.stem.split("-")[1])) for file in picked]


async def _call_datagram(job: CallerJob, chosen: Sequence[tuple[bytes, int]]) -> list[TimedAnswer]:
    asked: list[TimedAnswer] = []
    ends = time.monotonic() + job.phase_s
    async with AsyncClient(
        f"http://{job.host}:{PORT}",
        api_key=KEY,
        transport=DATAGRAM,
        paths=job.paths,
        timeout_s=job.limit_s,
        late_s=job.limit_s,
    ) as client:
        for number, (body, label) in enumerate(chosen):
            started = time.monotonic()
            try:
                answer = await client.classify(body, quality="fast", deadline_ms=job.deadline_ms)
                right, degraded, received = answer.index == label, answer.degraded, answer.received_fraction
            except HawkVisionError as error:
                print(f"datagram: {error}", file=sys.stderr)
                right, degraded, received = False, True, 0.0
            if number >= WARM_UP:
                asked.append(TimedAnswer((time.monotonic() - started) * 1e3, right, degraded, received))
                if time.monotonic() > ends:
                    break
            await asyncio.sleep(job.pause_s)
    return asked


def _call_http(job: CallerJob, chosen: Sequence[tuple[bytes, int]]) -> list[TimedAnswer]:
    asked: list[TimedAnswer] = []
    plain = [(_plain(body), label) for body, label in chosen]
    ends = time.monotonic() + job.phase_s
    connection = _connect(job)
    path = f"/v1/classify?quality=fast&deadline_ms={job.deadline_ms}"
    for number, (body, label) in enumerate(plain):
        started = time.monotonic()
        right = False
        try:
            connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
            answer = json.loads(connection.getresponse().read())
            right = answer["index"] == label
        except (OSError, http.client.HTTPException):
            connection.close()
            connection = _connect(job)
        if number >= WARM_UP:
            asked.append(TimedAnswer((time.monotonic() - started) * 1e3, right))
            if time.monotonic() > ends:
                break
        time.sleep(job.pause_s)
    return asked


def _connect(job: CallerJob) -> http.client.HTTPConnection:
    """A connection under the congestion control that is asked for, without Nagle's delay."""
    for attempt in range(5):
        connection = http.client.HTTPConnection(job.host, PORT, timeout=job.limit_s)
        try:
            connection.connect()
        except OSError:
            if attempt == 4:
                raise
            continue
        break
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, job.transport.encode())
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _plain(body: bytes) -> bytes:
    pixels = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    _, encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, FINE, cv2.IMWRITE_JPEG_OPTIMIZE, 1])
    return encoded.tobytes()


# ------------------------------------------------------------------------------------------- the bench


@contextlib.contextmanager
def running_node(link: TunLink, extra: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """An edge node without a datacenter in the server's namespace, ready."""
    command = [
        sys.executable, "-m", "edge", "--host", link.server_address, "--port", str(PORT), "--datagram-port", "0",
        "--api-key", KEY, "--allow-plain-http", *extra,
    ]  # fmt: skip
    node = subprocess.Popen(link.command("server", command), stdout=subprocess.PIPE)
    assert node.stdout is not None
    for line in node.stdout:
        if line.startswith(b"ready"):
            break
    else:
        raise SystemExit("the node did not start")
    yield node
    node.terminate()
    node.wait(timeout=30)


def run_caller(link: TunLink, job: CallerJob) -> list[TimedAnswer]:
    """One phase, in the client's namespace."""
    words = [sys.executable, "-m", f"{__package__}.datagram_against_tcp", "--job", msgspec.json.encode(job).decode()]
    done = subprocess.run(
        link.command("client", words),
        capture_output=True, check=False, text=True, timeout=job.phase_s + job.limit_s + 120,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the caller failed:\n{done.stderr}")
    sys.stderr.write(done.stderr)
    return msgspec.json.decode(done.stdout, type=list[TimedAnswer])


def spread_out(data: Path, folder: Path, limit: int) -> None:
    """The images as files, which callers share."""
    images = read_images(data, load_labels(load_manifest("imagenet", models_dir()), models_dir()))
    for number, (body, label) in enumerate(zip(images.bodies[:limit], images.labels, strict=False)):
        (folder / f"{number}-{label}.jpg").write_bytes(body)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench, or one caller of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.transport.datagram_against_tcp", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data/imagenet_eval.npz"))
    parser.add_argument("--loss", default="0,0.01,0.02,0.05,0.1,0.2", help="shares of packets, 0 to 1")
    parser.add_argument("--congestion", default="cubic,bbr")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--outage-ms", type=float, default=0.0, help="lose in outages of this mean length")
    parser.add_argument("--images", type=int, default=300, help="per phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.03)
    parser.add_argument("--limit-s", type=float, default=30.0)
    parser.add_argument("--phase-s", type=float, default=45.0)
    parser.add_argument("--deadline-ms", type=float, default=200.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.job:
        sys.stdout.write(msgspec.json.encode(call(msgspec.json.decode(options.job, type=CallerJob))).decode())
        return 0
    transports = [DATAGRAM, *options.congestion.split(",")]
    results: dict[str, dict[str, list[TimedAnswer]]] = {}
    with tempfile.TemporaryDirectory() as folder, TunLink(_spec(options, 0.0, 1)) as link, running_node(link):
        spread_out(options.data, Path(folder), 1360)
        for loss in options.loss.split(","):
            found = results[loss] = {transport: [] for transport in transports}
            for round_ in range(options.rounds):
                for turn in range(len(transports)):
                    transport = transports[(turn + round_) % len(transports)]
                    spec = _spec(options, float(loss), 100 * round_ + turn)
                    link.set(up=spec, down=spec)
                    job = CallerJob(
                        transport, link.server_address, folder, options.images, round_, options.pause_s,
                        options.limit_s, options.phase_s, options.deadline_ms,
                    )  # fmt: skip
                    found[transport] += run_caller(link, job)
            _show(loss, found)
    if options.json:
        options.json.write_bytes(msgspec.json.encode({"argv": sys.argv[1:], "results": results}))
    return 0


def _spec(options: argparse.Namespace, loss: float, seed: int) -> LinkSpec:
    text = f"rate={options.rate},delay={options.delay_ms}ms,loss={loss * 100}%,queue=100kB,seed={seed}"
    if loss and options.outage_ms:
        text += f",outage={options.outage_ms}ms"
    return LinkSpec.parse(text)


def _show(loss: str, found: dict[str, list[TimedAnswer]]) -> None:
    table = Table(title=f"loss {float(loss):.0%}, load {os.getloadavg()[0]:.1f}")
    for column in ("transport", "n", *(f"P{p:g} ms" for p in PERCENTILES), "max", "P50, P99 over lossy"):
        table.add_column(column, justify="right")
    for within in WITHIN_MS:
        table.add_column(f"right ≤ {within:g} ms", justify="right")
    table.add_column("right", justify="right")
    table.add_column("degraded", justify="right")
    base = np.percentile([a.latency_ms for a in found[DATAGRAM]], PERCENTILES)
    for transport, asked in found.items():
        latency = np.array([a.latency_ms for a in asked])
        right = np.array([a.right for a in asked])
        at = np.percentile(latency, PERCENTILES)
        table.add_row(
            transport, str(len(asked)), *(f"{v:.1f}" for v in at), f"{latency.max():.0f}",
            f"{at[0] / base[0]:.2f}, {at[2] / base[2]:.1f}",
            *(f"{(right & (latency <= within)).mean():.1%}" for within in WITHIN_MS),
            f"{right.mean():.1%}", f"{np.mean([a.degraded for a in asked]):.1%}",
        )  # fmt: skip
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
