"""The TLS exporter of a QUIC connection: a value that only the two ends of this connection have.

TLS 1.3 derives it from a secret that depends on the whole handshake, the server's certificate included (RFC 8446 §7.5).
A man in the middle has two connections and two values (RFC 9266), so a proof for one is of no use on the other. aioquic
has no exporter; the secret is taken from its key schedule at the stage that RFC 8446 §7.1 names. If another version of
aioquic works differently, nothing is exported and the caller gets an error.

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
"""The label of the value over which `hello` proves a key."""
MASTER_GENERATION: Final = 3
"""The key schedule's stage at its master secret: early, handshake, master."""


class Exporter:
    """The exporter of one connection. Make it before the handshake begins."""

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
