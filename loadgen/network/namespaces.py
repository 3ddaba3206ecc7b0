"""Network namespaces joined by TUN devices: how they are made, entered and removed.

      namespace "client"                                        namespace "server"
    10.98.0.1 link0 ◄─TUN─► descriptor   ...   descriptor ◄─TUN─► link0 10.98.0.2

`loadgen.network.tun_relay` moves packets between the descriptors, and `loadgen.network.tun_link` owns the namespaces. A
namespace is named after the process that owns it, so that namespaces left behind can be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias

from hawkvision.core.errors import HawkVisionError, NotReady

Side: TypeAlias = Literal["client", "server"]
SIDES: Final[tuple[Side, Side]] = ("client", "server")
MTU: Final = 1500
TX_QUEUE_PACKETS: Final = 1000
"""What the kernel holds while the relay does not read: 0.6 s of 20 Mbit/s, so that a pause of ours loses nothing."""
_NAMES: Final = re.compile(r"hvlink-(?P<pid>\d+)-(?P<birth>\d+)-\d+-(?:client|server|node\d+)")
_NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_serial = itertools.count()


@functools.cache
def available() -> str | None:
    """Why there can be no such link here, or None if there can; found out by trying."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs ip(8), of the package iproute2"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    name = f"{new_name()}-client"
    try:
        with _new_device():
            ip("netns", "add", name)
            try:
                ip("netns", "exec", name, "true")
            finally:
                remove(name)
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
            remove(entry.name)
            stale.append(entry.name)
    return stale


def new_name() -> str:
    """What the namespaces of one link or network are called, before "-client", "-server" or "-nodeN"."""
    return f"hvlink-{os.getpid()}-{_birth(os.getpid())}-{next(_serial)}"


def _birth(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if there is none (proc(5), field 22 of stat)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def address_of(link: int, side: Side) -> str:
    """The IPv4 address of one end; `link` is its number in a chain."""
    return f"10.{98 + link}.0.{1 + SIDES.index(side)}"


def route_of(link: int, side: Side) -> str:
    """A side's route to the other end. A namespace in the middle of a chain has the devices of two links."""
    return f"10.{98 + link}.0.0/30 dev link{link} src {address_of(link, side)}"


def ip(*arguments: str, batch: str = "") -> str:
    """What ip(8) prints.

    Raises:
        NotReady: with its complaint.
    """
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


def remove(namespace: str) -> None:
    """Delete a namespace of ours with all that runs in it; one that is already gone does no harm."""
    try:
        for pid in map(int, ip("netns", "pids", namespace).split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ip("netns", "delete", namespace)
    except NotReady:
        if (_NAMESPACES / namespace).exists():
            raise


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
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


@contextlib.contextmanager
def _new_device() -> Iterator[tuple[str, IO[bytes]]]:
    """(name, file) of a TUN device in our own namespace, named by the kernel; it exists while the file is open."""
    with open("/dev/net/tun", "r+b", buffering=0) as file:  # noqa: PTH123 - Path.open takes no unbuffered r+b
        answer = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"hvtun%d", _IFF_TUN_NO_PI))
        os.set_blocking(file.fileno(), False)
        yield answer[:16].rstrip(b"\0").decode(), file


@contextlib.contextmanager
def open_device(namespace: str, side: Side, link: int) -> Iterator[IO[bytes]]:
    """One end of a link: a device in a namespace, up, with its address and route.

    A read gives a packet, a write sends one; neither blocks.
    """
    name = f"link{link}"
    with _new_device() as (given_name, file):
        ip("link", "set", given_name, "netns", namespace, "name", name)
        lines = [
            "link set lo up",
            f"link set {name} addrgenmode none",  # else IPv6 looks for routers, which counts as traffic
            f"link set {name} mtu {MTU} txqueuelen {TX_QUEUE_PACKETS} up",
            f"addr add {address_of(link, side)}/30 dev {name} noprefixroute",
            f"route add {route_of(link, side)}",
        ]
        ip("-n", namespace, "-batch", "-", batch="\n".join(lines) + "\n")
        with entered(namespace):
            # What namespaces inherit differs between machines. Saved metrics would carry one phase of a benchmark
            # into the next.
            _sysctl("ip_forward", "0")
            _sysctl("tcp_no_metrics_save", "1")
        yield file
