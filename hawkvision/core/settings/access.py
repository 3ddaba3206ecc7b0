"""The settings that say who may call a server and over what. Both servers have them; they are checked at the start."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from hawkvision.core.errors import ConfigError

MinimumVersion: TypeAlias = Literal["1.2", "1.3"]
"""The oldest TLS version that a server accepts."""


class AccessSettings(Protocol):
    """What the settings of a server have in common."""

    @property
    def host(self) -> str: ...  # noqa: D102
    @property
    def api_key(self) -> str | None: ...  # noqa: D102
    @property
    def keys_file(self) -> Path | None: ...  # noqa: D102
    @property
    def tls_certificate(self) -> Path | None: ...  # noqa: D102
    @property
    def tls_key(self) -> Path | None: ...  # noqa: D102
    @property
    def tls_client_ca(self) -> Path | None: ...  # noqa: D102
    @property
    def tls_minimum_version(self) -> MinimumVersion: ...  # noqa: D102
    @property
    def allow_plain_http(self) -> bool: ...  # noqa: D102


class EscalationSettings(Protocol):
    """The settings of a node that may have a datacenter."""

    @property
    def datacenter_ca(self) -> Path | None: ...  # noqa: D102
    @property
    def datacenter_certificate(self) -> Path | None: ...  # noqa: D102
    @property
    def datacenter_key(self) -> Path | None: ...  # noqa: D102


def check_access(settings: AccessSettings, section: str, prefix: str, *, loopback: bool) -> None:
    """Refuse what would let strangers in, or keys out.

    Args:
        settings: of a server.
        section: in the file, such as `edge`.
        prefix: of variables, such as `HAWKVISION_EDGE_`.
        loopback: whether only this machine reaches it.

    Raises:
        ConfigError: naming what to set.
    """
    check_both_or_neither(section, "tls_certificate", settings.tls_certificate, "tls_key", settings.tls_key)
    if settings.tls_client_ca is not None and settings.tls_certificate is None:
        raise ConfigError(f"{section}.tls_client_ca: missing {section}.tls_certificate and {section}.tls_key")
    if loopback:
        return
    reachable = f"{section}.host = {settings.host!r} is reachable from other machines"
    if settings.api_key is None and settings.keys_file is None:
        raise ConfigError(
            f"{reachable}, so {section}.api_key must be set (for example in {prefix}API_KEY), or {section}.keys_file "
            "(`hawkvision keys add` makes one); only loopback addresses may go without"
        )
    if settings.tls_certificate is None and not settings.allow_plain_http:
        raise ConfigError(
            f"{reachable}, and keys and images would travel in clear text: set {section}.tls_certificate and "
            f"{section}.tls_key, or {section}.allow_plain_http = true ({prefix}ALLOW_PLAIN_HTTP=true) where something "
            "in front of it ends TLS or nobody else is on the network"
        )


def check_both_or_neither(section: str, one: str, first: object, other: str, second: object) -> None:
    """Refuse one of two settings that belong together.

    Raises:
        ConfigError: naming both.
    """
    if (first is None) != (second is None):
        raise ConfigError(f"{section}.{one} and {section}.{other} belong together: both or neither")


def is_loopback(host: str) -> bool:
    """Whether a listening address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
