"""The certificate of a datagram server.

An operator gives one as PEM files. Otherwise the server makes its own at each start. Callers learn it over HTTP from
the same node and trust it exactly as much as that connection: they compare it bit for bit. So its dates and names do
not matter, nor does the caller's clock.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hawkvision.core.errors import ConfigError

SERVER_NAME: Final = "hawkvision.invalid"
"""The name in self-made certificates; RFC 2606 reserves it."""
BEGINS: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""The date of a clock that was never set; callers of version 1 still check dates."""
ENDS: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""RFC 5280 §4.1.2.5: no well-defined end."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain, leaf first, the leaf's private key, and the name that callers of version 1 check."""

    chain: tuple[x509.Certificate, ...]
    key: Any
    name: str

    @property
    def pem(self) -> str:
        """The chain as PEM, without the key."""
        return "".join(c.public_bytes(serialization.Encoding.PEM).decode() for c in self.chain)


def fingerprint(certificate: x509.Certificate) -> bytes:
    """The SHA-256 of a certificate, which callers compare."""
    return certificate.fingerprint(hashes.SHA256())


def pin_of(pem: str) -> bytes:
    """The fingerprint of the first certificate of a chain.

    Raises:
        ValueError: if it is not a PEM certificate chain.
    """
    return fingerprint(x509.load_pem_x509_certificates(pem.encode())[0])


def own_identity() -> Identity:
    """A new self-signed certificate (ECDSA, P-256) without an end."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGINS)
        .not_valid_after(ENDS)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Identity((certificate,), key, SERVER_NAME)


def identity_for(certificate: Path | None, key: Path | None) -> Identity:
    """The operator's identity, if files are given, else a new one.

    Raises:
        ConfigError: as `load_identity`.
    """
    if certificate is None or key is None:
        return own_identity()
    return load_identity(certificate, key)


def load_identity(certificate: Path, key: Path) -> Identity:
    """The operator's certificate and key.

    Raises:
        ConfigError: if a file is missing or not PEM of its kind; names the file.
    """
    try:
        chain = tuple(x509.load_pem_x509_certificates(certificate.read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate}: expected a PEM certificate chain: {error}") from None
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{key}: expected an unencrypted PEM private key: {error}") from None
    if private.public_key() != chain[0].public_key():
        raise ConfigError(f"{key}: this is not the key of the certificate in {certificate}")
    try:
        names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ConfigError(f"{certificate}: expected a subject alternative name that callers can check") from None
    dns = names.get_values_for_type(x509.DNSName)
    addresses = names.get_values_for_type(x509.IPAddress)
    if not dns and not addresses:
        raise ConfigError(f"{certificate}: expected a DNS name or an IP address as subject alternative name")
    return Identity(chain, private, dns[0] if dns else str(addresses[0]))
