"""HawkVision: modeless vision inference from edge to datacenter.

A caller states how accurate an answer must be and by when. The system chooses the model that answers.

Public names are imported from here: `from hawkvision import Client, DeadlineMissed`. Submodules are internal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import hawkvision.system.library_environment  # noqa: F401  before any library that would report to its maker
from hawkvision.core import __version__

if TYPE_CHECKING:
    from hawkvision.client.asynchronous import AsyncClient, Health
    from hawkvision.client.batch import Outcome
    from hawkvision.client.blocking import Client
    from hawkvision.client.response import BadReply, Unreachable
    from hawkvision.core.errors import (
        BadField,
        BadImage,
        ConfigError,
        DeadlineMissed,
        Forbidden,
        HawkVisionError,
        HeadersTooLarge,
        InternalError,
        MethodNotAllowed,
        NotFound,
        NotReady,
        Overloaded,
        RequestError,
        RequestTimeout,
        ServiceError,
        TargetUnreachable,
        TooLarge,
        Unauthorized,
        UnsupportedMedia,
        UriTooLong,
    )
    from hawkvision.core.types import (
        AccuracyGuarantee,
        AccuracyStatus,
        Answer,
        Basis,
        DegradedReason,
        LabelledClass,
        OnMiss,
        Quality,
        Reason,
        StatusReason,
        Tier,
        Timing,
    )


_FROM: Final = {
    "hawkvision.client": ("AsyncClient", "Client", "Health"),
    "hawkvision.client.batch": ("Outcome",),
    "hawkvision.client.response": ("BadReply", "Unreachable"),
    "hawkvision.core.errors": (
        "BadField",
        "BadImage",
        "ConfigError",
        "DeadlineMissed",
        "Forbidden",
        "HawkVisionError",
        "HeadersTooLarge",
        "InternalError",
        "MethodNotAllowed",
        "NotFound",
        "NotReady",
        "Overloaded",
        "RequestError",
        "RequestTimeout",
        "ServiceError",
        "TargetUnreachable",
        "TooLarge",
        "Unauthorized",
        "UnsupportedMedia",
        "UriTooLong",
    ),
    "hawkvision.core.types": (
        "AccuracyGuarantee",
        "AccuracyStatus",
        "Answer",
        "Basis",
        "DegradedReason",
        "OnMiss",
        "LabelledClass",
        "Quality",
        "Reason",
        "StatusReason",
        "Tier",
        "Timing",
    ),
}
_MODULE_OF: Final = {name: module for module, names in _FROM.items() for name in names}

__all__ = [
    "AccuracyGuarantee",
    "AccuracyStatus",
    "Answer",
    "AsyncClient",
    "BadField",
    "BadImage",
    "BadReply",
    "Basis",
    "Client",
    "ConfigError",
    "DeadlineMissed",
    "DegradedReason",
    "Forbidden",
    "HawkVisionError",
    "HeadersTooLarge",
    "Health",
    "InternalError",
    "LabelledClass",
    "MethodNotAllowed",
    "NotFound",
    "NotReady",
    "OnMiss",
    "Outcome",
    "Overloaded",
    "Quality",
    "Reason",
    "RequestError",
    "RequestTimeout",
    "ServiceError",
    "StatusReason",
    "TargetUnreachable",
    "Tier",
    "Timing",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "UnsupportedMedia",
    "UriTooLong",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that servers and the command line do not load the client."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
