"""The relay of a TUN link: a process that moves packets between the devices of two namespaces, delayed or dropped.

    owner ──────── socketpair, one JSON document a line, each answered ────────► relay
    device of the client's side ──► Pipe up ──► device of the server's side
    device of the client's side ◄── Pipe down ◄── device of the server's side

The first command carries the devices' descriptors. The relay ends when its owner closes the socket or dies.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
from typing import Final, TypeAlias

import msgspec

from loadgen.network.link_model import BATCH, LinkPipe, PacketCounts
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import MTU

# ── What owner and relay say to one another ────────────────────────────────────────────────────────────────────────


class ChangeLink(msgspec.Struct, frozen=True):
    """Change the link from the next packet on; None leaves a direction as it is.

    The first command has both, and beside it the descriptors of the TUN devices, (client, server).
    """

    up: LinkSpec | None = None
    down: LinkSpec | None = None


Counts: TypeAlias = tuple[PacketCounts, PacketCounts]
"""The answer to every command: (up, down)."""
COMMANDS: Final = msgspec.json.Decoder(ChangeLink)


MOST_WAKING_S: Final = 5e-5
WAKING_RISE_S: Final = 1e-6
"""With each waking at most; by as much may a packet be early."""

# ── What the relay does ────────────────────────────────────────────────────────────────────────────────────────────


class _WakeUp:
    """The shortest time that a wake-up takes, which is subtracted from a link's delay.

    A packet and its answer cause four wake-ups.
    """

    def __init__(self) -> None:
        self.least_s = 0.0

    def took(self, seconds: float) -> None:
        """Record a wake-up: the estimate falls at once, grows by at most `WAKING_RISE_S`, and is bounded."""
        self.least_s = max(0.0, min(seconds, self.least_s + WAKING_RISE_S, MOST_WAKING_S))


class _Relay:
    """Moves packets between the devices until its owner closes the control socket, or dies."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pending = b""
        """The beginning of a command: at most one trace per direction."""
        self._ways: dict[int, tuple[int, LinkPipe[bytes]]] = {}
        """By source the target and the pipe: up, down."""

    def run(self) -> None:
        """Until the owner is gone."""
        data, files, _, _ = socket.recv_fds(self._control, 65536, 2)
        if not data:
            return
        client, server = files
        self._ways[client] = server, LinkPipe(LinkSpec(), "up")
        self._ways[server] = client, LinkPipe(LinkSpec(), "down")
        self._receive(data)
        pipes = self._pipes()
        sources = [self._control.fileno(), *self._ways]
        waking = _WakeUp()
        while data:
            soonest = min((at for pipe in pipes if (at := pipe.next_at) is not None), default=None)
            begun = time.monotonic()
            # select(2) waits to the microsecond, where poll and epoll round up to the next millisecond.
            wait_s = None if soonest is None else max(0.0, soonest - waking.least_s - begun)
            found = select.select(sources, [], [], wait_s)[0]
            woke = time.monotonic()
            if found:
                woke = max(begun, woke - waking.least_s)  # what it woke for had come by then
            elif wait_s:
                waking.took(woke - begun - wait_s)
            for ready in found:
                if ready in self._ways:
                    _take(ready, self._ways[ready][1], woke)
                else:
                    data = self._control.recv(1 << 20)
                    self._receive(data)
            for target, pipe in self._ways.values():
                _give(target, pipe)

    def _receive(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            command = COMMANDS.decode(line)
            for pipe, spec in zip(self._pipes(), (command.up, command.down), strict=True):
                if spec is not None:
                    pipe.direction.spec = spec
            self._control.sendall(msgspec.json.encode([pipe.counts for pipe in self._pipes()]) + b"\n")

    def _pipes(self) -> list[LinkPipe[bytes]]:
        return [pipe for _, pipe in self._ways.values()]


def _take(source: int, pipe: LinkPipe[bytes], came: float) -> None:
    """Read what the kernel sent into one end, the first of it at that time."""
    for _ in range(BATCH):
        try:
            packet = os.read(source, MTU + 1)
        except BlockingIOError:
            return
        pipe.put(len(packet), packet, came)
        came = time.monotonic()


def _give(target: int, pipe: LinkPipe[bytes]) -> None:
    """Write what has arrived to the other end."""
    for packet in pipe.due(time.monotonic()):
        try:
            os.write(target, packet)
        except OSError:  # the kernel has no room, or the device is down
            pipe.lost_relay += 1


def main() -> int:
    """Serve the owner at the other end of standard input, a socket."""
    gc.disable()  # packets make no cycles, and a collection is a pause
    with socket.socket(fileno=0) as control:
        _Relay(control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
