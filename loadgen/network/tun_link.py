"""A bad link for real kernel TCP and UDP: two network namespaces, joined by TUN devices and a relay process of ours.

      namespace "client"              relay (own process)               namespace "server"
    10.98.0.1 link0 ◄─TUN─► fd ─► Pipe ─► fd ◄─TUN─► link0 10.98.0.2

    with TunLink(LinkSpec.parse("rate=20mbit,delay=20ms,loss=5%")) as link:
        subprocess.Popen(link.command("server", [sys.executable, "-m", "http.server", "--bind", link.server_address]))
        subprocess.run(link.command("client", ["curl", f"http://{link.server_address}:8000/"]))

Neither namespace has any other device than loopback, so nothing in them reaches the machine or the world. Needs root,
`ip` (package iproute2) and /dev/net/tun; `loadgen.network.namespaces.available` says what is missing. The kernel's
own emulator (netem) is not part of every kernel, and does not repeat its losses by a seed.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import ConfigError, NotReady
from hawkvision.system.child_server import ended
from loadgen.network.link_spec import LinkSpec
from loadgen.network.namespaces import (
    SIDES,
    Side,
    address_of,
    available,
    entered,
    ip,
    new_name,
    open_device,
    remove,
    route_of,
    sweep,
)
from loadgen.network.tun_relay import ChangeLink, Counts

DISCARD_PORT: Final = 9
"""The discard port (RFC 863): a packet to it starts a link that follows a trace."""
MAX_CHAIN: Final = 8
"""Links one behind another. Each has a network of its own, 10.98.0.0/16 and on."""
CONTROL_LIMIT_S: Final = 30.0
STOP_LIMIT_S: Final = 5.0


class TunLink:
    """Two namespaces and the link between them, while the context is entered. Threads may share it.

    Links make a chain: with `behind`, the client's side is the server's namespace of another link, so that what runs
    there is a server to one and a client to the other. Nothing is forwarded: the ends of a chain do not see each other.
    What runs in the namespaces is killed with the link.

    Args:
        up: from client to server; `down` is the way back, the same spec if None.
        congestion: as `set_congestion`.
        behind: a link that is up, and stays up longer than this one.
    """

    def __init__(
        self,
        up: LinkSpec,
        down: LinkSpec | None = None,
        *,
        congestion: str | None = None,
        behind: TunLink | None = None,
    ) -> None:
        self._behind = behind
        self._number: int = 0 if behind is None else behind._number + 1
        if self._number >= MAX_CHAIN:
            raise ConfigError(f"a chain of {self._number + 1} links; expected at most {MAX_CHAIN}")
        self._specs = (up, up if down is None else down)
        self._congestion = congestion
        self._name = new_name()
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self.client_address, self.server_address = (address_of(self._number, side) for side in SIDES)
        """IPv4 addresses."""

    def __enter__(self) -> TunLink:
        """Raises ConfigError where no such link can be had, NotReady where one should have been."""
        reason = available()
        if reason is not None:
            raise ConfigError(f"no TUN link here: {reason}")
        sweep()
        with contextlib.ExitStack() as stack:
            for side in SIDES if self._behind is None else SIDES[1:]:
                ip("netns", "add", self.namespace(side))
                stack.callback(remove, self.namespace(side))
            devices = stack.enter_context(contextlib.ExitStack())
            files = [devices.enter_context(open_device(self.namespace(side), side, self._number)) for side in SIDES]
            if self._congestion is not None:
                self.set_congestion(self._congestion)
            self._start_relay(stack)
            self._command(ChangeLink(*self._specs), [file.fileno() for file in files])
            devices.close()  # the relay has its own
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def namespace(self, side: Side) -> str:
        """The name of a side's namespace."""
        if side == "client" and self._behind is not None:
            return self._behind.namespace("server")
        return f"{self._name}-{side}"

    def command(self, side: Side, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in a namespace."""
        return ["ip", "netns", "exec", self.namespace(side), *argv]

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """The calling thread enters a namespace: sockets made meanwhile stay there for good. Do not await inside."""
        with entered(self.namespace(side)):
            yield

    def set(self, *, up: LinkSpec | None = None, down: LinkSpec | None = None) -> None:
        """Change the link from the next packet on; None leaves a direction as it is."""
        self._command(ChangeLink(up, down))

    def counts(self) -> Counts:
        """What happened (up, down)."""
        return self._command(ChangeLink())

    def set_congestion(self, name: str | None) -> None:
        """TCP's congestion control for connections made from now on, both ways, even if a socket asks for another.

        None leaves it to sockets and to the kernel's default, which differs between machines: comparisons choose one.

        Raises:
            ConfigError: if the kernel does not have it; says what it has.
        """
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        if name is not None and name not in known:
            raise ConfigError(f"congestion control {name!r}; this kernel has {', '.join(known)}")
        for side in SIDES:
            # By route, although a route overrides what sockets ask for before they connect: a namespace's own default
            # may only be one that unprivileged users are allowed (net.ipv4.tcp_allowed_congestion_control), which
            # is for the machine to say.
            choice = "" if name is None else f" congctl {name}"
            ip("-n", self.namespace(side), "route", "replace", *f"{route_of(self._number, side)}{choice}".split())

    def _start_relay(self, stack: contextlib.ExitStack) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(CONTROL_LIMIT_S)
        self._replies = self._control.makefile("rb")
        with theirs:
            self._relay = subprocess.Popen(
                [sys.executable, "-m", "loadgen.network.tun_relay"],
                stdin=theirs.fileno(),
                start_new_session=True,  # an interrupt from the terminal is for the owner, who still needs the relay
            )
        stack.callback(self._stop_relay)

    def _stop_relay(self) -> None:
        """Hang up, which ends the relay."""
        self._replies.close()
        self._control.close()
        ended(self._relay, STOP_LIMIT_S)

    def _command(self, command: ChangeLink, files: Sequence[int] = ()) -> Counts:
        line = msgspec.json.encode(command) + b"\n"
        with self._lock:
            try:
                if files:
                    sent = socket.send_fds(self._control, [line], files)
                    line = line[sent:]
                self._control.sendall(line)
                reply = self._replies.readline()
            except OSError as error:
                raise NotReady(f"the link's relay does not answer: {error}") from None
        if not reply:
            raise NotReady("the link's relay has ended; it said why on standard error")
        counts: Counts = msgspec.json.decode(reply, type=Counts)
        return counts
