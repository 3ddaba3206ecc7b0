"""A bad link for real kernel TCP and UDP: two network namespaces, joined by TUN devices and a relay process of ours.

      namespace "client"              relay (own process)               namespace "server"
    10.98.0.1 path0 ◄─TUN─► fd ─► Pipe ─► fd ◄─TUN─► path0 10.98.0.2
    10.98.1.1 path1 ◄─TUN─► fd ─► Pipe ─► fd ◄─TUN─► path1 10.98.1.2      (a second path, if asked for)

    with TunLink(LinkSpec.parse("rate=20mbit,delay=20ms,loss=5%")) as link:
        server = link.popen("server", [sys.executable, "-m", "http.server", "--bind", link.server_address])
        link.run_in("client", ["curl", f"http://{link.server_address}:8000/"])

Neither namespace has any other device than loopback, so nothing in them reaches the machine or the world. Needs root,
`ip` (package iproute2) and /dev/net/tun; `available` says what is missing. The kernel's own emulator (netem) is not
part of every kernel, and does not repeat its losses by a seed.

    python -m loadgen.tun_link --link rate=20mbit,delay=20ms,loss=5%      keeps one up until interrupted
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import functools
import gc
import itertools
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias

import msgspec

from hawkvision.errors import ConfigError, HawkVisionError, NotReady
from hawkvision.process import stop_with_parent
from loadgen.link_model import BATCH, Counts, Pipe
from loadgen.link_spec import LinkSpec

Side: TypeAlias = Literal["client", "server"]
SIDES: Final[tuple[Side, Side]] = ("client", "server")
MAX_PATHS: Final = 2
MAX_CHAIN: Final = 8
"""Links one behind another. Each has a network of its own, 10.98.0.0/16 and on."""
MTU: Final = 1500
TX_QUEUE_PACKETS: Final = 1000
"""What the kernel holds while the relay does not read: 0.6 s of 20 Mbit/s, so that a pause of ours loses nothing."""
CONTROL_LIMIT_S: Final = 30.0
STOP_LIMIT_S: Final = 5.0
_NAMES: Final = re.compile(r"hvlink-(?P<pid>\d+)-(?P<birth>\d+)-\d+-(?:client|server)")
_NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_serial = itertools.count()


# ── What owner and relay say to one another, one JSON document a line ──────────────────────────────────────────────


class _Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Comes with the descriptors of the TUN devices, (client, server) of each path."""

    paths: tuple[tuple[LinkSpec, LinkSpec], ...]
    realtime: bool


class _Set(msgspec.Struct, frozen=True, tag="set"):
    path: int
    up: LinkSpec | None
    down: LinkSpec | None


class _Cut(msgspec.Struct, frozen=True, tag="cut"):
    path: int
    dead: bool


class _Ask(msgspec.Struct, frozen=True, tag="ask"):
    pass


_Command: TypeAlias = _Begin | _Set | _Cut | _Ask


class _Status(msgspec.Struct, frozen=True):
    """The answer to every command: (up, down) of each path."""

    realtime: bool
    counts: tuple[tuple[Counts, Counts], ...]


