"""The Serve deployments of the groups of variants."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from hawkvision.core import __version__
from hawkvision.core.logs import LogFormat, LogLevel, adopt
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.messages import PROTOCOL, decode_presence, own_metadata
from hawkvision.datacenter.deployment.replica_endpoint import ReplicaEndpoint
from hawkvision.datacenter.deployment.routers import MATCHING
from hawkvision.datacenter.execution.group_settings import (
    ProcessSettings,
    group_settings,
    process_settings,
    replica_cpus,
)
from hawkvision.datacenter.execution.model import HEALTH_LIMIT_S
from hawkvision.datacenter.stages.catalog import Catalog, Group
from hawkvision.system.log_relay import configure_worker

SCALE_UP_AFTER_S: Final = 30.0
SCALE_DOWN_AFTER_S: Final = 600.0
"""Seconds for which a deployment must need more, or fewer, replicas before Ray Serve changes their number."""
_HEALTH_PERIOD_S: Final = 1.0
"""How soon Serve notices and replaces a dead replica, instead of 10 s."""
_HEALTH_TIMEOUT_S: Final = HEALTH_LIMIT_S + 2.0
"""The time limit of a health check, instead of 30 s. Serve replaces a replica that fails three in a row, so one that
was suspended for half a minute need not load its models anew."""
_DRAIN_S: Final = 30.0
"""The longest that a replica which is stopped may take to finish its images."""
_PEER_S: Final = 1.0
"""For another replica to say that it serves."""
_DRAIN_POLL_S: Final = 0.5
"""From one look at the images inside to the next; a stopped replica without any ends after one, instead of 2 s."""


def log_like_the_tier(level: LogLevel, form: LogFormat) -> None:
    """Make this process, which Ray has started, and Serve in it log like the tier."""
    configure_worker(level, form)
    adopt("ray.serve")


class ServedReplica(ReplicaEndpoint):
    """A replica in one of Ray's processes."""

    def __init__(self, settings: ProcessSettings, *, waits: bool) -> None:
        """See `ReplicaEndpoint`; if it `waits`, it stays while its models cannot be loaded."""
        log_like_the_tier(settings.log_level, settings.log_format)
        super().__init__(settings, another_serves if waits else None)

    def record_replica_metadata(self) -> dict[str, int]:
        """What the routers are told of this replica; Serve asks once."""
        return own_metadata()


async def another_serves() -> bool:
    """Whether a replica of this replica's group answers images, as far as one that Serve chooses shows."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    try:
        async with asyncio.timeout(_PEER_S):
            return not decode_presence(await handle.present.remote(PROTOCOL)).failed
    except Exception:  # noqa: BLE001 - no replica, one of another version, or one that is about to end
        return False


# Wrapped by name, not by decorator, so that the class stays plain for tests and the type checker.
_GROUP: Any = serve.deployment(ServedReplica)


def group_apps(config: DatacenterConfig, catalog: Catalog, *, alone: bool = True) -> dict[str, Application]:
    """Each group's deployment by name, in the order of `catalog.groups`.

    If the task is `alone` in its tier, a replica that cannot load its models does not start, and neither does the
    application. Else the replica waits, and the other tasks are served.

    Other models or limits of the same group are an update of `user_config`, which replicas take without a restart, if
    `serve.run` deploys them; a file for `serve deploy` names the new `user_config` under `deployments`.
    """
    return {group.name: _group_app(group, catalog, config, waits=not alone) for group in catalog.groups}


def _group_app(group: Group, catalog: Catalog, config: DatacenterConfig, *, waits: bool) -> Application:
    process = process_settings(group, catalog, config)
    # Serve replaces all replicas when the version changes. Without one, `serve.run` replaces them each time.
    versioned = _GROUP.options(version=f"{__version__} {PROTOCOL} {process}", _internal=True)
    app: Application = versioned.options(
        name=group.name,
        user_config=group_settings(group, catalog, config).to_user_config(),
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        request_router_config=MATCHING,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_DRAIN_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        ray_actor_options={"num_cpus": replica_cpus(group, config), "num_gpus": config.num_gpus},
        **_scale(config),
    ).bind(process, waits=waits)
    return app


def _scale(config: DatacenterConfig) -> dict[str, Any]:
    per_node = config.max_replicas_per_node
    spread = {} if per_node is None else {"max_replicas_per_node": per_node}
    if config.min_replicas == config.max_replicas:
        return {"num_replicas": config.max_replicas, **spread}
    return {
        **spread,
        "autoscaling_config": {
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": config.target_ongoing_requests,
            "upscale_delay_s": SCALE_UP_AFTER_S,
            "downscale_delay_s": SCALE_DOWN_AFTER_S,
        },
    }
