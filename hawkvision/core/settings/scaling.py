"""Checks the settings by which Ray Serve scales a datacenter tier: each pair that would never do what it says."""

from __future__ import annotations

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig


def check_scaling(config: DatacenterConfig) -> None:
    """Refuse numbers of replicas and requests that contradict each other.

    Raises:
        ConfigError: naming both settings.
    """
    if config.min_replicas > config.max_replicas:
        raise ConfigError(
            f"dc.min_replicas = {config.min_replicas}: expected at most dc.max_replicas = {config.max_replicas}"
        )
    scales = config.min_replicas != config.max_replicas
    if scales and config.target_ongoing_requests > config.max_ongoing_requests:
        raise ConfigError(
            f"dc.target_ongoing_requests = {config.target_ongoing_requests:g}: expected at most "
            f"dc.max_ongoing_requests = {config.max_ongoing_requests}; no replica gets more, so none would be added"
        )
