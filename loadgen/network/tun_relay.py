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
from typing import Final, TypeAlias

import msgspec

from loadgen.network.link_model import BATCH, LinkPipe, PacketCounts
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import MAX_PATHS, MTU

# ── What owner and relay say to one another ────────────────────────────────────────────────────────────────────────


class ChangePath(msgspec.Struct, frozen=True, kw_only=True):
    """Change a path from the next packet on; None leaves a direction, or whether both are dead, as it is."""

    path: int
    up: LinkSpec | None = None
    down: LinkSpec | None = None
    dead: bool | None = None


Paths: TypeAlias = tuple[tuple[LinkSpec, LinkSpec], ...]
"""(up, down) of each path."""
Command: TypeAlias = Paths | ChangePath | None
"""The paths come first, with the descriptors of the TUN devices, (client, server) of each; None asks for the counts."""
Counts: TypeAlias = tuple[tuple[PacketCounts, PacketCounts], ...]
"""The answer to every command: (up, down) of each path."""
COMMANDS: Final[msgspec.json.Decoder[Command]] = msgspec.json.Decoder(Command)


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
        self._files: list[int] = []
        self._ways: dict[int, tuple[int, LinkPipe[bytes]]] = {}
        """By source the target and the pipe; (up, down) of each path, one after another."""

    def run(self) -> None:
        """Until the owner is gone."""
        data, self._files, _, _ = socket.recv_fds(self._control, 65536, 2 * MAX_PATHS)
        self._receive(data)
        while data and not self._ways:
            data = self._control.recv(1 << 20)
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
            self._obey(COMMANDS.decode(line))
            counts = [pipe.counts for pipe in self._pipes()]
            by_path: Counts = tuple(zip(counts[::2], counts[1::2], strict=True))
            self._control.sendall(msgspec.json.encode(by_path) + b"\n")

    def _obey(self, command: Command) -> None:
        match command:
            case None:
                pass
            case ChangePath(path=path, up=up, down=down, dead=dead):
                for pipe, spec in zip(self._pipes()[2 * path : 2 * path + 2], (up, down), strict=True):
                    if spec is not None:
                        pipe.direction.spec = spec
                    if dead is not None:
                        pipe.dead = dead
            case paths:
                for path, (up, down) in enumerate(paths):
                    client, server = self._files[2 * path : 2 * path + 2]
                    self._ways[client] = server, LinkPipe(up, f"{path} up")
                    self._ways[server] = client, LinkPipe(down, f"{path} down")

    def _pipes(self) -> list[LinkPipe[bytes]]:
        return [pipe for _, pipe in self._ways.values()]


def _take(source: int, pipe: LinkPipe[bytes], came: float) -> None:
    """Read what the kernel sent into one end of a path, the first of it at that time."""
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
