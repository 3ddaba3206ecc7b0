"""Keeps the libraries that we use from reporting to their makers. Imported before any of them can be.

ONNX Runtime 1.29 and later looks its vendor's host up, and keeps a device id and queued events below the cache, in
every process that imports it. Ray sends usage statistics. The environment variables that forbid it are set here, so
that child processes, Ray's workers among them, inherit them.

`hawkvision/__init__.py` imports this module, and `hawkvision.system.onnx_runtime` is the only one that imports ONNX
Runtime.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger("hawkvision")

SILENCED: Final = {
    "ORT_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Each variable with the value that forbids reports."""
_NO: Final = ("0", "false", "no", "off")
_YES: Final = ("1", "true", "yes", "on")


def silence(environ: MutableMapping[str, str]) -> None:
    """Forbid reports, unless the environment clearly allows them.

    A variable that is unset, empty or not understood is set to the value that forbids. Reports that an operator allows
    on purpose (`ORT_DISABLE_TELEMETRY=0`) stay allowed; `warn_if_allowed` says so in the log.
    """
    for name, value in SILENCED.items():
        if not _allows(name, environ):
            environ[name] = value


def warn_if_allowed() -> None:
    """Log one warning for each library that this process's environment allows to report."""
    for name in SILENCED:
        if _allows(name, os.environ):
            log.warning("%s=%s in the environment: this library reports to its maker", name, os.environ[name])


def _allows(name: str, environ: MutableMapping[str, str]) -> bool:
    allowing = _NO if SILENCED[name] in _YES else _YES
    return environ.get(name, "").strip().lower() in allowing


silence(os.environ)
