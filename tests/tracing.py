"""What processes ask the network for and write to disk, as `strace` sees it from their start to their end."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

CALLS: Final = (
    "connect,sendto,sendmsg,sendmmsg,open,openat,openat2,creat,mkdir,mkdirat,"
    "rename,renameat,renameat2,symlink,link,linkat"
)
RESOLVER: Final = re.compile(r'sun_path="[^"]*systemd[^"]*resolve')
"""The socket of this machine's own resolver. That of nscd is asked for users as well, so it tells nothing."""
FAILED: Final = re.compile(r"= -1 E(?!INPROGRESS|AGAIN)[A-Z]+ ")
FOLDERS: Final = ("home", "cache", "tmp")
NO_FILES: Final = ("/dev/", "/proc/", "/sys/")


@dataclass
class Trace:
    """What was seen, complete once the processes have ended."""

    folder: Path
    """Holds `FOLDERS`, which `environment` names; everything that is written must be below it."""
    lines: list[str] = field(default_factory=list)

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def sent(self) -> list[str]:
        """Look-ups of names, and what was sent or connected to beyond this machine.

        A datagram socket that is connected and never sent on does not count.
        """
        return [line for line in self.lines if _leaves(line)]

    def written(self) -> set[str]:
        """Files that were opened for writing or made anew, devices and the kernel's own left out."""
        made_here = {str(self.folder), *(str(self.folder / each) for each in FOLDERS)}
        found = {path for line in self.lines for path in _written(line) if not path.startswith(NO_FILES)}
        return found - made_here


def _leaves(line: str) -> bool:
    if FAILED.search(line):
        return False
    call = line.partition("(")[0].split()[-1]
    if call == "connect":
        asked = re.search(r"\(\d+<TCP.*(?:inet_addr\(|inet_pton\(AF_INET6, )\"([^\"]+)\"", line)
        return RESOLVER.search(line) is not None or (asked is not None and not _here(asked[1]))
    if not call.startswith("send"):
        return False
    peer = re.search(r"\(\d+<(?:UDP|TCP)[^>]*->\[?(.*?)\]?:(\d+)\]>", line)
    named = re.search(r"inet_addr\(\"([^\"]+)\"\)|inet_pton\(AF_INET6, \"([^\"]+)\"", line)
    to = peer[1] if peer else (named[1] or named[2]) if named else None
    asks_for_a_name = (peer is not None and peer[2] == "53") or "htons(53)" in line
    return asks_for_a_name or (to is not None and not _here(to))


def _here(address: str) -> bool:
    """Whether it is one of this machine's own."""
    found = ipaddress.ip_address(address)
    plain = (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
    return plain.is_loopback or plain.is_unspecified or str(plain) in _own_addresses()


@functools.cache
def _own_addresses() -> frozenset[str]:
    routes = Path("/proc/net/fib_trie").read_text(encoding="ascii")
    return frozenset(re.findall(r"\|-- (\S+)\s+/32 host LOCAL", routes))


def _written(line: str) -> list[str]:
    if FAILED.search(line):
        return []
    call = line.partition("(")[0].split()[-1]
    if call.startswith("open"):
        if not re.search(r"O_WRONLY|O_RDWR|O_CREAT", line):
            return []
        opened = re.search(r"= \d+<(/[^>]*)>\s*$", line)  # as the kernel has it, links followed
        if opened:
            return [opened[1]]
    if call.startswith(("open", "mkdir", "creat", "rename", "symlink", "link")):
        folder = re.search(r"\(AT_FDCWD<([^>]*)>|\(\d+<([^>]*)>", line)
        base = (folder[1] or folder[2]) if folder else "/"
        return [os.path.join(base, name) for name in re.findall(r'"([^"]*)"', line)[-1:]]  # noqa: PTH118
    return []


@contextlib.contextmanager
def traced() -> Iterator[tuple[Trace, list[str]]]:
    """A trace, and the command to put before the one that is to be traced; on leaving, the trace is complete.

    The traced process is the direct child of its starter, so signals and exit statuses are its own.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.fail("strace is missing, with which this test looks at what processes do: apt-get install strace")
    with tempfile.TemporaryDirectory(prefix="hv-", dir="/tmp", ignore_cleanup_errors=True) as name:
        trace = Trace(Path(name))
        for each in FOLDERS:
            (trace.folder / each).mkdir()
        pipe = trace.folder / "trace"
        os.mkfifo(pipe)

        def read() -> None:
            with pipe.open(encoding="utf-8", errors="replace") as lines:
                trace.lines.extend(lines)

        reader = threading.Thread(target=read)
        reader.start()
        keep_open = os.open(pipe, os.O_WRONLY)  # or the reader would wait for ever for a command that is never started
        try:
            yield (
                trace,
                [
                    strace,
                    "-D",
                    "-f",
                    "--seccomp-bpf",
                    "-yy",
                    "-q",
                    "-s",
                    "300",
                    "-e",
                    f"trace={CALLS}",
                    "-o",
                    str(pipe),
                ],
            )
        finally:
            os.close(keep_open)
            reader.join()
