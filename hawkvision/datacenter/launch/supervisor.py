"""The launcher: owns the public sockets, and keeps a tier process running that serves them.

    launcher ── settings ───────────────────────────► tier process: Ray and all its processes, in a network of their own
             ◄── "ready", "lost" ────────────────────
             ── public sockets, reload, drain ──────► ingress replicas, which are among them (`public_sockets`)
             ── 503 while none of them serves ──► callers (`StandbyListener`)

The launcher imports neither Ray nor models. It replaces a tier process that dies, because of a death in Ray or a
defect: at once, then after growing pauses, a bounded number of times. If the launcher is killed, the kernel ends all
its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from asyncio.subprocess import Process
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.errors import BackendError, ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import chosen_settings
from hawkvision.datacenter.deployment.ray_settings import check_ray
from hawkvision.datacenter.ingress.launcher_socket import socket_path
from hawkvision.datacenter.launch.child import LAUNCHER_DIED
from hawkvision.datacenter.launch.folder import private_folder
from hawkvision.datacenter.launch.isolation import family, listeners, network_of, uninvited, why_not_private
from hawkvision.datacenter.launch.messages import ABANDON_S, LOST, RAY_DIED, READY
from hawkvision.datacenter.launch.public_sockets import IngressLinks, PublicSockets, StandbyListener
from hawkvision.system.child_server import adopt_orphans, stop_with_parent

log = logging.getLogger("hawkvision.datacenter")

DRAIN_S: Final = 10.0
"""The time for the requests inside when the tier is stopped."""
STOP_S: Final = 50.0
"""The time for a tier process to stop before it is killed; it stops Ray in 5 s, or when a step of its start ends."""
_END_S: Final = 10.0
"""The wait for killed processes; one that hangs in a device's driver is left behind."""


def launch(config: DatacenterConfig, stopping: threading.Event) -> int:
    """Serve on this machine until SIGTERM or SIGINT; the exit status is 0 after a clean stop, 1 after a failed start.

    `stopping`, set by a signal that came before, ends the start at its next step.

    Prints `ready: http://HOST:PORT[/PATH]` on standard output once every variant is loaded. Until then, while draining
    and while a tier process is replaced, callers get 503. With a datagram port the tier also accepts images as
    datagrams, at the address in a second line `datagram: udp://HOST:PORT` and in `GET /v1/transport`.

    Raises:
        ConfigError: if a setting belongs to a cluster, the address cannot be listened on, Ray's version is not
            supported, or Ray cannot have the private network that the settings demand.
        BackendError: if more than the public sockets can be reached from outside, or tier processes keep dying.
    """
    check_ray()
    _check_options(config)
    config = _with_ray_network(config)
    with contextlib.closing(PublicSockets(config)) as sockets, private_folder() as folder:
        adopt_orphans()
        return asyncio.run(_Launcher(config, sockets, folder).run(stopping))


def _check_options(config: DatacenterConfig) -> None:
    """Refuse settings that make no sense on one machine.

    Raises:
        ConfigError: names the setting, and the command that it belongs to.
    """
    if config.address is not None:
        raise ConfigError(
            f"dc.address = {config.address!r}: `hawkvision dc up` starts a Ray of its own; to deploy to one that runs, "
            "use `hawkvision dc deploy`"
        )
    if config.max_replicas_per_node is not None and config.max_replicas_per_node < config.max_replicas:
        raise ConfigError(
            f"dc.max_replicas_per_node = {config.max_replicas_per_node}: on one machine all dc.max_replicas = "
            f"{config.max_replicas} have to find room"
        )
    if config.ingress_max_replicas != config.ingress_min_replicas:
        raise ConfigError(
            f"dc.ingress_max_replicas = {config.ingress_max_replicas}: on one machine the ingress does not scale; "
            f"expected dc.ingress_min_replicas = {config.ingress_min_replicas}"
        )


