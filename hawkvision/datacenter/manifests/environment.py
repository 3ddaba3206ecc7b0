"""The variables that every machine of a Ray cluster needs before `ray start`, without Kubernetes."""

from __future__ import annotations

import secrets

from hawkvision.datacenter.deployment.ray_settings import TUNING

_SECRET_BYTES = 32


def environment() -> str:
    """Lines `NAME=VALUE`: Ray's settings, a new token for its ports, and a new key for the tier's callers.

    Shells, systemd (`EnvironmentFile=`) and container engines (`--env-file`) read them. They hold secrets.
    """
    made = {
        **TUNING,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(_SECRET_BYTES),
        "HAWKVISION_DC_API_KEY": secrets.token_hex(_SECRET_BYTES),
    }
    return "".join(f"{name}={value}\n" for name, value in made.items())
