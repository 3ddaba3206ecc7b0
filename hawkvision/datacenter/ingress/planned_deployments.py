"""What the deployments of an application ask of Ray, read from the application itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray.serve import Application
from ray.serve._private.build_app import build_app
from ray.serve.config import AutoscalingConfig
from ray.serve.deployment import deployment_to_schema


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """One deployment."""

    name: str
    cpus: float
    """Cores that one replica reserves."""
    gpus: float
    least: int
    """The fewest replicas."""
    most: int
    """The most replicas."""


def planned_deployments(app: Application) -> tuple[PlannedDeployment, ...]:
    """All deployments of an application that is not deployed yet. Ray need not run."""
    return tuple(_planned(app))


def _planned(app: Application) -> Iterable[PlannedDeployment]:
    for built in build_app(app, name="planned").deployments:
        scaling = deployment_to_schema(built).autoscaling_config
        scaled = isinstance(scaling, AutoscalingConfig)
        asked = built.ray_actor_options or {}
        yield PlannedDeployment(
            name=built.name,
            cpus=float(asked.get("num_cpus", 1)),
            gpus=float(asked.get("num_gpus") or 0),
            least=scaling.min_replicas if scaled else built.num_replicas,
            most=scaling.max_replicas if scaled else built.num_replicas,
        )
