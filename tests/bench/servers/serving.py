"""One reference server, started, asked and ended: on its core, under a supervisor, its log kept when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import NotReady
from hawkvision.models.manifest import InputSpec
from hawkvision.system.child_server import ended
from loadgen.clients.base import ClientReply, RequestTimes
from loadgen.clients.connections import ConnectionBroken, ConnectionPool
from loadgen.workload.record import UNANSWERED
from tests.bench.ports import free_port
from tests.bench.servers import supervisor
from tests.bench.servers.catalogue import ReferenceServer, ServerSite
from tests.bench.servers.handlers.work import PREFIX

READY_TIMEOUT_S: Final = 120.0
"""Ray Serve, the slowest, took 45 s on a core that others used as well."""
PROBE_PAUSE_S: Final = 0.1
ANSWER_TIMEOUT_S: Final = 10.0
LOG_BYTES: Final = 3000
"""Of a failed server's last words that an error carries."""
NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")


@dataclass(frozen=True, slots=True)
class ServedTask:
    """What all servers of a comparison serve."""

    model: Path
    variant: str
    input: InputSpec
    core: int
    """The one that a server has for itself."""
    connections: int
    """At most, to one server."""

    def spec(self) -> str:
        """The input as `tests.bench.servers.handlers.work` reads it."""
        fields = {name: getattr(self.input, name) for name in ("height", "width", "interpolation", "crop_fraction")}
        return msgspec.json.encode(fields).decode()


class ReferenceClient:
    """An `Asker` of one peer; the fields of a target mean nothing to most and are not sent."""

    def __init__(self, peer: ReferenceServer, url: str, connections: int) -> None:
        self._peer = peer
        self._limit = connections
        self._connections = ConnectionPool(url, limit=connections, timeout_s=ANSWER_TIMEOUT_S)
        self._head = self._connections.head("POST", peer.path, peer.headers)

    async def open(self) -> None:
        """See `Asker`: all connections, so that none is made while it counts."""
        await self._connections.open(self._limit)

    async def ask(
        self,
        image: bytes,
        fields: Mapping[str, str],
        times: RequestTimes,
    ) -> ClientReply:
        """See `Asker`."""
        body = self._peer.frame(image)
        try:
            reply = await self._connections.exchange(self._head, body, times)
            if reply.status != 200:
                return ClientReply(reply.status, reply.body[:60].decode(errors="replace"), sent_bytes=len(body))
            return ClientReply(200, index=self._peer.index(reply.body), sent_bytes=len(body))
        except TimeoutError:
            return ClientReply(UNANSWERED, "timeout")
        except ConnectionBroken as error:
            return ClientReply(UNANSWERED, error.code)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return ClientReply(UNANSWERED, "bad_reply")

    async def close(self) -> None:
        """See `Asker`."""
        await self._connections.close()


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A peer that answers."""

    peer: ReferenceServer
    url: str
    asker: ReferenceClient
    supervisor_pid: int
    """Process id of the one that holds all of the server's processes."""

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far."""
        return supervisor.cpu_seconds(self.supervisor_pid)


@contextlib.asynccontextmanager
async def serving(
    peer: ReferenceServer, python: Path, task: ServedTask, image: bytes, log: Path
) -> AsyncIterator[RunningServer]:
    """The peer, started and asked once with success; ended with all its processes on leaving.

    Raises:
        NotReady: if it ends, or does not answer within `READY_TIMEOUT_S`; carries its last words and where the rest is.
    """
    with tempfile.TemporaryDirectory(prefix=f"hawkvision-{peer.name}-") as scratch:
        folder = Path(scratch)
        site = ServerSite(python, folder, free_port(), task.variant)
        log.parent.mkdir(parents=True, exist_ok=True)
        process = _start(peer, site, task, log)
        url = f"http://127.0.0.1:{site.port}"
        asker = ReferenceClient(peer, url, task.connections)
        try:
            await _wait_ready(peer, asker, process, image, log)
            await asker.open()
            yield RunningServer(peer, url, asker, process.pid)
        finally:
            await asker.close()
            _end(process)
    await asyncio.to_thread(log.unlink)


def _start(peer: ReferenceServer, site: ServerSite, task: ServedTask, log: Path) -> subprocess.Popen[bytes]:
    start = peer.start(site)
    # All of ours that a peer sees: this package, under its name.
    (site.folder / "tests").symlink_to(Path(__file__).resolve().parents[2])
    given = dict(start.env)
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site.folder), given.get("PYTHONPATH", ""))))
    given |= {
        f"{PREFIX}PORT": str(site.port),
        f"{PREFIX}HANDLER": peer.handler,
        f"{PREFIX}MODEL": str(task.model),
        f"{PREFIX}INPUT": task.spec(),
    }
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(task.core), str(site.folder), *start.command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **given},
            start_new_session=True,  # Ctrl-C is for us; the supervisor notices when its standard input closes
        )


async def _wait_ready(
    peer: ReferenceServer, asker: ReferenceClient, process: subprocess.Popen[bytes], image: bytes, log: Path
) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    last = ClientReply(UNANSWERED)
    while process.poll() is None and time.monotonic() < until:
        last = await asker.ask(image, {}, RequestTimes())
        if last.status == 200:
            return
        await asyncio.sleep(PROBE_PAUSE_S)
    how = "ended" if process.poll() is not None else f"did not answer within {READY_TIMEOUT_S:g} s"
    said = await asyncio.to_thread(log.read_bytes)
    raise NotReady(
        f"{peer.title} {how} (last reply: {last.status} {last.error}); its log is {log}; it ends:\n"
        f"{said[-LOG_BYTES:].decode(errors='replace')}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    ended(process, 3 * supervisor.STOP_TIMEOUT_S)
