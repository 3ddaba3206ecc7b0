"""TLS certificates from the settings of a server, and of an edge node that calls a datacenter."""

from __future__ import annotations

from hawkvision.core.settings.access import AccessSettings, EscalationSettings
from hawkvision.servers.tls import Certificates, TlsFiles


def server_certificates(settings: AccessSettings, section: str) -> Certificates | None:
    """The certificate of a server that speaks TLS; None of one that does not.

    Raises:
        ConfigError: if its files cannot be used.
    """
    if settings.tls_certificate is None:
        return None
    files = TlsFiles(
        f"{section}.tls_",
        settings.tls_certificate,
        settings.tls_key,
        settings.tls_client_ca,
        settings.tls_minimum_version,
    )
    return Certificates(files, server=True)


def datacenter_certificates(settings: EscalationSettings) -> Certificates | None:
    """Whom an edge node trusts to be its datacenter, and who it says it is; None where the system's trust will do.

    Raises:
        ConfigError: if its files cannot be used.
    """
    if settings.datacenter_ca is None and settings.datacenter_certificate is None:
        return None
    files = TlsFiles(
        "edge.datacenter_",
        settings.datacenter_certificate,
        settings.datacenter_key,
        settings.datacenter_ca,
        authorities_name="ca",
    )
    return Certificates(files, server=False)
