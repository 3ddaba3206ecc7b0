"""The cost of a datagram in Python: QUIC's DATAGRAM frames (aioquic) against ours, sealed beside QUIC.

    python -m tests.bench.transport.datagram_cost [--images 300] [--profile]

First table: microseconds of CPU per datagram of 1,100 bytes, for each end, in memory (both ends in this process,
simulated time), then over loopback sockets (the receiving end in a second process, uvloop). Images have 18 datagrams;
each gets its response before the next.

Second table: milliseconds of CPU per image and end, 256 pixels, quality 80, parity +50 %: the codec with its erasure
code, and the transport. `--profile` prints where the transport's time goes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cv2
import numpy as np
import uvloop
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import DatagramFrameReceived, QuicEvent

from hawkvision.core.types import Pixels
from hawkvision.transport.client.sender import Sender
from hawkvision.transport.coding.image_coding import Coded, Plan, decode, encode, opaque
from hawkvision.transport.endpoint.channel import Channel
from hawkvision.transport.protocol.frames import fragment_room
from hawkvision.transport.protocol.packet_protection import Secret, peek
from hawkvision.transport.protocol.wire import Status
from hawkvision.transport.server.assembly import Budget
from hawkvision.transport.server.listener import DatagramListener
from hawkvision.transport.server.receiver import Receiver
from hawkvision.transport.server.session import Incoming
from tests.hawkvision.transport.peers import IDENTITY, connected

DATAGRAMS = 18
SIZE = 1100
ANSWER = bytes(600)
ALPN = "cost"
RTT_S = 0.005
CLIENT, SERVER = ("127.0.0.1", 2), ("127.0.0.1", 1)
"""Addresses in memory. A client of aioquic takes nothing from an address but the server's."""
MOST_EXCHANGES = 1000


