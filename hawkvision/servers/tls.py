"""TLS contexts of servers and callers, made from files and made again when the files change.

    files ──► Certificates.reload ──► a new SSLContext ──► new handshakes
                     └── a bad pair: ConfigError, and the old context stays

Open connections keep their context. A context is never modified, so no handshake sees half of a new pair.
"""

from __future__ import annotations

import datetime
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.access import AccessSettings, EscalationSettings, MinimumVersion

log = logging.getLogger("hawkvision.tls")

MAX_PEM_BYTES: Final = 4 * 1024 * 1024
"""Longest PEM file; all authorities that browsers trust take 220 kB."""
_VERSIONS: Final[dict[MinimumVersion, ssl.TLSVersion]] = {
    "1.2": ssl.TLSVersion.TLSv1_2,
    "1.3": ssl.TLSVersion.TLSv1_3,
}


class Certificates:
    """The PEM files of one end of TLS, and the context from their last valid contents."""

    def __init__(
        self,
        where: str,
        certificate: Path | None = None,
        key: Path | None = None,
        authorities: Path | None = None,
        *,
        server: bool,
        minimum: MinimumVersion = "1.2",
    ) -> None:
        """Read the files.

        Args:
            where: prefix of their settings, such as `edge.tls_`.
            certificate: the certificate chain, leaf first.
            key: the private key of the leaf, unencrypted.
            authorities: for the other end's certificate. None: a server requires no certificate, a caller uses the
                system's authorities.
            server: which end this is.
            minimum: the oldest version of TLS.

        Raises:
            ConfigError: if they cannot be used; names setting and file.
        """
        self._where, self._certificate, self._key, self._authorities = where, certificate, key, authorities
        self._authorities_setting = f"{where}{'client_ca' if server else 'ca'}"
        self._minimum, self._server = minimum, server
        self.handshakes_failed = 0
        self.expires = None if certificate is None else _expiry(self._leaf())
        """When the certificate expires; None without one."""
        self.context = self._made()
        """The context of the next handshake."""
        if self.expires is not None and self.expires <= _now():
            log.warning("%scertificate: %s has expired on %s", where, certificate, _day(self.expires))

    @property
    def title(self) -> str:
        """A name for logs."""
        return f"{self._where}certificate" if self._certificate else self._authorities_setting

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are set."""
        return tuple(path for path in (self._certificate, self._key, self._authorities) if path is not None)

    def reload(self) -> None:
        """Read the files again, for new handshakes.

        Raises:
            ConfigError: if they cannot be used, or the new certificate has expired and the old one has not. The old
                context then stays.
        """
        expires = None if self._certificate is None else _expiry(self._leaf())
        context = self._made()
        if expires is not None and self.expires is not None and expires <= _now() < self.expires:
            raise ConfigError(
                f"{self._where}certificate: {self._certificate} has expired on {_day(expires)}, "
                f"and the one in use is good until {_day(self.expires)}"
            )
        self.context, self.expires = context, expires
        log.info("%s: read again%s", self.title, "" if expires is None else f", good until {_day(expires)}")

    def state(self) -> tuple[float, int]:
        """When the certificate expires, in seconds since 1970, and how many handshakes have failed; for metrics."""
        return 0.0 if self.expires is None else self.expires.timestamp(), self.handshakes_failed

    def renewing(self) -> ssl.SSLContext:
        """A context for libraries that take only one: each handshake uses the newest context."""
        made = _Renewing(ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT)
        made.certificates = self
        return made

    def _leaf(self) -> x509.Certificate:
        """The leaf certificate, after checking that the key belongs to it."""
        if self._certificate is None or self._key is None:
            raise ConfigError(f"{self._where}certificate and {self._where}key belong together: both or neither")
        chain = _certificates(self._certificate, f"{self._where}certificate")
        text = _read(self._key, f"{self._where}key")
        try:
            key = serialization.load_pem_private_key(text, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            why = "it is encrypted" if isinstance(error, TypeError) else str(error)
            raise ConfigError(
                f"{self._where}key: {self._key}: expected an unencrypted PEM private key: {why}"
            ) from None
        if key.public_key() != chain[0].public_key():
            raise ConfigError(f"{self._where}key: {self._key} is not the key of the certificate in {self._certificate}")
        return chain[0]

    def _made(self) -> ssl.SSLContext:
        context = ServerContext(ssl.PROTOCOL_TLS_SERVER) if self._server else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if isinstance(context, ServerContext):
            context.begun = []
        context.minimum_version = _VERSIONS[self._minimum]
        context.set_alpn_protocols(["http/1.1"])
        # Renegotiation lets a caller waste the server's time; TLS 1.3 removed it.
        context.options |= ssl.OP_NO_RENEGOTIATION
        setting = self._authorities_setting
        if self._authorities is not None:
            _certificates(self._authorities, setting)
        try:
            if self._certificate is not None:
                context.load_cert_chain(self._certificate, self._key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._where}certificate: {self._certificate}: {error}") from None
        try:
            if self._authorities is not None:
                context.load_verify_locations(self._authorities)
            elif not self._server:
                context.load_default_certs()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {self._authorities}: {error}") from None
        if self._server and self._authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def caller_context(
    ca: str | Path | None, certificate: str | Path | None, certificate_key: str | Path | None
) -> ssl.SSLContext:
    """A TLS context for a caller. `certificate_key` may be in the file of `certificate`.

    Raises:
        ConfigError: if a file cannot be used.
    """
    if certificate is None and certificate_key is not None:
        raise ConfigError("certificate_key: missing certificate, to which it belongs")
    own = None if certificate is None else Path(certificate)
    key = own if certificate_key is None else Path(certificate_key)
    return Certificates("", own, key, None if ca is None else Path(ca), server=False).context


def server_certificates(settings: AccessSettings, section: str) -> Certificates | None:
    """The certificate of a server that speaks TLS; None of one that does not.

    Raises:
        ConfigError: if its files cannot be used.
    """
    certificate, key, authorities = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None:
        return None
    where, minimum = f"{section}.tls_", settings.tls_minimum_version
    return Certificates(where, certificate, key, authorities, server=True, minimum=minimum)


def datacenter_certificates(settings: EscalationSettings) -> Certificates | None:
    """Whom an edge node trusts to be its datacenter, and who it says it is; None where the system's trust will do.

    Raises:
        ConfigError: if its files cannot be used.
    """
    certificate, key, authorities = settings.datacenter_certificate, settings.datacenter_key, settings.datacenter_ca
    if authorities is None and certificate is None:
        return None
    return Certificates("edge.datacenter_", certificate, key, authorities, server=False)


class _Renewing(ssl.SSLContext):
    """Passes each handshake to the newest context. asyncio and uvloop begin handshakes with `wrap_bio` only."""

    certificates: Certificates

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        return self.certificates.context.wrap_bio(*args, **kwargs)


class _Handshake(ssl.SSLObject):
    """A server's end of one connection. It reports the alert that refuses a caller, which event loops would drop."""

    outgoing: ssl.MemoryBIO
    refuse: Callable[[bytes], None] | None = None

    def do_handshake(self) -> None:
        """See `ssl.SSLObject.do_handshake`."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.refuse is not None:
                self.refuse(self.outgoing.read())
            raise


class ServerContext(ssl.SSLContext):
    """A server's context, which can report the alerts of its handshakes."""

    sslobject_class = _Handshake
    begun: list[_Handshake]

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        made = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(made, _Handshake)
        made.outgoing = outgoing
        self.begun.append(made)
        return made

    def on_alert(self, refuse: Callable[[bytes], None]) -> None:
        """Call `refuse` with the alert of the handshake begun since the last call, if that handshake fails."""
        if len(self.begun) == 1:
            self.begun[0].refuse = refuse
        self.begun.clear()


def _certificates(path: Path, setting: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path, setting))
    except ValueError as error:
        raise ConfigError(f"{setting}: {path}: expected PEM certificates: {error}") from None


def _read(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror or error}") from None
    if len(text) > MAX_PEM_BYTES:
        raise ConfigError(f"{setting}: {path}: expected at most {MAX_PEM_BYTES} bytes")
    return text


def _expiry(certificate: x509.Certificate) -> datetime.datetime:
    return certificate.not_valid_after_utc


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _day(moment: datetime.datetime) -> str:
    return moment.date().isoformat()
