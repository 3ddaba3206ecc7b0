"""The settings that the baselines add to an edge node."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import EdgeConfig, topic
from hawkvision.core.settings.package_settings import HAWKVISION, SettingsGroup

NEED_DATACENTER: Final = ("all-dc", "static", "split")
"""The baselines that send images to the datacenter by their rule."""

BASELINES: Final = topic("Baseline policies")


class BaselineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a baseline is told beside the node's own settings."""

    # fmt: off
    static_threshold: Annotated[float, BASELINES(
        "The score from which `static` accepts the edge's answer; none takes that of the profile's `balanced`.",
        ge=0.0, le=1.0)] | None = None
    deadline_fallback: Annotated[bool, BASELINES(
        "The edge answers just before a deadline that the datacenter misses.")] = False
    resident_memory_mb: Annotated[float, BASELINES(
        "Model files that `infaas` keeps loaded at once, in 10⁶ bytes; none means 16, three quantised networks of "
        "5 MB.", gt=0.0, le=1_000_000.0)] | None = None
    # fmt: on


def check(config: EdgeConfig, baseline: BaselineSettings) -> None:
    """Refuse settings that contradict the policy: a comparison must run what its command line says.

    Raises:
        ConfigError: naming both.
    """
    if config.policy in NEED_DATACENTER and config.datacenter_url is None:
        raise ConfigError(f"edge.policy = {config.policy!r}: missing edge.datacenter_url to send to")
    for key, policy in (("static_threshold", "static"), ("resident_memory_mb", "infaas")):
        if getattr(baseline, key) is not None and config.policy != policy:
            raise ConfigError(f"edge.{key} belongs to edge.policy = {policy!r}, got {config.policy!r}")
    if baseline.deadline_fallback and config.policy == HAWKVISION:
        raise ConfigError(f"edge.deadline_fallback belongs to other policies than {HAWKVISION!r}, which has its own")
    if config.backend.startswith("fpga-") and config.policy == "infaas":
        raise ConfigError(
            f"edge.backend = {config.backend!r} runs the quantised variants only, edge.policy = 'infaas' needs them all"
        )


SETTINGS: Final = SettingsGroup(section="edge", kind=BaselineSettings, check=check)
"""Named by the entry point `baselines` of `hawkvision.settings`."""
