"""Does the datagram transport lose an answer, or leak, over hundreds of thousands of images with random faults?

    python -m tests.bench.robustness.datagram_soak --images 200000 [--minutes 30] [--clients 8] [--seed 1]

One server and some clients on loopback, each client behind its own relay. About every second each relay gets another
state: loss up to 40 %, bursts, outages of up to a second, reordering, duplicates. Meanwhile strangers send garbage and
copies of genuine datagrams, clients disconnect and return, and callers cancel. Images are small, because only their
number finds leaks.

The exit status is 1 if an image that was not cancelled got no response or another image's, if a handler ran twice for
one request, if an error was logged, or if sessions, tasks, bytes, or memory beyond `GROWTH_MB` are left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import socket
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.image_coding import Complete, opaque
from hawkvision.transport.protocol.status import Status
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Incoming
from loadgen.network.link_spec import LinkSpec
from loadgen.network.udp_relay import UdpRelay
from tests.hawkvision.transport.peers import IDENTITY, LOOPBACK

ASKERS = 8
"""Images that each client has under way."""
LINKS = (
    "",
    "delay=2ms,loss=1%",
    "delay=5ms,loss=10%,jitter=5ms",
    "delay=5ms,loss=20%,burst=4",
    "delay=10ms,loss=40%",
    "delay=2ms,loss=10%,outage=30ms,duplicate=20%",
    "delay=5ms,reorder=30%,reorder_delay=20ms,duplicate=10%",
    "rate=5mbit,delay=10ms,loss=5%,jitter=20ms,jitter_reorders=yes",
)
WARM_UP = 0.1
"""Share of the images after which memory is compared with the end's."""
GROWTH_MB = 30.0
REMEMBERED = 20_000
TEMPLATES = (b"quality=fast", b"quality=balanced", b"max_accuracy_drop=0.01")


@dataclass
class Soak:
    """What is counted."""

    images: int
    until: float
    rng: random.Random
    begun: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    handled: dict[bytes, None] = field(default_factory=dict)
    """The latest askings that a handler saw, `REMEMBERED` of them."""
    errors: list[str] = field(default_factory=list)
    warm_mb: float | None = None
    latencies: array[float] = field(default_factory=lambda: array("f"))

    @property
    def over(self) -> bool:
        return self.begun >= self.images or time.monotonic() > self.until

    async def handle(self, incoming: Incoming) -> tuple[Status, bytes]:
        """Answer with the image's own beginning; some answers take a while."""
        if incoming.better is not None:
            incoming = await incoming.better
        assert isinstance(incoming.arrived, Complete)
        if incoming.meta in self.handled:
            self.errors.append(f"asking {incoming.meta.hex()} was handled twice")
        self.handled[incoming.meta] = None
        if len(self.handled) > REMEMBERED:
            del self.handled[next(iter(self.handled))]
        if incoming.meta[-1] % 16 == 0:
            await asyncio.sleep(0.02)
        return Status.OK, incoming.template + incoming.meta + incoming.arrived.body[:8]


class Caller:
    """A client behind its relay, connected again whenever it is lost."""

    def __init__(self, soak: Soak, relay: UdpRelay) -> None:
        self.soak = soak
        self.relay = relay
        self.client: ClientConnection | None = None
        self._lock = asyncio.Lock()

    async def connected(self) -> ClientConnection:
        async with self._lock:
            while self.client is None or self.client.lost is not None:
                await self.leave()
                try:
                    self.client = await ClientConnection.connect(
                        self.relay.address[1], IDENTITY.pem, IDENTITY.name, routes=[LOOPBACK], timeout_s=10.0
                    )
                    self.soak.counts["connections"] += 1
                except ConnectionLost:
                    self.soak.counts["connections that failed"] += 1
            return self.client

    async def leave(self) -> None:
        if self.client is not None:
            await self.client.close()
            self.client = None

    async def ask_on(self) -> None:
        """Ask one image after another until there are enough."""
        soak = self.soak
        while not soak.over:
            soak.begun += 1
            number = soak.begun
            if number == int(soak.images * WARM_UP):
                soak.warm_mb = resident_mb()
            await self._ask(number)

    async def _ask(self, number: int) -> None:
        soak, attempt = self.soak, 0
        body = number.to_bytes(8) + bytes(soak.rng.choice([50, 900, 2500]))
        coded = opaque(body, soak.rng.choice([0.5, 1.0]), 1000)
        assert coded is not None
        template = TEMPLATES[number % len(TEMPLATES)]
        timeout_s = soak.rng.uniform(0.001, 0.05) if soak.rng.random() < 0.02 else 60.0
        while True:
            meta = attempt.to_bytes(2) + number.to_bytes(6)
            attempt += 1
            begun = time.monotonic()
            try:
                status, answer = await (await self.connected()).ask(template, coded, meta=meta, timeout_s=timeout_s)
            except ConnectionLost:
                soak.counts["told that the connection was lost, asked again"] += 1
                continue
            except TimeoutError:
                soak.counts["gave up by itself" if timeout_s < 1 else "never answered"] += 1
                return
            soak.counts[f"answered {status.name}"] += 1
            soak.latencies.append(time.monotonic() - begun)
            if status is Status.OK and answer != template + meta + body[:8]:
                soak.errors.append(f"image {number} got another one's answer")
            return


