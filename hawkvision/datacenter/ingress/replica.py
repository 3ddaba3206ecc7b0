"""One replica of the ingress: the tier's servers before the replicas of the stages.

    Serve's proxies ──HTTP──► Ingress.__call__ ─┬─► HttpServer, TierDatagramServer ──handles──► replicas of the groups
    public sockets of a launcher ► PublicServer ┘

Serve gives it the handles; `application` says how many replicas there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import ray
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.core.errors import BackendError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.group_deployments import log_like_the_tier
from hawkvision.datacenter.deployment.handles import HandleVariants
from hawkvision.datacenter.deployment.presence import PolledPresence, ServeStates
from hawkvision.datacenter.ingress.cluster_watch import (
    AdmissionShare,
    HeadWatch,
    RayMetrics,
    ReplicaCounts,
    Watch,
)
from hawkvision.datacenter.ingress.public_server import PublicServer
from hawkvision.datacenter.servers.http_server import make_http_server, max_in_flight
from hawkvision.datacenter.servers.served_task import TaskState
from hawkvision.datacenter.stages.catalog import Catalog, TaskFailure
from hawkvision.servers.reload import FileWatcher
from hawkvision.servers.tls import server_certificates

log = logging.getLogger("hawkvision.datacenter")

INGRESS: Final = "ingress"
"""The name of the ingress deployment."""
_AGAIN_S: Final = 1.0
DRAIN_S: Final = 10.0
"""The longest that accepted requests may take once a replica is being stopped."""


class IngressSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a running ingress takes without a restart, as Serve's `user_config`."""

    max_in_flight: Annotated[int, msgspec.Meta(ge=1)]
    """The most requests inside at once, over all ingress replicas."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """The longest request body."""

    @classmethod
    def of(cls, config: DatacenterConfig, catalogs: Mapping[str, Catalog | TaskFailure]) -> IngressSettings:
        """Those of the tier's settings."""
        return cls(max_in_flight(config, catalogs), config.max_body_bytes)


class Ingress:
    """The tier's servers in one of Ray's processes."""

    def __init__(
        self,
        config: DatacenterConfig,
        catalogs: Mapping[str, Catalog | TaskFailure],
        handles: Mapping[str, Mapping[str, DeploymentHandle]],
        launcher: str | None = None,
    ) -> None:
        """Not ready yet.

        Args:
            config: the tier's settings.
            catalogs: by task.
            handles: of the groups' deployments, by task and group.
            launcher: the Unix socket of the launcher on this machine; None in a cluster.

        Raises:
            ConfigError: if keys or certificates cannot be read.
        """
        log_like_the_tier(config.log_level, config.log_format)
        self._config = config
        self._server = make_http_server(config, catalogs)
        # Callers wake a deployment that may scale to zero, and probes would keep it awake.
        self._polls = config.min_replicas > 0
        self._presences: dict[str, PolledPresence] = {}
        self._variants: dict[str, HandleVariants] = {}
        tier = self._server.tier
        states = ServeStates()
        for task, of_task in handles.items():
            presence = PolledPresence(
                of_task, tier.set_live_replicas, partial(tier.record_statement, task), tier.record_problem, states
            )
            self._presences[task] = presence
            groups = tier.catalogs[task].groups
            ordered = [of_task[group.name] for group in groups]
            self._variants[task] = HandleVariants(groups, ordered, presence if self._polls else None)
        certificates = None if launcher is None else server_certificates(config, "dc")
        self._reloads = FileWatcher.of(self._server.keys, certificates)
        self._public: PublicServer | None = None
        if launcher is not None:
            self._public = PublicServer(Path(launcher), config, self._server, certificates, self._reloads)
        least = config.ingress_min_replicas
        self._scales = launcher is None and least != config.ingress_max_replicas
        self._share = AdmissionShare(max_in_flight(config, catalogs), least, tier.set_limit)
        self._watches: list[Watch] = [ReplicaCounts(states, self._count)]
        for group in (group.name for catalog in tier.catalogs.values() for group in catalog.groups):
            tier.metrics.min_replicas.labels(group).set(config.min_replicas)
        tier.metrics.min_replicas.labels(INGRESS).set(least)
        if launcher is None and not config.survives_head:  # a launcher watches its own Ray
            address = ray.get_runtime_context().gcs_address
            self._watches.append(HeadWatch(address, partial(setattr, tier, "has_head")))
        if launcher is None:  # behind a launcher, Ray's endpoints cannot be reached
            self._watches.append(RayMetrics(tier.metrics.registry))
        self._describing: asyncio.Task[None] | None = None

    async def __call__(self, request: Request) -> Response:
        """Any request that Serve's proxies pass on."""
        return await self._server.respond(request)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take other limits, and read keys and certificates again. Serve calls this at the start and for each change.

        A change that cannot be used is logged and nothing changes, because Serve would stop a replica that raises.
        """
        try:
            settings = msgspec.convert(user_config, IngressSettings)
        except msgspec.ValidationError as error:
            log.error("new settings of the ingress refused, the old ones stay in use: %s", error)
            return
        self._share.set_limit(settings.max_in_flight)
        self._server.set_max_body_bytes(settings.max_body_bytes)
        if self._describing is not None:  # otherwise they have just been read
            self._reloads.now()

    async def check_health(self) -> None:
        """Start on the first call, before which there may be no event loop. Serve calls this regularly.

        Serve sends requests once the first call is over. Then it is known which groups have replicas, so that none is
        refused for not knowing.

        Raises:
            BackendError: if the public server has ended.
        """
        if self._describing is None:
            await self._start()
        if self._public is not None and self._public.failed:
            raise BackendError("the server at the public sockets has ended")

    async def _start(self) -> None:
        self._describing = asyncio.create_task(self._describe())
        if self._polls:
            for presence in self._presences.values():
                presence.start()
            await asyncio.gather(*(presence.wait_until_probed() for presence in self._presences.values()))
        for task, variants in self._variants.items():
            self._server.tier.set_variants(task, variants)
        self._reloads.start()
        for watch in self._watches:
            watch.start()
        if self._public is not None:
            self._public.start()

    async def _describe(self) -> None:
        """Tell the metrics what runs the models of each task, as soon as a replica of each group says it."""
        await asyncio.gather(*(self._describe_task(task) for task in self._variants))

    async def _describe_task(self, task: str) -> None:
        backend = await _backends(self._variants[task]) if self._polls else self._config.backend
        self._server.tier.metrics.describe(task, backend)

    def _count(self, deployment: str, running: int) -> None:
        self._server.tier.count_replicas(deployment, running)
        if deployment == INGRESS and self._scales:
            self._share.set_replicas(running)

    async def states(self) -> tuple[TaskState, ...] | None:
        """The state of each task; None while no replica serves at the public sockets of a launcher."""
        if self._public is not None and not self._public.serves.is_set():
            return None
        return self._server.tier.states()

    async def drain(self) -> None:
        """Answer the requests inside, and accept no more at the public sockets; Serve drains its own before."""
        if self._public is not None:
            await self._public.drain(DRAIN_S)
        for watch in self._watches:
            await watch.close()
        await self._reloads.close()


async def _backends(variants: HandleVariants) -> str:
    """The backends of the groups' replicas, each once, separated by commas; waits until all have models."""
    while True:
        try:
            found = await variants.presence()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises while replicas come and go
            log.info("the backends are unknown for now: %s", error)
        else:
            if not any(presence.failed for presence in found):
                return ",".join(dict.fromkeys(name for presence in found for name in presence.backends))
        await asyncio.sleep(_AGAIN_S)
