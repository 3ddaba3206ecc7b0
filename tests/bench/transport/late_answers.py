"""The cost of closing late HTTP exchanges: images over HTTP with deadlines, with and without closing.

    python -m tests.bench.transport.late_answers [--links lte-drive,wifi-busy] [--deadlines-ms 60,100,140] [--seconds
    60]   (root)

Two links with the same trace at the same time. Over one, the node's escalation lets late answers arrive; over the other
it closes their connections. The server answers after 12 ms. Images of 24 kB, a Poisson process of 2.5 a second; the
deadline is what the escalation is given, after the edge's own work.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
import numpy as np
from aiohttp import web

from edge.escalation.http_transport import DRAIN_S, HttpTransport
from edge.escalation.transport import ReplyLate, TransportBroken
from hawkvision.core.escalation_api import INFER_PATH, EscalationRequest
from hawkvision.core.trace_context import start_trace
from loadgen.network.link_spec import LinkSpec
from loadgen.network.profiles import LinkProfile, load_profile
from loadgen.network.tun_link import TunLink

PORT: Final = 8090
SERVICE_S: Final = 0.012
IMAGE: Final = bytes(24_000)
ARMS: Final = ("breaks off", "lets come")


class CallerJob(msgspec.Struct, frozen=True):
    """What one end of a link does."""

    host: str
    arm: str
    deadline_ms: float = 0.0
    seconds: float = 0.0
    rate: float = 0.0


class DeadlineOutcome(msgspec.Struct, frozen=True):
    """What came of it."""

    asked: int
    in_time: int
    connections: int


async def serve(job: CallerJob) -> None:
    """Answer late or not, and count connections."""
    peers: set[object] = set()

    async def infer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        await request.read()
        await asyncio.sleep(SERVICE_S)
        return web.Response(body=bytes(300))

    async def connections(_: web.Request) -> web.Response:
        return web.json_response({"connections": len(peers)})

    app = web.Application(client_max_size=2 * len(IMAGE))
    app.router.add_post(INFER_PATH, infer)
    app.router.add_get("/connections", connections)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, job.host, PORT).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def ask(job: CallerJob) -> DeadlineOutcome:
    """Ask as the job says; the same moments for the same job."""
    escalation = HttpTransport(f"http://{job.host}:{PORT}", None, 32, drain_s=DRAIN_S if job.arm == ARMS[1] else 0.0)
    gaps = np.random.default_rng(1).exponential(1.0 / job.rate, round(2 * job.rate * job.seconds)).cumsum()
    due = gaps[gaps < job.seconds].tolist()
    loop, request = asyncio.get_running_loop(), EscalationRequest(deadline_ms=job.deadline_ms)
    started = loop.time()

    async def one(at: float) -> bool:
        await asyncio.sleep(max(0.0, started + at - loop.time()))
        try:
            await escalation.send(IMAGE, request, start_trace(), job.deadline_ms * 1e-3, lossless=False)
        except (ReplyLate, TransportBroken):
            return False
        return True

    in_time = await asyncio.gather(*(one(at) for at in due))
    async with escalation._session.get(f"{escalation.url}/connections") as response:
        connections = (await response.json())["connections"]
    await escalation.close()
    return DeadlineOutcome(len(due), sum(in_time), connections)


def run_arm(link: TunLink, profile: LinkProfile, job: CallerJob) -> DeadlineOutcome:
    """One arm over one link, from a calm beginning."""
    module = [
        sys.executable,
        "-m",
        "tests.bench.transport.late_answers",
        "--job",
        msgspec.json.encode(job).decode(),
        "--end",
    ]
    calm_up, calm_down = profile.calm()
    link.set(up=calm_up, down=calm_down)
    server = link.popen("server", [*module, "server"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise SystemExit("the server did not start")
    up, down = profile.specs()
    link.set(up=up, down=down)
    done = link.run_in("client", [*module, "client"], timeout_s=job.seconds + 120.0)
    server.kill()
    server.wait()
    if done.returncode:
        raise SystemExit(f"the client failed:\n{done.stderr}")
    return msgspec.json.decode(done.stdout, type=DeadlineOutcome)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or be one end of a link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="lte-drive,wifi-busy")
    parser.add_argument("--deadlines-ms", default="60,100,140")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.5)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--end", choices=("server", "client"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.job is not None:
        job = msgspec.json.decode(given.job, type=CallerJob)
        if given.end == "server":
            asyncio.run(serve(job))
        else:
            print(msgspec.json.encode(asyncio.run(ask(job))).decode())
        return 0
    print(f"{'link':12}{'deadline':>10}" + "".join(f"{arm + ': in time':>24}{'connections':>13}" for arm in ARMS))
    perfect = LinkSpec()
    with TunLink(perfect) as one, TunLink(perfect) as other, ThreadPoolExecutor(2) as threads:
        for name in given.links.split(","):
            profile = load_profile(name)
            for deadline_ms in map(float, given.deadlines_ms.split(",")):
                running = [
                    threads.submit(
                        run_arm,
                        link,
                        profile,
                        CallerJob(link.server_address, arm, deadline_ms, given.seconds, given.rate),
                    )
                    for link, arm in zip((one, other), ARMS, strict=True)
                ]
                seen = [each.result() for each in running]
                cells = "".join(f"{each.in_time / each.asked:24.1%}{each.connections:13}" for each in seen)
                print(f"{name:12}{deadline_ms:7g} ms{cells}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