def _with_ray_network(config: DatacenterConfig) -> DatacenterConfig:
    """The settings with `ray_network` either `private` or `shared`.

    Raises:
        ConfigError: if it must be private and cannot be.
    """
    if config.ray_network == "shared":
        return config
    reason = why_not_private()
    if reason is None:
        return msgspec.structs.replace(config, ray_network="private")
    if config.ray_network == "auto":
        log.warning("Ray shares this machine's network, because it cannot have a private one here: %s", reason)
        return msgspec.structs.replace(config, ray_network="shared")
    raise ConfigError(
        f"dc.ray_network = 'private': Ray cannot have a private network here ({reason}). Allow user namespaces, or in "
        "a container the capability SYS_ADMIN; or, if nobody else reaches this machine's ports, set "
        "dc.ray_network = 'shared'"
    )


class _Launcher:
    """A launcher, its tier process and its restarts."""

    def __init__(self, config: DatacenterConfig, sockets: PublicSockets, folder: Path) -> None:
        self._config = config
        self._sockets = sockets
        self._folder = folder
        self._has_been_ready = False
        self._standby = StandbyListener(sockets.http)
        self._links: IngressLinks | None = None
        self._stop = asyncio.Event()
        self._restarts = Restarts()

    async def run(self, stopping: threading.Event) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if stopping.is_set():
            self._stop.set()
        try:
            while not self._stop.is_set():
                status = await self._one_process()
                await _end_all_children()
                if self._stop.is_set():
                    break
                if not self._has_been_ready:
                    if status < 0:
                        raise BackendError(f"the tier process was ended by {_cause(status)} before it was ready")
                    return max(status, 1)  # it has printed why
                await self._before_restart(status)
        finally:
            self._standby.close()
            await _end_all_children()
        return 0

    async def _before_restart(self, status: int) -> None:
        """Wait before the next tier process.

        Raises:
            BackendError: if there have been too many.
        """
        pause_s = self._restarts.pause_s(time.monotonic())
        if pause_s is None:
            raise BackendError(
                f"the tier process ended {MAX_RESTARTS + 1} times within {WITHIN_S:g} s, last by {_cause(status)}"
            )
        log.warning(
            "the tier process was ended by %s: restart %d of at most %d in %g s, after %g s",
            _cause(status),
            self._restarts.count,
            MAX_RESTARTS,
            WITHIN_S,
            pause_s,
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stop.wait()

    async def _one_process(self) -> int:
        """Run a tier process and return its exit status, or the negative number of the signal that ended it."""
        self._standby.open()
        self._links = links = IngressLinks(
            socket_path(self._folder), self._sockets, self._standby, self._restarts.count
        )
        links.open()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours, theirs:
            process = await self._start(theirs)
            ours.send(msgspec.json.encode(chosen_settings(self._config)))
            reading = asyncio.create_task(self._read_messages(ours, links))
            stopping = asyncio.create_task(self._stop.wait())
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait((ended, stopping, reading), return_when=asyncio.FIRST_COMPLETED)
                if not ended.done() and reading.done() and reading.exception() is None:
                    # It has closed its socket, so it is about to end.
                    await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    await self._end(process, ended, links)
                status = await ended
                if reading.done() and (failed := reading.exception()) is not None:
                    raise failed
                return status
            finally:
                for task in (reading, stopping, ended):
                    task.cancel()
                await asyncio.gather(reading, stopping, ended, return_exceptions=True)
                await links.close()
                self._links = None

    async def _start(self, theirs: socket.socket) -> Process:
        """A tier process, which gets this end of a socket pair."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "hawkvision.datacenter.launch.child",
            str(theirs.fileno()),
            str(self._folder),
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "RAY_TMPDIR": str(self._folder)},
            # Ctrl-C must reach only the launcher, which stops the others in order.
            process_group=0,
            preexec_fn=functools.partial(stop_with_parent, LAUNCHER_DIED, os.getpid()),
        )
        theirs.close()
        return process

    async def _end(self, process: Process, ended: asyncio.Task[int], links: IngressLinks) -> None:
        """Drain the ingress, then stop the tier process, by force if it takes too long."""
        await links.drain(DRAIN_S)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait((ended,), timeout=STOP_S)
        if not ended.done():
            log.error("the tier process did not stop within %g s: killed", STOP_S)
            process.kill()

    async def _read_messages(self, tier: socket.socket, links: IngressLinks) -> None:
        """Handle the tier process's messages until it closes its socket.

        Raises:
            BackendError: if more than the public sockets can be reached from outside.
        """
        while message := await _next_message(tier):
            if message == READY:
                await links.serving.wait()  # the ingress says so on its own connection
                self._check_exposure()
                if self._has_been_ready:
                    log.info("the tier is ready again")
                else:
                    self._has_been_ready = True
                    self._print_ready()
            elif message == LOST:
                await links.drain(ABANDON_S / 2)

    def _check_exposure(self) -> None:
        """Log the tier's listening sockets; refuse any that is not public and can be reached from outside.

        Raises:
            BackendError: names them.
        """
        here, public = network_of(os.getpid()), self._sockets.inodes
        found = listeners(os.getpid())
        beyond = uninvited(found, here, public)
        for each in found:
            if each.inode in public:
                kind = "public"
            elif each.network != here:
                kind = "in the tier's own network"
            else:
                kind = "reachable from outside" if each in beyond else "on loopback"
            log.debug("listens: %s: %s", each, kind)
        if not beyond:
            return
        words = ", ".join(map(str, beyond))
        if self._config.ray_network == "private":
            raise BackendError(f"reachable from outside the tier's own network, and should not be: {words}")
        log.warning("reachable from outside this machine unless something forbids it, with Ray's token only: %s", words)

    def _print_ready(self) -> None:
        shown = self._sockets.shown_host
        scheme = "http" if self._config.tls_certificate is None else "https"
        port, path = self._sockets.http.getsockname()[1], self._config.route_prefix.rstrip("/")
        print(f"ready: {scheme}://{shown}:{port}{path}", flush=True)  # noqa: T201  the contract
        if self._sockets.datagrams is not None:
            print(f"datagram: udp://{shown}:{self._sockets.datagrams.getsockname()[1]}", flush=True)  # noqa: T201

    def _on_hangup(self) -> None:
        if self._links is not None:
            self._links.reload()


async def _next_message(tier: socket.socket) -> bytes:
    """The next message; empty once the tier process has closed its socket."""
    try:
        return await asyncio.get_running_loop().sock_recv(tier, 64)
    except ConnectionError:
        return b""


def _cause(status: int) -> str:
    if status == RAY_DIED:
        return "a death in Ray"
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


async def _end_all_children() -> None:
    """Kill the descendants of a tier process; they become children of this process when their parents end."""
    gives_up = time.monotonic() + _END_S
    while len(left := family(os.getpid())) > 1 and time.monotonic() < gives_up:
        for pid in left[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # noqa: ASYNC222 - it does not block
                pass
        await asyncio.sleep(0.01)


MAX_RESTARTS: Final = 5
WITHIN_S: Final = 600.0
"""After more restarts within this time the launcher gives up with an exit status."""
MAX_PAUSE_S: Final = 8.0


class Restarts:
    """The recent restarts, and the pause before the next one."""

    def __init__(self) -> None:
        self._past: deque[float] = deque()
        """The times within the last `WITHIN_S`; at most `MAX_RESTARTS`."""

    @property
    def count(self) -> int:
        """The restarts within `WITHIN_S` of the last one."""
        return len(self._past)

    def pause_s(self, now: float) -> float | None:
        """Count a restart, and return the pause before it; None if there were too many. `now` is monotonic."""
        while self._past and now - self._past[0] > WITHIN_S:
            self._past.popleft()
        if len(self._past) >= MAX_RESTARTS:
            return None
        pause_s = min(2.0 ** (len(self._past) - 1), MAX_PAUSE_S) if self._past else 0.0
        self._past.append(now)
        return pause_s
