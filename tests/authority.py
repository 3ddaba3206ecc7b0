"""Certificate authorities of the tests' own, and what they certify."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path

    def become(self, other: Pair) -> None:
        """Put another pair in the place of this one, as certbot and Kubernetes do: written aside, then renamed over."""
        for own, new in ((self.certificate, other.certificate), (self.key, other.key)):
            replace(own, new.read_bytes())


def replace(path: Path, data: bytes) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(data)
    aside.replace(path)


class Authority:
    """A certificate authority for tests."""

    def __init__(self, folder: Path, name: str = "an authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = self._signed(self._name, self._key, [], 0, 3650, authority=True)
        self.path = folder / f"{name.replace(' ', '-')}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def certify(self, title: str, *names: str, days: int = 30) -> Pair:
        """A pair for DNS names and addresses, 127.0.0.1 unless given; negative days have passed."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
        certificate = self._signed(subject, key, names or ("127.0.0.1",), min(0, 2 * days), days, authority=False)
        pair = Pair(self._folder / f"{title}.crt", self._folder / f"{title}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Of a caller that trusts this authority, and shows a certificate if it has one."""
        context = ssl.create_default_context(cafile=str(self.path))
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context

    def server(self, pair: Pair) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        return context

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: tuple[str, ...] | list[str],
        since_days: int,
        until_days: int,
        *,
        authority: bool,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + (since_days - 1) * DAY)
            .not_valid_after(now + until_days * DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_named(name) for name in names]), False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
