"""Congestion controllers by name: ours, and those that packages add by the entry point `hawkvision.congestion`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.transport.congestion.controller import CongestionController
from hawkvision.transport.congestion.loss_tolerant import LossTolerant

ENTRY_POINTS: Final = "hawkvision.congestion"
DEFAULT: Final = "loss_tolerant"


def controller_class(name: str) -> type[CongestionController]:
    """The controller of this name.

    Raises:
        ConfigError: if there is none, or if the registered object is not a `CongestionController`.
    """
    if name == DEFAULT:
        return LossTolerant
    added = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in added:
        known = ", ".join(sorted({DEFAULT, *added}))
        raise ConfigError(f"datagram_congestion_control: there is no {name!r}; expected one of {known}")
    loaded = added[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, CongestionController)):
        raise ConfigError(
            f"datagram_congestion_control: entry point {name!r} of {ENTRY_POINTS} is {added[name].value}; "
            "expected a CongestionController"
        )
    return loaded
