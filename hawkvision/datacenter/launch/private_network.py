"""A private network for a process and its descendants: loopback only, no way in or out (network_namespaces(7)).

Sockets that were opened before stay in their network and work as before. So a process that got its public sockets
serves the outside, while nothing else that it or its children listen on can be reached.

This needs CAP_SYS_ADMIN or user namespaces (user_namespaces(7)). In a user namespace a process keeps its user and
group, and no other user exists: others' files show as `nobody`'s, and root has no power over them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
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
