"""What is exported of a handshake: as RFC 8446 and OpenSSL say, the same at both ends, and of no other connection."""

from __future__ import annotations

import contextlib

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.tls import CipherSuite, KeySchedule
from cryptography.hazmat.primitives import hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from OpenSSL import SSL

from hawkvision.transport.protocol.exporter import Exporter, exported
from hawkvision.transport.protocol.wire import WireError
from tests.hawkvision.transport.peers import IDENTITY


class Transcript(hashes.HashContext):
    """A hash that is known, of messages that are not at hand."""

    algorithm = hashes.SHA256()

    def __init__(self, value: bytes) -> None:
        self._value = value

    def update(self, data: object) -> None:
        raise AssertionError("nothing is added")

    def finalize(self) -> bytes:
        return self._value

    def copy(self) -> Transcript:
        return self


def test_the_exporter_master_secret_is_that_of_rfc_8448() -> None:
    schedule = KeySchedule(CipherSuite.AES_128_GCM_SHA256)
    schedule.generation = 3
    schedule.secret = bytes.fromhex("18df06843d13a08bf2a449844c5f8a478001bc4d4c627984d5a41da8d0402919")
    schedule.hash = Transcript(  # type: ignore[assignment]
        bytes.fromhex("9608102a0f1ccc6db6250b7b7e417b1a000eaada3daae4777a7686c9ff83df13")
    )
    exporter = Exporter(QuicConnection(configuration=QuicConfiguration(is_client=True)))
    exporter._keep(schedule)
    assert exporter._master is not None
    assert exporter._master.hex() == "fe22f881176eda18eb8f44529e6792c50c9a3f89452f68d8ae311b4309d3cf50"


def openssl_handshake(suite: bytes) -> tuple[SSL.Connection, bytes]:
    """One end of a TLS 1.3 connection in memory, and its exporter master secret as OpenSSL logs it."""
    lines = list[bytes]()
    ends = []
    for _ in range(2):
        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        context.set_tls13_ciphersuites(suite)
        context.use_certificate(IDENTITY.chain[0])
        context.use_privatekey(IDENTITY.key)
        context.set_keylog_callback(lambda _, line: lines.append(line))
        ends.append(SSL.Connection(context, None))
    client, server = ends
    client.set_connect_state()
    server.set_accept_state()
    for _ in range(3):
        for one, other in ((client, server), (server, client)):
            with contextlib.suppress(SSL.WantReadError):
                one.do_handshake()
            with contextlib.suppress(SSL.WantReadError):
                other.bio_write(one.bio_read(1 << 16))
    (secret,) = {line.split()[2] for line in lines if line.startswith(b"EXPORTER_SECRET")}
    return client, bytes.fromhex(secret.decode())


@pytest.fixture(scope="module", params=[b"TLS_AES_128_GCM_SHA256", b"TLS_AES_256_GCM_SHA384"])
def openssl(request: pytest.FixtureRequest) -> tuple[hashes.HashAlgorithm, SSL.Connection, bytes]:
    algorithm = hashes.SHA384() if b"SHA384" in request.param else hashes.SHA256()
    return algorithm, *openssl_handshake(request.param)


@given(label=st.text("abcXYZ-", min_size=1, max_size=40), context=st.binary(max_size=40), length=st.integers(1, 200))
@settings(deadline=None)
def test_any_value_is_what_openssl_exports(
    openssl: tuple[hashes.HashAlgorithm, SSL.Connection, bytes], label: str, context: bytes, length: int
) -> None:
    algorithm, connection, master = openssl
    expected = connection.export_keying_material(label.encode(), length, context)
    assert exported(algorithm, master, label.encode(), context, length) == expected


def test_nothing_is_exported_before_the_handshake() -> None:
    quic = QuicConnection(configuration=QuicConfiguration(is_client=True))
    exporter = Exporter(quic)
    with pytest.raises(WireError, match="handshake"):
        exporter.export(b"EXPORTER-test")
    quic.connect(("127.0.0.1", 1), now=0.0)
    with pytest.raises(WireError, match="handshake"):
        exporter.export(b"EXPORTER-test")
