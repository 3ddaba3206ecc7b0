"""`python -m tests.bench.transport.fairness`: images beside one TCP flow on the same bottleneck.

An emulated link between two network namespaces (`loadgen.network.tun_link`) carries images by the datagram transport
to a receiver that responds at once, and one bulk transfer by kernel TCP. Images either saturate the link, eight at a
time, or come ten a second as from a camera. The report has both shares of the link's bytes, without headers below UDP
and TCP, and the images' latencies, alone and beside TCP.

Needs root, as `loadgen.network.tun_link` says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from hawkvision.transport.client.connection import ClientConnection
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.coding.image_coding import Plan, encode
from hawkvision.transport.endpoint.udp import UdpRoute
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.server_certificate import own_identity
from hawkvision.transport.protocol.status import Status
from hawkvision.transport.protocol.wire import OVERHEAD
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.session import Incoming
from loadgen.network.link_spec import LinkSpec
from loadgen.network.tun_link import TunLink

UDP_PORT: Final = 9000
TCP_PORT: Final = 9001
SETTLE_S: Final = 5.0
"""At the start, not counted."""
AT_ONCE: Final = 8


class SentImages(msgspec.Struct, frozen=True):
    """What the images' side did after settling."""

    bytes: int
    seconds: float
    latencies_ms: list[float]
    failed: int


async def _serve(host: str) -> None:
    async def answer(_: Incoming) -> tuple[Status, bytes]:
        return Status.OK, bytes(700)

    identity = own_identity()
    await DatagramListener.start(host, UDP_PORT, identity, answer)
    listener = socket.create_server((host, TCP_PORT))
    threading.Thread(target=_sink, args=(listener,), daemon=True).start()
    print(json.dumps([identity.pem, identity.name]), flush=True)
    await asyncio.Event().wait()


def _sink(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16):
                pass


async def _send_images(host: str, seconds: float, per_s: float, pem: str, name: str) -> SentImages:
    rng = np.random.default_rng(0)
    pixels = np.kron(rng.integers(0, 255, (32, 32, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    coded = encode(pixels, Plan(80, 0.5), fragment_room(b""))
    size = sum(map(len, coded.symbols)) + OVERHEAD * coded.format.n
    client = await ClientConnection.connect(UDP_PORT, pem, name, routes=[UdpRoute(None, host)])
    begun = time.monotonic() + SETTLE_S
    latencies: list[float] = []
    failed = total = 0

    async def ask() -> None:
        nonlocal failed, total
        started = time.monotonic()
        try:
            await client.ask(b"", coded, timeout_s=10.0)
        except (TimeoutError, ConnectionLost):
            failed += 1
        if started >= begun:
            latencies.append((time.monotonic() - started) * 1e3)
            total += size

    async def always() -> None:
        while time.monotonic() < begun + seconds:
            await ask()

    if per_s:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < begun + seconds:
                group.create_task(ask())
                await asyncio.sleep(1 / per_s)
    else:
        await asyncio.gather(*(always() for _ in range(AT_ONCE)))
    await client.close()
    return SentImages(total, time.monotonic() - begun, latencies, failed)


def _send_bulk(host: str, seconds: float, congestion: str) -> float:
    """Bytes per second that TCP carried after settling, by what the kernel was told is acknowledged."""
    with socket.create_connection((host, TCP_PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        connection.settimeout(30)
        block, begun, ends = bytes(1 << 14), time.monotonic() + SETTLE_S, time.monotonic() + SETTLE_S + seconds
        at_begin: int | None = None
        while (now := time.monotonic()) < ends:
            connection.sendall(block)
            if at_begin is None and now >= begun:
                at_begin = _acknowledged(connection)
        return (_acknowledged(connection) - (at_begin or 0)) / seconds


def _acknowledged(connection: socket.socket) -> int:
    """`tcpi_bytes_acked`, at byte 120 of Linux's struct tcp_info."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    return int.from_bytes(info[120:128], sys.byteorder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench, or one process of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.transport.fairness", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--link", default="rate=20mbit,delay=20ms,queue=100kB")
    parser.add_argument("--loss", default="0,0.02")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    match options.role:
        case ["serve", host]:
            asyncio.run(_serve(host))
        case ["images", host, per_s, identity]:
            pem, name = json.loads(identity)
            sent = asyncio.run(_send_images(host, options.seconds, float(per_s), pem, name))
            sys.stdout.write(msgspec.json.encode(sent).decode())
        case ["bulk", host, congestion]:
            print(_send_bulk(host, options.seconds, congestion))
        case _:
            _bench(options.link, options.loss.split(","), options.seconds)
    return 0


def _bench(link_text: str, losses: Sequence[str], seconds: float) -> None:
    table = Table(title=f"{link_text}, {seconds:g} s each")
    for column in (
        "loss",
        "images",
        "TCP",
        "images Mbit/s",
        "TCP Mbit/s",
        "images' share",
        "P50 ms",
        "P99 ms",
        "failed",
    ):
        table.add_column(column, justify="right")
    module = [sys.executable, "-m", "tests.bench.transport.fairness", "--seconds", str(seconds), "--role"]
    with TunLink(LinkSpec.parse(link_text)) as link:
        server = link.popen("server", [*module, "serve", link.server_address], stdout=subprocess.PIPE)
        assert server.stdout is not None
        identity = server.stdout.readline().decode()
        for loss in losses:
            spec = LinkSpec.parse(f"{link_text},loss={float(loss) * 100}%,seed=1")
            link.set(up=spec, down=spec)
            for per_s in ("0", "10"):
                for tcp in ("none", "cubic", "bbr"):
                    images = link.popen(
                        "client", [*module, "images", link.server_address, per_s, identity], stdout=subprocess.PIPE
                    )
                    bulk = None
                    if tcp != "none":
                        bulk = link.popen("client", [*module, "bulk", link.server_address, tcp], stdout=subprocess.PIPE)
                    sent = msgspec.json.decode(images.communicate()[0], type=SentImages)
                    rate = 0.0 if bulk is None else float(bulk.communicate()[0])
                    ours = sent.bytes / sent.seconds
                    at = np.percentile(sent.latencies_ms, [50, 99])
                    table.add_row(
                        f"{float(loss):.0%}", "saturating" if per_s == "0" else f"{per_s}/s", tcp, f"{ours * 8e-6:.1f}",
                        f"{rate * 8e-6:.1f}", f"{ours / (ours + rate):.0%}", f"{at[0]:.0f}", f"{at[1]:.0f}",
                        str(sent.failed),
                    )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
