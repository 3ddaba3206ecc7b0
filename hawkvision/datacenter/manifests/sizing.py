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

    @property
    def scale(self) -> bool:
        """Whether their number changes."""
        return self.least != self.most


def size_workers(config: DatacenterConfig) -> Workers:
    """Workers of which each holds one replica of each deployment, as many as the deployment with most replicas has.

    Raises:
        ConfigError: if a replica reserves no core: Ray would place it on the head, which has no models.
    """
    # Here, because Ray takes seconds to import.
    from hawkvision.datacenter.ingress.application import application
    from hawkvision.datacenter.ingress.planned_deployments import planned_deployments

    deployments = planned_deployments(application(config))
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
