"""Two paths, one dies and returns: answers lost, time to notice, latency before, during and after.

    python -m tests.bench.transport.multipath [--every-ms 30] [--seconds 12] [--link rate=20mbit,delay=20ms,loss=5%]

Real sockets on loopback, two relays with the same link. A 256-pixel image is sent at fixed intervals, open loop.
After a third of the time the first path (QUIC's own) goes silent, after two thirds it returns; then the same for the
second path. The exit status is 1 if an image got no response.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import cv2
import numpy as np
import uvloop

from hawkvision.core.types import Pixels
from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.coding.image_coding import Coded, Plan, encode
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.status import Status
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.peers import connected, serving

MOMENT_S = 0.5
"""How long after the cut counts as the event."""


@dataclass
class MultipathRun:
    """One path's death and return."""

    begun: float = field(default_factory=time.monotonic)
    cut_at: float = 0.0
    noticed_at: float | None = None
    mended_at: float = 0.0
    used_again_at: float | None = None
    answers: list[tuple[float, float]] = field(default_factory=list)
    """(when asked, milliseconds until the answer)."""
    unanswered: int = 0


def pixels() -> Pixels:
    """256 by 256 of about a photograph's detail."""
    rng = np.random.default_rng(0)
    smooth = cv2.resize(rng.integers(0, 255, (24, 24, 3), np.uint8), (256, 256), interpolation=cv2.INTER_CUBIC)
    made: Pixels = np.clip(smooth + rng.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
    return made


def image() -> Coded:
    """Quality 80, parity of a half."""
    return encode(pixels(), Plan(80, 0.5), fragment_room(b""))


async def ask(run: MultipathRun, client: ClientConnection, coded: Coded) -> None:
    at = time.monotonic()
    try:
        status, _ = await client.ask(b"quality=fast", coded, timeout_s=10.0)
    except TimeoutError:
        status = Status.EXPIRED
    if status is Status.OK:
        run.answers.append((at, (time.monotonic() - at) * 1e3))
    else:
        run.unanswered += 1


async def watch(run: MultipathRun, client: ClientConnection, number: int) -> None:
    """Note when the path is found dead, and when it carries fragments again."""
    path = client.sender.channel.paths[number]
    while run.used_again_at is None:
        now = time.monotonic()
        if run.cut_at and run.noticed_at is None and path.dead(now):
            run.noticed_at = now
        if run.mended_at and not path.dead(now):
            run.used_again_at = now
        await asyncio.sleep(0.001)


async def one(client: ClientConnection, relay: UdpRelay, number: int, every_s: float, seconds: float) -> MultipathRun:
    """Ask; cut at a third; mend at two thirds."""
    run, coded = MultipathRun(), image()
    watching = asyncio.create_task(watch(run, client, number))
    asked = list[asyncio.Task[None]]()
    while (past := time.monotonic() - run.begun) < seconds:
        if not run.cut_at and past > seconds / 3:
            relay.blackhole(True)
            run.cut_at = time.monotonic()
        if not run.mended_at and past > 2 * seconds / 3:
            relay.blackhole(False)
            run.mended_at = time.monotonic()
        asked.append(asyncio.create_task(ask(run, client, coded)))
        await asyncio.sleep(every_s)
    await asyncio.gather(*asked)
    watching.cancel()
    return run


def reported(run: MultipathRun, number: int, rtt_s: float) -> int:
    """Print a run; how many were not answered."""
    spans = {
        "before the cut": (run.begun, run.cut_at),
        f"within {MOMENT_S:g} s of it": (run.cut_at, run.cut_at + MOMENT_S),
        "on one path": (run.cut_at + MOMENT_S, run.mended_at),
        "after the return": (run.mended_at, float("inf")),
    }
    noticed = "never" if run.noticed_at is None else f"{(run.noticed_at - run.cut_at) / rtt_s:.1f} round trips"
    again = "never" if run.used_again_at is None else f"{(run.used_again_at - run.mended_at) * 1e3:.0f} ms"
    print(f"path {number}: found dead after {noticed}, alive again {again} after its return")
    for name, (begin, end) in spans.items():
        took = [ms for at, ms in run.answers if begin <= at < end]
        p50, p99, most = np.percentile(took, [50, 99, 100]) if took else (0.0, 0.0, 0.0)
        print(f"  {name:<20} {len(took):>5} answers   P50 {p50:6.1f}   P99 {p99:6.1f}   longest {most:6.1f} ms")
    print(f"  {run.unanswered} not answered")
    return run.unanswered


async def bench(link: LinkSpec, every_s: float, seconds: float) -> int:
    """Both paths, one after the other."""
    lost = 0
    async with (
        serving() as server,
        UdpRelay(("127.0.0.1", server.port), link) as first,
        UdpRelay(("127.0.0.1", server.port), link, listen=("127.0.0.2", first.address[1])) as second,
        connected(first.address[1], routes=[UdpRoute(None, "127.0.0.1"), UdpRoute(None, "127.0.0.2")]) as client,
    ):
        for number, relay in enumerate((first, second)):
            run = await one(client, relay, number, every_s, seconds)
            lost += reported(run, number, client.rtt_s() or 0.001)
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--link", default="rate=20mbit,delay=20ms,loss=5%", help="of each path, both ways")
    parser.add_argument("--every-ms", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=12.0, help="for each path")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lost = runner.run(bench(LinkSpec.parse(options.link), options.every_ms / 1e3, options.seconds))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
