"""HawkVision: modeless vision inference from edge to datacenter.

A caller states what a picture's answer must be worth and when it is needed; the system chooses who answers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import hawkvision.telemetry  # noqa: F401  before any library that would report to its maker

if TYPE_CHECKING:
    from hawkvision.client import AsyncClient as AsyncClient
    from hawkvision.client import Client as Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the clients on first use, so that servers and the command line do not pay for them."""
    if name in ("AsyncClient", "Client"):
        return getattr(importlib.import_module("hawkvision.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
