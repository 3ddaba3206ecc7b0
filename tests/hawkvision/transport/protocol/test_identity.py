"""Certificates of the datagram server: its own, or an operator's, checked before it listens; and who trusts them."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hawkvision.core.errors import ConfigError
from hawkvision.transport.client.pending_responses import ConnectionLost
from hawkvision.transport.protocol.server_certificate import SERVER_NAME, Identity, load_identity, own_identity, pin_of
from hawkvision.transport.protocol.wire import Status
from tests.hawkvision.transport.peers import IDENTITY, connected, serving
from tests.hawkvision.transport.session import coded
from tests.waiting import until

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


def test_a_self_made_certificate_has_a_reserved_name_and_no_end() -> None:
    identity = own_identity()
    assert identity.name == SERVER_NAME
    (certificate,) = identity.chain
    assert certificate.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert certificate.not_valid_after_utc.year == 9999
    assert x509.load_pem_x509_certificates(identity.pem.encode()) == [certificate]
    assert pin_of(identity.pem) == hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


async def refused(server: Identity, expected: Identity) -> str:
    """Why a client that was told of one certificate does not talk to a server with another; nothing was said to it."""
    async with serving(identity=server) as running:
        with pytest.raises(ConnectionLost) as caught:
            async with connected(running.port, certificate=expected.pem, name=expected.name):
                pass
        await until(lambda: running.half_open == 0)
        assert not running.sessions
        return str(caught.value)


def test_another_servers_certificate_is_refused_and_both_are_named() -> None:
    stranger = own_identity()
    why = asyncio.run(refused(IDENTITY, stranger))
    assert pin_of(stranger.pem).hex() in why
    assert pin_of(IDENTITY.pem).hex() in why


def test_another_certificate_of_the_same_authority_and_name_is_refused() -> None:
    key, before, after = ec.generate_private_key(ec.SECP256R1()), NOW - DAY, NOW + DAY
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def issued(subject: x509.Name, public: Any, ca: bool) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(before).not_valid_after(after)
        builder = builder.add_extension(x509.BasicConstraints(ca, None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("edge.example")]), critical=False)
        return builder.sign(key, hashes.SHA256())

    root = issued(authority, key.public_key(), ca=True)
    node = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    one, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    reported = Identity((issued(node, one.public_key(), ca=False), root), one, "edge.example")
    shown = Identity((issued(node, other.public_key(), ca=False), root), other, "edge.example")
    assert "another certificate" in asyncio.run(refused(shown, reported))
    assert "another certificate" in asyncio.run(refused(shown, Identity((root,), key, "edge.example")))


def test_a_server_with_the_right_certificate_but_not_its_key_is_refused() -> None:
    asyncio.run(refused(Identity(IDENTITY.chain, own_identity().key, IDENTITY.name), IDENTITY))


@pytest.mark.parametrize("reported", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\0"])
def test_an_advertised_certificate_that_is_not_pem_is_named_in_the_error(reported: str) -> None:
    async def scenario() -> None:
        async with serving() as server:
            with pytest.raises(ConnectionLost, match="is not PEM"):
                async with connected(server.port, certificate=reported):
                    pass

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [NOW - 700 * DAY, NOW + 700 * DAY], ids=["ended", "not begun"])
def test_the_dates_of_an_advertised_certificate_do_not_matter(tmp_path: Path, end: datetime.datetime) -> None:
    identity = load_identity(*files(tmp_path, [x509.DNSName("edge.example")], end))

    async def scenario() -> None:
        async with (
            serving(identity=identity) as server,
            connected(server.port, certificate=identity.pem, name="another.example") as client,
        ):
            assert (await client.ask(b"", coded()))[0] is Status.OK

    asyncio.run(scenario())


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
