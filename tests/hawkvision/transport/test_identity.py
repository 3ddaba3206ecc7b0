"""Certificates of the lossy server: its own, or an operator's, checked before anything listens."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hawkvision.errors import ConfigError
from hawkvision.transport.identity import SERVER_NAME, load_identity, own_identity
from hawkvision.transport.receiver import Status
from tests.hawkvision.transport.lossy_peers import connected, serving
from tests.hawkvision.transport.session import coded

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


def files(folder: Path, names: list[x509.GeneralName], end: datetime.datetime = NOW + DAY) -> tuple[Path, Path]:
    """An operator's certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(7).not_valid_before(end - 3 * DAY).not_valid_after(end)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate, private = folder / "node.pem", folder / "node.key"
    certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private


def test_our_own_is_made_out_to_a_name_that_nobody_has() -> None:
    identity = own_identity(NOW)
    assert identity.name == SERVER_NAME
    (certificate,) = identity.chain
    assert certificate.not_valid_before_utc < NOW - datetime.timedelta(hours=12)
    assert x509.load_pem_x509_certificates(identity.pem.encode()) == [certificate]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([x509.DNSName("edge.example")], "edge.example"),
        ([x509.IPAddress(ipaddress.ip_address("192.0.2.7"))], "192.0.2.7"),
    ],
)
def test_an_operators_certificate_serves_clients_that_trust_it(
    tmp_path: Path, names: list[x509.GeneralName], expected: str
) -> None:
    identity = load_identity(*files(tmp_path, names))
    assert identity.name == expected

    async def scenario() -> None:
        async with (
            serving(identity=identity) as server,
            connected(server.port, certificate=identity.pem, name=identity.name) as client,
        ):
            assert (await client.ask(b"", coded()))[0] is Status.OK

    asyncio.run(scenario())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, [x509.DNSName("edge.example")])
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        load_identity(tmp_path / "nowhere.pem", key)
    with pytest.raises(ConfigError, match=r"nowhere\.key"):
        load_identity(certificate, tmp_path / "nowhere.key")


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, [x509.DNSName("edge.example")])
    with pytest.raises(ConfigError, match="certificate chain"):
        load_identity(key, key)
    with pytest.raises(ConfigError, match="private key"):
        load_identity(certificate, certificate)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, _ = files(tmp_path, [x509.DNSName("edge.example")])
    _, other = files(tmp_path / "other", [x509.DNSName("edge.example")])
    with pytest.raises(ConfigError, match="not the key"):
        load_identity(certificate, other)


@pytest.mark.parametrize("names", [[], [x509.RFC822Name("a@example")]])
def test_a_certificate_without_a_name_to_check_is_refused(tmp_path: Path, names: list[x509.GeneralName]) -> None:
    with pytest.raises(ConfigError, match="alternative name"):
        load_identity(*files(tmp_path, names))
