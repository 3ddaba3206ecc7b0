"""TLS of servers and of those who call them: contexts made of files, and made anew when the files change.

    files ──► Certificates.reload ──► a new SSLContext ──► new handshakes
                     └── a bad pair: ConfigError, and the old context stays

Connections keep what they were made with. A context is never changed, so no handshake sees half of a new pair.
"""

from __future__ import annotations

import datetime
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import TlsState
from hawkvision.core.settings.access import MinimumVersion

log = logging.getLogger("hawkvision.tls")

MAX_PEM_BYTES: Final = 4 * 1024 * 1024
"""Of one file; all authorities that browsers trust are 220 KB."""
_VERSIONS: Final[dict[MinimumVersion, ssl.TLSVersion]] = {
    "1.2": ssl.TLSVersion.TLSv1_2,
    "1.3": ssl.TLSVersion.TLSv1_3,
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of TLS; `where` is what their settings begin with, such as `edge.tls_`."""

    where: str
    certificate: Path | None = None
    """A chain, leaf first."""
    key: Path | None = None
    """The leaf's, unencrypted."""
    authorities: Path | None = None
    """Whose certificates the other end must have: of a server, None asks callers for none; of a caller, None means
    the authorities that this system trusts."""
    minimum: MinimumVersion = "1.2"
    authorities_name: str = "client_ca"
    """What the setting of `authorities` ends with."""

    @property
    def title(self) -> str:
        """For logs."""
        return f"{self.where}certificate" if self.certificate else f"{self.where}{self.authorities_name}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that there are."""
        return tuple(path for path in (self.certificate, self.key, self.authorities) if path is not None)


class Certificates:
    """One end's files, and the context that is made of them as they were when last they were right."""

    def __init__(self, files: TlsFiles, *, server: bool) -> None:
        """Read them.

        Raises:
            ConfigError: if they cannot be used; names setting and file.
        """
        self.files = files
        self._server = server
        self.handshakes_failed = 0
        self.expires = None if files.certificate is None else _expiry(self._leaf())
        """When the certificate's time is over; None without one."""
        self.context = self._made()
        """For the next handshake."""
        if self.expires is not None and self.expires <= _now():
            log.warning("%scertificate: %s has expired on %s", files.where, files.certificate, _day(self.expires))

    def reload(self) -> None:
        """Read the files again; new handshakes take what they hold now.

        Raises:
            ConfigError: if they cannot be used, or hold a certificate that has expired while the old one has not;
                then all stays as it was.
        """
        expires = None if self.files.certificate is None else _expiry(self._leaf())
        context = self._made()
        if expires is not None and self.expires is not None and expires <= _now() < self.expires:
            raise ConfigError(
                f"{self.files.where}certificate: {self.files.certificate} has expired on {_day(expires)}, "
                f"and the one in use is good until {_day(self.expires)}"
            )
        self.context, self.expires = context, expires
        log.info("%s: read again%s", self.files.title, "" if expires is None else f", good until {_day(expires)}")

    def state(self) -> TlsState:
        """What the metrics show."""
        return TlsState(0.0 if self.expires is None else self.expires.timestamp(), self.handshakes_failed)

    def renewing(self) -> ssl.SSLContext:
        """A context for those who can be given one only once: every handshake is made by the newest."""
        made = _Renewing(ssl.PROTOCOL_TLS_SERVER if self._server else ssl.PROTOCOL_TLS_CLIENT)
        made.certificates = self
        return made

    def _leaf(self) -> x509.Certificate:
        """The certificate, if certificate and key belong together."""
        files = self.files
        if files.certificate is None or files.key is None:
            raise ConfigError(f"{files.where}certificate and {files.where}key belong together: both or neither")
        chain = _certificates(files.certificate, f"{files.where}certificate")
        text = _read(files.key, f"{files.where}key")
        try:
            key = serialization.load_pem_private_key(text, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            why = "it is encrypted" if isinstance(error, TypeError) else str(error)
            raise ConfigError(
                f"{files.where}key: {files.key}: expected an unencrypted PEM private key: {why}"
            ) from None
        if key.public_key() != chain[0].public_key():
            raise ConfigError(f"{files.where}key: {files.key} is not the key of the certificate in {files.certificate}")
        return chain[0]

    def _made(self) -> ssl.SSLContext:
        files = self.files
        context = ServerContext(ssl.PROTOCOL_TLS_SERVER) if self._server else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if isinstance(context, ServerContext):
            context.begun = []
        context.minimum_version = _VERSIONS[files.minimum]
        context.set_alpn_protocols(["http/1.1"])
        # A caller that renegotiates makes the server work for nothing; TLS 1.3 has done away with it.
        context.options |= ssl.OP_NO_RENEGOTIATION
        setting = f"{files.where}{files.authorities_name}"
        if files.authorities is not None:
            _certificates(files.authorities, setting)
        try:
            if files.certificate is not None:
                context.load_cert_chain(files.certificate, files.key)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{files.where}certificate: {files.certificate}: {error}") from None
        try:
            if files.authorities is not None:
                context.load_verify_locations(files.authorities)
            elif not self._server:
                context.load_default_certs()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {files.authorities}: {error}") from None
        if self._server and files.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def caller_context(
    ca: str | Path | None, certificate: str | Path | None, certificate_key: str | Path | None
) -> ssl.SSLContext:
    """The context of a caller; `certificate_key` may be in the file of `certificate`.

    Raises:
        ConfigError: if a file cannot be used.
    """
    if certificate is None and certificate_key is not None:
        raise ConfigError("certificate_key: missing certificate, whose key it is")
    own = None if certificate is None else Path(certificate)
    key = own if certificate_key is None else Path(certificate_key)
    files = TlsFiles("", own, key, None if ca is None else Path(ca), authorities_name="ca")
    return Certificates(files, server=False).context


class _Renewing(ssl.SSLContext):
    """Hands every handshake to the newest context. asyncio and uvloop begin them with `wrap_bio`, and only so."""

    certificates: Certificates

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        return self.certificates.context.wrap_bio(*args, **kwargs)


class _Handshake(ssl.SSLObject):
    """A server's end of one connection, which tells with what alert it refuses a caller: event loops would drop it."""

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
    """A server's: whoever begins handshakes with it may hear of their alerts."""

    sslobject_class = _Handshake
    begun: list[_Handshake]

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext.wrap_bio`."""
        made = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(made, _Handshake)
        made.outgoing = outgoing
        self.begun.append(made)
        return made

    def tell(self, refuse: Callable[[bytes], None]) -> None:
        """Have `refuse` told the alert of the handshake that was begun since the last call, if it fails."""
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
