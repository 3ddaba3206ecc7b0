"""The Serve deployments of the groups of variants."""

from __future__ import annotations

from typing import Any, Final

from ray import serve
from ray.serve import Application

from hawkvision.core.logs import LogFormat, LogLevel, adopt
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.execution.group_settings import GroupSettings, settings_of
from hawkvision.datacenter.execution.replica import Replica
from hawkvision.datacenter.local_socket.protocol import Address
from hawkvision.datacenter.stages.catalog import Catalog
from hawkvision.system.log_relay import configure_worker

_HEALTH_PERIOD_S: Final = 1.0
"""How soon Serve notices and replaces a dead replica, instead of 10 s. The time limit of a check stays at Serve's 30 s:
a replica that was suspended for some seconds need not load its models anew."""


def log_like_the_tier(level: LogLevel, form: LogFormat) -> None:
    """Make this process, which Ray has started, and Serve in it log like the tier."""
    configure_worker(level, form)
    adopt("ray.serve")


class ServedReplica(Replica):
    """A replica in one of Ray's processes."""

    def __init__(self, settings: GroupSettings) -> None:
        """See `Replica`."""
        log_like_the_tier(settings.log_level, settings.log_format)
        super().__init__(settings)


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