# ── The owner ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
        realtime: run the relay before all ordinary processes (SCHED_FIFO), so that busy cores do not delay packets;
            the attribute says afterwards whether that was allowed.
        behind: a link that is up, and stays up longer than this one.
    """

    def __init__(
        self,
        up: LinkSpec,
        down: LinkSpec | None = None,
        *,
        second: tuple[LinkSpec, LinkSpec] | None = None,
        congestion: str | None = None,
        realtime: bool = True,
        behind: TunLink | None = None,
    ) -> None:
        self._behind = behind
        self._hop: int = 0 if behind is None else behind._hop + 1
        if self._hop >= MAX_CHAIN:
            raise ConfigError(f"a chain of {self._hop + 1} links; expected at most {MAX_CHAIN}")
        first = (up, up if down is None else down)
        self._paths = (first,) if second is None else (first, second)
        self._congestion = congestion
        self._name = _new_name()
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()
        self.realtime = realtime
        self.client_addresses = tuple(_address(self._hop, path, "client") for path in range(len(self._paths)))
        """IPv4 addresses by path; as `server_addresses`."""
        self.server_addresses = tuple(_address(self._hop, path, "server") for path in range(len(self._paths)))
        self.client_address, self.server_address = self.client_addresses[0], self.server_addresses[0]

    def __enter__(self) -> TunLink:
        """Raises ConfigError where no such link can be had, NotReady where one should have been."""
        reason = available()
        if reason is not None:
            raise ConfigError(f"no TUN link here: {reason}")
        sweep()
        with contextlib.ExitStack() as stack:
            for side in SIDES if self._behind is None else SIDES[1:]:
                _ip("netns", "add", self.namespace(side))
                stack.callback(_remove, self.namespace(side))
            devices = stack.enter_context(contextlib.ExitStack())
            files = [
                devices.enter_context(_device(self.namespace(side), side, self._hop, path))
                for path in range(len(self._paths))
                for side in SIDES
            ]
            if self._congestion is not None:
                self.set_congestion(self._congestion)
            self._start_relay(stack)
            begun = self._tell(_Begin(self._paths, self.realtime), [file.fileno() for file in files])
            devices.close()  # the relay has its own
            self.realtime = begun.realtime
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

    def run_in(
        self, side: Side, argv: Sequence[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a namespace and wait for it. `env` adds to the environment.

        Raises:
            subprocess.TimeoutExpired: after `timeout_s`.
        """
        return subprocess.run(  # noqa: S603 - what our caller asks for
            self.command(side, argv),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
            check=False,
        )

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
            preexec_fn=stop_with_parent if on_main_thread else None,
        )
        self._started = [*(earlier for earlier in self._started if earlier.poll() is None), process]
        return process

    @contextlib.contextmanager
    def inside(self, side: Side) -> Iterator[None]:
        """The calling thread enters a namespace: sockets made meanwhile stay there for good. Do not await inside."""
        with _entered(self.namespace(side)):
            yield

    def set(self, path: int = 0, *, up: LinkSpec | None = None, down: LinkSpec | None = None) -> None:
        """Change a path from the next packet on; None leaves a direction as it is."""
        self._check(path)
        self._tell(_Set(path, up, down))

    def cut(self, path: int = 0) -> None:
        """Kill a path both ways: packets disappear, those under way as well, and nobody is told."""
        self._check(path)
        self._tell(_Cut(path, dead=True))

    def restore(self, path: int = 0) -> None:
        """Mend a path that was cut."""
        self._check(path)
        self._tell(_Cut(path, dead=False))

    def counts(self, path: int = 0) -> tuple[Counts, Counts]:
        """What happened on a path (up, down)."""
        self._check(path)
        return self._tell(_Ask()).counts[path]

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
            routes = [route for path in range(len(self._paths)) for route in _routes(self._hop, path, side)]
            lines = [f"route replace {route}{choice}\n" for route in routes]
            _ip("-n", self.namespace(side), "-batch", "-", batch="".join(lines))

    @property
    def relay_pid(self) -> int:
        """The relay's process id, to measure what it costs."""
        return self._relay.pid

    def _check(self, path: int) -> None:
        if not 0 <= path < len(self._paths):
            raise ConfigError(f"path {path}; this link has {len(self._paths)}, counted from 0")

    def _start_relay(self, stack: contextlib.ExitStack) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(CONTROL_LIMIT_S)
        self._replies = self._control.makefile("rb")
        with theirs:
            self._relay = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", "loadgen.tun_link", _RELAY],
                stdin=theirs.fileno(),
                start_new_session=True,  # an interrupt from the terminal is for the owner, who still needs the relay
            )
        stack.callback(self._stop_relay)

    def _stop_relay(self) -> None:
        """Hang up, which ends the relay."""
        self._replies.close()
        self._control.close()
        _end(self._relay)

    def _stop_started(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            _end(process)

    def _tell(self, command: _Command, files: Sequence[int] = ()) -> _Status:
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
        return msgspec.json.decode(reply, type=_Status)


@functools.cache
def available() -> str | None:
    """Why there can be no such link here, or None if there can; found out by trying."""
    if sys.platform != "linux":
        return "network namespaces are Linux"
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs ip(8), of the package iproute2"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    name = f"{_new_name()}-client"
    try:
        with _device_made():
            _ip("netns", "add", name)
            try:
                _ip("netns", "exec", name, "true")
            finally:
                _remove(name)
    except (HawkVisionError, OSError) as error:
        return str(error)
    return None


def sweep() -> list[str]:
    """Remove the namespaces of owners that died without doing so, and what still runs there; their names.

    An owner is known by its process id and when it began. Owners in other containers that share /run/netns would look
    dead: do not share it.
    """
    stale = []
    for entry in sorted(_NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else ():
        found = _NAMES.fullmatch(entry.name)
        if found and _birth(int(found["pid"])) != int(found["birth"]):
            _remove(entry.name)
            stale.append(entry.name)
    return stale


def _new_name() -> str:
    return f"hvlink-{os.getpid()}-{_birth(os.getpid())}-{next(_serial)}"


def _birth(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if there is none (proc(5), field 22 of stat)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _address(hop: int, path: int, side: Side) -> str:
    return f"10.{98 + hop}.{path}.{1 + SIDES.index(side)}"


def _name(hop: int, path: int) -> str:
    """Of a path's devices. A namespace in the middle of a chain has those of two links."""
    return f"path{path}" if hop == 0 else f"hop{hop}path{path}"


def _routes(hop: int, path: int, side: Side) -> list[str]:
    """A side's routes over a path: to the other end, and for the client from its own address to any of the server's."""
    address, device, network = _address(hop, path, side), _name(hop, path), f"10.{98 + hop}"
    routes = [f"{network}.{path}.0/30 dev {device} src {address}"]
    if side == "client":
        routes.append(f"{network}.0.0/16 dev {device} src {address} table {_table(hop, path)}")
    return routes


def _table(hop: int, path: int) -> int:
    return 100 + MAX_PATHS * hop + path


def _ip(*arguments: str, batch: str = "") -> str:
    ran = subprocess.run(  # noqa: S603
        ["ip", *arguments],  # noqa: S607 - where the system keeps it
        input=batch,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # an interrupt from the terminal must not break cleaning up
    )
    if ran.returncode != 0:
        raise NotReady(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def _remove(namespace: str) -> None:
    """Delete a namespace of ours with all that runs in it; one that is already gone does no harm."""
    try:
        for pid in map(int, _ip("netns", "pids", namespace).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "delete", namespace)
    except NotReady:
        if (_NAMESPACES / namespace).exists():
            raise


@contextlib.contextmanager
def _entered(namespace: str) -> Iterator[None]:
    """The calling thread is in a namespace (setns(2); os.setns comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open() as there, Path("/proc/thread-self/ns/net").open() as here:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise NotReady(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            back = libc.setns(here.fileno(), _CLONE_NEWNET)
            assert back == 0, f"stuck in {namespace}: {os.strerror(ctypes.get_errno())}"


def _sysctl(name: str, value: str) -> None:
    """Set net.ipv4.`name` in the namespace of the calling thread."""
    Path("/proc/sys/net/ipv4", name).write_text(value)


@dataclass(frozen=True, slots=True)
class _Device:
    name: str
    file: IO[bytes]

    def fileno(self) -> int:
        return self.file.fileno()


@contextlib.contextmanager
def _device_made() -> Iterator[_Device]:
    """A TUN device in our own namespace, named by the kernel; it exists while somebody holds its descriptor."""
    with open("/dev/net/tun", "r+b", buffering=0) as file:  # noqa: PTH123 - Path.open takes no unbuffered r+b
        answer = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"hvtun%d", _IFF_TUN_NO_PI))
        os.set_blocking(file.fileno(), False)
        yield _Device(answer[:16].rstrip(b"\0").decode(), file)


@contextlib.contextmanager
def _device(namespace: str, side: Side, hop: int, path: int) -> Iterator[_Device]:
    """One end of a path: a device in a namespace, up, with its address and routes."""
    address, name = _address(hop, path, side), _name(hop, path)
    with _device_made() as device:
        _ip("link", "set", device.name, "netns", namespace, "name", name)
        lines = [
            "link set lo up",
            f"link set {name} addrgenmode none",  # else IPv6 looks for routers, which counts as traffic
            f"link set {name} mtu {MTU} txqueuelen {TX_QUEUE_PACKETS} up",
            f"addr add {address}/30 dev {name} noprefixroute",
            *(f"route add {route}" for route in _routes(hop, path, side)),
        ]
        if side == "client":
            lines.append(f"rule add from {address} table {_table(hop, path)}")
        _ip("-n", namespace, "-batch", "-", batch="\n".join(lines) + "\n")
        with _entered(namespace):
            # What namespaces inherit differs between machines. Saved metrics would carry one phase of a benchmark
            # into the next; reverse path filters would drop what comes by the other path.
            _sysctl("ip_forward", "0")
            _sysctl("tcp_no_metrics_save", "1")
            _sysctl("conf/all/rp_filter", "0")
            _sysctl(f"conf/{name}/rp_filter", "0")
        yield device


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ── The relay ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction of one path."""

    source: int
    target: int
    pipe: Pipe[bytes]


class _Relay:
    """Moves packets between the devices until its owner closes the control socket, or dies."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pending = b""
        """The beginning of a command: at most one trace per direction."""
        self._files: list[int] = []
        self._ways: dict[int, _Way] = {}
        """By source; (up, down) of each path, one after another."""
        self._realtime = False

    def run(self) -> None:
        """Until the owner is gone."""
        data, self._files, _, _ = socket.recv_fds(self._control, 65536, 2 * MAX_PATHS)
        self._hear(data)
        while data and not self._ways:
            data = self._control.recv(1 << 20)
            self._hear(data)
        ways = tuple(self._ways.values())
        sources = [self._control.fileno(), *self._ways]
        while data:
            soonest = min((at for way in ways if (at := way.pipe.next_at) is not None), default=None)
            # select(2) waits to the microsecond, where poll and epoll round up to the next millisecond.
            wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
            for ready in select.select(sources, [], [], wait_s)[0]:
                if ready in self._ways:
                    _take(self._ways[ready])
                else:
                    data = self._control.recv(1 << 20)
                    self._hear(data)
            for way in ways:
                _give(way)

    def _hear(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._obey(msgspec.json.decode(line, type=_Command))
            counts = [way.pipe.counts for way in self._ways.values()]
            status = _Status(self._realtime, tuple(zip(counts[::2], counts[1::2], strict=True)))
            self._control.sendall(msgspec.json.encode(status) + b"\n")

    def _obey(self, command: _Command) -> None:
        match command:
            case _Begin(paths=paths, realtime=realtime):
                self._realtime = realtime and _before_others()
                for path, (up, down) in enumerate(paths):
                    client, server = self._files[2 * path : 2 * path + 2]
                    self._ways[client] = _Way(client, server, Pipe(up, f"{path} up"))
                    self._ways[server] = _Way(server, client, Pipe(down, f"{path} down"))
            case _Set(path=path, up=up, down=down):
                for way, spec in zip(self._path(path), (up, down), strict=True):
                    if spec is not None:
                        way.pipe.direction.spec = spec
            case _Cut(path=path, dead=dead):
                for way in self._path(path):
                    way.pipe.dead = dead
            case _Ask():
                pass

    def _path(self, path: int) -> list[_Way]:
        return list(self._ways.values())[2 * path : 2 * path + 2]


def _take(way: _Way) -> None:
    """Read what the kernel sent into one end of a path."""
    for _ in range(BATCH):
        try:
            packet = os.read(way.source, MTU + 1)
        except BlockingIOError:
            return
        way.pipe.put(len(packet), packet, time.monotonic())


def _give(way: _Way) -> None:
    """Write what has arrived to the other end."""
    for packet in way.pipe.due(time.monotonic()):
        try:
            os.write(way.target, packet)
        except OSError:  # the kernel has no room, or somebody took the device down
            way.pipe.lost_relay += 1


def _before_others() -> bool:
    """Run before all ordinary processes, if we may. The kernel keeps 5 % for those (sched_rt_runtime_us)."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    return True


# ── The command line ───────────────────────────────────────────────────────────────────────────────────────────────

_RELAY: Final = "relay-of-a-running-link"


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a link up until interrupted; then print what happened. The exit status is 1 for an explained error."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments == [_RELAY]:
        gc.disable()  # packets make no cycles, and a collection is a pause
        with socket.socket(fileno=0) as control:
            _Relay(control).run()
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.tun_link", description="A bad link between two namespaces."
    )
    parser.add_argument("--link", default="", metavar="SPEC", help="both ways, as rate=20mbit,delay=20ms,loss=5%%")
    parser.add_argument("--up", metavar="SPEC", help="from client to server, in the place of --link")
    parser.add_argument("--down", metavar="SPEC", help="from server to client, in the place of --link")
    parser.add_argument("--second", metavar="SPEC", help="a second path, both ways")
    parser.add_argument("--congestion", help="TCP's congestion control (default: the kernel's)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        _keep(options)
    except HawkVisionError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _keep(options: argparse.Namespace) -> None:
    up = LinkSpec.parse(options.link if options.up is None else options.up)
    down = LinkSpec.parse(options.link if options.down is None else options.down)
    second = None if options.second is None else (LinkSpec.parse(options.second),) * 2
    with TunLink(up, down, second=second, congestion=options.congestion) as link:
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
    sys.exit(main())
