"""Both tiers under load with a breakable link between them, shared by `faults` and `soak`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import cv2

from hawkvision.client.asynchronous import AsyncClient
from hawkvision.core.errors import HawkVisionError
from hawkvision.core.types import Answer

READY_S: Final = 120.0
LATE_S: Final = 30.0
SCRAPE_S: Final = 0.05
"""Between looks at gauges and readiness."""
CROPS: Final = 24


@dataclass(frozen=True, slots=True)
class Asking:
    """A kind of request."""

    name: str
    fields: dict[str, Any]
    deadline_ms: float | None = None

    def all_fields(self) -> dict[str, Any]:
        """As the client takes them."""
        return self.fields if self.deadline_ms is None else {**self.fields, "deadline_ms": self.deadline_ms}


ASKINGS: Final = (
    Asking("fast", {"quality": "fast"}),
    Asking("balanced, 300 ms", {"quality": "balanced"}, 300.0),
    Asking("best, 300 ms", {"quality": "best"}, 300.0),
    Asking("best", {"quality": "best"}),
)


def photographs(count: int = CROPS) -> list[bytes]:
    """Crops of scikit-image's photographs as JPEG, the same each time."""
    import skimage

    folder, rng, crops = Path(skimage.__path__[0]) / "data", random.Random(1), []
    names = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")
    for name in itertools.islice(itertools.cycle(names), count):
        pixels = cv2.imread(str(folder / name))
        assert pixels is not None, f"scikit-image has no {name}"
        side = rng.randint(250, min(pixels.shape[:2]))
        top, left = rng.randint(0, pixels.shape[0] - side), rng.randint(0, pixels.shape[1] - side)
        done, written = cv2.imencode(".jpg", pixels[top : top + side, left : left + side])
        assert done
        crops.append(written.tobytes())
    return crops


@dataclass
class Server:
    """A process of ours, started by hand so that it may be killed and started again where it was."""

    name: str
    words: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    said: list[tuple[float, str]] = field(default_factory=list)
    """Lines of its output and when they came."""
    url: str = ""
    process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, *, port: int = 0, wait: bool = True) -> None:
        """Start it, and wait until it is ready.

        Raises:
            TimeoutError: if it does not become ready in `READY_S`.
        """
        self._ready.clear()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *self.words,
            "--port",
            str(port),
            env={**os.environ, **self.env},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._reading = asyncio.create_task(self._read(self.process))
        if wait:
            await asyncio.wait_for(self._ready.wait(), READY_S)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.said.append((time.monotonic(), text))
            if text.startswith("ready: "):
                self.url = text.removeprefix("ready: ").strip()
                self._ready.set()

    async def ready(self) -> None:
        """Return once it has said that it is."""
        await self._ready.wait()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def kill(self, sent: signal.Signals = signal.SIGKILL) -> int:
        """End it and give its exit status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(sent)
        status = await self.process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        return status

    async def stop(self) -> int:
        """End it gently, or by force after a minute."""
        if self.process is None or self.process.returncode is not None:
            return 0
        try:
            return await asyncio.wait_for(self.kill(signal.SIGTERM), 60.0)
        except TimeoutError:
            return await self.kill()


def descendants(pid: int) -> dict[int, str]:
    """Process numbers below a process, with their command lines."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(each.name))
    found, waiting = {}, list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        with contextlib.suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        waiting += children.get(child, ())
    return found


KINDS: Final = {
    "replica": r"ray::ServeReplica:[^:]+:(?!ingress)",
    "ingress": r"ray::ServeReplica:[^:]+:ingress",
    "raylet": r"/raylet/raylet ",
    "gcs": r"gcs_server",
}


def processes(tier: Server, kind: str) -> list[int]:
    """The tier's processes of a kind: `launcher`, `ingress`, `replica`, `raylet` or `gcs`."""
    if kind == "launcher":
        return [tier.pid]
    below = descendants(tier.pid)
    return [pid for pid, words in below.items() if re.search(KINDS[kind], words) and "defunct" not in words]


