"""The Ray Serve application for a cluster: a deployment per group of variants, and an ingress with the HTTP server.

    caller ──HTTP──▶ ingress ──handle──▶ the members of an ensemble  (1..n replicas, each decodes and batches)
                         └───handle──▶ a variant that is in no ensemble

On one machine (`launch.tier_process`) there is no ingress: the process that starts Ray runs the server.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config
from hawkvision.datacenter.deployment.group_deployments import group_apps, log_like_the_tier
from hawkvision.datacenter.deployment.handles import HandleVariants
from hawkvision.datacenter.deployment.presence import PolledPresence
from hawkvision.datacenter.servers.http_server import make_http_server, max_in_flight
from hawkvision.datacenter.stages.catalog import Catalog, load_catalog
from hawkvision.servers.reload import FileWatcher
from hawkvision.transport.settings import DatagramSettings

APP_NAME = "hawkvision"


class Ingress:
    """The HTTP server inside a cluster, behind Serve's own HTTP listener."""

    def __init__(self, config: DatacenterConfig, catalog: Catalog, *handles: DeploymentHandle) -> None:
        log_like_the_tier(config.log_level, config.log_format)
        self._server = make_http_server(config, catalog)
        self._server.tier.metrics.describe(config.task, config.backend)
        self._presence = PolledPresence(
            {group.name: handle for group, handle in zip(catalog.groups, handles, strict=True)},
            self._server.tier.set_live_replicas,
            self._server.tier.record_statement,
        )
        # Callers wake a deployment that may scale to zero, and probes would keep it awake.
        self._polls = config.min_replicas > 0
        self._variants = HandleVariants(catalog.groups, handles, self._presence if self._polls else None)
        self._reloads = FileWatcher.of(self._server.keys)

    async def __call__(self, request: Request) -> Response:
        """Any request to the application."""
        self._reloads.start()  # here, because there may be no event loop before
        return await self._server.respond(request)

    async def check_health(self) -> None:
        """Serve calls this before it calls the ingress started, and regularly."""
        if self._polls:
            self._presence.start()
        self._server.tier.variants = self._variants


# Wrapped by name, not by decorator, so that the class stays plain for tests and the type checker.
_INGRESS: Any = serve.deployment(Ingress)


def build(args: dict[str, Any]) -> Application:
    """The whole application for `serve deploy` and KubeRay; `args` are fields of `[dc]`.

    They override the `HAWKVISION_DC_*` variables of the node that builds. The key belongs into such a variable.

    Raises:
        ConfigError: for an unknown key or a bad value.
    """
    return application(load_config(DatacenterConfig, overrides=args))


def application(config: DatacenterConfig) -> Application:
    """The whole application under these settings.

    Raises:
        ConfigError: if the stages are unknown, or if a datagram port is set: a cluster's proxies speak HTTP only.
    """
    port = config.feature(DatagramSettings).port
    if port is not None:
        raise ConfigError(
            f"dc.datagram_port = {port}: in a cluster the tier speaks HTTP only; the datagram transport needs a "
            "tier on one machine (`hawkvision dc up`)"
        )
    catalog = load_catalog(config)
    limit = max_in_flight(config, catalog)
    return _INGRESS.options(
        name="ingress",
        # Above the server's own bound, so that the server sheds, with 429 and Retry-After.
        max_ongoing_requests=2 * limit,
        max_queued_requests=limit,
        ray_actor_options={"num_cpus": 1},
    ).bind(config, catalog, *group_apps(config, catalog).values())
