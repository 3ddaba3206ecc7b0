"""Environment variables of libraries that we use: no telemetry, and the same pixels everywhere. Must be imported before
them.

ONNX Runtime 1.29 and later contacts its vendor and stores a device id and queued events in every process that imports
it. Ray sends usage statistics. This module sets the environment variables that forbid both; child processes, such as
Ray's workers, inherit them.

OpenCV's bicubic scaling uses Intel's IPP, which chooses code by CPU, and the variants round some pixels differently. An
image could then get another confidence than on the machine of the certification. So every x86-64 CPU with AVX2 uses the
same code. A value that the user set is kept.

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
    """Forbid telemetry, unless the environment explicitly allows it.

    A variable that is unset, empty or malformed is set to the value that forbids. Telemetry that an operator allows
    (`ORT_DISABLE_TELEMETRY=0`) stays allowed, and `warn_if_allowed` logs it.
    """
    for name, value in SILENCED.items():
        if not _allows(name, environ):
            environ[name] = value


def warn_if_allowed() -> None:
    """Log one warning for each library whose telemetry the environment allows."""
    for name in SILENCED:
        if _allows(name, os.environ):
            log.warning("%s=%s in the environment: this library reports to its maker", name, os.environ[name])


def _allows(name: str, environ: MutableMapping[str, str]) -> bool:
    allowing = _NO if SILENCED[name] in _YES else _YES
    return environ.get(name, "").strip().lower() in allowing


silence(os.environ)
os.environ.setdefault("OPENCV_IPP", "avx2")
