"""The sockets that a process and its descendants listen on, from Linux's /proc (proc(5)).

A process may hold a socket of another network, as the tier holds its public ones. So sockets are looked up in the
networks of all these processes and of the calling one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