class FaultyLink:
    """A TCP relay from the edge to the tier that can be reset, silenced or left half open."""

    def __init__(self, upstream: Server) -> None:
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._mute = False
        self.url = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[FaultyLink]:
        """Listen."""
        server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.reset()

    def reset(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self, silent: bool) -> None:
        """Carry nothing in either direction, and tell nobody; what came meanwhile is carried afterwards."""
        self._passing.clear() if silent else self._passing.set()

    def half_open(self, mute: bool) -> None:
        """Take bytes from the edge and never bring any back: what came meanwhile is lost."""
        self._mute = mute

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._carried(reader, back), self._carried(there, writer, back=True))
        finally:
            self._writers -= {writer, back}
            for end in (writer, back):
                end.close()

    async def _carried(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, back: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._passing.wait()
                if not self._mute:
                    sink.write(data)
                    await sink.drain()
            sink.close()


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request and what came of it."""

    asking: Asking
    image: int
    due: float
    took_s: float
    outcome: Answer | HawkVisionError


@dataclass
class World:
    """Both tiers, the link between them, and what is known to be right."""

    tier: Server
    edge: Server
    link: FaultyLink
    images: list[bytes]
    healthy: dict[tuple[str, int], str] = field(default_factory=dict)
    """The label that each kind of request gets for each image while nothing is broken."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, scratch: Path, edge_words: Sequence[str] = ()) -> AsyncIterator[World]:
        """Start everything and learn what is right."""
        tier = Server("datacenter", ("hawkvision.datacenter",))
        try:
            await tier.start()
            link = FaultyLink(tier)
            async with link.open():
                state = ("--state-file", str(scratch / "state.sqlite"))
                edge = Server("edge", ("edge", "--datacenter-url", link.url, *state, *edge_words))
                world = cls(tier, edge, link, photographs())
                try:
                    await edge.start()
                    await world.learn()
                    yield world
                finally:
                    await edge.stop()
        finally:
            await tier.stop()

    async def learn(self) -> None:
        """Ask everything once while nothing is broken."""
        async with AsyncClient(self.edge.url, timeout_s=60.0) as client:
            for asking in ASKINGS:
                for number, image in enumerate(self.images):
                    answer = await client.classify(image, **asking.fields)
                    assert not answer.degraded, f"{asking.name} is degraded although nothing is broken"
                    self.healthy[asking.name, number] = answer.label

    def is_wrong(self, asked: SentRequest) -> bool:
        """Whether an answer claims to be whole and is not what a healthy system says, nor what its best stage says."""
        answer = asked.outcome
        if not isinstance(answer, Answer) or answer.degraded:
            return False
        return answer.label not in (self.healthy[asked.asking.name, asked.image], self.healthy["best", asked.image])


class BackgroundLoad:
    """Requests at a rate, whatever the servers do: open loop, each kind in turn."""

    def __init__(self, world: World, rate: float, *, timeout_s: float = 30.0) -> None:
        self._world = world
        self._rate = rate
        self._timeout_s = timeout_s
        self.asked: list[SentRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def under_way(self) -> int:
        """Requests that wait for an answer."""
        return len(self._tasks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BackgroundLoad]:
        """Send until the context ends; then wait for what is under way."""
        async with AsyncClient(
            self._world.edge.url, timeout_s=self._timeout_s, late_s=LATE_S, connections=256
        ) as client:
            sending = asyncio.create_task(self._send(client))
            try:
                yield self
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await asyncio.gather(*self._tasks)

    async def _send(self, client: AsyncClient) -> None:
        began = time.monotonic()
        for number in itertools.count():
            due = began + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._ask(client, number, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, client: AsyncClient, number: int, due: float) -> None:
        asking = ASKINGS[number % len(ASKINGS)]
        image = number // len(ASKINGS) % len(self._world.images)
        outcome: Answer | HawkVisionError
        try:
            outcome = await client.classify(self._world.images[image], **asking.all_fields())
        except HawkVisionError as error:
            outcome = error
        self.asked.append(SentRequest(asking, image, due, time.monotonic() - due, outcome))


@dataclass
class Watch:
    """Looks at gauges, readiness and logs, and notes when each changed."""

    world: World
    gauge: list[tuple[float, float]] = field(default_factory=list)
    """Changes of the edge's `hawkvision_datacenter_up`."""
    readiness: list[tuple[float, int]] = field(default_factory=list)
    """Changes of the tier's `/readyz`; 0 is no answer."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watch]:
        """Look until the context ends."""
        looking = asyncio.create_task(self._look())
        try:
            yield self
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _look(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while True:
                up = await self._up(session)
                if up is not None and (not self.gauge or self.gauge[-1][1] != up):
                    self.gauge.append((time.monotonic(), up))
                ready = await self._ready(session)
                if not self.readiness or self.readiness[-1][1] != ready:
                    self.readiness.append((time.monotonic(), ready))
                await asyncio.sleep(SCRAPE_S)

    async def _up(self, session: aiohttp.ClientSession) -> float | None:
        try:
            async with session.get(f"{self.world.edge.url}/metrics") as reply:
                found = re.search(r"^hawkvision_datacenter_up\{.*\} (\S+)$", await reply.text(), re.MULTILINE)
        except (aiohttp.ClientError, TimeoutError):
            return None
        return None if found is None else float(found[1])

    async def _ready(self, session: aiohttp.ClientSession) -> int:
        try:
            async with session.get(f"{self.world.tier.url}/readyz") as reply:
                return reply.status
        except (aiohttp.ClientError, TimeoutError):
            return 0

    def gauge_said(self, since: float) -> float | None:
        """Seconds from a moment until the gauge fell."""
        return next((at - since for at, up in self.gauge if at >= since and up == 0.0), None)

    def readiness_said(self, since: float) -> float | None:
        """Seconds from a moment until the tier was not ready."""
        return next((at - since for at, status in self.readiness if at >= since and status != 200), None)


def logged(server: Server, since: float) -> float | None:
    """Seconds from a moment until a server logged a warning."""
    return next((at - since for at, line in server.said if at >= since and "WARNING" in line), None)


def recovered(load: BackgroundLoad, since: float) -> float | None:
    """Seconds from a moment until requests for the best answer got it again, and all later ones did."""
    best = sorted(
        (each for each in load.asked if each.asking.name == "best" and each.due >= since), key=lambda a: a.due
    )
    last_bad = max(
        (i for i, each in enumerate(best) if not isinstance(each.outcome, Answer) or each.outcome.degraded), default=-1
    )
    return best[last_bad + 1].due + best[last_bad + 1].took_s - since if last_bad + 1 < len(best) else None


def errors_of(asked: Sequence[SentRequest]) -> Counter[str]:
    """Errors by code."""
    return Counter(each.outcome.code for each in asked if isinstance(each.outcome, HawkVisionError))


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Processes that stand still meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