async def vary(soak: Soak, relay: UdpRelay) -> None:
    """Change a link until cancelled."""
    while True:
        relay.up = LinkSpec.parse(soak.rng.choice(LINKS))
        relay.down = LinkSpec.parse(soak.rng.choice(LINKS))
        await asyncio.sleep(soak.rng.uniform(0.3, 1.5))
        if soak.rng.random() < 0.1:
            soak.counts["outages"] += 1
            relay.blackhole(True)
            await asyncio.sleep(soak.rng.uniform(0.05, 1.0))
            relay.blackhole(False)


async def strangers(soak: Soak, server: DatagramListener) -> None:
    """Send what nobody asked for, from changing addresses."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            for _ in range(20):
                session = soak.rng.choice([0, *server.sessions])
                begin = soak.rng.choice([b"", b"\x11" + session.to_bytes(4) + b"\0", b"\xc0\0\0\0\x01\x08", b"\x40"])
                data = begin + soak.rng.randbytes(soak.rng.choice([0, 3, 30, 1100, 1300]))
                stranger.sendto(data, ("127.0.0.1", server.port))
                soak.counts["datagrams of strangers"] += 1
        await asyncio.sleep(0.1)


async def coming_and_going(soak: Soak, callers: list[Caller]) -> None:
    """Close a client in the midst of its work, now and then."""
    while True:
        await asyncio.sleep(soak.rng.uniform(2.0, 6.0))
        client = soak.rng.choice(callers).client
        if client is not None:
            soak.counts["clients closed"] += 1
            await client.close()


async def progress(soak: Soak) -> None:
    """Say how it goes twice a minute."""
    begun = time.monotonic()
    while True:
        await asyncio.sleep(30.0)
        rate = soak.begun / (time.monotonic() - begun)
        print(f"{soak.begun} images, {rate:.0f}/s, {resident_mb():.0f} MB, {dict(soak.counts)}", flush=True)


class Complaints(logging.Handler):
    """Remembers what is logged as an error."""

    def __init__(self, soak: Soak) -> None:
        super().__init__(logging.ERROR)
        self._soak = soak

    def emit(self, record: logging.LogRecord) -> None:
        self._soak.errors.append(f"{record.name}: {record.getMessage()} {record.exc_info}")


async def run(soak: Soak, clients: int) -> None:
    """All of it, and then that nothing is left."""
    logging.getLogger().addHandler(Complaints(soak))
    server = await DatagramListener.start("127.0.0.1", 0, IDENTITY, soak.handle)
    relays = [UdpRelay(("127.0.0.1", server.port), LinkSpec()) for _ in range(clients)]
    for relay in relays:
        await relay.__aenter__()
    callers = [Caller(soak, relay) for relay in relays]
    around = [asyncio.create_task(vary(soak, relay)) for relay in relays]
    around += [
        asyncio.create_task(strangers(soak, server)),
        asyncio.create_task(coming_and_going(soak, callers)),
        asyncio.create_task(progress(soak)),
    ]
    await asyncio.gather(*(caller.ask_on() for caller in callers for _ in range(ASKERS)))
    for task in around:
        task.cancel()
    await asyncio.gather(*around, return_exceptions=True)
    for relay in relays:
        relay.blackhole(False)
        relay.up = relay.down = LinkSpec()
    for caller in callers:
        await caller.leave()
    await emptied(soak, server)
    await server.close()
    for relay in relays:
        await relay.__aexit__()


async def emptied(soak: Soak, server: DatagramListener) -> None:
    """Wait for what must go by itself, QUIC's idle timeout at the latest; then look."""
    until = time.monotonic() + 45.0
    while (server.sessions or server.half_open) and time.monotonic() < until:  # noqa: ASYNC110 - seen from outside
        await asyncio.sleep(0.1)
    left = {
        "sessions": len(server.sessions),
        "QUIC connections": len(server._protocols),
        "bytes": server.budget.used,
        "tasks": len(asyncio.all_tasks()) - 1,
    }
    print("left at the end:", left)
    soak.errors += [f"{count} {what} are left" for what, count in left.items() if count]


def resident_mb() -> float:
    """This process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def report(soak: Soak, seconds: float) -> int:
    """Print what was found; the exit status."""
    end_mb = resident_mb()
    warm_mb = soak.warm_mb or end_mb
    if end_mb - warm_mb > GROWTH_MB:
        soak.errors.append(f"memory grew by {end_mb - warm_mb:.0f} MB")
    if soak.counts["never answered"]:
        soak.errors.append(f"{soak.counts['never answered']} images were never answered")
    answered = sum(count for what, count in soak.counts.items() if what.startswith("answered"))
    if answered + soak.counts["gave up by itself"] + soak.counts["never answered"] != soak.begun:
        soak.errors.append(f"{soak.begun} images, {answered} answers")
    latencies = sorted(soak.latencies) or [0.0]
    p50, p99, p999 = (latencies[int((len(latencies) - 1) * share)] * 1e3 for share in (0.5, 0.99, 0.999))
    print(f"{soak.begun} images in {seconds:.0f} s ({soak.begun / seconds:.0f}/s), from asking to answer")
    print(f"P50 {p50:.0f} ms, P99 {p99:.0f} ms, P99.9 {p999:.0f} ms; {ASKERS} at once on each client")
    print(f"memory {warm_mb:.0f} MB after {WARM_UP:.0%} of the images, {end_mb:.0f} MB at the end")
    for what, count in sorted(soak.counts.items()):
        print(f"  {count:>9} {what}")
    print(f"{len(soak.errors)} errors")
    for error in soak.errors[:20]:
        print("  ", error)
    return 1 if soak.errors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop asking after so long")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    soak = Soak(options.images, time.monotonic() + 60 * options.minutes, random.Random(options.seed))
    begun = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(soak, options.clients))
    return report(soak, time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
