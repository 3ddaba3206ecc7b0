"""How large the worker pods are and how many, read from what the application's deployments ask of Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig


@dataclass(frozen=True, slots=True)
class Workers:
    """Worker pods of one size."""

    cpus: int
    gpus: int
    memory_gib: int
    least: int
    """The fewest pods."""
    most: int
    """The most pods."""


@dataclass(frozen=True, slots=True)
class _Deployment:
    """What one deployment of the application asks for."""

    name: str
    cpus: float
    gpus: float
    least: int
    most: int


def size_workers(config: DatacenterConfig) -> Workers:
    """Workers of which each holds one replica of each deployment, as many as the deployment with most replicas has.

    Raises:
        ConfigError: if a replica reserves no core: Ray would place it on the head, which has no models.
    """
    deployments = _deployments(config)
    for each in deployments:
        if each.cpus <= 0:
            raise ConfigError(f"dc.num_cpus: the replicas of {each.name!r} reserve no core; expected more than 0")
    return Workers(
        cpus=math.ceil(sum(each.cpus for each in deployments)),
        gpus=math.ceil(sum(each.gpus for each in deployments)),
        # Two for Ray's own processes and the HTTP proxy.
        memory_gib=2 + len(deployments),
        least=max(1, *(each.least for each in deployments)),
        most=max(1, *(each.most for each in deployments)),
    )


def _deployments(config: DatacenterConfig) -> list[_Deployment]:
    # Here, because Ray takes seconds to import.
    from ray.serve._private.build_app import build_app
    from ray.serve.config import AutoscalingConfig
    from ray.serve.deployment import deployment_to_schema

    from hawkvision.datacenter.app import application

    found = []
    for built in build_app(application(config), name="sizing").deployments:
        scaling = deployment_to_schema(built).autoscaling_config
        scaled = isinstance(scaling, AutoscalingConfig)
        asked = built.ray_actor_options or {}
        found.append(
            _Deployment(
                name=built.name,
                cpus=float(asked.get("num_cpus", 1)),
                gpus=float(asked.get("num_gpus") or 0),
                least=scaling.min_replicas if scaled else built.num_replicas,
                most=scaling.max_replicas if scaled else built.num_replicas,
            )
        )
    return found
