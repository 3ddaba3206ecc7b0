"""A bad link for real kernel TCP and UDP: two network namespaces, joined by TUN devices and a relay process of ours.

      namespace "client"              relay (own process)               namespace "server"
    10.98.0.1 path0 ◄─TUN─► fd ─► Pipe ─► fd ◄─TUN─► path0 10.98.0.2
    10.98.1.1 path1 ◄─TUN─► fd ─► Pipe ─► fd ◄─TUN─► path1 10.98.1.2      (a second path, if asked for)

    with TunLink(LinkSpec.parse("rate=20mbit,delay=20ms,loss=5%")) as link:
        server = link.popen("server", [sys.executable, "-m", "http.server", "--bind", link.server_address])
        link.popen("client", ["curl", f"http://{link.server_address}:8000/"])

Neither namespace has any other device than loopback, so nothing in them reaches the machine or the world. Needs root,
`ip` (package iproute2) and /dev/net/tun; `loadgen.network.namespaces.available` says what is missing. The kernel's
own emulator (netem) is not part of every kernel, and does not repeat its losses by a seed.

    python -m loadgen.network.tun_link --link rate=20mbit,delay=20ms,loss=5%      keeps one up until interrupted
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec
from msgspec import Meta

from hawkvision.core.command_line import call
from hawkvision.core.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.system.child_server import ended, stop_with_parent
from loadgen.network.link_model import PacketCounts
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
    routes_of,
    sweep,
)
from loadgen.network.tun_relay import ChangePath, Command, Counts

DISCARD_PORT: Final = 9
"""The discard port (RFC 863): a packet to it starts a link that follows a trace."""
MAX_CHAIN: Final = 8
"""Links one behind another. Each has a network of its own, 10.98.0.0/16 and on."""
CONTROL_LIMIT_S: Final = 30.0
STOP_LIMIT_S: Final = 5.0


class TunLink:
    """Two namespaces and the link between them, while the context is entered. Threads may share it.

    With two paths, the client's packets leave by the path of the address that their socket is bound to, else by that
    of their destination; the server's leave by that of their destination, so answers return as their question came.
    Either of the server's addresses can be reached by either path.

    Links make a chain: with `behind`, the client's side is the server's namespace of another link, so that what runs
    there is a server to one and a client to the other. Nothing is forwarded: the ends of a chain do not see each other.

    Args:
        up: from client to server; `down` is the way back, the same spec if None.
        second: (up, down) of a second path.
        congestion: as `set_congestion`.
        behind: a link that is up, and stays up longer than this one.
    """

    def __init__(
        self,
        up: LinkSpec,
        down: LinkSpec | None = None,
        *,
        second: tuple[LinkSpec, LinkSpec] | None = None,
        congestion: str | None = None,
        behind: TunLink | None = None,
    ) -> None:
        self._behind = behind
        self._number: int = 0 if behind is None else behind._number + 1
        if self._number >= MAX_CHAIN:
            raise ConfigError(f"a chain of {self._number + 1} links; expected at most {MAX_CHAIN}")
        first = (up, up if down is None else down)
        self._paths = (first,) if second is None else (first, second)
        self._congestion = congestion
        self._name = new_name()
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()
        self.client_addresses = tuple(address_of(self._number, path, "client") for path in range(len(self._paths)))
        """IPv4 addresses by path; as `server_addresses`."""
        self.server_addresses = tuple(address_of(self._number, path, "server") for path in range(len(self._paths)))
        self.client_address, self.server_address = self.client_addresses[0], self.server_addresses[0]

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
            files = [
                devices.enter_context(open_device(self.namespace(side), side, self._number, path))
                for path in range(len(self._paths))
                for side in SIDES
            ]
            if self._congestion is not None:
                self.set_congestion(self._congestion)
            self._start_relay(stack)
            self._command(self._paths, [file.fileno() for file in files])
            devices.close()  # the relay has its own
            stack.callback(self._stop_started)
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

    def popen(
        self,
        side: Side,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a namespace, stopped with the link. The process id is the command's own."""
        on_main_thread = threading.current_thread() is threading.main_thread()
        process = subprocess.Popen(  # noqa: S603 - what our caller asks for
            self.command(side, argv),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            preexec_fn=functools.partial(stop_with_parent, parent=os.getpid()) if on_main_thread else None,
        )
        self._started = [*(earlier for earlier in self._started if earlier.poll() is None), process]
        return process

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """The calling thread enters a namespace: sockets made meanwhile stay there for good. Do not await inside."""
        with entered(self.namespace(side)):
            yield

    def set(self, path: int = 0, *, up: LinkSpec | None = None, down: LinkSpec | None = None) -> None:
        """Change a path from the next packet on; None leaves a direction as it is."""
        self._check(path)
        self._command(ChangePath(path=path, up=up, down=down))

    def cut(self, path: int = 0) -> None:
        """Cut a path both ways: all packets disappear without an error, those under way included."""
        self._check(path)
        self._command(ChangePath(path=path, dead=True))

    def restore(self, path: int = 0) -> None:
        """Mend a path that was cut."""
        self._check(path)
        self._command(ChangePath(path=path, dead=False))

    def counts(self, path: int = 0) -> tuple[PacketCounts, PacketCounts]:
        """What happened on a path (up, down)."""
        self._check(path)
        return self._command(None)[path]

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
            routes = [route for path in range(len(self._paths)) for route in routes_of(self._number, path, side)]
            lines = [f"route replace {route}{choice}\n" for route in routes]
            ip("-n", self.namespace(side), "-batch", "-", batch="".join(lines))

    def _check(self, path: int) -> None:
        if not 0 <= path < len(self._paths):
            raise ConfigError(f"path {path}; this link has {len(self._paths)}, counted from 0")

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

    def _stop_started(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            ended(process, STOP_LIMIT_S)

    def _command(self, command: Command, files: Sequence[int] = ()) -> Counts:
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
        return msgspec.json.decode(reply, type=Counts)


def main(
    link: Annotated[str, Meta(description="Both ways, as rate=20mbit,delay=20ms,loss=5%.")] = "",
    up: Annotated[str | None, Meta(description="From client to server, instead of --link.")] = None,
    down: Annotated[str | None, Meta(description="From server to client, instead of --link.")] = None,
    second: Annotated[str | None, Meta(description="A second path, both ways.")] = None,
    congestion: Annotated[str | None, Meta(description="TCP's congestion control. Default: the kernel's.")] = None,
) -> int:
    """Keep a bad link between two namespaces up until interrupted; then print what happened to packets."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        upwards, downwards = (LinkSpec.parse(link if each is None else each) for each in (up, down))
        both = None if second is None else (LinkSpec.parse(second),) * 2
        _keep(TunLink(upwards, downwards, second=both, congestion=congestion))
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _keep(made: TunLink) -> None:
    with made as link:
        for side, addresses in zip(SIDES, (link.client_addresses, link.server_addresses), strict=True):
            print(f"{side}: {' '.join(addresses)}  {' '.join(link.command(side, ['COMMAND']))}")  # noqa: T201
        try:  # before we say that we may be interrupted
            print("ready: interrupt to end", flush=True)  # noqa: T201
            signal.pause()
        finally:
            for path in range(len(link.client_addresses)):
                for way, counts in zip(("up", "down"), link.counts(path), strict=True):
                    print(f"path {path} {way} {msgspec.json.encode(counts).decode()}", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(call(main, sys.argv[1:], "python -m loadgen.network.tun_link"))
