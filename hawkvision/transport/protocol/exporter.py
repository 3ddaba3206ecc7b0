"""What TLS exports of a QUIC connection's handshake: a value that both its ends have, and nobody else on any other.

TLS 1.3 derives it from a secret that depends on the whole handshake, the server's certificate included (RFC 8446 §7.5).
Who stands in between has two connections, and two values (RFC 9266): what is proved about one proves nothing about the
other. aioquic does not export; the secret is taken from its key schedule at the one moment at which that is where RFC
8446 §7.1 says. If another aioquic works otherwise, nothing is exported, and whoever asks gets an error.

    ClientHello … server's Finished ─► application traffic keys ─► exporter master secret ─► label ─► exported value
                                       (`_update_traffic_key`)      (`exp master`)
"""

from __future__ import annotations

from typing import Any, Final

from aioquic.quic.connection import QuicConnection
from aioquic.tls import CipherSuite, Direction, Epoch, KeySchedule, hkdf_expand_label
from cryptography.hazmat.primitives import hashes

from hawkvision.transport.protocol.wire import WireError

KEY_PROOF: Final = b"EXPORTER-hawkvision-key-proof"
"""The label of what `hello` proves a key over."""
MASTER_GENERATION: Final = 3
"""Of a key schedule at its master secret: early, handshake, master."""


class Exporter:
    """Of one connection. Make it before the connection's handshake begins."""

    def __init__(self, quic: QuicConnection) -> None:
        self._algorithm: hashes.HashAlgorithm
        self._master: bytes | None = None
        hidden: Any = quic
        update = hidden._update_traffic_key

        def updated(direction: Direction, epoch: Epoch, suite: CipherSuite, secret: bytes) -> None:
            # The first key of this epoch is the server's, and made when its Finished is the last of the transcript.
            if epoch is Epoch.ONE_RTT and self._master is None:
                self._keep(hidden.tls.key_schedule)
            update(direction, epoch, suite, secret)

        hidden._update_traffic_key = updated  # aioquic hands it to its TLS when the handshake begins

    def _keep(self, schedule: KeySchedule) -> None:
        assert schedule.generation == MASTER_GENERATION, "aioquic makes its keys in another order"
        self._algorithm, self._master = schedule.algorithm, schedule.derive_secret(b"exp master")

    def export(self, label: bytes, context: bytes = b"", length: int = 32) -> bytes:
        """A value of this connection, for one purpose, which the label names.

        Raises:
            WireError: before the handshake is that far.
        """
        if self._master is None:
            raise WireError("nothing can be proved on this connection: its handshake is not over")
        return exported(self._algorithm, self._master, label, context, length)


def exported(algorithm: hashes.HashAlgorithm, master: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """`TLS-Exporter` of RFC 8446 §7.5."""
    secret = hkdf_expand_label(algorithm, master, label, _hash(algorithm, b""), algorithm.digest_size)
    return hkdf_expand_label(algorithm, secret, b"exporter", _hash(algorithm, context), length)


def _hash(algorithm: hashes.HashAlgorithm, data: bytes) -> bytes:
    digest = hashes.Hash(algorithm)
    digest.update(data)
    return digest.finalize()
