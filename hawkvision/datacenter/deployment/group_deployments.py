"""The Serve deployments of the groups of variants."""

from __future__ import annotations

from typing import Any, Final

from ray import serve
from ray.serve import Application

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.served_replica import ServedReplica
from hawkvision.datacenter.execution.group_settings import settings_of
from hawkvision.datacenter.local_socket.protocol import Address
from hawkvision.datacenter.stages.catalog import Catalog

_HEALTH_PERIOD_S: Final = 1.0
"""How soon Serve notices and replaces a dead replica, instead of 10 s. The time limit of a check stays at Serve's 30 s:
a replica that was suspended for some seconds need not load its models anew."""


# Wrapped by name, not by decorator, so that the class stays plain for tests and the type checker.
_GROUP: Any = serve.deployment(ServedReplica)


def group_apps(config: DatacenterConfig, catalog: Catalog, server: Address | None = None) -> dict[str, Application]:
    """Each group's deployment by name, in the order of `catalog.groups`.

    Replicas register at `server`, if that is on their machine.
    """
    scale: dict[str, Any] = {"num_replicas": config.max_replicas}
    if config.min_replicas != config.max_replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": config.min_replicas,
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": config.target_ongoing_requests,
                "upscale_delay_s": config.scale_up_after_s,
                "downscale_delay_s": config.scale_down_after_s,
            }
        }
    return {
        group.name: _GROUP.options(
            name=group.name,
            max_ongoing_requests=config.max_ongoing_requests,
            max_queued_requests=config.max_queued_requests,
            health_check_period_s=_HEALTH_PERIOD_S,
            ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
            **scale,
        ).bind(settings_of(group, catalog, config, server))
        for group in catalog.groups
    }
