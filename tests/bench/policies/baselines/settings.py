"""The settings that the baselines add to an edge node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import EdgeConfig, topic
from hawkvision.core.settings.package_settings import SettingsGroup

BASELINES: Final = topic("Baseline policies")


class BaselineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a baseline is told beside the node's own settings."""

    # fmt: off
    thresholds: Annotated[str, BASELINES(
        "What `threshold` was tuned to: for each accuracy drop, the score from which it accepts the edge's answer, as "
        "in `0=inf,0.01=0.93,0.05=0.5`.")] | None = None
    # fmt: on


def read_thresholds(text: str) -> tuple[tuple[float, float], ...]:
    """The thresholds by accuracy drop, as `write_thresholds` writes them.

    Raises:
        ConfigError: if there are none, or they are no numbers.
    """
    try:
        found = tuple((float(drop), float(bar)) for drop, bar in (part.split("=") for part in text.split(",")))
    except ValueError:
        found = ((math.nan, math.nan),)
    if any(math.isnan(value) for part in found for value in part):
        raise ConfigError(f"edge.thresholds: expected DROP=SCORE,DROP=SCORE,…, got {text!r}")
    return found


def write_thresholds(found: Mapping[float, float]) -> str:
    """Thresholds by accuracy drop, so that each is read as the very same number."""
    return ",".join(f"{drop!r}={bar!r}" for drop, bar in found.items())


def check(config: EdgeConfig, baseline: BaselineSettings) -> None:
    """Refuse settings that contradict the policy: a comparison must run what its command line says.

    Raises:
        ConfigError: naming both, or what is wrong with the thresholds.
    """
    if config.policy == "threshold":
        read_thresholds(baseline.thresholds or "")
    elif baseline.thresholds is not None:
        raise ConfigError(f"edge.thresholds belongs to edge.policy = 'threshold', got {config.policy!r}")
    if config.backend.startswith("fpga-") and config.policy == "infaas":
        raise ConfigError(
            f"edge.backend = {config.backend!r} runs the quantised variants only, edge.policy = 'infaas' needs them all"
        )


SETTINGS: Final = SettingsGroup(section="edge", kind=BaselineSettings, check=check)
"""Named by the entry point `baselines` of `hawkvision.settings`."""
