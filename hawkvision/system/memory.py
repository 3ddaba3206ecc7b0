"""The memory that a process may use, and a budget of it that is shared by what takes much for a short time.

    RLIMIT_AS ──────────────── less this process's address space ─┐
    cgroup (v1, v2), ancestors ─ less what the group uses ────────┼─ least ─► room ─ · SHARE ─► budget ─┬─ bodies
    the machine ────────────── what is available ─────────────────┘                                     └─ decoding

`room` reads the limits; `MemoryBudget` hands out bytes and takes them back, and knows nothing of what they are for.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import math
import resource
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from hawkvision.core.errors import DeadlineMissed, Overloaded

ResultT = TypeVar("ResultT")

SHARE: Final = 0.75
"""Of the room, what is budgeted. The rest is for what is not counted: connections, answers, threads' stacks, inference
of more images at once than at the start, and what an allocator cannot give back."""
BODIES_SHARE: Final = 0.25
"""Of the budget, what bodies may take; each counts twice, for it is in pieces and in one piece for a moment. Bodies
never take decoding's part, so that an image that is here can always be decoded, and then leaves."""
LEAST_BYTES: Final = 32 * 1024 * 1024
"""Of a budget that is not set: with less no image at all could be decoded."""
REQUEST_SHARE: Final = 0.5
"""Of decoding's part, what one request may take: never all of it, so that others' images are decoded meanwhile."""
OVERTAKEN_MOST: Final = 16
"""How often who needs more memory than is free is overtaken by who needs less; then nobody gets any before."""
WAITING_MOST: Final = 1024
"""Who waits in line for memory; a node or replica lets in fewer requests."""
LARGE_BYTES: Final = 4 * 1024 * 1024
"""Rasters of JPEGs, which are decoded small, are below, and their memory is used again without asking the kernel."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""
_UNLIMITED: Final = 1 << 60
"""Kernels write 2⁶³ less a page, or the like, where there is no limit (cgroup v1)."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that the process may still take, and what sets that limit."""

    free_bytes: int
    limited_by: str


def room(proc: Path = Path("/proc")) -> MemoryRoom:
    """The least that any limit leaves; without `/proc` (not Linux), 1 GiB.

    Args:
        proc: where the kernel tells of processes.
    """
    found = [MemoryRoom(*each) for each in (*_address_space(proc), *_cgroups(proc), *_machine(proc))]
    return min(found, key=lambda each: each.free_bytes, default=MemoryRoom(1 << 30, "nothing that could be read"))


def _machine(proc: Path) -> Iterator[tuple[int, str]]:
    fields = _fields(proc / "meminfo")
    if "MemAvailable" in fields:
        yield fields["MemAvailable"] * 1024, "the machine's available memory"


def _address_space(proc: Path) -> Iterator[tuple[int, str]]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _fields(proc / "self" / "status").get("VmSize")
    if limit != resource.RLIM_INFINITY and used is not None:
        yield max(0, limit - used * 1024), "RLIMIT_AS"