def pixels() -> Pixels:
    """256 by 256 of about a photograph's detail."""
    rng = np.random.default_rng(0)
    smooth = cv2.resize(rng.integers(0, 255, (24, 24, 3), np.uint8), (256, 256), interpolation=cv2.INTER_CUBIC)
    made: Pixels = np.clip(smooth + rng.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
    return made


def image() -> Coded:
    """Quality 80, parity of a half."""
    return encode(pixels(), Plan(80, 0.5), fragment_room(b""))


@dataclass
class Spent:
    """Seconds of CPU of the sending and the receiving end."""

    sending: float = 0.0
    receiving: float = 0.0


class Account:
    """Time of both ends in one process, batch by batch.

    By the wall clock, because asking for CPU time can cost as much as what is measured; the median batch is the one
    that no other process interrupted.
    """

    def __init__(self) -> None:
        self._batch = Spent()
        self._batches: list[Spent] = []

    @contextmanager
    def sending(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._batch.sending += time.perf_counter() - begun

    @contextmanager
    def receiving(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._batch.receiving += time.perf_counter() - begun

    def close_batch(self) -> None:
        self._batches.append(self._batch)
        self._batch = Spent()

    @property
    def spent(self) -> Spent:
        """As if all batches had cost what the median one did."""
        sending = statistics.median(batch.sending for batch in self._batches)
        receiving = statistics.median(batch.receiving for batch in self._batches)
        return Spent(sending * len(self._batches), receiving * len(self._batches))


@contextmanager
def cpu(spent: Spent, end: str) -> Iterator[None]:
    """Add the CPU that passes to an end's account."""
    begun = time.process_time()
    yield
    setattr(spent, end, getattr(spent, end) + time.process_time() - begun)


def quic_configuration(*, client: bool) -> QuicConfiguration:
    configuration = QuicConfiguration(is_client=client, alpn_protocols=[ALPN], max_datagram_frame_size=65536)
    if client:
        configuration.cadata, configuration.server_name = IDENTITY.pem.encode(), IDENTITY.name
    else:
        configuration.certificate, configuration.private_key = IDENTITY.chain[0], IDENTITY.key
    return configuration


# ----------------------------------------------------------------------------------------------- in memory


def quic_in_memory(batches: int) -> Spent:
    """Batches of DATAGRAM frames between two connections, acknowledged before the next."""
    now = 100.0
    client = QuicConnection(configuration=quic_configuration(client=True))
    client.connect(SERVER, now=now)
    first = client.datagrams_to_send(now=now)
    server = QuicConnection(
        configuration=quic_configuration(client=False), original_destination_connection_id=client._peer_cid.cid
    )
    for data, _ in first:
        server.receive_datagram(data, CLIENT, now=now)
    account, payload = Account(), bytes(SIZE)
    for _ in range(6):
        now, _ = exchange(client, server, now, account)
    account.close_batch()
    for _ in range(batches):
        with account.sending():
            for _ in range(DATAGRAMS):
                client.send_datagram_frame(payload)
        arrived = 0
        for _ in range(MOST_EXCHANGES):
            now, some = exchange(client, server, now, account)
            arrived += some
            if arrived == DATAGRAMS:
                break
        assert arrived == DATAGRAMS
        account.close_batch()
    return account.spent


def exchange(client: QuicConnection, server: QuicConnection, now: float, account: Account) -> tuple[float, int]:
    """What both have to say to one another, once; the later time, and how many frames the server has got."""
    arrived = 0
    ends = (
        (client, server, CLIENT, account.sending, account.receiving),
        (server, client, SERVER, account.receiving, account.sending),
    )
    for source, target, address, giving, taking in ends:
        now += RTT_S / 2
        with giving():
            timer = source.get_timer()
            if timer is not None and timer <= now:
                source.handle_timer(now=now)
            datagrams = source.datagrams_to_send(now=now)
        with taking():
            for data, _ in datagrams:
                target.receive_datagram(data, address, now=now)
            while (event := target.next_event()) is not None:
                arrived += isinstance(event, DatagramFrameReceived)
    return now, arrived


def ours_in_memory(coded: Coded, images: int) -> Spent:
    """Images between a `Sender` and a `Receiver`, each answered before the next; the codec's decoding is included."""
    now, account = 100.0, Account()
    there, back = Secret.random(), Secret.random()
    sender = Sender(Channel[Any](1, there, back))
    sender.channel.path(0, now, proven=True)
    receiver = Receiver(Channel[Any](1, back, there), Budget(1 << 30))
    receiver.register_template(0, b"quality=fast")
    answered = 0
    for _ in range(images):
        with account.sending():
            number = sender.submit(0, coded, None, b"", now)
        until = now + 0.5
        while not sender.answered and now < until:
            now = carry(sender, receiver, now, account)
            while receiver.events:
                event = receiver.events.popleft()
                if event.final:
                    with account.receiving():
                        receiver.answer(number, Status.OK, ANSWER, now)
        answered += len(sender.answered)
        sender.answered.clear()
        for _ in range(3):
            now = carry(sender, receiver, now + 0.004, account)
        account.close_batch()
    assert answered == images
    return account.spent


def carry(sender: Sender, receiver: Receiver, now: float, account: Account) -> float:
    """Half a round trip each way; the later time."""
    with account.sending():
        datagrams = list(sender.poll(now))
        sender.next_timer(now)
    now += RTT_S / 2
    with account.receiving():
        for _, data in datagrams:
            receiver.receive(peek(data), data, now)
        datagrams = list(receiver.poll(now))
        receiver.next_timer(now)
    now += RTT_S / 2
    with account.sending():
        for _, data in datagrams:
            sender.receive(peek(data), data, now)
    return now


# ------------------------------------------------------------------------------------------------- sockets


class _Counting(QuicConnectionProtocol):
    """Answers each batch of DATAGRAM frames with one frame."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.received = 0
        self.answered = asyncio.Event()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, DatagramFrameReceived):
            self.received += 1
            self.answered.set()
            if not self._quic.configuration.is_client and self.received % DATAGRAMS == 0:
                self._quic.send_datagram_frame(ANSWER)


async def serve_quic(ready: Connection) -> None:
    server = await serve("127.0.0.1", 0, configuration=quic_configuration(client=False), create_protocol=_Counting)
    assert server._transport is not None
    await served(ready, server._transport.get_extra_info("sockname")[1])
    server.close()


async def serve_ours(ready: Connection) -> None:
    async def handler(_: Incoming) -> tuple[Status, bytes]:
        return Status.OK, ANSWER

    server = await DatagramListener.start("127.0.0.1", 0, IDENTITY, handler)
    await served(ready, server.port)
    await server.close()


async def served(ready: Connection, port: int) -> None:
    """Tell the port; then the CPU spent between the first and the second word that comes."""
    ready.send(port)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, ready.recv)
    begun = time.process_time()
    await loop.run_in_executor(None, ready.recv)
    ready.send(time.process_time() - begun)


def process(target: Callable[[Connection], Any], ready: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(target(ready))


async def ask_quic(port: int, batches: int, word: Connection) -> Spent:
    payload, spent = bytes(SIZE), Spent()
    async with connect(
        "127.0.0.1", port, configuration=quic_configuration(client=True), create_protocol=_Counting
    ) as protocol:
        assert isinstance(protocol, _Counting)
        await protocol.ping()
        word.send("begin")
        with cpu(spent, "sending"):
            for _ in range(batches):
                protocol.answered.clear()
                for _ in range(DATAGRAMS):
                    protocol._quic.send_datagram_frame(payload)
                protocol.transmit()
                await protocol.answered.wait()
        word.send("end")
        spent.receiving = word.recv()
    return spent


async def ask_ours(port: int, coded: Coded, images: int, word: Connection) -> Spent:
    spent = Spent()
    async with connected(port) as client:
        for _ in range(5):
            await client.ask(b"quality=fast", coded)
        word.send("begin")
        with cpu(spent, "sending"):
            for _ in range(images):
                await client.ask(b"quality=fast", coded)
        word.send("end")
        spent.receiving = word.recv()
    return spent


def over_sockets(server: Callable[[Connection], Any], client: Callable[[int, Connection], Any]) -> tuple[Spent, float]:
    """Both ends in processes of their own: CPU of each, and seconds that passed."""
    context = multiprocessing.get_context("fork")  # the same certificate at both ends
    ours, theirs = context.Pipe()
    child = context.Process(target=process, args=(server, theirs), daemon=True)
    child.start()
    port = ours.recv()
    begun = time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        spent: Spent = runner.run(client(port, ours))
    child.join(10)
    return spent, time.perf_counter() - begun


# -------------------------------------------------------------------------------------------------- tables


def per_datagram(images: int) -> None:
    plain = opaque(bytes(SIZE * DATAGRAMS), 0.0, SIZE)
    assert plain is not None
    quic, _ = over_sockets(serve_quic, lambda port, word: ask_quic(port, images, word))
    ours, _ = over_sockets(serve_ours, lambda port, word: ask_ours(port, plain, images, word))
    rows = (
        ("QUIC DATAGRAM frames, in memory", quic_in_memory(images)),
        ("sealed datagrams, in memory", ours_in_memory(plain, images)),
        ("QUIC DATAGRAM frames, sockets", quic),
        ("sealed datagrams, sockets", ours),
    )
    print(f"{'CPU µs per datagram, all included':<34} {'sending':>8} {'receiving':>10} {'both':>7}")
    for name, spent in rows:
        sending, receiving = (s / images / DATAGRAMS * 1e6 for s in (spent.sending, spent.receiving))
        print(f"{name:<34} {sending:>8.1f} {receiving:>10.1f} {sending + receiving:>7.1f}")


def per_image(images: int) -> None:
    coded, rgb = image(), pixels()
    spent = Spent()
    with cpu(spent, "sending"):
        for _ in range(images):
            encode(rgb, Plan(80, 0.5), fragment_room(b""))
    k, n = coded.format.k, coded.format.n
    half = {index: coded.symbols[index] for index in range(n) if index % 3}  # parity is needed
    assert len(half) >= k
    with cpu(spent, "receiving"):
        for _ in range(images):
            decode(coded.format, half)
    whole = {index: coded.symbols[index] for index in range(k)}
    begun = time.process_time()
    for _ in range(images):
        decode(coded.format, whole)
    decoding_s = time.process_time() - begun
    memory = ours_in_memory(coded, images)
    memory.receiving -= decoding_s
    sockets, seconds = over_sockets(serve_ours, lambda port, word: ask_ours(port, coded, images, word))
    sockets.receiving -= decoding_s
    size = sum(map(len, coded.symbols[:k])) / 1e3
    print(f"\nimage of {size:.1f} KB in {k} + {n - k} datagrams, answer of {len(ANSWER)} bytes")
    print(f"{'CPU ms per image':<34} {'sending':>8} {'receiving':>10}")
    for name, each in (
        ("codec and erasure code", spent),
        ("transport, in memory", memory),
        ("transport, with sockets", sockets),
    ):
        print(f"{name:<34} {each.sending / images * 1e3:>8.2f} {each.receiving / images * 1e3:>10.2f}")
    busiest = max(sockets.sending, sockets.receiving + decoding_s) / images
    one_by_one = images / seconds
    print(f"one core of either end: {1 / busiest:.0f} images/s; closed loop, one at a time: {one_by_one:.0f}/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(ours_in_memory, image(), options.images)
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        return
    per_datagram(options.images)
    per_image(options.images)


if __name__ == "__main__":
    main()
