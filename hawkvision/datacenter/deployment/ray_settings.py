"""What the tier asks of Ray: its version, and the environment variables that Ray reads when it is imported.

A variable that is already set keeps its value. Versions of Ray before 2.58.1 run any code that some of their ports are
sent. A newer version is supported once `python -m tests.bench.robustness.exposure` passes with it.
"""

from __future__ import annotations

import importlib.metadata
import re
import secrets
from typing import Final

from hawkvision.core.errors import ConfigError
from hawkvision.system.library_environment import SILENCED

OLDEST: Final = (2, 58, 1)
BEFORE: Final = (2, 61, 0)
"""The first untried version. pyproject.toml has the same bounds."""


def check_ray(installed: str | None = None) -> None:
    """Refuse an unsupported Ray; None looks up the installed version without importing it.

    Raises:
        ConfigError: names the installed and the supported versions.
        ModuleNotFoundError: if Ray is not installed.
    """
    if installed is None:
        try:
            installed = importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError("No module named 'ray'", name="ray") from None
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\+|$)", installed)
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) < BEFORE:
        oldest, before = (".".join(map(str, its)) for its in (OLDEST, BEFORE))
        raise ConfigError(
            f"Ray {installed} is installed; expected at least {oldest} and below {before}: older ones run code of "
            f"anybody who reaches their ports, and newer ones are untried: pip install 'ray[serve]>={oldest},<{before}'"
        )


TUNING: Final = {
    # Handle calls by gRPC: faster for images, and no object store for large ones.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Replicas and the server never block their event loops (models and decoders have threads), so one loop suffices.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray starts its workers with a niceness of 15; these serve callers, and must not wait for other programs.
    "RAY_worker_niceness": "0",
    # gRPC takes `http_proxy` for calls to any address, loopback too; those of Ray's processes pass no proxy.
    "no_grpc_proxy": "0.0.0.0/0,::/0",
    **SILENCED,
}
CONNECTION_RETRIES: Final = {"RAY_NUM_REDIS_GET_RETRIES": "5"}
"""A second apart, instead of twenty: an address that listens and refuses five times most likely got a wrong key."""
_SECRET_BYTES: Final = 32


def environment() -> str:
    """What every machine of a Ray cluster needs before `ray start`: Ray's settings and token, and a key for callers.

    Lines `NAME=VALUE`, as shells, systemd (`EnvironmentFile=`) and container engines (`--env-file`) read them. The
    token and the key are new.
    """
    made = {
        **TUNING,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(_SECRET_BYTES),
        "HAWKVISION_DC_API_KEY": secrets.token_hex(_SECRET_BYTES),
    }
    return "".join(f"{name}={value}\n" for name, value in made.items())
