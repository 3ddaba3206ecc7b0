"""Checks of the server's certificate and its callers' keys."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Final

from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.doctor.findings import Finding, ok, problem, warning
from hawkvision.servers.keys import Keys
from hawkvision.servers.tls import server_certificates

SOON: Final = datetime.timedelta(days=14)
"""Half of the time before expiry at which certbot renews certificates (30 days)."""


def access(config: EdgeConfig | DatacenterConfig, section: str, now: datetime.datetime) -> Iterator[Finding]:
    """Whether certificate and keys can be used, and until when.

    Raises:
        ConfigError: if they cannot be; names setting and file.
    """
    Keys(config.api_key, config.keys_file, where=f"{section}.api_key")
    if config.api_key is None and config.keys_file is None:
        yield ok("keys", "none: whoever reaches this machine's loopback may ask")
    else:
        yield ok("keys", "can be read")
    certificates = server_certificates(config, section)
    if certificates is not None and certificates.expires is not None:
        yield _lifetime(certificates.expires, now)
    elif is_loopback(config.host):
        yield ok("TLS", "none, and none is needed on loopback")
    else:
        advice = f"set {section}.tls_certificate and {section}.tls_key, unless something in front ends TLS"
        yield warning("TLS", "none: keys and images travel in clear text beyond this machine", advice)


def _lifetime(expires: datetime.datetime, now: datetime.datetime) -> Finding:
    day, advice = expires.date().isoformat(), "renew it: the server reads the new files by itself"
    if expires <= now:
        return problem("TLS", f"the certificate has expired on {day}", advice)
    if expires - now < SOON:
        return warning("TLS", f"the certificate expires on {day}", advice)
    return ok("TLS", f"the certificate is good until {day}")
