"""A private network for the tier, and the sockets that its processes listen on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP_RUNNING: Final = 0x1 | 0x40
_IFREQ: Final = struct.Struct("16sH22x")
"""`struct ifreq` (netdevice(7)): the name, the flags, and the rest of the union."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def enter_private_network() -> None:
    """Move this process into a private network. If a user namespace is needed, it must have a single thread.

    Raises:
        OSError: if the kernel refuses; names the failed step. The process is of no use afterwards.
    """
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        _write("setgroups", "deny")
        _write("uid_map", f"{uid} {uid} 1")
        _write("gid_map", f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP_RUNNING))
        except OSError as error:
            raise OSError(error.errno, f"bringing loopback up: {error.strerror}") from None


def why_not_private() -> str | None:
    """Why a process cannot have a private network here; None if it can. Tried in a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        reason = b""
        try:
            enter_private_network()
        except OSError as error:
            reason = (error.strerror or str(error)).encode()
        except BaseException as error:  # noqa: BLE001 - a child must never return into its parent's code
            reason = repr(error).encode()
        finally:
            os.write(writing, reason[:1000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as reading_end:
        reason = reading_end.read()
    os.waitpid(child, 0)
    return reason.decode(errors="replace") or None


def _unshare(flags: int) -> None:
    if _LIBC.unshare(flags) != 0:
        number = ctypes.get_errno()
        what = "a network namespace" if flags == _CLONE_NEWNET else "a user and a network namespace"
        limits = ", see /proc/sys/user/max_*_namespaces" if number == errno.ENOSPC else ""
        raise OSError(number, f"making {what}: {os.strerror(number)}{limits}")


def _write(name: str, text: str) -> None:
    try:
        Path(f"/proc/self/{name}").write_text(text)
    except OSError as error:
        raise OSError(error.errno, f"writing /proc/self/{name}: {error.strerror}") from None


_TABLES: Final = ("tcp", "tcp6", "udp", "udp6")
_WAITING: Final = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""States (include/net/tcp_states.h): listening TCP; unconnected UDP."""
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A socket that accepts connections or datagrams from anybody."""

    protocol: str
    """`tcp` or `udp`."""
    address: str
    port: int
    inode: int
    network: int
    """Its network namespace: the inode number of /proc/PID/ns/net."""
    pid: int
    """The first process that holds it."""
    command: str

    @property
    def beyond_loopback(self) -> bool:
        """Whether other machines may reach it, if its network has other interfaces than loopback."""
        return not ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        """The address and the process, for the log."""
        shown = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.protocol} {shown}:{self.port} ({self.command}, process {self.pid})"


def listeners(of: int) -> tuple[Listener, ...]:
    """All sockets that this process and its descendants listen on, sorted.

    Processes that end in the meantime are left out.

    Raises:
        PermissionError: if the kernel hides one of the processes.
    """
    holders: dict[int, int] = {}
    networks = {network_of(os.getpid()): os.getpid()}
    for pid in family(of):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            networks.setdefault(network_of(pid), pid)
            for inode in _sockets(pid):
                holders.setdefault(inode, pid)
    found = []
    for network, pid in networks.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for protocol, address, port, inode in _table(pid):
                if inode in holders:
                    found.append(
                        Listener(protocol, address, port, inode, network, holders[inode], _name(holders[inode]))
                    )
    return tuple(sorted(found))


def uninvited(found: Iterable[Listener], network: int, public: Collection[int]) -> tuple[Listener, ...]:
    """The sockets that other machines can reach by this network, without the public ones."""
    return tuple(
        each for each in found if each.network == network and each.beyond_loopback and each.inode not in public
    )


def network_of(pid: int) -> int:
    """The network namespace of a process.

    Raises:
        OSError: if it is gone, or hidden.
    """
    return (_PROC / str(pid) / "ns" / "net").stat().st_ino


def family(of: int) -> tuple[int, ...]:
    """A process and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The state and the parent follow the command, which may contain parentheses.
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [of]
    for pid in found:  # grows in the loop
        found.extend(sorted(children.get(pid, ())))
    return tuple(found)


def _sockets(pid: int) -> Iterator[int]:
    for file in (_PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            target = str(file.readlink())
            if target.startswith("socket:["):
                yield int(target[len("socket:[") : -1])


def _table(pid: int) -> Iterator[tuple[str, str, int, int]]:
    """Protocol, address, port and inode of each listening socket in the network of a process."""
    for table in _TABLES:
        path = _PROC / str(pid) / "net" / table
        if not path.exists():  # a kernel without IPv6
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _WAITING[table]:
                address, _, port = local.partition(":")
                yield table.removesuffix("6"), address_of(address), int(port, 16), int(inode)


def address_of(digits: str) -> str:
    """An address of /proc/net, words of 32 bits in the machine's byte order; IPv4 in IPv6 becomes IPv4.

    Raises:
        ValueError: if it is not an address.
    """
    raw = bytes.fromhex(digits)
    words = [raw[start : start + 4] for start in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(address if mapped is None else mapped)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return "gone"
