"""The launcher and ingress replicas over their Unix socket: who serves at the public sockets, and when."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.ingress.launcher_socket import connect_to_launcher
from hawkvision.datacenter.ingress.public_server import PublicServer
from hawkvision.datacenter.launch import public_sockets
from hawkvision.datacenter.launch.public_sockets import IngressLinks, PublicSockets, StandbyListener
from hawkvision.datacenter.servers.http_server import make_http_server
from hawkvision.datacenter.stages.catalog import load_catalogs
from hawkvision.servers.reload import FileWatcher
from hawkvision.transport.settings import DatagramSettings

LIMIT_S = 60.0


class Replica:
    """The parts of an ingress replica that face the launcher."""

    def __init__(self, config: DatacenterConfig, path: Path) -> None:
        self.server = make_http_server(config, load_catalogs(config))
        self.reloads: list[None] = []
        watcher = FileWatcher.of(self.server.keys)
        watcher.add("nothing", [Path("/nowhere")], lambda: self.reloads.append(None))
        self.public = PublicServer(path, config, self.server, None, watcher)
        self.public.start()


@dataclass
class Launcher:
    """The parts of a launcher that face ingress replicas, and the replicas of one test."""

    config: DatacenterConfig
    path: Path
    sockets: PublicSockets
    links: IngressLinks

    def replica(self) -> Replica:
        return Replica(self.config, self.path)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a request at the public socket."""

        host, port = self.sockets.http.getsockname()

        def ask() -> tuple[int, bytes]:
            connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
            with closing(connection):
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read()

        return await asyncio.to_thread(ask)

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not happened():  # noqa: ASYNC110 - it is another process's state, or a server's
                await asyncio.sleep(0.01)


@asynccontextmanager
async def launcher(config: DatacenterConfig, folder: Path) -> AsyncIterator[Launcher]:
    with closing(PublicSockets(config)) as sockets:
        standby = StandbyListener(sockets.http)
        links = IngressLinks(folder / "ingress", sockets, standby, restarts=3)
        standby.open()
        links.open()
        try:
            yield Launcher(config, folder / "ingress", sockets, links)
        finally:
            await links.close()
            standby.close()


@pytest.fixture
def public(config: DatacenterConfig) -> DatacenterConfig:
    return msgspec.structs.replace(config, port=0, features=(DatagramSettings(port=0),))


def test_callers_get_503_until_a_replica_serves_and_again_once_it_has_left(
    public: DatacenterConfig, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with launcher(public, tmp_path) as started:
            before = await started.get("/healthz")
            replica = started.replica()
            await asyncio.wait_for(started.links.serving.wait(), LIMIT_S)
            served = await started.get("/healthz")
            metrics = await started.get("/metrics")
            await replica.public.drain(5.0)
            await started.until(lambda: not started.links.serving.is_set())
            after = await started.get("/healthz")
        assert (before[0], served, after[0]) == (503, (200, b"ok"), 503)
        assert b"hawkvision_datacenter_restarts 3.0" in metrics[1]

    asyncio.run(scenario())


def test_the_udp_socket_is_one_replicas_at_a_time_and_the_others_offer_it_too(
    public: DatacenterConfig, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with launcher(public, tmp_path) as started:
            first = started.replica()
            await started.until(lambda: first.server.transports().datagram is not None)
            second = started.replica()
            await started.until(lambda: second.server.transports().datagram is not None)
            offered = first.server.transports()
            assert second.server.transports() == offered
            await first.public.drain(5.0)
            # Without a certificate of the operator, each replica makes its own.
            await started.until(lambda: second.server.transports() != offered)
            assert second.server.transports().datagram is not None
            assert (await started.get("/healthz"))[0] == 200
            await second.public.drain(5.0)

    asyncio.run(scenario())


def test_a_hangup_and_a_drain_reach_all_replicas(public: DatacenterConfig, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with launcher(public, tmp_path) as started:
            replicas = [started.replica(), started.replica()]
            for replica in replicas:
                await asyncio.wait_for(replica.public.serves.wait(), LIMIT_S)
            started.links.reload()
            await started.until(lambda: all(replica.reloads for replica in replicas))
            await asyncio.wait_for(started.links.drain(5.0), LIMIT_S)
            assert (await started.get("/healthz"))[0] == 503
            late = started.replica()
            await started.get("/healthz")
            assert not late.public.serves.is_set()
            await late.public.drain(0.0)

    asyncio.run(scenario())


def test_what_does_not_keep_to_the_protocol_is_disconnected_and_changes_nothing(
    public: DatacenterConfig, tmp_path: Path
) -> None:
    async def scenario() -> int:
        async with launcher(public, tmp_path) as started:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(str(started.path))
                stranger.send(b"not a message")
                stranger.setblocking(False)
                await asyncio.sleep(0)
                async with asyncio.timeout(LIMIT_S):
                    while await asyncio.get_running_loop().sock_recv(stranger, 65536):
                        pass
            return (await started.get("/healthz"))[0]

    assert asyncio.run(scenario()) == 503


def test_connections_of_ingress_replicas_are_bounded(
    public: DatacenterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_sockets, "MAX_LINKS", 1)

    async def scenario() -> None:
        async with launcher(public, tmp_path) as started:
            replica = started.replica()
            await asyncio.wait_for(replica.public.serves.wait(), LIMIT_S)
            refused = connect_to_launcher(started.path)
            with closing(refused), pytest.raises(ConnectionError, match="the other end is gone"):
                await asyncio.wait_for(refused.receive(), LIMIT_S)
            await replica.public.drain(0.0)

    asyncio.run(scenario())
