"""The relay of a TUN link: a process that moves packets between the devices of two namespaces, delayed or dropped.

    owner ──────── socketpair, one JSON document a line, each answered ────────► relay
    device of the client's side ──► Pipe up ──► device of the server's side, of each path
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
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from loadgen.network.link_model import BATCH, LinkPipe, PacketCounts
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import MAX_PATHS, MTU

# ── What owner and relay say to one another ────────────────────────────────────────────────────────────────────────


class BeginRelay(msgspec.Struct, frozen=True, tag="begin"):
    """Comes with the descriptors of the TUN devices, (client, server) of each path."""

    paths: tuple[tuple[LinkSpec, LinkSpec], ...]


class SetLink(msgspec.Struct, frozen=True, tag="set"):
    """From the next packet on; None leaves a direction as it is."""

    path: int
    up: LinkSpec | None
    down: LinkSpec | None


class CutPath(msgspec.Struct, frozen=True, tag="cut"):
    """Kill a path both ways, or mend it."""

    path: int
    dead: bool


class AskStatus(msgspec.Struct, frozen=True, tag="ask"):
    """For the counts alone."""


Command: TypeAlias = BeginRelay | SetLink | CutPath | AskStatus


class RelayStatus(msgspec.Struct, frozen=True):
    """The answer to every command: (up, down) of each path."""

    counts: tuple[tuple[PacketCounts, PacketCounts], ...]


MOST_WAKING_S: Final = 5e-5
WAKING_RISE_S: Final = 1e-6
"""With each waking at most; by as much may a packet be early."""

# ── What the relay does ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _PathDirection:
    """One direction of one path."""

    source: int
    target: int
    pipe: LinkPipe[bytes]


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
        self._files: list[int] = []
        self._ways: dict[int, _PathDirection] = {}
        """By source; (up, down) of each path, one after another."""

    def run(self) -> None:
        """Until the owner is gone."""
        data, self._files, _, _ = socket.recv_fds(self._control, 65536, 2 * MAX_PATHS)
        self._receive(data)
        while data and not self._ways:
            data = self._control.recv(1 << 20)
            self._receive(data)
        ways = tuple(self._ways.values())
        sources = [self._control.fileno(), *self._ways]
        waking = _WakeUp()
        while data:
            soonest = min((at for way in ways if (at := way.pipe.next_at) is not None), default=None)
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
                    _take(self._ways[ready], woke)
                else:
                    data = self._control.recv(1 << 20)
                    self._receive(data)
            for way in ways:
                _give(way)

    def _receive(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._obey(msgspec.json.decode(line, type=Command))
            counts = [way.pipe.counts for way in self._ways.values()]
            status = RelayStatus(tuple(zip(counts[::2], counts[1::2], strict=True)))
            self._control.sendall(msgspec.json.encode(status) + b"\n")

    def _obey(self, command: Command) -> None:
        match command:
            case BeginRelay(paths=paths):
                for path, (up, down) in enumerate(paths):
                    client, server = self._files[2 * path : 2 * path + 2]
                    self._ways[client] = _PathDirection(client, server, LinkPipe(up, f"{path} up"))
                    self._ways[server] = _PathDirection(server, client, LinkPipe(down, f"{path} down"))
            case SetLink(path=path, up=up, down=down):
                for way, spec in zip(self._path(path), (up, down), strict=True):
                    if spec is not None:
                        way.pipe.direction.spec = spec
            case CutPath(path=path, dead=dead):
                for way in self._path(path):
                    way.pipe.dead = dead
            case AskStatus():
                pass

    def _path(self, path: int) -> list[_PathDirection]:
        return list(self._ways.values())[2 * path : 2 * path + 2]


def _take(way: _PathDirection, came: float) -> None:
    """Read what the kernel sent into one end of a path, the first of it at that time."""
    for _ in range(BATCH):
        try:
            packet = os.read(way.source, MTU + 1)
        except BlockingIOError:
            return
        way.pipe.put(len(packet), packet, came)
        came = time.monotonic()


def _give(way: _PathDirection) -> None:
    """Write what has arrived to the other end."""
    for packet in way.pipe.due(time.monotonic()):
        try:
            os.write(way.target, packet)
        except OSError:  # the kernel has no room, or the device is down
            way.pipe.lost_relay += 1


def main() -> int:
    """Serve the owner at the other end of standard input, a socket."""
    gc.disable()  # packets make no cycles, and a collection is a pause
    with socket.socket(fileno=0) as control:
        _Relay(control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