def _cgroups(proc: Path) -> Iterator[tuple[int, str]]:
    """What each group that this process is in leaves, its own and those above; page cache that can go is free."""
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        for mounted_from, mounted_at in _mounts(proc, version):
            inside = path.removeprefix(mounted_from) if mounted_from != "/" else path
            top = Path(mounted_at)
            for group in _upwards(top, top / inside.strip("/")):
                limit = _number(group / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
                used = _number(group / ("memory.usage_in_bytes" if version == 1 else "memory.current"))
                if limit is None or used is None or limit >= _UNLIMITED:
                    continue
                cache = _fields(group / "memory.stat")
                reclaimable = cache.get("total_inactive_file", cache.get("inactive_file", 0))
                yield max(0, limit - max(0, used - reclaimable)), f"cgroup {group}"


def _upwards(top: Path, group: Path) -> Iterator[Path]:
    """A group and those above it, `top` included; `top` alone where the group is not to be seen from here."""
    while group != top:
        if group.is_dir():
            yield group
        group = group.parent
    yield top


def _mounts(proc: Path, version: int) -> Iterator[tuple[str, str]]:
    """Of which part of the hierarchy there is a view, and where (proc(5), mountinfo)."""
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, behind = line.partition(" - ")
        fields, described = before.split(" "), behind.split(" ")
        if len(fields) < 5 or len(described) < 3:
            continue
        v1 = described[0] == "cgroup" and "memory" in described[2].split(",")
        if (version == 1 and v1) or (version == 2 and described[0] == "cgroup2"):
            yield fields[3], fields[4]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them."""
    found: dict[str, int] = {}
    for line in _lines(path):
        name, _, rest = line.replace(":", " ", 1).partition(" ")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None


def give_back_at_once() -> None:
    """Have the allocator return what is large as soon as it is free, where it is glibc's.

    It would learn from each large raster that is freed to keep the next, up to 32 MB for every thread (mallopt(3),
    M_MMAP_THRESHOLD), and so hold for ever what a few large images once took.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """How a budget is divided; bytes."""

    total: int
    bodies: int
    decoding: int
    request: int
    """At most, of `decoding`, for one request."""
    basis: str
    """Where `total` is from."""


def divided(total: int | None, request: int | None, processes: int = 1) -> MemoryParts:
    """The budget that settings say, or that the limits of this process leave.

    Args:
        total: bytes for all, if set.
        request: bytes for one request, if set; no more than decoding has.
        processes: that share the limits, this one included.
    """
    if total is None:
        left = room()
        total, basis = int(left.free_bytes * SHARE / processes), left.limited_by
        if total < LEAST_BYTES:
            total, basis = LEAST_BYTES, f"{basis}, which leaves less than that"
    else:
        basis = "a setting"
    bodies = int(total * BODIES_SHARE)
    decoding = total - bodies
    return MemoryParts(total, bodies, decoding, min(request or int(decoding * REQUEST_SHARE), decoding), basis)


class MemoryBudget:
    """Bytes that are handed out and come back, from any thread. Before `limit` is set there is no bound.

    Who waits is served by deadline, and is overtaken by smaller ones at most `OVERTAKEN_MOST` times.
    """

    def __init__(self, limit: int = _UNLIMITED) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        """The most that were ever in use."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        """By deadline: until when, number, bytes, who."""
        self._numbers = itertools.count()
        self._overtaken = 0
        """How often the first of them was."""
        self._freed: list[Callable[[], None]] = []

    def when_freed(self, call: Callable[[], None]) -> None:
        """Call this, on whatever thread, each time that bytes come back."""
        self._freed.append(call)

    def take(self, size: int) -> bool:
        """Take so many bytes, if they are free and nobody who waits has been overtaken too often."""
        with self._lock:
            if self.in_use + size > self.limit:
                return False
            if self._waiting:
                if self._overtaken >= OVERTAKEN_MOST:
                    return False
                self._overtaken += 1
            self._took(size)
            return True

    def give_back(self, size: int) -> None:
        """Undo `take`."""
        with self._lock:
            self.in_use -= size
            if self._waiting:
                self._serve()
        for call in self._freed:
            call()

    @asynccontextmanager
    async def held(self, size: int, until: float = math.inf) -> AsyncGenerator[None]:
        """Have so many bytes for as long as the block lasts, as soon as they are free.

        Args:
            size: bytes.
            until: on the loop's clock; nobody waits longer.

        Raises:
            DeadlineMissed: if that passes first.
            Overloaded: if `size` is more than there ever is, or the line is full.
        """
        if size > self.limit:
            raise Overloaded(f"decoding takes {size} bytes, and {self.limit} is all the memory there is for it", 1.0)
        if not self.take(size):
            await self._wait(size, until)
        try:
            yield
        finally:
            self.give_back(size)

    async def _wait(self, size: int, until: float) -> None:
        loop = asyncio.get_running_loop()
        served: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if len(self._waiting) >= WAITING_MOST:
                raise Overloaded(f"{WAITING_MOST} images are already waiting for memory", 1.0)
            heapq.heappush(self._waiting, (until, next(self._numbers), size, served))
            self._serve()  # it may have come back meanwhile
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await served
        except BaseException as error:
            with self._lock:
                left = [each for each in self._waiting if each[3] is not served]
                ours = len(left) == len(self._waiting)
                self._waiting = left
                heapq.heapify(left)
            if ours:  # served, and nobody there
                self.give_back(size)
            if isinstance(error, TimeoutError):
                raise DeadlineMissed("the deadline passed before there was memory to decode the image") from None
            raise

    def _serve(self) -> None:
        """Give those who wait what is free, with the lock held."""
        while self._waiting and self.in_use + self._waiting[0][2] <= self.limit:
            _, _, size, served = heapq.heappop(self._waiting)
            self._overtaken = 0
            self._took(size)
            served.get_loop().call_soon_threadsafe(_done, served)

    def _took(self, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)


async def to_the_end(running: asyncio.Future[ResultT]) -> ResultT:
    """What a thread gives; who is cancelled meanwhile leaves when it has ended, for until then it uses its memory."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _done(served: asyncio.Future[None]) -> None:
    if not served.done():
        served.set_result(None)
