"""The QUIC plug-in keeps the link's rate where random loss makes aioquic's own controllers collapse.

Two real connections; the link between them is simulated, bytes and time, with a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived

from hawkvision.transport.congestion.quic_congestion import ALGORITHM, ImagesCongestionControl
from tests.hawkvision.transport.peers import IDENTITY

LINK = 625_000.0  # bytes per second: 5 Mbit/s
ONE_WAY_S = 0.02
QUEUE = 64_000
CLIENT, SERVER = ("10.0.0.1", 1), ("10.0.0.2", 2)


class Wire:
    """Both ends and the link: a drop-tail queue of one rate each way, and random loss once the handshake is over."""

    def __init__(self, algorithm: str, loss: float, seed: int) -> None:
        client = QuicConfiguration(is_client=True, alpn_protocols=["t"], verify_mode=0, server_name="localhost")
        server = QuicConfiguration(
            is_client=False, alpn_protocols=["t"], certificate=IDENTITY.chain[0], private_key=IDENTITY.key
        )
        for configuration in (client, server):
            configuration.congestion_control_algorithm = algorithm
            configuration.max_data = configuration.max_stream_data = 1 << 24
        self.now = 0.0
        self._loss, self._rng = loss, random.Random(seed)
        self.client = QuicConnection(configuration=client)
        self.client.connect(SERVER, now=0.0)
        self.server = QuicConnection(
            configuration=server, original_destination_connection_id=self.client.original_destination_connection_id
        )
        self.received: dict[int, int] = {}
        self.longest_queue_s = 0.0
        self._order = itertools.count()
        self._flying: list[tuple[float, int, bytes, QuicConnection]] = []
        self._busy = {CLIENT: 0.0, SERVER: 0.0}
        self._datagram = self._received = False
        self.run(lambda: self.now >= 1.0, limit_s=1.0)
        self._datagram = True

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Let time pass until something is so, for so long at most."""
        end = self.now + limit_s
        while not until() and self.now < end:
            self._flush(self.client, self.server, CLIENT)
            if self._received:
                self._flush(self.server, self.client, SERVER)
            timers = [timer for c in (self.client, self.server) if (timer := c.get_timer()) is not None]
            # A microsecond at least: rounding can leave a timer due at the very instant it was handled.
            self.now = max(self.now + 1e-6, min([*timers, end, *([self._flying[0][0]] if self._flying else [])]))
            while self._flying and self._flying[0][0] <= self.now:
                _, _, datagram, to = heapq.heappop(self._flying)
                self._received |= to is self.server
                to.receive_datagram(datagram, CLIENT if to is self.server else SERVER, now=self.now)
            for connection in (self.client, self.server):
                timer = connection.get_timer()
                if timer is not None and timer <= self.now:
                    connection.handle_timer(now=self.now)
                while (event := connection.next_event()) is not None:
                    if isinstance(event, StreamDataReceived):
                        self.received[event.stream_id] = self.received.get(event.stream_id, 0) + len(event.data)

    def _flush(self, source: QuicConnection, to: QuicConnection, address: tuple[str, int]) -> None:
        for datagram, _ in source.datagrams_to_send(now=self.now):
            waiting_s = max(0.0, self._busy[address] - self.now)
            if waiting_s * LINK + len(datagram) > QUEUE:
                continue
            self.longest_queue_s = max(self.longest_queue_s, waiting_s)
            self._busy[address] = self.now + waiting_s + len(datagram) / LINK
            if not (self._datagram and self._rng.random() < self._loss):
                heapq.heappush(self._flying, (self._busy[address] + ONE_WAY_S, next(self._order), datagram, to))

    def transfer(self, size: int, limit_s: float = 120.0) -> float:
        """Seconds until `size` bytes from the client have arrived on a new stream."""
        stream = self.client.get_next_available_stream_id()
        began = self.now
        self.client.send_stream_data(stream, bytes(size), end_stream=True)
        self.run(lambda: self.received.get(stream, 0) == size, limit_s)
        assert self.received[stream] == size, f"{self.received} of {size} bytes in {limit_s} s"
        return self.now - began


def transfers(algorithm: str, loss: float, seed: int) -> list[float]:
    wire = Wire(algorithm, loss, seed)
    return [wire.transfer(100_000) for _ in range(10)]


IDEAL_S = 100_000 / LINK + ONE_WAY_S


def test_random_loss_does_not_slow_streams_as_it_slows_reno() -> None:
    ours, reno = sum(transfers(ALGORITHM, 0.05, seed=1)), sum(transfers("reno", 0.05, seed=1))
    assert ours < 2.0 * 10 * IDEAL_S
    assert reno > 2.0 * ours


@pytest.mark.parametrize("loss", [0.1, 0.2])
def test_streams_get_through_heavy_loss(loss: float) -> None:
    assert sum(transfers(ALGORITHM, loss, seed=2)) < 4.0 * 10 * IDEAL_S


def test_without_loss_the_link_is_used_and_the_queue_stays_short() -> None:
    wire = Wire(ALGORITHM, 0.0, seed=3)
    wire.transfer(100_000)
    wire.longest_queue_s = 0.0
    assert wire.transfer(1_000_000) < 1.2 * 1_000_000 / LINK
    assert wire.longest_queue_s < 0.06


def test_after_an_outage_the_connection_recovers() -> None:
    wire = Wire(ALGORITHM, 1.0, seed=4)
    stream = wire.client.get_next_available_stream_id()
    wire.client.send_stream_data(stream, bytes(50_000), end_stream=True)
    wire.run(lambda: False, limit_s=3.0)
    assert wire.received.get(stream, 0) == 0
    wire._loss = 0.0
    wire.run(lambda: wire.received.get(stream, 0) == 50_000, limit_s=10.0)
    assert wire.received[stream] == 50_000


def test_nothing_stays_in_flight_when_everything_arrived() -> None:
    wire = Wire(ALGORITHM, 0.1, seed=5)
    wire.transfer(50_000)
    wire.run(lambda: False, limit_s=5.0)
    control = wire.client._loss._cc
    assert isinstance(control, ImagesCongestionControl)
    assert control.bytes_in_flight == 0
    assert not control._out
