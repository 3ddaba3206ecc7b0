"""The memory that a process may use, and a budget for short, large uses of it.

    RLIMIT_AS ──────────────── less this process's address space ─┐
    cgroup (v1, v2), ancestors ─ less what the group uses ────────┼─ least ─► room ─ · SHARE ─► budget ─┬─ bodies
    the machine ────────────── what is available ─────────────────┘                                     └─ decoding

`room` reads the limits. `MemoryBudget` lends bytes.
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
"""Share of the free memory that the budget takes. The rest is for connections, responses, thread stacks, parallel
inference and what the allocator keeps."""
BODIES_SHARE: Final = 0.25
"""Share of the budget for bodies. Each body counts twice, because its pieces and the joined body exist together. Bodies
never take the part for decoding, so that a received image can always be decoded."""
LEAST_BYTES: Final = 32 * 1024 * 1024
"""Smallest budget that is not set explicitly; less does not suffice to decode an image."""
REQUEST_SHARE: Final = 0.5
"""Share of decoding's part for one request, so that other images can be decoded meanwhile."""
OVERTAKEN_MOST: Final = 16
"""Requests that may overtake a waiting larger one; then it is served first."""
WAITING_MOST: Final = 1024
"""Most requests that wait for memory."""
LARGE_BYTES: Final = 4 * 1024 * 1024
"""Allocations from this size on are returned to the kernel when freed. Rasters of JPEGs are smaller and reused."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Constants of glibc's malloc.h."""
_UNLIMITED: Final = 1 << 60
"""Limits from this on mean no limit: cgroup v1 writes about 2⁶³."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that the process may still use, and what limits them."""

    free_bytes: int
    limited_by: str


def room(proc: Path = Path("/proc")) -> MemoryRoom:
    """The tightest limit of this process; 1 GiB without `/proc` (not Linux).

    Args:
        proc: the proc file system.
    """
    found = [MemoryRoom(*each) for each in (*_address_space(proc), *_cgroups(proc), *_machine(proc))]
    return min(found, key=lambda each: each.free_bytes, default=MemoryRoom(1 << 30, "nothing that could be read"))


def resident_bytes(proc: Path = Path("/proc")) -> int | None:
    """Bytes of this process in memory; None without `/proc`."""
    kib = _fields(proc / "self" / "status").get("VmRSS")
    return None if kib is None else kib * 1024


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
    """Free bytes of each cgroup of this process and its ancestors; reclaimable page cache counts as free."""
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
    """A group and its ancestors up to `top`; only `top` if the group is not visible."""
    while group != top:
        if group.is_dir():
            yield group
        group = group.parent
    yield top


def _mounts(proc: Path, version: int) -> Iterator[tuple[str, str]]:
    """(root, mount point) of each mounted memory hierarchy (proc(5), mountinfo)."""
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
    """Lines of a name and a number."""
    found: dict[str, int] = {}
    for line in _lines(path):
        name, _, rest = line.replace(":", " ", 1).partition(" ")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or no limit ("max")."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None


def give_back_at_once() -> None:
    """Make glibc's allocator return large blocks to the kernel when they are freed.

    By default it raises its threshold with each large block freed, up to 32 MB per thread (mallopt(3)), and keeps what
    a few large images once took. Other allocators are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE_BYTES)


def give_back_freed() -> None:
    """Return what glibc's allocator keeps of freed memory to the kernel (malloc_trim(3)). Takes some milliseconds."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of a memory budget in bytes."""

    total: int
    bodies: int
    decoding: int
    request: int
    """Most of `decoding` for one request."""
    basis: str
    """What `total` follows from."""


def divided(total: int | None, request: int | None, processes: int = 1) -> MemoryParts:
    """The budget from the settings, or from the limits of this process.

    Args:
        total: bytes for everything, if set.
        request: bytes for one request, if set; at most decoding's part.
        processes: number of processes that share the limits.
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
    """Lends bytes to any thread. There is no bound before `limit` is set.

    Waiting requests are served by deadline. Smaller ones may overtake the first at most `OVERTAKEN_MOST` times.
    """

    def __init__(self, limit: int = _UNLIMITED) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        """Highest value of `in_use`."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, int, Callable[[], None]]] = []
        """A heap of (deadline, sequence number, bytes, what tells who waits)."""
        self._numbers = itertools.count()
        self._overtaken = 0
        """How often the first one was overtaken."""

    def take(self, size: int) -> bool:
        """Take `size` bytes if they are free and no waiting request has been overtaken too often."""
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
        """Give back `size` bytes of `take`."""
        with self._lock:
            self.in_use -= size
            if self._waiting:
                self._serve()

    def wait_for(self, size: int, until: float = math.inf) -> None:
        """Take `size` bytes, at most `limit`; blocks the thread until they are free. The deadline orders who waits."""
        if self.take(size):
            return
        served = threading.Event()
        with self._lock:
            heapq.heappush(self._waiting, (until, next(self._numbers), size, served.set))
            self._serve()  # memory may have been given back meanwhile
        served.wait()

    @asynccontextmanager
    async def held(self, size: int, until: float = math.inf) -> AsyncGenerator[None]:
        """Hold `size` bytes for the duration of the block, after waiting for them.

        Args:
            size: bytes.
            until: latest time of the loop's clock to wait for.

        Raises:
            DeadlineMissed: if that time passes first.
            Overloaded: if `size` exceeds the budget, or too many requests wait.
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

            def tell() -> None:
                loop.call_soon_threadsafe(_done, served)

            entry = (until, next(self._numbers), size, tell)
            heapq.heappush(self._waiting, entry)
            self._serve()  # memory may have been given back meanwhile
        try:
            async with asyncio.timeout_at(None if until == math.inf else until):
                await served
        except BaseException as error:
            with self._lock:
                left = [each for each in self._waiting if each is not entry]
                ours = len(left) == len(self._waiting)
                self._waiting = left
                heapq.heapify(left)
            if ours:  # the bytes were lent although the wait had ended
                self.give_back(size)
            if isinstance(error, TimeoutError):
                raise DeadlineMissed("the deadline passed before there was memory to decode the image") from None
            raise

    def _serve(self) -> None:
        """Serve waiting requests from the free bytes, with the lock held."""
        while self._waiting and self.in_use + self._waiting[0][2] <= self.limit:
            _, _, size, tell = heapq.heappop(self._waiting)
            self._overtaken = 0
            self._took(size)
            tell()

    def _took(self, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)


async def to_the_end(running: asyncio.Future[ResultT]) -> ResultT:
    """Await the result of a thread. On cancellation, wait until the thread ends, because it uses memory until then."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _done(served: asyncio.Future[None]) -> None:
    if not served.done():
        served.set_result(None)
